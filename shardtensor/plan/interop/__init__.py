"""Other libraries' ways to say how tensors lie, read and written: DTensor's, JAX's, Hugging Face's."""
