"""Run one rank of a sharded module once on meta tensors; count what it sends, computes and keeps."""
