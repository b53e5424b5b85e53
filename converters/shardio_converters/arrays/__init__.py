"""Converters of files that contain named arrays: one sample per file, or one sample per row."""
