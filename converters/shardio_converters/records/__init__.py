"""Converters of record files: consecutive samples in files of other data loaders."""
