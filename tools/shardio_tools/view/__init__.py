"""The command `shardio view`: a dataset in the browser."""
