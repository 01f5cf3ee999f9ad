"""The names of ``torch.distributed._shard.sharded_tensor.api``."""

import shardtensor.ops  # gives ShardedTensor its operations
from shardtensor.compat.ported import ShardedTensorBase
from shardtensor.compat.ported import create_tensor_from_params as _create_tensor_from_params
from shardtensor.compat.rrefs import SHOWN as _sharded_tensor_map
from shardtensor.spec.devices import ShardMetadata
from shardtensor.tensor.shard import Shard, ShardedTensorMetadata, TensorProperties
from shardtensor.tensor.sharded_tensor import ShardedTensor
