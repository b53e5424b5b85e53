"""The command line of shardio: one module per command, built on shardio's public API only."""
