"""shardio's own converters: one folder per family of sources, one module per kind.

Converters only read; the driver writes.
"""
