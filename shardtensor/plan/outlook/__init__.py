"""What a plan comes to before it runs: bytes, seconds, balance, other meshes."""
