"""One rank of a sharded module, run once on meta tensors: what it sends, computes and keeps."""
