"""What bench_converters measures: files of each kind, and their libraries' loops."""
