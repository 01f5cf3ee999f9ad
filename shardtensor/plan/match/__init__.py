"""A plan matched to the names and shapes of a model: one layout a tensor."""
