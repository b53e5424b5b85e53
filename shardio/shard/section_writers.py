"""Writers of the sections of a shard: columns, validity bits, records with their index, streams.

`ShardWriter` decides where a section's buffer keeps the bytes: in memory, a temporary file or the
shard file. `SectionTable` appends finished sections to the shard file, and writes the section table
and the header pages. If a field is compressed with a dictionary, the first rows are held back in
memory until there is enough data to train the dictionary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Final

from shardio.format.checksum import (
    ROW_HASH_MIN,
    Hasher,
    block_hashes,
    chunk_hashes,
    content_id,
    hash_bytes,
    pack_hashes,
    rows_per_unit,
)
from shardio.format.codecs import (
    BY_CODE,
    SPECS,
    Codec,
    Dictionary,
    cached_dictionary,
    encode,
    train_dictionary,
)
from shardio.format.layout import PAGE, Header, Required, Section, pack_table, padded
from shardio.format.schema import Schema
from shardio.format.sections import DIMENSION, ENTRY, SectionSpec, block_hashes_of, pack_entry
from shardio.format.types import Array
from shardio.format.types.field import Content
from shardio.format.types.streams import PACKET, Record, StreamRecord, with_first_indices


class SectionBuffer:
    """The bytes of a section in memory or, after `move_to`, in a file."""

    def __init__(self, content: bytes = b"") -> None:
        self.n_bytes = len(content)
        self._memory = bytearray(content)
        self._file: IO[bytes] | None = None

    @property
    def n_in_memory(self) -> int:
        """The number of bytes held in memory."""
        return len(self._memory)

    def write(self, data: bytes | memoryview) -> None:
        """Append data."""
        if self._file is None:
            self._memory += data
        else:
            self._file.write(data)
        self.n_bytes += len(data) if type(data) is bytes else memoryview(data).nbytes

    def move_to(self, file: IO[bytes]) -> None:
        """Move the bytes to `file`, to which all further bytes are written."""
        file.write(self._memory)
        self._memory = bytearray()
        self._file = file

    def pieces(self) -> Iterator[memoryview]:
        """Yield all bytes in pieces of 1 MiB (whole hash blocks); the last may be shorter."""
        if self._file is None:
            whole = memoryview(self._memory)
            for i in range(0, len(whole), _COPY_BYTES):
                yield whole[i : i + _COPY_BYTES]
            return
        self._file.seek(0)
        while piece := self._file.read(_COPY_BYTES):
            yield memoryview(piece)

    def hash(self) -> int:
        """Return the hash of all bytes written so far."""
        hasher = Hasher()
        for piece in self.pieces():
            hasher.update(piece)
        return hasher.intdigest()

    def close(self) -> None:
        """Release the memory and close the file."""
        self._memory = bytearray()
        if self._file is not None:
            self._file.close()


class SectionTable:
    """The section table of a borrowed shard file, to which sections are appended.

    The file must begin with the first page. If it already contains a streamed section, call
    `add_entry` for this section first.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._offset = PAGE
        self._sections: list[Section] = []

    def add_entry(self, spec: SectionSpec, n_bytes: int, hash_: int) -> None:
        """Add the entry of a section that is the last `n_bytes` of the file; pad the section."""
        section = Section(*spec.key, self._offset, n_bytes, spec.n_items, spec.stride, hash_)
        self._sections.append(section)
        self._file.write(bytes(section.end - self._offset - n_bytes))
        self._offset = section.end

    def add(self, spec: SectionSpec, pieces: Iterable[memoryview], hash_: int) -> None:
        """Append a section with the bytes `pieces` and the hash `hash_`."""
        n_bytes = 0
        for piece in pieces:
            self._file.write(piece)
            n_bytes += piece.nbytes
        self.add_entry(spec, n_bytes, hash_)

    def add_with_block_hashes(self, spec: SectionSpec, pieces: Iterable[memoryview]) -> None:
        """Append an index section, given in whole hash blocks, and the section of its hashes."""
        hashes: list[bytes] = []
        n_bytes = 0
        for piece in pieces:
            self._file.write(piece)
            n_bytes += piece.nbytes
            hashes.append(pack_hashes(block_hashes(piece)))
        packed = b"".join(hashes)
        whole = hash_bytes(packed)
        self.add_entry(spec, n_bytes, whole)
        self.add(block_hashes_of(spec), [memoryview(packed)], whole)

    def close(self, n_samples: int, required: int) -> Header:
        """Append the section table and the last page, then write the first page."""
        table = pack_table(self._sections)
        self._file.write(table.ljust(padded(len(table)), b"\0"))
        header = Header(
            n_samples=n_samples,
            file_size=self._offset + padded(len(table)) + PAGE,
            table_offset=self._offset,
            table_size=len(table),
            table_hash=hash_bytes(table),
            id=content_id(table),
            required=required,
        )
        self._file.write(header.pack())
        self._file.seek(0)
        self._file.write(header.pack())
        return header


