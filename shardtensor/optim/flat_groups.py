"""Flat parameter groups: leaves that are adjacent in memory, which elementwise optimizers step as one tensor.

One tensor and one state replace many; users still see the state of each parameter, as views.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import optim

from shardtensor.tensor.bucket import FlatShard, flat_shard_of


def step_without_hooks(optimizer: optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
    """Step an optimizer that is inside another one: torch's hooks run once, around the step of the other."""
    step = type(optimizer).step
    return (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer, *args, **kwargs)  # type: ignore


class FlatGroup:
    """Adjacent leaves of one flat tensor, with the same hyperparameters.

    Args:
        shard: the flat tensor, and where leaves begin in it.
        first: the number of the first leaf.
        leaves: in order.

    Attributes:
        tensor: the memory from the first leaf to the last, as one leaf.
    """

    def __init__(self, shard: FlatShard, first: int, leaves: Sequence[torch.Tensor]) -> None:
        self.leaves = list(leaves)
        is_all = len(leaves) == len(shard.starts)
        starts = shard.starts[first : first + len(leaves)]
        self._shape = shard.whole.shape
        self._from = 0 if is_all else starts[0]
        end = shard.whole.numel() if is_all else starts[-1] + leaves[-1].numel()
        self._length = end - self._from
        self.tensor = shard.whole.narrow(0, self._from, self._length).detach().requires_grad_()
        self._starts = [start - self._from for start in starts]

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

    def merge(self, state: MutableMapping[Any, Any]) -> bool:
        """Replace the states of the leaves by one; return False if they differ in more than elements (step counts)."""
        states = [state.get(leaf) or {} for leaf in self.leaves]
        if any(own.keys() != states[0].keys() for own in states):
            return False
        merged: dict[str, Any] = {}
        for key, first in states[0].items():
            values = [own[key] for own in states]
            if any(map(_is_like, values, self.leaves)):
                merged[key] = self._merged(values)
            elif all(_equal(value, first) for value in values):
                merged[key] = first
            else:
                return False
        for leaf in self.leaves:
            state.pop(leaf, None)
        if merged:
            state[self.tensor] = merged
        return True

    def _merged(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Return tensors of the leaves as one; without a copy if they are its views, as `split` made them."""
        base = parts[0]._base
        if (
            base is not None
            and base.shape == self.tensor.shape
            and all(part._base is base for part in parts)
            and [part.storage_offset() for part in parts] == self._starts
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
            key: self.part(i, x) if _is_like(x, self.tensor) else x.clone() if isinstance(x, torch.Tensor) else x
            for key, x in own.items()
        }

    def split(self, state: MutableMapping[Any, Any]) -> None:
        """Replace the state of `tensor` by one for each leaf, with the same memory."""
        for i, leaf in enumerate(self.leaves):
            own = self.state_of(i, state)
            if own is not None:
                state[leaf] = own
        state.pop(self.tensor, None)


class FlatGroups:
    """The flat parameter groups of an optimizer, and its state by leaf.

    A flat group has one state from when it is found until it is split: `split_all` splits all groups, a step splits
    one if only some of its leaves have gradients.

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
                    flat.tensor.grad = None  # it would keep the memory of the leaves' gradients

    def _grouped(self, leaves: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        if self._groups is None:
            if any(leaf.is_cuda for group in leaves for leaf in group) and torch.cuda.is_current_stream_capturing():
                return leaves  # comparing states waits for the device
            self._groups = [find_flat_groups(group) for group in leaves]
            for flats, alone in self._groups:
                for flat in list(flats):
                    self._places.update((id(leaf), (flat, i)) for i, leaf in enumerate(flat.leaves))
                    if not flat.merge(self.state):
                        self._leave(flat, flats, alone)
        return [
            [x for flat in list(flats) for x in self._ready(flat, flats, alone)] + alone
            for flats, alone in self._groups
        ]

    def _ready(self, flat: FlatGroup, flats: list[FlatGroup], alone: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors to step for a flat group: its tensor with its gradient, or none."""
        flat.tensor.grad, is_uneven = flat.gradient()
        if is_uneven:
            flat.split(self.state)
            self._leave(flat, flats, alone)
        return [] if flat.tensor.grad is None else [flat.tensor]

    def _leave(self, flat: FlatGroup, flats: list[FlatGroup], alone: list[torch.Tensor]) -> None:
        """Step the leaves of a flat group one by one from now on."""
        flats.remove(flat)
        alone += flat.leaves
        for leaf in flat.leaves:
            del self._places[id(leaf)]

    def stepped_for(self, leaf: torch.Tensor) -> torch.Tensor:
        """Return the tensor that is stepped for a leaf: itself, or its flat group's."""
        flat, _ = self._places.get(id(leaf), (None, 0))
        return leaf if flat is None else flat.tensor

    # -- state by leaf ----------------------------------------------------------------------------------------------

    def state_of(self, leaf: torch.Tensor) -> MutableMapping[str, Any]:
        """Return the state of a leaf: the optimizer's own dict, or a dict of views; empty if there is none."""
        flat, i = self._places.get(id(leaf), (None, 0))
        found = self.state.get(leaf) if flat is None else flat.state_of(i, self.state)
        return {} if found is None else found

    def split_state(self, leaf: torch.Tensor) -> MutableMapping[Any, Any]:
        """Give `leaf` a state of its own until the next step, and return the optimizer's state."""
        if id(leaf) in self._places:
            self.split_all()
        return self.state

    def has_state(self, leaf: object) -> bool:
        """Whether the optimizer has state for a leaf, or for its flat group."""
        flat, _ = self._places.get(id(leaf), (None, 0))
        return (leaf if flat is None else flat.tensor) in self.state

    def state_keys(self) -> list[Any]:
        """Return the keys of the optimizer's state, with the leaves of flat groups in place of their tensors."""
        of_flats = {id(flat.tensor): flat.leaves for flat, _ in self._places.values()}
        return [leaf for key in self.state for leaf in of_flats.get(id(key), (key,))]


def find_flat_groups(leaves: Iterable[torch.Tensor]) -> tuple[list[FlatGroup], list[torch.Tensor]]:
    """Return the flat groups among the leaves of one param group, and the leaves that are in none."""
    found: dict[int, tuple[FlatShard, dict[int, torch.Tensor]]] = {}
    alone = []
    for leaf in leaves:
        part = flat_shard_of(leaf)
        if part is None or not leaf.requires_grad:
            alone.append(leaf)
        else:
            found.setdefault(id(part[0]), (part[0], {}))[1][part[1]] = leaf
    flats = []
    for shard, members in found.values():
        for _, adjacent in groupby(enumerate(sorted(members)), lambda pair: pair[1] - pair[0]):
            numbers = [number for _, number in adjacent]
            if len(numbers) > 1:
                flats.append(FlatGroup(shard, numbers[0], [members[number] for number in numbers]))
            else:
                alone.append(members[numbers[0]])
    return flats, alone


def _is_like(value: Any, leaf: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == leaf.shape


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a is b or (a.shape == b.shape and a.device == b.device and bool(torch.equal(a, b)))
    return not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor) and bool(a == b)
