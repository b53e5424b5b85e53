"""The engine of loaders: fills blocks of shared memory with batches, and knows no tensors."""
