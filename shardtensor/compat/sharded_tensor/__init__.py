"""The names of ``torch.distributed._shard.sharded_tensor``."""

from shardtensor.comm.process_group import load_with_process_group
from shardtensor.compat.custom_ops import custom_sharded_op_impl
from shardtensor.compat.ported import pre_load_state_dict_hook, state_dict_hook
from shardtensor.compat.rrefs import with_rrefs
from shardtensor.tensor import factories, init_local

from . import metadata, shard, utils
from .api import *
from .api import _create_tensor_from_params, _sharded_tensor_map
from .utils import _parse_and_validate_remote_device

empty, full, ones = with_rrefs(factories.empty), with_rrefs(factories.full), with_rrefs(factories.ones)
rand, randn, zeros = with_rrefs(factories.rand), with_rrefs(factories.randn), with_rrefs(factories.zeros)
init_from_local_shards = with_rrefs(init_local.init_from_local_shards)
