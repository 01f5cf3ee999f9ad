"""Plans: how all tensors of a model lie on a mesh, and how values pass its modules. No torch."""
