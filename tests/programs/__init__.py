"""Random programs: a few operations on tensors of random layouts, dense and sharded, compared value by value.

`generate(seed)` makes a `Program` by running it densely while it is written; `run_dense` and `run_sharded` run one;
`problem` says how a sharded run differs; `shrink` takes away what a difference does not need.
"""
