"""Datasets in object stores: objects, a cache of whole shards, and reads of parts of them."""
