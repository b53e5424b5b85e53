"""The engine of loaders: fills blocks of shared memory with batches. It does not know tensors."""
