"""Flat parameter groups: leaves that are adjacent in memory, which elementwise optimizers step as one tensor.

One tensor and one state replace many; users still see the state of each parameter, as views.
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
"""Classes whose update of an element depends only on that element; not their subclasses, which may differ."""


class FlatGroup:
    """Adjacent pieces of one flat tensor, with the same hyperparameters.

    Args:
        pieces: the flat tensor and its pieces.
        first: the number of the first leaf.
        leaves: in order.

    Attributes:
        tensor: the memory from the first leaf to the last, as one leaf.
        is_merged: whether the optimizer has state for `tensor` now, rather than for the leaves.
        is_split: the states of the leaves differ in more than their elements (in step counts), so they stay separate.
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
        self.is_merged = self.is_split = False

    def part(self, i: int, whole: torch.Tensor) -> torch.Tensor:
        """Return the view of leaf `i` in `whole`, which has the shape of `tensor`."""
        leaf = self.leaves[i]
        return whole.narrow(0, self._starts[i], leaf.numel()).view(leaf.shape)

    def gradient(self) -> tuple[torch.Tensor | None, bool]:
        """Return the gradients of all leaves as one tensor, or None; and whether only some leaves have one."""
        grads = [leaf.grad for leaf in self.leaves]
        base = None if grads[0] is None else grads[0]._base
        if base is not None and base.shape == self._shape and all([g is not None and g._base is base for g in grads]):
            return base if self._length == base.numel() else base.narrow(0, self._from, self._length), False
        found = [g for g in grads if g is not None]
        if len(found) < len(grads):
            return None, bool(found)
        made = torch.zeros_like(self.tensor, requires_grad=False)  # the gradients are not adjacent
        torch._foreach_copy_([self.part(i, made) for i in range(len(grads))], found)
        return made, False

    def merge(self, state: MutableMapping[Any, Any]) -> None:
        """Replace the states of the leaves by one, unless they differ in more than elements."""
        states = [state.get(leaf) for leaf in self.leaves]
        if any(states):
            first = states[0] or {}
            keys = [key for key, value in first.items() if _is_like(value, self.leaves[0])]
            rest = {key: value for key, value in first.items() if key not in keys}
            if not all(other is not None and self._agrees(other, first, rest) for other in states):
                self.is_split = True
                return
            state[self.tensor] = {**first, **{key: self._merged([s[key] for s in states if s]) for key in keys}}
        for leaf in self.leaves:
            state.pop(leaf, None)
        self.is_merged = True

    def _agrees(self, other: dict[str, Any], first: dict[str, Any], rest: dict[str, Any]) -> bool:
        return other.keys() == first.keys() and all(_equal(other[key], value) for key, value in rest.items())

    def _merged(self, parts: list[torch.Tensor]) -> torch.Tensor:
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
        """Return the state of leaf `i` from the state of `tensor`: views, and copies of 0-d tensors."""
        own = state.get(self.tensor)
        if not own:
            return None
        return {
            key: self.part(i, value) if _is_like(value, self.tensor) else _copied(value) for key, value in own.items()
        }

    def split(self, state: MutableMapping[Any, Any]) -> None:
        """Replace the state of `tensor` by one for each leaf, with the same memory."""
        if self.is_merged:
            for i, leaf in enumerate(self.leaves):
                own = self.state_of(i, state)
                if own is not None:
                    state[leaf] = own
            state.pop(self.tensor, None)
        self.is_merged = False


