"""What a training step of a plan sends."""
