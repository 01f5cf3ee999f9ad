"""The names of ``torch.distributed._shard.sharded_tensor`` and its ``api``, ``metadata``, ``shard`` and ``utils``;
nothing lives here."""

import shardtensor.ops  # noqa: F401  (gives ShardedTensor its operations)
from shardtensor.comm.process_group import load_with_process_group
from shardtensor.spec.devices import ShardMetadata
from shardtensor.tensor.dispatch import custom_sharded_op_impl
from shardtensor.tensor.factories import empty, full, ones, rand, randn, zeros
from shardtensor.tensor.init_local import init_from_local_shards
from shardtensor.tensor.metadata import ShardedTensorMetadata, TensorProperties
from shardtensor.tensor.ported import ShardedTensorBase, pre_load_state_dict_hook, state_dict_hook
from shardtensor.tensor.ported import create_tensor_from_params as _create_tensor_from_params
from shardtensor.tensor.ported import parse_and_validate_remote_device as _parse_and_validate_remote_device
from shardtensor.tensor.remote import SHOWN as _sharded_tensor_map
from shardtensor.tensor.shard import Shard
from shardtensor.tensor.sharded_tensor import ShardedTensor

__all__ = [
    "Shard",
    "ShardMetadata",
    "ShardedTensor",
    "ShardedTensorBase",
    "ShardedTensorMetadata",
    "TensorProperties",
    "_create_tensor_from_params",
    "_parse_and_validate_remote_device",
    "_sharded_tensor_map",
    "custom_sharded_op_impl",
    "empty",
    "full",
    "init_from_local_shards",
    "load_with_process_group",
    "ones",
    "pre_load_state_dict_hook",
    "rand",
    "randn",
    "state_dict_hook",
    "zeros",
]
