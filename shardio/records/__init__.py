"""Records: the values of a shard that are not stored in columns, found by its index, verified.

`stored` has them all; `streams` those of videos and sound, whose packets are read part by part.
"""

from shardio.records.stored import Present, Records
from shardio.records.streams import StoredData

__all__ = ["Present", "Records", "StoredData"]
