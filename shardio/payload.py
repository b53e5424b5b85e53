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
from shardio.format.streams import PACKET, StreamTables, pack_line
from shardio.storage import Spool

WAITING_BYTES: Final = 32 << 20
"""How much waits, of all records together, for dictionaries to be learned."""

Tables = tuple[int, ...] | StreamTables
"""What other sections have of a value: the shape of an array or a picture, a stream's tables."""
Record = tuple[memoryview, Tables]
"""The bytes of one value, and what other sections have of it."""


class StreamWriter:
    """Gathers the streams of one field: a line of each, their packets, the hashes of chunks."""

    def __init__(self) -> None:
        self.lines, self.packets, self.chunks = Spool(), Spool(), Spool()

    @property
    def spools(self) -> tuple[Spool, Spool, Spool]:
        """Everything that is held."""
        return self.lines, self.packets, self.chunks

    def append(self, record: memoryview, tables: StreamTables) -> int:
        """Add the stream whose record this is; returns the hash for the record's index entry."""
        first_packet = self.packets.n_bytes // PACKET.size
        first_chunk = self.chunks.n_bytes // DIMENSION.size
        self.lines.write(pack_line(tables.line, first_packet, first_chunk))
        self.packets.write(tables.packets)
        hashes = pack_hashes(chunk_hashes(record))
        self.chunks.write(hashes)
        return hash_bytes(hashes)


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
        kept = [(memoryview(bytes(record)), shape) for record, shape in records]
        self._waiting.append(kept)
        self._n_waiting_bytes += sum(record.nbytes for record, _ in kept)
        if self._n_waiting_bytes >= WAITING_BYTES:
            self.finish()

    def finish(self) -> None:
        """Learn the dictionaries from what waits, and write it."""
        if not self._is_learning:
            return
        self._is_learning = False
        for k, (name, _) in enumerate(self._fields):
            if name in self.dictionaries:
                content = train_dictionary([row[k][0] for row in self._waiting])
                self.dictionaries[name] = known_dictionary(content) if content else None
        for row in self._waiting:
            self._write(row)
        self._waiting, self._n_waiting_bytes = [], 0

    def _write(self, records: Sequence[Record]) -> None:
        for (name, field), (record, tables) in zip(self._fields, records, strict=True):
            self._write_record(name, field, record, tables)

    def _write_record(self, name: str, field: Field, record: memoryview, tables: Tables) -> None:
        wanted = Codec[field.codec.upper()]
        codec, stored = encode(record, wanted, self.dictionaries.get(name))
        if codec is Codec.ZSTD:
            self.required |= Required.ZSTD
        start = alignment(field, codec)
        if gap := -self.data.n_bytes % start:
            self.data.write(bytes(gap))
        if isinstance(tables, StreamTables):
            hash_ = self.streams[name].append(stored, tables)
        else:
            hash_ = hash_bytes(stored)
        entry = pack_entry(self.data.n_bytes, stored.nbytes, codec, record.nbytes, hash_)
        self.index.write(entry)
        self.data.write(stored)
        self.hash.update(DIMENSION.pack(hash_))
        if name in self.shapes and not isinstance(tables, StreamTables):
            dims: tuple[int | None, ...] = (None,) * len(tables)
            for d, n in zip(field.shape if isinstance(field, Array) else dims, tables, strict=True):
                if d is None:
                    self.shapes[name].write(DIMENSION.pack(n))
