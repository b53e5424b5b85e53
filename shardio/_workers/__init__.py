"""Worker processes, shared memory, and tasks that run in workers; independent of datasets."""
