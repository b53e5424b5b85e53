"""Decide which worker fills which step in which block; runs in the main process."""
