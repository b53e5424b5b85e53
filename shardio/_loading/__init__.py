"""The machinery of the loaders: options, epochs, and the iterators that deliver batches."""
