"""Processes and shared memory under every loader: knows offsets and arrays, not tensors."""
