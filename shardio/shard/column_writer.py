"""The columns of samples on their way into a shard, and the bits of optional fields.

Beside `payload`, which does the same for records. What is gathered waits in spools; the writer of
the shard says where they go, and closes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Final

from shardio.format.checksum import ROW_HASH_MIN, Hasher, hash_bytes, rows_per_unit
from shardio.format.fields import Array
from shardio.format.index import DIMENSION

GATHERED: Final = 256
"""Rows that are put together and hashed at a time; each is an object of its own until then."""
_COPY_BYTES: Final = 1 << 20


class SectionBuffer:
    """Bytes on their way into a shard: in memory, in a file, or straight in their place.

    Append only. Owns its temporary file, if `move_to` gave it one, until `close()`.
    """

    def __init__(self) -> None:
        self.n_bytes = 0
        self._memory = bytearray()
        self._file: IO[bytes] | None = None

    @property
    def waiting(self) -> int:
        """Bytes held in memory."""
        return len(self._memory)

    def write(self, data: bytes | memoryview) -> None:
        """Append."""
        if self._file is None:
            self._memory += data
        else:
            self._file.write(data)
        self.n_bytes += len(data) if type(data) is bytes else memoryview(data).nbytes

    def move_to(self, file: IO[bytes]) -> None:
        """Write what waits, and everything from now on, to `file`."""
        file.write(self._memory)
        self._memory = bytearray()
        self._file = file

    def chunks(self) -> Iterator[memoryview]:
        """Everything written, in pieces of whole blocks, from memory or the temporary file."""
        if self._file is None:
            whole = memoryview(self._memory)
            for i in range(0, len(whole), _COPY_BYTES):
                yield whole[i : i + _COPY_BYTES]
            return
        self._file.seek(0)
        while piece := self._file.read(_COPY_BYTES):
            yield memoryview(piece)

    def close(self) -> None:
        """Let go of what is held."""
        self._memory = bytearray()
        if self._file is not None:
            self._file.close()


class ColumnWriter:
    """Gathers the rows of one column, at their stride, and one hash per unit of them.

    Rows that share a hash wait here until there are GATHERED of them, or `flush`.
    """

    def __init__(self, field: Array) -> None:
        row_bytes = field.row_bytes or 0
        self.data, self.hashes = SectionBuffer(), SectionBuffer()
        self._fill = bytes(field.stride - row_bytes)
        self._row_bytes, self._absent = row_bytes, b""
        self._rows_per_unit = rows_per_unit(row_bytes, field.stride)
        self._by_row = row_bytes >= ROW_HASH_MIN
        self._run, self._n_in_run = Hasher(), 0
        self._rows: list[bytes | memoryview] = []
        self._n_wanted = min(GATHERED, self._rows_per_unit)

    def append(self, row: bytes | memoryview | None) -> None:
        """Add a row; None, of an optional field, is a row of zeros.

        One that has no hash of its own must not change afterwards.
        """
        row = self._zeros() if row is None else row
        if self._by_row:
            self._put(hash_bytes(row))
            self.data.write(row)
            if self._fill:
                self.data.write(self._fill)
            return
        self._rows.append(row)
        if len(self._rows) == self._n_wanted:
            self.flush()

    def _zeros(self) -> bytes:
        """The row of a missing value; made with the first, as a schema can say any size."""
        if not self._absent:
            self._absent = bytes(self._row_bytes)
        return self._absent

    def flush(self) -> None:
        """Have all rows in `data`."""
        if not self._rows:
            return
        joined = self._fill.join(self._rows) + self._fill
        self.data.write(joined)
        self._run.update(joined)
        self._n_in_run += len(self._rows)
        self._rows = []
        if self._n_in_run == self._rows_per_unit:
            self._end_run()
        self._n_wanted = min(GATHERED, self._rows_per_unit - self._n_in_run)

    def finish(self) -> None:
        """Close the last, incomplete run."""
        self.flush()
        if self._n_in_run:
            self._end_run()

    def _end_run(self) -> None:
        self._put(self._run.intdigest())
        self._run.reset()
        self._n_in_run = 0

    def _put(self, hash_: int) -> None:
        self.hashes.write(DIMENSION.pack(hash_))


class ValidityWriter:
    """Gathers which samples have a value of an optional field: a bit each, from the lowest on."""

    def __init__(self) -> None:
        self.data = SectionBuffer()
        self._n, self._byte = 0, 0

    def append(self, value: object) -> None:
        """Add a sample's bit: 0 if `value` is None."""
        self._byte |= (value is not None) << (self._n & 7)
        self._n += 1
        if not self._n & 7:
            self._put()

    def finish(self) -> None:
        """Fill the last byte up with zeros."""
        if self._n & 7:
            self._put()

    def _put(self) -> None:
        self.data.write(bytes([self._byte]))
        self._byte = 0
