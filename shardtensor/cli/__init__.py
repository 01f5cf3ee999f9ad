"""The command ``shardtensor``."""
