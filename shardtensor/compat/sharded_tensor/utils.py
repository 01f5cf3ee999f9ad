"""The names of ``torch.distributed._shard.sharded_tensor.utils``."""

from shardtensor.tensor.from_metadata import parse_and_validate_remote_device as _parse_and_validate_remote_device
