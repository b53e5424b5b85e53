"""Batches: the layout of a block of memory, collation of samples, and `Batch` itself."""
