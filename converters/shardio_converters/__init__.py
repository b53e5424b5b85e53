"""shardio's own converters, one module per kind of source. They only read; the driver writes."""
