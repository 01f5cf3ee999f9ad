"""Leaves that lie next to each other in memory, stepped as one tensor by optimizers that treat every element alone.

One call for many leaves, and one state. People see the state of each parameter all the same, as views.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import optim

from shardtensor.tensor.pieces import Pieces, piece_of

ELEMENTWISE = frozenset(
    {
        optim.ASGD,
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
    }
)
"""Classes whose update of an element depends on that element alone. Exactly these: a subclass may do otherwise."""


class Run:
    """Consecutive pieces of one tensor that are stepped alike.

    Args:
        pieces: what the leaves are pieces of.
        first: the number of the first leaf.
        leaves: in order.

    Attributes:
        tensor: the memory from the first leaf to the last, as a leaf of its own.
        is_one: whether the optimizer's state is that of `tensor` now, rather than of the leaves.
        is_apart: the states of the leaves differ in more than their elements (counts of steps): not one any more.
    """

    def __init__(self, pieces: Pieces, first: int, leaves: Sequence[torch.Tensor]) -> None:
        self.leaves = list(leaves)
        is_all = len(leaves) == len(pieces.starts)
        self._shape = pieces.whole.shape
        self._from = 0 if is_all else pieces.starts[first]
        last = first + len(leaves) - 1
        end = pieces.whole.numel() if is_all else pieces.starts[last] + leaves[-1].numel()
        self._length = end - self._from
        self.tensor = pieces.whole.narrow(0, self._from, self._length).detach().requires_grad_()
        self._starts = [start - self._from for start in pieces.starts[first : last + 1]]
        self.is_one = self.is_apart = False

    def part(self, i: int, whole: torch.Tensor) -> torch.Tensor:
        """What belongs to leaf `i` of a tensor like `tensor`: a view."""
        leaf = self.leaves[i]
        return whole.narrow(0, self._starts[i], leaf.numel()).view(leaf.shape)

    def gradient(self) -> tuple[torch.Tensor | None, bool]:
        """The gradients of all leaves as one tensor; None without any. And whether some have one and some do not."""
        grads = [leaf.grad for leaf in self.leaves]
        base = None if grads[0] is None else grads[0]._base
        if base is not None and base.shape == self._shape and all([g is not None and g._base is base for g in grads]):
            return base if self._length == base.numel() else base.narrow(0, self._from, self._length), False
        found = [g for g in grads if g is not None]
        if len(found) < len(grads):
            return None, bool(found)
        made = torch.zeros_like(self.tensor, requires_grad=False)  # of the user's own, not the pieces of one
        torch._foreach_copy_([self.part(i, made) for i in range(len(grads))], found)
        return made, False

    def join(self, state: MutableMapping[Any, Any]) -> None:
        """Make the states of the leaves one, where they differ in elements alone."""
        states = [state.get(leaf) for leaf in self.leaves]
        if any(states):
            first = states[0] or {}
            keys = [key for key, value in first.items() if _is_like(value, self.leaves[0])]
            rest = {key: value for key, value in first.items() if key not in keys}
            if not all(other is not None and self._agrees(other, first, rest) for other in states):
                self.is_apart = True
                return
            state[self.tensor] = {**first, **{key: self._joined([s[key] for s in states if s]) for key in keys}}
        for leaf in self.leaves:
            state.pop(leaf, None)
        self.is_one = True

    def _agrees(self, other: dict[str, Any], first: dict[str, Any], rest: dict[str, Any]) -> bool:
        return other.keys() == first.keys() and all(_equal(other[key], value) for key, value in rest.items())

    def _joined(self, parts: list[torch.Tensor]) -> torch.Tensor:
        base = parts[0]._base
        places = zip(parts, self._starts, strict=True)
        if (
            base is not None
            and base.shape == self.tensor.shape
            and all(p._base is base and _at(p, s) for p, s in places)
        ):
            return base
        whole = torch.zeros_like(self.tensor, dtype=parts[0].dtype, requires_grad=False)
        torch._foreach_copy_([self.part(i, whole) for i in range(len(parts))], parts)
        return whole

    def state_of(self, i: int, state: MutableMapping[Any, Any]) -> dict[str, Any] | None:
        """The state of leaf `i` out of the state of all; numbers in tensors are copies, as every leaf has its own."""
        own = state.get(self.tensor)
        if not own:
            return None
        return {
            key: self.part(i, value) if _is_like(value, self.tensor) else _copied(value) for key, value in own.items()
        }

    def part_ways(self, state: MutableMapping[Any, Any]) -> None:
        """Give each leaf its own state again, over the same memory."""
        if self.is_one:
            for i, leaf in enumerate(self.leaves):
                own = self.state_of(i, state)
                if own is not None:
                    state[leaf] = own
            state.pop(self.tensor, None)
        self.is_one = False


class Runs(MutableMapping[torch.Tensor, MutableMapping[str, Any]]):
    """The runs of an optimizer, and its state by leaf whether or not the leaf is stepped in a run.

    Args:
        optimizer: what steps; its groups hold the leaves, but while it steps.
    """

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._groups: list[tuple[list[Run], list[torch.Tensor]]] | None = None
        self._places: dict[int, tuple[Run, int]] = {}

    @property
    def state(self) -> MutableMapping[Any, Any]:
        """As the optimizer keeps it."""
        return self._optimizer.state

    # -- the step ---------------------------------------------------------------------------------------------------

    def dissolve(self) -> None:
        """Give every leaf its own state; the next step looks anew at what lies next to each other."""
        for runs, _ in self._groups or ():
            for run in runs:
                run.part_ways(self.state)
        self._groups, self._places = None, {}

    def step(self, options: Iterable[dict[str, Any]], step: Callable[[], Any]) -> None:
        """Call `step` with groups that hold runs where those have their gradients as one, and leaves elsewhere.

        Args:
            options: of each group, the hyperparameters to step with.
        """
        groups = self._optimizer.param_groups
        leaves = [group["params"] for group in groups]
        stepped = leaves if self._optimizer.defaults.get("differentiable") else self._form(leaves)
        for group, values, params in zip(groups, options, stepped, strict=True):
            group.update(values)
            group["params"] = params
        try:
            step()
        finally:
            for group, params in zip(groups, leaves, strict=True):
                group["params"] = params
            for runs, _ in self._groups or ():
                for run in runs:
                    run.tensor.grad = None  # whose memory goes with the leaves' gradients

    def _form(self, leaves: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        if self._groups is None:
            self._groups = list(map(find_runs, leaves))
            self._places = {
                id(leaf): (run, i) for runs, _ in self._groups for run in runs for i, leaf in enumerate(run.leaves)
            }
        return [[x for run in runs for x in self._ready(run)] + alone for runs, alone in self._groups]

    def _ready(self, run: Run) -> list[torch.Tensor]:
        if run.is_apart:
            return run.leaves
        grad, is_uneven = run.gradient()
        if grad is None and not is_uneven:
            return []
        if is_uneven:
            run.part_ways(self.state)
            run.is_apart = True
        elif not run.is_one:
            if run.tensor.is_cuda and torch.cuda.is_current_stream_capturing():
                return run.leaves  # to compare states would wait for the device
            run.join(self.state)
        if run.is_apart:
            return run.leaves
        run.tensor.grad = grad
        return [run.tensor]

    # -- state by leaf ----------------------------------------------------------------------------------------------

    def values_of(self, leaf: torch.Tensor) -> dict[str, Any] | None:
        """The state of a leaf: the dict of the optimizer itself, or one of views."""
        run, i = self._places.get(id(leaf), (None, 0))
        return self.state.get(leaf) if run is None or not run.is_one else run.state_of(i, self.state)

    def apart(self, leaf: torch.Tensor) -> MutableMapping[Any, Any]:
        """The optimizer's state, in which `leaf` has its own from now on."""
        run, _ = self._places.get(id(leaf), (None, 0))
        if run is not None:
            run.part_ways(self.state)
        return self.state

    def __getitem__(self, leaf: torch.Tensor) -> MutableMapping[str, Any]:
        if leaf not in self:
            return self.state[leaf]  # which makes one, or raises
        return LeafState(self, leaf)

    def __setitem__(self, leaf: torch.Tensor, values: MutableMapping[str, Any]) -> None:
        self.apart(leaf)[leaf] = values

    def __delitem__(self, leaf: torch.Tensor) -> None:
        del self.apart(leaf)[leaf]

    def __contains__(self, leaf: object) -> bool:
        run, _ = self._places.get(id(leaf), (None, 0))
        return leaf in self.state if run is None or not run.is_one else run.tensor in self.state

    def __iter__(self) -> Iterator[Any]:
        of_runs = {id(run.tensor): run.leaves for run, _ in self._places.values() if run.is_one}
        return iter([leaf for key in self.state for leaf in of_runs.get(id(key), (key,))])

    def __len__(self) -> int:
        return len(list(iter(self)))


