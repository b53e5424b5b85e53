"""Tables of Arrow's, Parquet among them: a sample of each row."""
