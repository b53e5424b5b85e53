"""Bytes to values and back: the shard format, without files, maps or processes."""
