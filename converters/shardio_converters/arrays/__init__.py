"""Named arrays: a sample of each file of them, or of each row."""
