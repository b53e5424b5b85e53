"""Helpers without dependencies on other packages: base classes, callers, file names, statistics."""
