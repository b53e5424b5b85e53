"""The command `shardio inspect`: facts about a dataset or shard, and pictures of its samples."""
