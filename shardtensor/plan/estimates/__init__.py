"""Estimates for a plan before it runs: bytes, seconds, balance, other meshes."""
