"""Batches: the layout of a block of memory, how samples are put together, and `Batch` itself."""
