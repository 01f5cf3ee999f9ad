"""Sharded tensors. Importing the package gives the class its methods and torch's functions their handlers.

`dispatch` has the table, `sharded_tensor` the class; each module below imports these and registers with them.
"""

from shardtensor.tensor import autograd as autograd
from shardtensor.tensor import convert as convert
from shardtensor.tensor import copying as copying
from shardtensor.tensor import custom_functions as custom_functions
from shardtensor.tensor import dtensor as dtensor
from shardtensor.tensor import from_metadata as from_metadata
from shardtensor.tensor import modules as modules
from shardtensor.tensor import plain_operands as plain_operands
from shardtensor.tensor import reshard as reshard
from shardtensor.tensor import state as state
from shardtensor.tensor import unbound as unbound
