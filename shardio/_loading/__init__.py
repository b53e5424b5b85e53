"""Behind ShardLoader: its options, its epochs, and the iterator that a loop gets batches from."""
