"""Datasets in object stores: a client, a local cache of whole shards, and reads of byte ranges."""
