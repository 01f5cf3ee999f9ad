"""What operations do to layouts. Integers only; `shardtensor.ops` carries it out."""