MAX_PENDING_ROWS: Final = 256
"""The maximum number of small rows that are kept as objects before they are joined and hashed."""


class ColumnWriter:
    """A buffer of the rows of one column, padded to the stride, and of the column's hashes."""

    def __init__(self, field: Array) -> None:
        row_bytes = field.row_bytes or 0
        self.data, self.hashes = SectionBuffer(), SectionBuffer()
        self._padding = bytes(field.stride - row_bytes)
        self._row_bytes, self._zero_row = row_bytes, b""
        self._rows_per_unit = rows_per_unit(row_bytes, field.stride)
        self._has_row_hashes = row_bytes >= ROW_HASH_MIN
        self._unit_hasher, self._n_in_unit = Hasher(), 0
        self._rows: list[bytes | memoryview] = []
        self._flush_count = min(MAX_PENDING_ROWS, self._rows_per_unit)

    def append(self, row: bytes | memoryview | None) -> None:
        """Add a row; for None, a row of zeros. A small row is borrowed until `flush`."""
        if row is None:
            # Create the row of zeros only when it is needed, because it may be very large.
            self._zero_row = self._zero_row or bytes(self._row_bytes)
            row = self._zero_row
        if self._has_row_hashes:
            self.hashes.write(DIMENSION.pack(hash_bytes(row)))
            self.data.write(row)
            if self._padding:
                self.data.write(self._padding)
            return
        self._rows.append(row)
        if len(self._rows) == self._flush_count:
            self.flush()

    def flush(self) -> None:
        """Join the small rows; hash and write them."""
        if not self._rows:
            return
        joined = self._padding.join(self._rows) + self._padding
        self.data.write(joined)
        self._unit_hasher.update(joined)
        self._n_in_unit += len(self._rows)
        self._rows = []
        if self._n_in_unit == self._rows_per_unit:
            self._end_unit()
        self._flush_count = min(MAX_PENDING_ROWS, self._rows_per_unit - self._n_in_unit)

    def finish(self) -> None:
        """Flush, and write the hash of the last unit if it is incomplete."""
        self.flush()
        if self._n_in_unit:
            self._end_unit()

    def _end_unit(self) -> None:
        self.hashes.write(DIMENSION.pack(self._unit_hasher.intdigest()))
        self._unit_hasher.reset()
        self._n_in_unit = 0


class ValidityWriter:
    """A buffer of validity bits: 1 for each sample that has a value."""

    def __init__(self) -> None:
        self.data = SectionBuffer()
        self._n_bits, self._byte = 0, 0

    def append(self, value: object) -> None:
        """Add the bit of a sample: 0 if its value of the field is None, otherwise 1."""
        self._byte |= (value is not None) << (self._n_bits & 7)
        self._n_bits += 1
        if not self._n_bits & 7:
            self._write_byte()

    def finish(self) -> None:
        """Write the last byte if it is incomplete."""
        if self._n_bits & 7:
            self._write_byte()

    def _write_byte(self) -> None:
        self.data.write(bytes([self._byte]))
        self._byte = 0


_COPY_BYTES: Final = 1 << 20
TRAINING_BYTES: Final = 32 << 20
"""The dictionaries are trained when the records that are held back have this many bytes."""


class StreamWriter:
    """Buffers for the stream table, the packet table and the chunk hashes of a field."""

    def __init__(self) -> None:
        self.rows, self.packets, self.chunk_hashes = (SectionBuffer() for _ in range(3))
        self.buffers = self.rows, self.packets, self.chunk_hashes

    def append(self, record: StreamRecord, data: SectionBuffer) -> int:
        """Append a stream: its tables here, its record to `data`; return the hash for the index."""
        first_packet = self.packets.n_bytes // PACKET.size
        first_chunk = self.chunk_hashes.n_bytes // DIMENSION.size
        self.rows.write(with_first_indices(record.tables.row, first_packet, first_chunk))
        self.packets.write(record.tables.packets)
        hasher = Hasher()
        for piece in record.pieces():  # a piece is hashed and written while the CPU caches it
            hashes = pack_hashes(chunk_hashes(piece))
            self.chunk_hashes.write(hashes)
            hasher.update(hashes)
            data.write(piece)
        return hasher.intdigest()


@dataclass(frozen=True, slots=True, eq=False)
class _RecordLayout:
    name: str
    codec: int
    raw_alignment: int
    shapes: SectionBuffer | None
    stored_dims: tuple[int, ...]


