"""Arrow table files, read batch by batch: Parquet, and Arrow's file and stream formats."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from shardio import Input, MediaError
from shardio_converters.files import damage, data_name

PARQUET: Final = (".parquet", ".pq")
SUFFIXES: Final = (*PARQUET, ".arrow", ".arrows", ".feather", ".ipc")

STATE: Final = "state.json"  # Hugging Face's list of the tables in a folder
SPLITS: Final = "dataset_dict.json"  # Hugging Face's list of the splits in a folder

_MAX_STATE_BYTES: Final = 64 << 20
_N_ROWS: Final = 4096  # the maximum number of rows of a batch
_BATCH_BYTES: Final = 8 << 20  # the approximate size of a batch
_BUFFER_BYTES: Final = 1 << 20  # the size of single reads of a Parquet column
_FILE_MAGIC: Final = b"ARROW1"
_FEATHER_1: Final = b"FEA1"
# The end of an Arrow stream; the second form was used until 2019
_ENDS: Final = (b"\xff\xff\xff\xff\0\0\0\0", b"\0\0\0\0")
_TABLE_DAMAGE: Final = (pa.ArrowException, OSError, ValueError, MemoryError, RecursionError)


@dataclass(frozen=True)
class OpenTable:
    """An open table; `batches(columns=None)`, to be called once only, yields all rows in order."""

    schema: pa.Schema
    batches: Callable[..., Iterator[pa.RecordBatch]]


@contextmanager
def open_table(path: str, name: str) -> Iterator[OpenTable]:
    """Open the table at `path`, Parquet if `name` says so; pyarrow's errors become MediaError."""
    with open(path, "rb") as file:  # an error of `open` names the file
        head = file.read(len(_FILE_MAGIC))
    if not head:
        raise MediaError("the file is empty")
    if head.startswith(_FEATHER_1):
        raise MediaError("Feather of version 1: convert it to version 2 with pyarrow")
    place = os.fsencode(path)  # pyarrow refuses str for names that are not UTF-8
    with damage(_TABLE_DAMAGE):
        if name.lower().endswith(PARQUET):
            with (
                pa.OSFile(place) as source,
                pq.ParquetFile(
                    source,
                    buffer_size=_BUFFER_BYTES,
                    pre_buffer=False,
                    page_checksum_verification=True,
                ) as table,
            ):
                yield OpenTable(table.schema_arrow, partial(_parquet_batches, table))
        else:
            # The memory map lives as long as arrays refer to it.
            with pa.memory_map(place) as source:
                if head == _FILE_MAGIC:
                    reader = pa.ipc.open_file(source)
                    batches: Iterator[Any] = map(reader.get_batch, range(reader.num_record_batches))
                else:
                    reader = pa.ipc.open_stream(source)
                    batches = _streamed(source, reader)
                yield OpenTable(reader.schema, partial(_validated, batches))


def _parquet_batches(table: Any, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Yield batches of limited size, even if row groups are larger."""
    metadata = table.metadata
    groups = map(metadata.row_group, range(table.num_row_groups))
    row_bytes = max((one.total_byte_size // max(1, one.num_rows) for one in groups), default=1)
    n_found = 0
    for batch in table.iter_batches(
        batch_size=_n_rows(row_bytes), columns=columns, use_threads=False
    ):
        n_found += batch.num_rows
        yield batch
    if n_found != metadata.num_rows:
        raise MediaError(f"expected {metadata.num_rows:,} rows, found {n_found:,}")


def _n_rows(row_bytes: int) -> int:
    return max(1, min(_N_ROWS, _BATCH_BYTES // max(1, row_bytes)))


def _validated(
    batches: Iterable[pa.RecordBatch], columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield validated slices of batches; only one batch is decompressed at a time."""
    for batch in batches:
        if columns is not None:
            batch = batch.select(columns)
        # Arrow trusts the offsets in a file unless asked to validate them.
        batch.validate(full=True)
        n_rows = _n_rows(batch.nbytes // max(1, batch.num_rows))
        for first in range(0, batch.num_rows, n_rows):
            yield batch.slice(first, n_rows)


def _streamed(source: Any, reader: Any) -> Iterator[pa.RecordBatch]:
    yield from reader
    read, n_bytes = source.tell(), source.size()
    if read != n_bytes:
        raise MediaError(
            f"the stream ends at byte {read:,} of {n_bytes:,}: if a file has several streams, only "
            "the first would be read"
        )
    if not source.read_at(8, max(0, read - 8)).endswith(_ENDS):
        raise MediaError("the stream has no end marker: it was truncated, or never closed")


def is_table(source: Input) -> bool:
    """Return True if the name of a file has the suffix of a table.

    If there is a state.json in its folder, it must list the file: a dataset folder of Hugging Face
    may also contain cached tables of earlier steps.
    """
    name = os.path.basename(source.name)
    if not name.lower().endswith(SUFFIXES):
        return False
    listed = _listed(os.path.join(os.path.dirname(source.path), STATE))
    return listed is None or name in listed


def refuse_missing_tables(source: Input) -> None:
    """Check that all tables listed in a state.json exist."""
    if os.path.basename(source.name) == STATE:
        there = map(data_name, os.listdir(os.path.dirname(source.path)))
        if missing := sorted((_listed(source.path) or frozenset()).difference(there)):
            raise MediaError(f"{missing[0]!r}, which it lists, is missing")


def listed_splits(path: str) -> list[str]:
    """Return the splits that a dataset_dict.json lists; [] if it is damaged."""
    try:
        with open(path, "rb") as file:
            names = json.loads(file.read(_MAX_STATE_BYTES))["splits"]
        return [name for name in names if isinstance(name, str) and name.isprintable()]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []


def _listed(path: str) -> frozenset[str] | None:
    """Return the tables that a state.json lists; None if it is absent or damaged."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return _parse_state(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=16)  # a small cache is enough, as the tables of a folder are read in sequence
def _parse_state(path: str, changed_ns: int, n_bytes: int) -> frozenset[str] | None:
    try:
        with open(path, "rb") as file:
            state = json.loads(file.read(_MAX_STATE_BYTES))
        return frozenset(str(one["filename"]) for one in state["_data_files"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
