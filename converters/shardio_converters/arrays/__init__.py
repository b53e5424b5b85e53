"""Converters of named arrays: one sample per file, or per row."""
