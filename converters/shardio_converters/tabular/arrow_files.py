"""Files of tables: Parquet, and Arrow's own as a file or a stream, read batch by batch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from shardio import Input, MediaError
from shardio_converters.file_names import data_name

PARQUET: Final = (".parquet", ".pq")
SUFFIXES: Final = (*PARQUET, ".arrow", ".arrows", ".feather", ".ipc")

STATE: Final = "state.json"
"""The name of the file in which Hugging Face's `datasets` lists the tables of a data set."""

_MAX_STATE_BYTES: Final = 64 << 20
_N_ROWS: Final = 4096  # at most, of a batch
_BATCH_BYTES: Final = 8 << 20  # about, of a batch
_BUFFER_BYTES: Final = 1 << 20  # of a column of Parquet that are read at a time
_FILE_MAGIC: Final = b"ARROW1"
_FEATHER_1: Final = b"FEA1"
_ENDS: Final = (b"\xff\xff\xff\xff\0\0\0\0", b"\0\0\0\0")
"""What a stream of Arrow closes with; the second one until 2019."""
_NOT_READABLE: Final = (pa.ArrowException, OSError, ValueError, MemoryError, RecursionError)


class ParquetTable:
    """A file of Parquet. It is read in pieces of columns, whatever the size of its row groups."""

    def __init__(self, path: str) -> None:
        self._file = pq.ParquetFile(
            pa.OSFile(os.fsencode(path)),  # pyarrow takes no text for names that are no UTF-8
            buffer_size=_BUFFER_BYTES,
            pre_buffer=False,
            page_checksum_verification=True,
        )
        self.schema: pa.Schema = self._file.schema_arrow

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Read all rows, those of some columns, in their order.

        Raises:
            MediaError: there are not as many as the file says.
        """
        n_found, n_rows = 0, self._file.metadata.num_rows
        for batch in self._file.iter_batches(
            batch_size=self._n_rows(), columns=columns, use_threads=False
        ):
            n_found += batch.num_rows
            yield batch
        if n_found != n_rows:
            raise MediaError(f"expected {n_rows:,} rows, found {n_found:,}")

    def _n_rows(self) -> int:
        """How many rows make a batch."""
        groups = map(self._file.metadata.row_group, range(self._file.num_row_groups))
        row_bytes = (group.total_byte_size // max(1, group.num_rows) for group in groups)
        return max(1, min(_N_ROWS, _BATCH_BYTES // max(1, max(row_bytes, default=1))))

    def close(self) -> None:
        """Close the file."""
        self._file.close(force=True)


class ArrowTable:
    """A file or a stream of Arrow, as a memory map; of what is compressed, one batch is held."""

    def __init__(self, path: str) -> None:
        self._source = pa.memory_map(os.fsencode(path))
        self._is_file = self._source.read_at(len(_FILE_MAGIC), 0) == _FILE_MAGIC
        self._size: int = self._source.size()
        opened = pa.ipc.open_file if self._is_file else pa.ipc.open_stream
        self._reader: Any = opened(self._source)
        self.schema: pa.Schema = self._reader.schema

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Read all rows, in their order; each batch is proved to be sound.

        Raises:
            MediaError: a stream goes on behind its end, or has none.
        """
        for batch in self._whole_batches():
            if columns is not None:
                batch = batch.select(columns)
            batch.validate(full=True)  # Arrow itself trusts the offsets that it finds in a file
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
            raise MediaError("the stream has no end: it was cut off, or never closed")

    def close(self) -> None:
        """Let go of the file; the memory map stays as long as something is made of it."""
        self._source.close()


@contextmanager
def open_table(path: str, name: str) -> Iterator[ParquetTable | ArrowTable]:
    """Open a file by the suffix of its name; whatever is raised while it is open names its damage.

    Raises:
        MediaError: it is damaged, or of a kind that cannot be read.
        OSError: it cannot be opened.
    """
    with open(path, "rb") as file:  # an error of this one names the file
        head = file.read(len(_FILE_MAGIC))
        n_bytes = os.fstat(file.fileno()).st_size
    if not n_bytes:
        raise MediaError("the file is empty")
    if head.startswith(_FEATHER_1):
        raise MediaError("Feather of version 1: read it with pyarrow, and write version 2")
    try:
        table = ParquetTable(path) if name.lower().endswith(PARQUET) else ArrowTable(path)
        try:
            yield table
        finally:
            table.close()
    except MediaError:
        raise
    except _NOT_READABLE as error:
        if isinstance(error, OSError) and error.filename:
            raise
        raise MediaError(f"damaged: {error}") from error


def is_table(source: Input) -> bool:
    """Whether a file is a table, by its name; beside a state, whether that one lists it.

    What a data set of Hugging Face's has remembered of earlier steps may lie there as well.
    """
    name = os.path.basename(source.name)
    if not name.lower().endswith(SUFFIXES):
        return False
    listed = _listed(os.path.join(os.path.dirname(source.path), STATE))
    return listed is None or name in listed


def refuse_missing_tables(source: Input) -> None:
    """Make sure, of a state, that the tables that it lists are there.

    Raises:
        MediaError: one is not.
    """
    if os.path.basename(source.name) == STATE:
        there = map(data_name, os.listdir(os.path.dirname(source.path)))
        if missing := sorted((_listed(source.path) or frozenset()).difference(there)):
            raise MediaError(f"{missing[0]!r}, which it lists, is missing")


def _listed(path: str) -> frozenset[str] | None:
    """The tables that a state lists; None where there is none, or it says nothing of any."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return _listed_then(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=16)  # the tables of one folder come one after the other
def _listed_then(path: str, changed_ns: int, n_bytes: int) -> frozenset[str] | None:
    try:
        with open(path, "rb") as file:
            state = json.loads(file.read(_MAX_STATE_BYTES))
        return frozenset(str(one["filename"]) for one in state["_data_files"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