class FlatGroups(MutableMapping[torch.Tensor, MutableMapping[str, Any]]):
    """The flat parameter groups of an optimizer; as a mapping, its state by leaf.

    Args:
        optimizer: its groups contain the leaves, except while it steps.
    """

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._groups: list[tuple[list[FlatGroup], list[torch.Tensor]]] | None = None
        self._places: dict[int, tuple[FlatGroup, int]] = {}

    @property
    def state(self) -> MutableMapping[Any, Any]:
        """The optimizer's own state."""
        return self._optimizer.state

    # -- the step ---------------------------------------------------------------------------------------------------

    def split_all(self) -> None:
        """Give every leaf its own state; the next step groups the leaves again."""
        for flats, _ in self._groups or ():
            for flat in flats:
                flat.split(self.state)
        self._groups, self._places = None, {}

    def step(self, options: Iterable[dict[str, Any]], step: Callable[[], Any]) -> None:
        """Call `step` with param groups that contain flat tensors with flat gradients, and the other leaves.

        Args:
            options: the hyperparameters of each param group.
        """
        groups = self._optimizer.param_groups
        leaves = [group["params"] for group in groups]
        stepped = leaves if self._optimizer.defaults.get("differentiable") else self._grouped(leaves)
        for group, values, params in zip(groups, options, stepped, strict=True):
            group.update(values)
            group["params"] = params
        try:
            step()
        finally:
            for group, params in zip(groups, leaves, strict=True):
                group["params"] = params
            for flats, _ in self._groups or ():
                for flat in flats:
                    flat.tensor.grad = None  # its memory is that of the leaves' gradients

    def _grouped(self, leaves: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        if self._groups is None:
            self._groups = list(map(find_flat_groups, leaves))
            self._places = {
                id(leaf): (flat, i) for flats, _ in self._groups for flat in flats for i, leaf in enumerate(flat.leaves)
            }
        return [[x for flat in flats for x in self._ready(flat)] + alone for flats, alone in self._groups]

    def _ready(self, flat: FlatGroup) -> list[torch.Tensor]:
        if flat.is_split:
            return flat.leaves
        grad, is_uneven = flat.gradient()
        if grad is None and not is_uneven:
            return []
        if is_uneven:
            flat.split(self.state)
            flat.is_split = True
        elif not flat.is_merged:
            if flat.tensor.is_cuda and torch.cuda.is_current_stream_capturing():
                return flat.leaves  # comparing the states would wait for the device
            flat.merge(self.state)
        if flat.is_split:
            return flat.leaves
        flat.tensor.grad = grad
        return [flat.tensor]

    # -- state by leaf ----------------------------------------------------------------------------------------------

    def values_of(self, leaf: torch.Tensor) -> dict[str, Any] | None:
        """Return the state of a leaf: the optimizer's own dict, or a dict of views."""
        flat, i = self._places.get(id(leaf), (None, 0))
        return self.state.get(leaf) if flat is None or not flat.is_merged else flat.state_of(i, self.state)

    def split_state(self, leaf: torch.Tensor) -> MutableMapping[Any, Any]:
        """Give `leaf` a state of its own, and return the optimizer's state."""
        flat, _ = self._places.get(id(leaf), (None, 0))
        if flat is not None:
            flat.split(self.state)
        return self.state

    def __getitem__(self, leaf: torch.Tensor) -> MutableMapping[str, Any]:
        if leaf not in self:
            return self.state[leaf]  # a defaultdict may make one
        return LeafState(self, leaf)

    def __setitem__(self, leaf: torch.Tensor, values: MutableMapping[str, Any]) -> None:
        self.split_state(leaf)[leaf] = values

    def __delitem__(self, leaf: torch.Tensor) -> None:
        del self.split_state(leaf)[leaf]

    def __contains__(self, leaf: object) -> bool:
        flat, _ = self._places.get(id(leaf), (None, 0))
        return leaf in self.state if flat is None or not flat.is_merged else flat.tensor in self.state

    def __iter__(self) -> Iterator[Any]:
        of_flats = {id(flat.tensor): flat.leaves for flat, _ in self._places.values() if flat.is_merged}
        return iter([leaf for key in self.state for leaf in of_flats.get(id(key), (key,))])

    def __len__(self) -> int:
        return len(list(iter(self)))


class LeafState(MutableMapping[str, Any]):
    """The state of one leaf; a live view."""

    def __init__(self, flats: FlatGroups, leaf: torch.Tensor) -> None:
        self._flat_groups, self._leaf = flats, leaf

    def _values(self) -> dict[str, Any]:
        return self._flat_groups.values_of(self._leaf) or {}

    def __getitem__(self, key: str) -> Any:
        return self._values()[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._flat_groups.split_state(self._leaf)[self._leaf][key] = value

    def __delitem__(self, key: str) -> None:
        del self._flat_groups.split_state(self._leaf)[self._leaf][key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values())

    def __len__(self) -> int:
        return len(self._values())

    def __repr__(self) -> str:
        return repr(self._values())


def find_flat_groups(leaves: Iterable[torch.Tensor]) -> tuple[list[FlatGroup], list[torch.Tensor]]:
    """Return the flat groups among the leaves of one param group, and the leaves that are in none."""
    found: dict[int, tuple[Pieces, dict[int, torch.Tensor]]] = {}
    alone = []
    for leaf in leaves:
        piece = piece_of(leaf)
        if piece is None or not leaf.requires_grad:
            alone.append(leaf)
        else:
            found.setdefault(id(piece[0]), (piece[0], {}))[1][piece[1]] = leaf
    flats = []
    for pieces, members in found.values():
        for first, count in _consecutive(sorted(members)):
            adjacent = [members[first + i] for i in range(count)]
            if count > 1:
                flats.append(FlatGroup(pieces, first, adjacent))
            else:
                alone += adjacent
    return flats, alone


def _consecutive(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first number and the count of each range of consecutive numbers.

    Example:
        >>> _consecutive([1, 2, 3, 7])
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
