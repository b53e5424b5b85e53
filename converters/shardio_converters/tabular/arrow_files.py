"""Arrow table files, read batch by batch: Parquet, and Arrow's file and stream formats."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import lru_cache
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from shardio import Input, MediaError
from shardio_converters.files import damage, data_name

PARQUET: Final = (".parquet", ".pq")
SUFFIXES: Final = (*PARQUET, ".arrow", ".arrows", ".feather", ".ipc")

STATE: Final = "state.json"
"""The name of the file in which Hugging Face's `datasets` lists the tables of a data set."""

_MAX_STATE_BYTES: Final = 64 << 20
_N_ROWS: Final = 4096  # the maximum number of rows of a batch
_BATCH_BYTES: Final = 8 << 20  # the approximate size of a batch
_BUFFER_BYTES: Final = 1 << 20  # the size of single reads of a Parquet column
_FILE_MAGIC: Final = b"ARROW1"
_FEATHER_1: Final = b"FEA1"
_ENDS: Final = (b"\xff\xff\xff\xff\0\0\0\0", b"\0\0\0\0")
"""The end markers of an Arrow stream; the second was used until 2019."""
_TABLE_DAMAGE: Final = (pa.ArrowException, OSError, ValueError, MemoryError, RecursionError)


class ParquetTable:
    """A Parquet file, read in batches of limited size, even if its row groups are larger."""

    def __init__(self, path: str) -> None:
        self._file = pq.ParquetFile(
            pa.OSFile(os.fsencode(path)),  # pyarrow refuses str for names that are not UTF-8
            buffer_size=_BUFFER_BYTES,
            pre_buffer=False,
            page_checksum_verification=True,
        )
        self.schema: pa.Schema = self._file.schema_arrow

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield all rows of some columns, in order."""
        n_found, n_rows = 0, self._file.metadata.num_rows
        for batch in self._file.iter_batches(
            batch_size=self._n_rows(), columns=columns, use_threads=False
        ):
            n_found += batch.num_rows
            yield batch
        if n_found != n_rows:
            raise MediaError(f"expected {n_rows:,} rows, found {n_found:,}")

    def _n_rows(self) -> int:
        groups = map(self._file.metadata.row_group, range(self._file.num_row_groups))
        row_bytes = (group.total_byte_size // max(1, group.num_rows) for group in groups)
        return max(1, min(_N_ROWS, _BATCH_BYTES // max(1, max(row_bytes, default=1))))

    def close(self) -> None:
        """Close the file."""
        self._file.close(force=True)


class ArrowTable:
    """A memory-mapped Arrow file or stream; compressed batches are decompressed one at a time."""

    def __init__(self, path: str) -> None:
        self._source = pa.memory_map(os.fsencode(path))
        self._is_file = self._source.read_at(len(_FILE_MAGIC), 0) == _FILE_MAGIC
        self._size: int = self._source.size()
        opened = pa.ipc.open_file if self._is_file else pa.ipc.open_stream
        self._reader: Any = opened(self._source)
        self.schema: pa.Schema = self._reader.schema

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield all rows in order; each batch is validated."""
        for batch in self._whole_batches():
            if columns is not None:
                batch = batch.select(columns)
            # Arrow trusts the offsets in a file unless asked to validate them.
            batch.validate(full=True)
            row_bytes = batch.nbytes // max(1, batch.num_rows)
            n_rows = max(1, min(_N_ROWS, _BATCH_BYTES // max(1, row_bytes)))
            for first in range(0, batch.num_rows, n_rows):
                yield batch.slice(first, n_rows)

    def _whole_batches(self) -> Iterator[pa.RecordBatch]:
        if self._is_file:
            yield from map(self._reader.get_batch, range(self._reader.num_record_batches))
            return
        self._source.seek(0)
        yield from pa.ipc.open_stream(self._source)
        read = self._source.tell()
        if read != self._size:
            raise MediaError(
                f"the stream ends at byte {read:,}, the file has {self._size:,}: of streams in one "
                "file only the first would be read"
            )
        if not self._source.read_at(8, max(0, read - 8)).endswith(_ENDS):
            raise MediaError("the stream has no end marker: it was truncated, or never closed")

    def close(self) -> None:
        """Close the file; the memory map lives as long as arrays refer to it."""
        self._source.close()


@contextmanager
def open_table(path: str, name: str) -> Iterator[ParquetTable | ArrowTable]:
    """Open the table at `path`; errors of pyarrow become MediaError.

    The suffix of `name` states if the format is Parquet.
    """
    with open(path, "rb") as file:  # an error of `open` names the file
        head = file.read(len(_FILE_MAGIC))
        n_bytes = os.fstat(file.fileno()).st_size
    if not n_bytes:
        raise MediaError("the file is empty")
    if head.startswith(_FEATHER_1):
        raise MediaError("Feather of version 1: convert it to version 2 with pyarrow")
    with damage(_TABLE_DAMAGE):
        is_parquet = name.lower().endswith(PARQUET)
        with closing(ParquetTable(path) if is_parquet else ArrowTable(path)) as table:
            yield table


def is_table(source: Input) -> bool:
    """Return True if the name of a file has the suffix of a table.

    If there is a state.json in its folder, the file must also be listed there, because a dataset
    folder of Hugging Face may also contain cached tables of earlier steps.
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


def _listed(path: str) -> frozenset[str] | None:
    """Return the tables that a state.json lists; None if it is absent or cannot be parsed."""
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
