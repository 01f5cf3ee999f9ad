"""The names of ``torch.distributed._shard.api``."""

import shardtensor.ops  # gives ShardedTensor its operations
from shardtensor.comm.process_group import load_with_process_group
from shardtensor.parallel.parameter import collect_local_shard as _collect_local_shard
from shardtensor.parallel.parameter import reshard_output as _reshard_output
from shardtensor.parallel.parameter import shard_parameter
from shardtensor.parallel.parameter import shard_tensor as _shard_tensor
from shardtensor.parallel.shard_module import shard_module
