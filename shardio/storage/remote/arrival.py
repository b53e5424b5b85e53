"""What came over a network is what was written: every hash of a shard, once, before it is used.

Everything is bound to the id that the generation names: it is the hash of the section table, which
has the hashes of the tables of hashes, which have those of all bytes that anything is read from.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from shardio.errors import ShardCorrupt
from shardio.format.fields import STREAMED
from shardio.format.index import stored_bytes
from shardio.format.layout import Kind
from shardio.shard.reader import ShardReader
from shardio.shard.verification import Rows
from shardio.shard.writer import ShardSummary

_ROWS_AT_ONCE: Final = 1 << 14


def check_arrived(path: str, shard: ShardSummary) -> None:
    """Make sure that a file is the shard that a generation names, whole and as it was written.

    Raises:
        ShardCorrupt, ShardIncomplete, ShardUnsupported: it is not.
    """
    with ShardReader(path, verify="first", access="mmap") as reader:
        found = (reader.id, len(reader), reader.header.file_size)
        expected = (shard.id, shard.n_samples, shard.n_bytes)
        if found != expected:
            raise ShardCorrupt(
                "not the shard that the generation names (id, samples, bytes)",
                code="generation",
                path=path,
                expected=expected,
                found=found,
            )
        for section in reader.sections:
            if section.kind == Kind.DICTIONARY:
                stored = reader.content[section.offset : section.offset + section.size]
                reader.units.check_whole(section, bytes(stored))
        for first in range(0, len(reader), _ROWS_AT_ONCE):
            rows = np.arange(first, min(first + _ROWS_AT_ONCE, len(reader)))
            for name in reader.schema.optional:
                reader.records.present(name, rows)
            for name in reader.schema.columns:
                reader.units.check_column(name, rows)
            for k, name in enumerate(reader.schema.records):
                _check_records(reader, name, k, rows)


def _check_records(reader: ShardReader, name: str, k: int, rows: Rows) -> None:
    """Check all that is stored of a record field, without decoding it."""
    records, units = reader.records, reader.units
    entries = records.entries(name, rows)
    records.shapes(name, rows)
    if isinstance(reader.schema[name], STREAMED):
        for stream in records.streams.streams(name, rows, entries):
            stream.data[:]
        return
    columns = (
        rows.tolist(),
        (entries["offset"] + np.uint64(records.offset)).tolist(),
        stored_bytes(entries).tolist(),
        entries["hash"].tolist(),
    )
    for row, offset, n_bytes, expected in zip(*columns, strict=True):
        units.check_record(
            name, k, row, offset, reader.content[offset : offset + n_bytes], expected
        )
