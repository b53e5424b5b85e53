"""PayloadWriter: the records of samples on their way into a shard, with their index.

Where fields are compressed with a dictionary, the first rows wait until there is enough of them to
learn it from; all else is written as it comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from shardio.format.checksum import Hasher, chunk_hashes, hash_bytes, pack_hashes
from shardio.format.codec import Codec, Dictionary, encode, known_dictionary, train_dictionary
from shardio.format.fields import STREAMED, Array, Field, n_stored_dims
from shardio.format.index import DIMENSION, alignment, pack_entry
from shardio.format.layout import Required
from shardio.format.schema import Schema
from shardio.format.streams import PACKET, StreamRecord, pack_line
from shardio.storage import Spool

WAITING_BYTES: Final = 32 << 20
"""How much waits, of all records together, for dictionaries to be learned."""

Record = tuple[memoryview, tuple[int, ...]] | StreamRecord
"""The bytes of one value, and its shape if it is an array or a picture; or a stream."""


class StreamWriter:
    """Gathers the streams of one field: a line of each, their packets, the hashes of chunks."""

    def __init__(self) -> None:
        self.lines, self.packets, self.chunks = Spool(), Spool(), Spool()

    @property
    def spools(self) -> tuple[Spool, Spool, Spool]:
        """Everything that is held."""
        return self.lines, self.packets, self.chunks

    def append(self, record: StreamRecord, data: Spool) -> int:
        """Add a stream, its record to `data`; returns the hash for the record's index entry."""
        first_packet = self.packets.n_bytes // PACKET.size
        first_chunk = self.chunks.n_bytes // DIMENSION.size
        self.lines.write(pack_line(record.tables.line, first_packet, first_chunk))
        self.packets.write(record.tables.packets)
        hasher = Hasher()
        for piece in record.pieces():  # written while the processor still has it
            hashes = pack_hashes(chunk_hashes(piece))
            self.chunks.write(hashes)
            hasher.update(hashes)
            data.write(piece)
        return hasher.intdigest()


class PayloadWriter:
    """Owns the payload of one shard, its index, and the stored dimensions, until `close()`."""

    def __init__(self, schema: Schema) -> None:
        self.data, self.index, self.hash = Spool(), Spool(), Hasher()
        self.shapes = {n: Spool() for n, f in schema.records.items() if n_stored_dims(f)}
        self.streams = {
            n: StreamWriter() for n, f in schema.records.items() if isinstance(f, STREAMED)
        }
        self._tables = [spool for stream in self.streams.values() for spool in stream.spools]
        self.dictionaries: dict[str, Dictionary | None] = {
            name: None for name, field in schema.records.items() if field.codec == "zstd_dictionary"
        }
        """What was learned of each field that asks for it; None where there was too little."""
        self.required = Required(0)
        """The features that its records need."""
        self._fields = list(schema.records.items())
        self._is_learning = bool(self.dictionaries)
        self._waiting: list[list[Record]] = []
        self._n_waiting_bytes = 0

    @property
    def n_bytes(self) -> int:
        """Bytes so far; those that wait are not compressed yet."""
        return self.data.n_bytes + self._n_waiting_bytes

    @property
    def spools(self) -> list[Spool]:
        """Everything that is held."""
        return [self.data, self.index, *self.shapes.values(), *self._tables]

    def append(self, records: Sequence[Record]) -> None:
        """Add a row: a record for every record field of the schema, in order."""
        if not self._is_learning:
            self._write(records)
            return
        # Copies: what a record lies in is the caller's, and may change before it is written.
        kept = [_kept(record) for record in records]
        self._waiting.append(kept)
        self._n_waiting_bytes += sum(map(_n_bytes, kept))
        if self._n_waiting_bytes >= WAITING_BYTES:
            self.finish()

    def least_bytes(self, records: Sequence[Record]) -> int:
        """How much longer a row makes `data` at least, at once: by its streams."""
        if self._is_learning:
            return 0
        return sum(record.nbytes for record in records if isinstance(record, StreamRecord))

    def finish(self) -> None:
        """Learn the dictionaries from what waits, and write it."""
        if not self._is_learning:
            return
        self._is_learning = False
        for k, (name, _) in enumerate(self._fields):
            if name in self.dictionaries:
                column = [row[k] for row in self._waiting]
                content = train_dictionary([one[0] for one in column if isinstance(one, tuple)])
                self.dictionaries[name] = known_dictionary(content) if content else None
        for row in self._waiting:
            self._write(row)
        self._waiting, self._n_waiting_bytes = [], 0

    def _write(self, records: Sequence[Record]) -> None:
        for (name, field), record in zip(self._fields, records, strict=True):
            if isinstance(record, StreamRecord):
                self._write_stream(name, record)
            else:
                self._write_record(name, field, *record)

    def _write_stream(self, name: str, record: StreamRecord) -> None:
        place = self.data.n_bytes
        hash_ = self.streams[name].append(record, self.data)
        self._enter(place, record.nbytes, Codec.RAW, record.nbytes, hash_)

    def _enter(self, place: int, n_stored: int, codec: Codec, n_bytes: int, hash_: int) -> None:
        self.index.write(pack_entry(place, n_stored, codec, n_bytes, hash_))
        self.hash.update(DIMENSION.pack(hash_))

    def _write_record(
        self, name: str, field: Field, record: memoryview, shape: tuple[int, ...]
    ) -> None:
        wanted = Codec[field.codec.upper()]
        codec, stored = encode(record, wanted, self.dictionaries.get(name))
        if codec is Codec.ZSTD:
            self.required |= Required.ZSTD
        start = alignment(field, codec)
        if gap := -self.data.n_bytes % start:
            self.data.write(bytes(gap))
        self._enter(self.data.n_bytes, stored.nbytes, codec, record.nbytes, hash_bytes(stored))
        self.data.write(stored)
        if name in self.shapes:
            dims: tuple[int | None, ...] = (None,) * len(shape)
            for d, n in zip(field.shape if isinstance(field, Array) else dims, shape, strict=True):
                if d is None:
                    self.shapes[name].write(DIMENSION.pack(n))


def _kept(record: Record) -> Record:
    """The same, of which nothing is the caller's."""
    if isinstance(record, StreamRecord):
        return record.kept()
    return memoryview(bytes(record[0])), record[1]


def _n_bytes(record: Record) -> int:
    return record.nbytes if isinstance(record, StreamRecord) else record[0].nbytes
