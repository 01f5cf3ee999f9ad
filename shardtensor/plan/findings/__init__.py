"""What checks find, where it was written, and how it is told."""
