"""Local files: all changes to the file system, and shards, which are mapped or read by offset."""
