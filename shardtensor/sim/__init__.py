"""A whole world in one process: ranks as threads that take turns, and a group that only counts bytes."""
