"""The state dicts of a `ZeroRedundancyOptimizer`: on one rank, by name with ShardedTensors, and loaded from any."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import optim

from shardtensor.comm.agree import agree
from shardtensor.comm.group import Group
from shardtensor.errors import LayoutError
from shardtensor.optim import state_dict as saved
from shardtensor.optim.flat_groups import FlatGroups
from shardtensor.optim.update_units import UpdateUnit
from shardtensor.optim.zero.arguments import copy_options
from shardtensor.optim.zero.state import HeldState, PartitionedState
from shardtensor.tensor.sharded_tensor import ShardedTensor
from shardtensor.tensor.trees import tensors_in


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
