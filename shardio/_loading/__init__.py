"""Behind what users construct: options, epochs, and the iterators that loops get batches from."""