class LeafState(MutableMapping[str, Any]):
    """The state of one leaf; a live view."""

    def __init__(self, runs: Runs, leaf: torch.Tensor) -> None:
        self._runs, self._leaf = runs, leaf

    def _values(self) -> dict[str, Any]:
        return self._runs.values_of(self._leaf) or {}

    def __getitem__(self, key: str) -> Any:
        return self._values()[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._runs.apart(self._leaf)[self._leaf][key] = value

    def __delitem__(self, key: str) -> None:
        del self._runs.apart(self._leaf)[self._leaf][key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values())

    def __len__(self) -> int:
        return len(self._values())

    def __repr__(self) -> str:
        return repr(self._values())


def find_runs(leaves: Iterable[torch.Tensor]) -> tuple[list[Run], list[torch.Tensor]]:
    """The runs among leaves that are stepped alike, and the leaves that are in none."""
    found: dict[int, tuple[Pieces, dict[int, torch.Tensor]]] = {}
    alone = []
    for leaf in leaves:
        piece = piece_of(leaf)
        if piece is None or not leaf.requires_grad:
            alone.append(leaf)
        else:
            found.setdefault(id(piece[0]), (piece[0], {}))[1][piece[1]] = leaf
    runs = []
    for pieces, members in found.values():
        for first, count in _stretches(sorted(members)):
            run = [members[first + i] for i in range(count)]
            if count > 1:
                runs.append(Run(pieces, first, run))
            else:
                alone += run
    return runs, alone


def _stretches(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """First number and count of each stretch of consecutive ones.

    Example:
        >>> _stretches([1, 2, 3, 7])
        [(1, 3), (7, 1)]
    """
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number == sum(found[-1]):
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((number, 1))
    return found


def _is_like(value: Any, leaf: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == leaf.shape


def _at(part: torch.Tensor, start: int) -> bool:
    return part.storage_offset() == start


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a is b or (a.shape == b.shape and a.device == b.device and bool(torch.equal(a, b)))
    return not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor) and bool(a == b)
