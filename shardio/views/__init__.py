"""What of a dataset counts as its samples: rows, clips of videos, or windows of packed tokens."""
