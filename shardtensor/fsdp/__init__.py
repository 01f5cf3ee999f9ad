"""`fully_shard`: parameters that lie in shards and are gathered just in time."""
