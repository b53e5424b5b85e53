"""Datasets: folders of shards, opened, read and written.

`manifest` is the commit point: it publishes and reads the generations that list a dataset's shards.
"""
