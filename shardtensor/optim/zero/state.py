"""The state of parameters that ranks step in parts: by name as ShardedTensors, on one rank, loaded from any layout."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import optim

from shardtensor.comm.group import Group
from shardtensor.errors import LayoutError, ShardTensorError
from shardtensor.layout.layout import Layout
from shardtensor.optim.flat_groups import FlatGroups
from shardtensor.optim.named_params import ParamRecord
from shardtensor.optim.state import ParamState, is_scalar, mapped, scalar_value
from shardtensor.spec.nodes import Cut, Replicate, Spec
from shardtensor.tensor.placing import bind_named, mesh_of
from shardtensor.tensor.sharded_tensor import ShardedTensor, local_as, wrap
from shardtensor.tensor.trees import map_tensors, tensors_in

_AXIS = "dp"
"""A name for the ranks in specs; the group has no mesh, so any name stands for them."""

State = dict[str, dict[str, Any]]


class HeldState(ParamState):
    """The state that this rank holds; it is true if any rank holds some, so that all ranks decide alike.

    Attributes:
        is_anywhere: whether any rank holds state.
    """

    is_anywhere = False

    def __bool__(self) -> bool:
        return self.is_anywhere


@attrs.frozen
class _Outline:
    """A state tensor on the rank that holds it: its local shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class PartitionedState:
    """Which rank holds the state of which parameter, or of which of its elements.

    Args:
        by_rows: ranks that hold parts of a parameter hold whole rows.

    Attributes:
        records: by the id of a parameter. A record's leaf is empty on a rank that steps no element of it.
    """

    def __init__(self, group: Group, *, by_rows: bool) -> None:
        self._group, self._by_rows = group, by_rows
        self._specs: dict[int, Spec | None] = {}  # None if every rank holds all
        self._is_held: dict[int, bool] = {}
        self.records: dict[int, ParamRecord] = {}

    def add(
        self, name: str, param: torch.Tensor, leaf: torch.Tensor | None, owner: int | None, sizes: Sequence[int] | None
    ) -> None:
        """Add a parameter.

        Args:
            leaf: the tensor that this rank steps, if any.
            owner: the rank in the group that steps all of it, or None.
            sizes: how many of its elements each rank steps; None if it has an owner, or if every rank steps it.
        """
        spec: Spec | None = None
        if owner is not None:
            spec = Replicate().only(_AXIS, owner)
        elif sizes is not None and self._by_rows and param.dim():
            row = max(param.shape[1:].numel(), 1)
            spec = Spec(Cut(_AXIS, sizes=tuple(size // row for size in sizes)), ...)
        elif sizes is not None:
            spec = Replicate().flat(_AXIS, sizes=tuple(sizes))
        layout = None if spec is None else self._bound(spec, tuple(param.shape))
        held = param.detach().new_empty(0) if leaf is None else leaf
        group = None if layout is None else self._group
        self.records[id(param)] = ParamRecord(name, param, held, layout, group, param.dtype, param.device)
        self._specs[id(param)], self._is_held[id(param)] = spec, leaf is not None

    def leaf_of(self, param: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor that this rank steps for a parameter, if any."""
        return self.records[id(param)].leaf if self._is_held[id(param)] else None

    def owner_of(self, param: torch.Tensor) -> int:
        """Return the rank in the group that steps a parameter."""
        spec = self._specs[id(param)]
        assert spec is not None and spec.only_part is not None, "parameters have owners"
        return spec.only_part.index

    def _bound(self, spec: Spec, shape: tuple[int, ...]) -> Layout:
        return bind_named(spec, shape, mesh_of(self._group))

    def _layout(self, record: ParamRecord, shape: Sequence[int]) -> Layout:
        """Return the layout of a state tensor of a parameter, of this global shape."""
        spec = self._specs[id(record.param)]
        assert spec is not None, "it is divided"
        own = tuple(record.param.shape)
        is_flat = spec.flat_part is not None
        if tuple(shape) != own if is_flat else spec.only_part is None and tuple(shape[:1]) != own[:1]:
            raise LayoutError(
                f'a state tensor of "{record.name}" has another shape than the parameter, of which ranks hold '
                + ("ranges" if is_flat else "rows"),
                {"state": tuple(shape), "parameter": own},
                'pass partition="owners"',
            )
        return self._bound(spec, tuple(shape))

    def fault(self, state: State) -> ShardTensorError | None:
        """Return the error if a loaded state tensor cannot be divided as its parameter is."""
        for record in self.records.values():
            values = state.get(record.name, {}) if self._specs[id(record.param)] is not None else {}
            for value in tensors_in(values):
                if value.dim():
                    try:
                        self._layout(record, value.shape)
                    except ShardTensorError as error:
                        return error
        return None

    def _global_shape(self, record: ParamRecord, local: tuple[int, ...]) -> tuple[int, ...]:
        """Return the global shape of a state tensor of which a rank holds a part of this shape."""
        spec = self._specs[id(record.param)]
        if spec is None or spec.only_part is not None:
            return local
        shape = tuple(record.param.shape)
        return shape if spec.flat_part is not None else (shape[0], *local[1:])

    # -- from the parts of all ranks --------------------------------------------------------------------------------

    def sharded(self, flats: FlatGroups) -> State:
        """Return the state of all parameters by name: ShardedTensors over each rank's part, and numbers.

        All ranks call it; it sends the shapes and dtypes of tensors, and the numbers.
        """
        held = [record for record in self.records.values() if self.leaf_of(record.param) is not None]
        own = {record.name: dict(values) for record in held if (values := flats.state_of(record.leaf))}
        outlines = self._group.exchange_objects(map_tensors(_outlined, own))
        found: State = {}
        for record in self.records.values():
            name = record.name
            outline = next((each[name] for each in outlines if name in each), None)
            if outline is not None:
                parts = own.get(name)
                found[name] = {
                    key: self._joined(record, value, None if parts is None else parts[key])
                    for key, value in outline.items()
                }
        return found

    def _joined(self, record: ParamRecord, outline: Any, part: Any) -> Any:
        """Return a value of a parameter's state, from its outline, and from this rank's part if it has one."""
        if isinstance(outline, list | tuple):
            parts = [None] * len(outline) if part is None else part
            return type(outline)(self._joined(record, *pair) for pair in zip(outline, parts, strict=True))
        if isinstance(outline, dict):
            return {
                key: self._joined(record, value, None if part is None else part[key]) for key, value in outline.items()
            }
        if not isinstance(outline, _Outline):
            return outline if part is None else part
        if record.layout is None:
            return part
        layout = self._layout(record, self._global_shape(record, outline.shape))
        if part is None:
            part = torch.empty(0, dtype=outline.dtype, device=record.device)
        elif layout.packed:
            part = part.reshape(-1)
        return wrap(part, layout, None, self._group)

    def consolidated(self, flats: FlatGroups, to: int) -> dict[Any, Any] | None:
        """Return the state by parameter, with full tensors on the CPU, on the rank `to`; None on the others.

        All ranks call it; state is sent to that rank only.
        """
        state = self.sharded(flats)
        is_here = self._group.index == to

        def sent(value: torch.Tensor) -> torch.Tensor:
            if isinstance(value, ShardedTensor):
                value = local_as(value, self._bound(Replicate().only(_AXIS, to), tuple(value.shape)), self._group)
            return value.detach().to("cpu", copy=True) if is_here else value

        full = map_tensors(sent, state)
        if not is_here:
            return None
        return {record.param: full[record.name] for record in self.records.values() if record.name in full}

    # -- to the parts of all ranks ----------------------------------------------------------------------------------

    @torch.no_grad()
    def load(
        self, optimizer: optim.Optimizer, state: State, groups: Sequence[Mapping[str, Any]], *, copies: bool = True
    ) -> None:
        """Replace an optimizer's state by this rank's part of `state`; collective if it has sharded tensors."""
        taken: dict[Any, Any] = {}
        for group in groups:
            for param in group["params"]:
                record = self.records[id(param)]
                values = state.pop(record.name, None)
                if values is not None:
                    own = {key: self._part(value, record, key, group, copies) for key, value in values.items()}
                    if self._is_held[id(record.param)]:
                        taken[record.leaf] = own
        optimizer.state.clear()
        taken.update(state)
        optimizer.state.update(taken)
        optimizer.__setstate__({})  # some classes convert old states there

    def _part(self, value: Any, record: ParamRecord, key: str, options: Mapping[str, Any], copies: bool) -> Any:
        """Return this rank's part of a loaded value of a parameter's state."""
        if isinstance(value, list | tuple | dict):
            return mapped(value, lambda item, own: self._part(item, record, own, options, copies), key)
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        leaf = record.leaf
        if is_scalar(value, record, key):
            return scalar_value(value, record, key, options)
        if record.layout is not None:
            value = local_as(value, self._layout(record, value.shape), self._group)
        elif isinstance(value, ShardedTensor):
            value = value.full_tensor()
        if not self._is_held[id(record.param)]:
            return None
        if record.layout is not None and record.layout.packed:
            value = value.reshape(leaf.shape)
        dtype = leaf.dtype if leaf.is_floating_point() or leaf.is_complex() else value.dtype
        return value.detach().to(record.device, dtype, copy=copies)


def _outlined(value: torch.Tensor) -> Any:
    if value.dim() == 0:
        return value.detach().cpu()
    return _Outline(tuple(value.shape), value.dtype)
