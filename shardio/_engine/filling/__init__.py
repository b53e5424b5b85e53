"""Filling of a block of shared memory with a batch; runs in workers."""
