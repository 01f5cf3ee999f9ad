"""The state of parameters that ranks step in parts: by name as ShardedTensors, on one rank, loaded from any layout;
and the state dicts of a `ZeroRedundancyOptimizer`."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import optim

from shardtensor.comm.agree import agree
from shardtensor.comm.group import Group
from shardtensor.errors import LayoutError, ShardTensorError
from shardtensor.layout.layout import Layout
from shardtensor.optim import state_dict as saved
from shardtensor.optim.flat_groups import FlatGroups
from shardtensor.optim.named_params import ParamRecord
from shardtensor.optim.state import ParamState, is_scalar, mapped, scalar_value
from shardtensor.optim.update_units import UpdateUnit
from shardtensor.optim.zero.arguments import copy_options
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


@attrs.frozen
class _Place:
    """Where the state of a parameter is: its spec, or None if every rank holds all; whether this rank holds some."""

    spec: Spec | None
    is_held: bool


class PartitionedState:
    """Which rank holds the state of which parameter, or of which of its elements.

    Args:
        by_rows: ranks that hold parts of a parameter hold whole rows.

    Attributes:
        records: by the id of a parameter. A record's leaf is empty on a rank that steps no element of it.
    """

    def __init__(self, group: Group, *, by_rows: bool) -> None:
        self._group, self._by_rows = group, by_rows
        self._places: dict[int, _Place] = {}
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
        self._places[id(param)] = _Place(spec, leaf is not None)

    def leaf_of(self, param: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor that this rank steps for a parameter, if any."""
        return self.records[id(param)].leaf if self._places[id(param)].is_held else None

    def owner_of(self, param: torch.Tensor) -> int:
        """Return the rank in the group that steps a parameter."""
        spec = self._places[id(param)].spec
        assert spec is not None and spec.only_part is not None, "parameters have owners"
        return spec.only_part.index

    def _bound(self, spec: Spec, shape: tuple[int, ...]) -> Layout:
        return bind_named(spec, shape, mesh_of(self._group))

    def _layout(self, record: ParamRecord, shape: Sequence[int]) -> Layout:
        """Return the layout of a state tensor of a parameter, of this global shape."""
        spec = self._places[id(record.param)].spec
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
            values = state.get(record.name, {}) if self._places[id(record.param)].spec is not None else {}
            for value in tensors_in(values):
                if value.dim():
                    try:
                        self._layout(record, value.shape)
                    except ShardTensorError as error:
                        return error
        return None

    def _global_shape(self, record: ParamRecord, local: tuple[int, ...]) -> tuple[int, ...]:
        """Return the global shape of a state tensor of which a rank holds a part of this shape."""
        spec = self._places[id(record.param)].spec
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
                    if self._places[id(record.param)].is_held:
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
        if not self._places[id(record.param)].is_held:
            return None
        if record.layout is not None and record.layout.packed:
            value = value.reshape(leaf.shape)
        dtype = leaf.dtype if leaf.is_floating_point() or leaf.is_complex() else value.dtype
        return value.detach().to(record.device, dtype, copy=copies)


def _outlined(value: torch.Tensor) -> Any:
    if value.dim() == 0:
        return value.detach().cpu()
    return _Outline(tuple(value.shape), value.dtype)


