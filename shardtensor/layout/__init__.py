"""Who holds what of a tensor: a spec bound to ranks and a shape. Integers only."""
