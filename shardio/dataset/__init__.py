"""Open, read and write datasets. A dataset is a folder of shard files with a manifest.

The module `manifest` publishes and reads generations. A generation is one published state of a
dataset: it lists the shards. A dataset changes when its next generation is published.
"""
