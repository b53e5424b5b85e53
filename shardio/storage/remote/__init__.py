"""Read datasets in object stores, and cache their shards on a local disk."""
