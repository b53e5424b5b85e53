"""shardio's own converters: a folder for each family of sources, a module for each kind.

They only read; the driver writes.
"""
