"""The built-in converters: one folder per family of sources, one module per kind.

Converters only read; `shardio.conversion` writes.
"""
