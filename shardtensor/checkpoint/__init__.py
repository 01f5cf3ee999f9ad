"""Checkpoints: saved under any layout, loaded under any other."""
