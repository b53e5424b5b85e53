"""Workloads of the case `converters`: files of each kind, and their libraries' loops."""
