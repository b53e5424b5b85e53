"""Batches: the layout of a batch in a block of memory, collation of samples, and `Batch` itself."""
