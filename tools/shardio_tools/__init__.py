"""The command line of shardio: one module per command, on shardio's public names only."""
