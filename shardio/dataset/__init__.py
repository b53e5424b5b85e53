"""Open, read and write datasets. A dataset is a folder of shard files with a manifest."""
