"""Worker processes, shared memory, and tasks that run in them; no module here knows of datasets."""
