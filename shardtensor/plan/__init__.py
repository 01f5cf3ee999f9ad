"""Plans: the layouts of all tensors of a model on a mesh, and of the values that enter and leave modules. No torch."""
