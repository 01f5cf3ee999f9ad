"""The layouts that operations need and return. Integers only; `shardtensor.ops` runs the operations."""
