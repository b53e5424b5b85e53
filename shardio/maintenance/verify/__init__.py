"""Check every byte of a shard or dataset, and report findings."""
