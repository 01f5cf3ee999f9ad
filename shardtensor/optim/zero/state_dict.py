"""State dicts of a `ZeroRedundancyOptimizer`: by name with ShardedTensors, and loaded from any optimizer's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardtensor.comm.agree import agree
from shardtensor.optim import state_dict as saved
from shardtensor.optim.zero.arguments import OWN_KEYS, copy_options
from shardtensor.tensor.sharded_tensor import ShardedTensor
from shardtensor.tensor.trees import tensors_in

if TYPE_CHECKING:
    from shardtensor.optim.zero.optimizer import ZeroRedundancyOptimizer


def state_by_name(optimizer: ZeroRedundancyOptimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return the state dict keyed by name; `names` maps the id of each parameter to its name. All ranks call it."""
    groups = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in OWN_KEYS}
        groups.append({**options, "params": [names[id(param)] for param in group["params"]]})
    renamed = {own: names[key] for key, own in optimizer.names.items()}
    state = optimizer.partitioned.sharded(optimizer.flat_groups)
    return {"state": {renamed[name]: values for name, values in state.items()}, "param_groups": groups}


def load(optimizer: ZeroRedundancyOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Load this rank's part of a state dict, and the hyperparameters. All ranks call it.

    Raises:
        LayoutError: on every rank: the state dict is of other parameters or shapes; nothing has been loaded.
    """
    partitioned, names = optimizer.partitioned, optimizer.names
    given = {key: values for key, values in state_dict["state"].items() if values is not None}
    own = [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]
    shapes = None
    if optimizer.unit == "element":  # the state of other classes may have other shapes
        shapes = {record.name: tuple(record.param.shape) for record in partitioned.records.values()}
    state, options, fault = saved.match_and_check({**state_dict, "state": given}, own, {}, shapes)
    sharded = {key: x for key, x in state.items() if any(isinstance(t, ShardedTensor) for t in tensors_in(x))}
    agree(optimizer.group, "load_state_dict", {"state": saved.outline(sharded)}, fault)
    for group, new in zip(optimizer.param_groups, options, strict=True):
        group.update(new)
    copy_options(optimizer.param_groups, optimizer.optim.param_groups)
    optimizer.flat_groups.split_all()
    partitioned.load(optimizer.optim, state, optimizer.param_groups)
