"""Torch's operations on ShardedTensors. Importing this package registers them."""

from shardtensor.ops import by_rule as by_rule
from shardtensor.ops import embedding as embedding
from shardtensor.ops import foreach as foreach
from shardtensor.ops import indexing as indexing
from shardtensor.ops import indices as indices
from shardtensor.ops import inplace as inplace
from shardtensor.ops import layers as layers
from shardtensor.ops import linear as linear
from shardtensor.ops import loss as loss
from shardtensor.ops import making as making
from shardtensor.ops import pointwise as pointwise
from shardtensor.ops import reductions as reductions
from shardtensor.ops import scalars as scalars
from shardtensor.ops import views as views
