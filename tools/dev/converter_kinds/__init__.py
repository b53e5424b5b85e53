"""Workloads of bench_converters: files of each kind, and their libraries' loops."""
