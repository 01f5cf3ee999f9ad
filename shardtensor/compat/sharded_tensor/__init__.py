"""The names of ``torch.distributed._shard.sharded_tensor``."""

from shardtensor.comm.process_group import load_with_process_group
from shardtensor.compat.custom_ops import custom_sharded_op_impl
from shardtensor.tensor.factories import empty, full, ones, rand, randn, zeros
from shardtensor.tensor.init_local import init_from_local_shards
from shardtensor.tensor.ported import pre_load_state_dict_hook, state_dict_hook

from . import metadata, shard, utils
from .api import (
    Shard,
    ShardedTensor,
    ShardedTensorBase,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
    _create_tensor_from_params,
    _sharded_tensor_map,
)
from .utils import _parse_and_validate_remote_device

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
    "metadata",
    "ones",
    "pre_load_state_dict_hook",
    "rand",
    "randn",
    "shard",
    "state_dict_hook",
    "utils",
    "zeros",
]