class StateDicts(optim.Optimizer):
    """An optimizer whose state is partitioned among the ranks of a group.

    Attributes:
        optim: this rank's optimizer.
        partitioned: which rank holds what.
        unit: what its class updates together.
    """

    group: Group
    optim: optim.Optimizer
    partitioned: PartitionedState
    flat_groups: FlatGroups
    unit: UpdateUnit
    state: HeldState  # type: ignore[assignment]

    _consolidated: dict[Any, Any] | None = None  # on the rank that it was sent to
    _is_consolidated = False

    @abstractmethod
    def synchronize(self) -> None:
        """Make the host wait until the state of the last step is on the CPU."""

    def _forget_consolidated(self) -> None:
        """Note that the state changes."""
        self._consolidated, self._is_consolidated, self.state.is_anywhere = None, False, True

    @property
    def names(self) -> dict[int, str]:
        """The name of each parameter by its id: the user's, or its number as text."""
        return {key: record.name for key, record in self.partitioned.records.items()}

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Send all state to one rank, which `state_dict` returns there. All ranks call it.

        Args:
            to: the rank in the process group; it holds all state on the CPU.
        """
        agree(self.group, "consolidate_state_dict", {"to": str(to)})
        self.synchronize()
        copy_options(self.param_groups, self.optim.param_groups)
        self._consolidated, self._is_consolidated = self.partitioned.consolidated(self.flat_groups, to), True

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parameters.

        After `consolidate_state_dict`, until the next step, on its rank: the state dict of `optimizer_class`, keyed by
        number, with full tensors on the CPU. Without that call, if parameters have names: keyed by name, with
        ShardedTensors of which each rank holds its part; all ranks call it then.

        Raises:
            RuntimeError: the state was sent to another rank, or to none and the parameters have no names.
        """
        if self._consolidated is None:
            if not self._is_consolidated and all("param_names" in group for group in self.param_groups):
                return self.state_by_name(self.names)
            raise RuntimeError(
                "Optimizer state has not been consolidated on this rank. "
                f"Please call `consolidate_state_dict(to={self.group.index})` on "
                "all ranks beforehand if you meant to save the global state."
            )
        state, self.state = self.state, self._consolidated  # type: ignore[assignment]
        try:
            return super().state_dict()
        finally:
            self.state = state

    def state_by_name(self, names: Mapping[int, str]) -> dict[str, Any]:
        """Return the state dict keyed by name, with ShardedTensors; `names` maps the id of each parameter to its name.

        All ranks call it; it sends only the shapes and dtypes of the state.
        """
        self.synchronize()
        renamed = {own: names[key] for key, own in self.names.items()}
        state = self.partitioned.sharded(self.flat_groups)
        named = {renamed[name]: values for name, values in state.items()}
        return {"state": named, "param_groups": saved.groups_by_name(self, names)}

    def load_state_dict(self, state_dict: Mapping[str, Any], *, copies: bool = True) -> None:
        """Load this rank's part of a state dict. All ranks call it.

        Args:
            state_dict: of this class or another optimizer, for any number of ranks: keyed by number, or by name if the
                parameters have names; its tensors full or sharded. It is not changed.
            copies: False if it is not used any more: tensors that need no change are then kept, not copied.

        Raises:
            LayoutError: (a ValueError) the state dict is of other parameters or shapes; nothing has been loaded.
        """
        loaded: dict[str, Any] = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            loaded = pre_hook(self, loaded) or loaded
        partitioned, names = self.partitioned, self.names
        if not (isinstance(loaded.get("state"), Mapping) and isinstance(loaded.get("param_groups"), list)):
            error = LayoutError('a state dict has "state" and "param_groups"; nothing has been loaded')
            agree(self.group, "load_state_dict", {}, error)
        given = {key: values for key, values in loaded["state"].items() if values is not None}
        own = [[names[id(param)] for param in group["params"]] for group in self.param_groups]
        shapes = None
        if self.unit == "element":  # the state of other classes may have other shapes
            shapes = {record.name: tuple(record.param.shape) for record in partitioned.records.values()}
        state, options, fault = saved.match_and_check({**loaded, "state": given}, own, {}, shapes)
        sharded = {key: x for key, x in state.items() if any(isinstance(t, ShardedTensor) for t in tensors_in(x))}
        fault = fault or partitioned.fault(state)
        agree(self.group, "load_state_dict", {"state": saved.outline(sharded)}, fault)
        self.flat_groups.split_all()
        for group, new in zip(self.param_groups, options, strict=True):
            group.update(new)
        partitioned.load(self.optim, state, self.param_groups, copies=copies)
        copy_options(self.param_groups, self.optim.param_groups)
        self.state.is_anywhere = bool(loaded["state"])
        self._consolidated, self._is_consolidated = None, False
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)
