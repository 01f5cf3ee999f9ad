"""Other libraries' ways to say how tensors lie, read and written: DTensor's and Hugging Face's."""
