"""The engine of loaders: fills blocks of shared memory with batches, without tensors."""
