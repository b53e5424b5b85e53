"""The built-in converters: one folder per family of sources, one module per kind.

Converters only read; `shardio.conversion` writes. Functions raise `MediaError` for a source that is
damaged or cannot be stored, `OSError` if reading fails, and `InvalidArgument` for bad options.
"""
