"""How many units a shard has, told without opening it: where its marks lie among those of others.

Exact where no field is a stream: schema and number of samples decide everything that has a hash.
How many packets and chunks streams have only the file can tell; it has bytes for so many at most.
"""

from __future__ import annotations

import numpy as np

from shardio.errors import ShardCorrupt
from shardio.format.checksum import BLOCK_BYTES, CHUNK_BYTES, distinct
from shardio.format.fields import STREAMED
from shardio.format.index import DIMENSION
from shardio.format.layout import Kind
from shardio.format.schema import Schema
from shardio.format.streams import PACKET
from shardio.shard.opening import expected_sections
from shardio.shard.reader import ShardReader
from shardio.shard.verification import Rows


def most_marks(schema: Schema, n_samples: Rows, n_bytes: Rows) -> Rows:
    """How many units each of some shards has at most.

    Args:
        schema: of all of them.
        n_samples, n_bytes: of each.
    """
    found: Rows = np.zeros(len(n_samples), np.int64)
    for n in distinct(n_samples).tolist():
        found[n_samples == n] = _n_fixed(schema, n)
    n_streams = sum(isinstance(field, STREAMED) for field in schema.records.values())
    chunks = n_bytes // CHUNK_BYTES + n_samples
    packets = n_bytes // PACKET.size
    blocks = [_most_blocks(chunks * DIMENSION.size), _most_blocks(packets * PACKET.size)]
    return found + n_streams * (chunks + sum(blocks))


def _n_fixed(schema: Schema, n_samples: int) -> int:
    """How many units a shard has but those of packets and chunks."""
    sections = expected_sections(schema, n_samples).items()
    tables = sum(1 + count for (kind, _, _), (count, _) in sections if kind == Kind.BLOCK_HASHES)
    columns = sum(count for (kind, _, _), (count, _) in sections if kind == Kind.COLUMN_HASHES)
    return tables + columns + n_samples * len(schema.records)


def _most_blocks(n_bytes: Rows) -> Rows:
    return n_bytes // BLOCK_BYTES + 1


def check_marks(reader: ShardReader, most: int) -> None:
    """Make sure that a shard has no more units than there is room for.

    Raises:
        ShardCorrupt: it has more hashes of chunks than its bytes could need.
    """
    if reader.units.n_marks > most:
        raise ShardCorrupt(
            "it has more hashes than its bytes can need",
            code="section",
            path=reader.path,
            expected=most,
            found=reader.units.n_marks,
        )
