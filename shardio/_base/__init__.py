"""Helpers that all packages use, and the version of shardio."""

__version__ = "0.1.0"
"""The version of this package; the version of the file format is in `format.layout`."""
