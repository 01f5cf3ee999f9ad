"""The names of ``torch.distributed._shard.sharded_tensor.metadata``."""

from shardtensor.spec.devices import ShardMetadata
from shardtensor.tensor.shard import ShardedTensorMetadata, TensorProperties
