"""Datasets in object stores: a client, a cache of whole shards, and reads of byte ranges."""
