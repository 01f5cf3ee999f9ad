"""Sharded tensors. Importing the package gives them their autograd, hooks, checkpoints, copies and pickles."""

from shardtensor.tensor import autograd as autograd
from shardtensor.tensor import checkpointing as checkpointing
from shardtensor.tensor import convert as convert
from shardtensor.tensor import copying as copying
from shardtensor.tensor import custom_functions as custom_functions
from shardtensor.tensor import full_state as full_state
from shardtensor.tensor import hooks as hooks
from shardtensor.tensor import pickling as pickling
from shardtensor.tensor import plain_operands as plain_operands
from shardtensor.tensor import ported as ported
from shardtensor.tensor import replacing as replacing
from shardtensor.tensor import unbound as unbound