class PayloadWriter:
    """A buffer of all records of one shard: the payload, its index, and the records' tables."""

    def __init__(self, schema: Schema) -> None:
        self.data, self.index, self.hash = SectionBuffer(), SectionBuffer(), Hasher()
        self.shapes = {n: SectionBuffer() for n, f in schema.records.items() if f.stored_dims}
        self.streams = {n: StreamWriter() for n, f in schema.records.items() if f.is_streamed}
        self._tables = [buffer for stream in self.streams.values() for buffer in stream.buffers]
        self.buffers = [self.data, self.index, *self.shapes.values(), *self._tables]
        self.dictionaries: dict[str, Dictionary | None] = {
            n: None for n, f in schema.records.items() if SPECS[f.codec].has_dictionary
        }
        """The dictionary of each field; None before training, or if there is too little data."""
        self.required = Required(0)
        """The features that a reader needs for the records written so far."""
        self.n_buffered = 0
        """The number of bytes in all buffers together."""
        self._layouts = [
            _RecordLayout(n, SPECS[f.codec].code, f.alignment, self.shapes.get(n), f.stored_dims)
            for n, f in schema.records.items()
        ]
        self._is_training_pending = bool(self.dictionaries)
        self._pending: list[list[Record]] = []
        self._n_pending_bytes = 0

    @property
    def n_bytes(self) -> int:
        """The number of payload bytes so far; records that are held back count uncompressed."""
        return self.data.n_bytes + self._n_pending_bytes

    def append(self, records: Sequence[Record]) -> None:
        """Add a row: a record for each field that is stored as records, in schema order."""
        if not self._is_training_pending:
            self._write(records)
            return
        # Copy the records: the caller may change their memory before they are written.
        copies = [_owned_copy(record) for record in records]
        self._pending.append(copies)
        self._n_pending_bytes += sum(map(_n_bytes, copies))
        if self._n_pending_bytes >= TRAINING_BYTES:
            self.finish()

    def min_added_bytes(self, records: Sequence[Record]) -> int:
        """Return a lower bound on the number of bytes that a row adds to `data`."""
        if self._is_training_pending:
            return 0
        return sum(record.nbytes for record in records if isinstance(record, StreamRecord))

    def finish(self) -> None:
        """Train the dictionaries on the rows that are held back; then write these rows."""
        if not self._is_training_pending:
            return
        self._is_training_pending = False
        for k, layout in enumerate(self._layouts):
            if layout.name in self.dictionaries:
                column = [row[k] for row in self._pending]
                content = train_dictionary([one[0] for one in column if isinstance(one, tuple)])
                self.dictionaries[layout.name] = cached_dictionary(content) if content else None
        for row in self._pending:
            self._write(row)
        self._pending, self._n_pending_bytes = [], 0

    def _write(self, records: Sequence[Record]) -> None:
        for layout, record in zip(self._layouts, records, strict=True):
            if not isinstance(record, StreamRecord):
                self._write_record(layout, *record)
                continue
            start, n_tables = self.data.n_bytes, sum(table.n_bytes for table in self._tables)
            hash_ = self.streams[layout.name].append(record, self.data)
            self._write_entry(start, record.nbytes, Codec.RAW, record.nbytes, hash_)
            self.required |= record.required
            n_added = sum(table.n_bytes for table in self._tables) - n_tables
            self.n_buffered += record.nbytes + n_added

    def _write_entry(self, start: int, n_stored: int, codec: int, n_bytes: int, hash_: int) -> None:
        entry = pack_entry(start, n_stored, codec, n_bytes, hash_)
        self.index.write(entry)
        self.hash.update(entry[-DIMENSION.size :])
        self.n_buffered += ENTRY.size

    def _write_record(self, layout: _RecordLayout, record: Content, shape: tuple[int, ...]) -> None:
        codec, stored = layout.codec, record
        if codec:  # RAW is 0
            codec, stored = encode(memoryview(record), codec, self.dictionaries.get(layout.name))
            self.required |= BY_CODE[codec].required_by_record
        data, n_stored = self.data, len(stored)
        gap = 0 if codec else -data.n_bytes % layout.raw_alignment
        if gap:
            data.write(bytes(gap))
        self._write_entry(data.n_bytes, n_stored, codec, len(record), hash_bytes(stored))
        data.write(stored)
        self.n_buffered += gap + n_stored
        if layout.shapes is not None:
            for d in layout.stored_dims:
                layout.shapes.write(DIMENSION.pack(shape[d]))
            self.n_buffered += DIMENSION.size * len(layout.stored_dims)


def _owned_copy(record: Record) -> Record:
    if isinstance(record, StreamRecord):
        return record.owned_copy()
    return bytes(record[0]), record[1]


def _n_bytes(record: Record) -> int:
    return record.nbytes if isinstance(record, StreamRecord) else len(record[0])
