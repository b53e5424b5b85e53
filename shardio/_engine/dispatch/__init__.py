"""Assignment of steps and blocks to workers; runs in the main process."""
