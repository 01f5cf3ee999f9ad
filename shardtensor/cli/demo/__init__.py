"""``shardtensor demo``: a small decoder trained on real text, sharded, beside the same training on one process."""
