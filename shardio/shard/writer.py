"""Write samples to one shard file, in one pass.

Sections grow in buffers in memory. When the buffers hold `STREAMING_BYTES`, the largest section of
data (a column or the payload) is *streamed*: its data goes directly to the shard file, which has a
temporary name. Whenever the other buffers hold `MEMORY_BYTES`, the largest of them moves to a
temporary file without a name. Closing appends all sections except the streamed one, and renames the
file. Thus memory is bounded, and the largest section is written only once.
"""

from __future__ import annotations

import contextlib
import os
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import IO, TYPE_CHECKING, Any, Final

from shardio._base.callers import (
    ANY_OPTION,
    did_you_mean,
    expand_home,
    missing_attribute,
    refuses,
)
from shardio._base.classes import Publishing, undo_on_error
from shardio.errors import ClosedError, InvalidArgument, MediaError, SchemaError, ShardExists
from shardio.format.layout import NO_FIELD, PAGE, Header, Kind
from shardio.format.schema import Schema
from shardio.format.sections import (
    DIMENSION,
    VARIABLE_COUNT_STRIDES,
    Key,
    SectionSpec,
    plan_sections,
)
from shardio.format.types import EncodedImage, Field
from shardio.format.types.field import Content
from shardio.format.types.streams import EncodedStream, Record
from shardio.shard.section_writers import (
    ColumnWriter,
    PayloadWriter,
    SectionBuffer,
    SectionTable,
    ValidityWriter,
)
from shardio.storage.fs import create, create_unnamed, rename_exclusive, sync, sync_path, unlink


def encode_media(name: str, field: Field, value: Any) -> Any:
    """Return the EncodedImage or EncodedStream for a media file's bytes; other values unchanged.

    Raises MediaError if the bytes are not a readable media file.
    """
    if isinstance(value, EncodedImage | EncodedStream):
        return value
    is_file = isinstance(value, bytes | bytearray | memoryview)
    if not is_file or field.medium is None:
        return value
    data = bytes(value)
    try:
        if field.medium != "image":
            return import_module("shardio.media.demuxing").demux(data, field.medium)
        facts = import_module("shardio.media.image").probe(data)
    except MediaError as error:
        raise MediaError(f"field {name!r}: {error}") from error
    return EncodedImage(data, facts.height, facts.width, facts.channels)


def check_names(sample: Mapping[str, Any], schema: Schema) -> None:
    """Raise SchemaError if a flat sample lacks a required field or has an unknown one."""
    missing = [n for n, f in schema.items() if n not in sample and not f.optional]
    extra = [str(n) for n in sample if n not in schema]
    if missing or extra:
        found = {"fields missing": missing, "not in the schema": extra}
        text = ", ".join(f"{what}: {names}" for what, names in found.items() if names)
        hint = next(filter(None, (did_you_mean(each, missing) for each in extra)), "")
        if missing and not hint:
            hint = "a field that some samples lack is declared with optional=True"
        raise SchemaError(f"{text}; {hint or 'leave them out, or add them to the schema'}")


STREAMING_BYTES: Final = 8 << 20
"""The number of bytes in memory at which the largest section of data starts to be streamed."""
MEMORY_BYTES: Final = 64 << 20
"""The number of bytes in memory at which the largest buffer moves to a temporary file, once a
section is streamed."""


@dataclass(frozen=True, slots=True)
class ShardSummary:
    """The description of a finished shard in a generation, which is one state of a dataset."""

    name: str
    n_samples: int
    n_bytes: int
    id: str


_AS_A_DICT: Final = 'write writer.append({"image": …, "label": …}), with a dict of all fields'
APPEND_ADVICE: Final = dict.fromkeys((ANY_OPTION, "sample"), _AS_A_DICT)
"""The advice in errors about calls of `append` with other arguments than one dict."""
_WRITER_ADVICE: Final = {
    **dict.fromkeys(("add", "write", "write_sample"), _AS_A_DICT),
    **dict.fromkeys(("extend", "write_all"), "write writer.append(sample) for each sample"),
    **dict.fromkeys(("commit", "finish", "flush", "save"), "write writer.close(), or use `with`"),
}
"""Attributes of other libraries' writers, and what to write instead."""

_SHARD_WRITER_ADVICE: Final = dict.fromkeys(
    ("maxcount", "maxsize", "pattern", "shard_bytes"),
    "a ShardWriter writes one shard: shardio.DatasetWriter(path, schema, shard_bytes=…) writes as "
    "many as are needed, and names them",
)
"""Options of writers of several shards, such as webdataset's, and what to write instead."""


class SampleWriter(Publishing):
    """A writer of samples. For methods of other libraries' writers, errors say what to write."""

    if not TYPE_CHECKING:  # for type checkers, a writer would have every attribute

        def __getattr__(self, name: str) -> Any:
            return missing_attribute(self, name, _WRITER_ADVICE)


class ShardWriter(SampleWriter):
    """A writer of one shard. Until `close()`, it owns a hidden file in the folder of the shard.

    `close()`, or the end of a `with` block, syncs and renames this file; only then does the shard
    appear. `abort()`, or an exception in the block, removes this file. An invalid sample is
    refused before any part of it is written, and the writer stays usable.

    Raises:
        ShardExists: the file exists; shards are never overwritten.
        SchemaError: (from `append`) the sample does not match the schema.
        MediaError: (from `append`) the bytes of an image, video or audio file are damaged.
        OSError: a write failed, for example because the disk is full. Nothing is published.
    """

    @refuses(_SHARD_WRITER_ADVICE, "ShardWriter")
    def __init__(self, path: str | os.PathLike[str], schema: Schema) -> None:
        self.path = os.fspath(path := expand_home(path))
        self.schema = check_schema(schema)
        self.n_samples = 0
        self._absolute = os.path.abspath(path)  # valid after a chdir
        self._folder, name = os.path.split(self._absolute)
        if not name.endswith(".shard"):
            raise InvalidArgument(f"{self.path}: a shard's file name must end in .shard")
        if os.path.lexists(self._absolute):
            raise _exists_error(self.path)
        # Shorten the name: it may have the maximum length, and the temporary name is longer.
        temporary = f".{name[:40]}.{os.urandom(6).hex()}.tmp"
        self._temporary = os.path.join(self._folder, temporary)
        self._file: IO[bytes] | None = create(self._temporary)
        self._file.write(bytes(PAGE))
        self._columns = {n: ColumnWriter(f) for n, f in schema.columns.items()}
        self._payload = PayloadWriter(schema)
        self._validity = {name: ValidityWriter() for name in schema.optional}
        self._media_fields = {n: f for n, f in schema.records.items() if f.medium}
        self._row_encoders = [(n, f.row_encoder(n)) for n, f in schema.columns.items()]
        self._record_encoders = [(n, f.record_encoder(n)) for n, f in schema.records.items()]
        self._row_bytes = sum(field.stride for field in schema.columns.values())
        n_hashes = DIMENSION.size * len(self._columns)  # a column has at most one hash per row
        self._max_row_bytes = self._row_bytes + n_hashes + len(self._validity)
        self._streamed: SectionBuffer | None = None
        self._next_check_bytes = STREAMING_BYTES

    @property
    def n_bytes(self) -> int:
        """The number of payload and column bytes so far, without indexes and section padding."""
        return self._payload.n_bytes + self.n_samples * self._row_bytes

    def __repr__(self) -> str:
        end = ", closed" if self._is_closed else " so far"
        return f"ShardWriter({self.path!r}: {self.n_samples} samples{end})"

    @refuses(APPEND_ADVICE, "writer.append")
    def append(self, sample: Mapping[str, Any]) -> None:
        """Add a sample: a dict with a value for every field of the schema, and no other keys.

        An optional value may be None or omitted. Nested records are dicts, or their fields have
        dotted names. Media is the bytes of a file, an EncodedImage or an EncodedStream.
        """
        if self._file is None:
            raise ClosedError(
                f"{self.path}: the writer is closed; a finished shard cannot grow: write another"
            )
        try:
            if not isinstance(sample, Mapping):
                raise SchemaError(
                    f"expected a mapping of fields, found {type(sample).__name__}: {_AS_A_DICT}"
                )
            sample = self.schema.flatten(sample)
            rows, records = self._encode(sample)
        except (SchemaError, MediaError) as error:
            raise type(error)(f"{self.path}, sample {self.n_samples}: {error}") from error
        try:
            for column, row in zip(self._columns.values(), rows, strict=True):
                column.append(row)
            if records:
                if self._payload.streams:
                    self._stream_large_payload(records)
                self._payload.append(records)
            for name, validity in self._validity.items():
                validity.append(sample.get(name))
            if self._n_buffered() >= self._next_check_bytes:
                self._limit_memory()
        except BaseException:
            self.abort()  # a half-written sample would misalign all samples after it
            raise
        self.n_samples += 1

    def _encode(self, sample: Mapping[str, Any]) -> tuple[list[Content | None], list[Record]]:
        if sample.keys() != self.schema.keys():
            check_names(sample, self.schema)
        rows = [encode(sample.get(name)) for name, encode in self._row_encoders]
        if self._media_fields:
            given = {n: encode_media(n, f, sample.get(n)) for n, f in self._media_fields.items()}
            sample = {**sample, **given}
        return rows, [encode(sample.get(name)) for name, encode in self._record_encoders]

    def _all_buffers(self) -> list[SectionBuffer]:
        columns = [s for c in self._columns.values() for s in (c.data, c.hashes)]
        bits = [validity.data for validity in self._validity.values()]
        return [*columns, *self._payload.buffers, *bits]

    def _stream_large_payload(self, records: list[Record]) -> None:
        """Start to stream the payload if `records` will make it the largest section.

        Large records then go to the shard file without being kept in memory.
        """
        n_more = self._payload.min_added_bytes(records) if self._streamed is None else 0
        self._flush_columns()
        if not n_more or n_more + sum(b.n_in_memory for b in self._all_buffers()) < STREAMING_BYTES:
            return
        columns = max((c.data.n_bytes for c in self._columns.values()), default=0)
        if self._payload.data.n_bytes + n_more > columns:
            self._stream(self._payload.data)

    def _flush_columns(self) -> None:
        for column in self._columns.values():
            column.flush()

    def _n_buffered(self) -> int:
        """Return an upper bound on the bytes in all buffers, including the sample being added."""
        return (self.n_samples + 1) * self._max_row_bytes + self._payload.n_buffered

    def _limit_memory(self) -> None:
        """Move a section out of memory if the buffers are too large.

        The choice depends only on the samples, so the same samples give the same file.
        """
        self._flush_columns()
        n_in_memory = sum(buffer.n_in_memory for buffer in self._all_buffers())
        if self._streamed is None and n_in_memory >= STREAMING_BYTES:
            self._stream_largest()
        elif n_in_memory >= MEMORY_BYTES:
            largest = max(self._all_buffers(), key=lambda buffer: buffer.n_in_memory)
            largest.move_to(create_unnamed(self._folder))
        n_in_memory = sum(buffer.n_in_memory for buffer in self._all_buffers())
        most = STREAMING_BYTES if self._streamed is None else MEMORY_BYTES
        # Check again when the buffers have grown by the number of bytes that they may still take.
        self._next_check_bytes = self._n_buffered() + most - n_in_memory

    def _stream_largest(self) -> None:
        data = [c.data for c in self._columns.values()]
        self._stream(max([*data, self._payload.data], key=lambda buffer: buffer.n_bytes))

    def _stream(self, buffer: SectionBuffer) -> None:
        self._streamed = buffer
        if self._file is not None:
            buffer.move_to(self._file)

    def close(self) -> ShardSummary:
        """Write the remaining sections, sync the file, and rename it to the name of the shard.

        Raises OSError if a write failed; nothing is published then.
        """
        if self._file is None:
            raise ClosedError(f"{self.path}: the writer is closed")
        with undo_on_error(self.abort):
            header = self._finish(self._file)
            sync(self._file, self._temporary)
            try:
                rename_exclusive(self._temporary, self._absolute)
            except FileExistsError as error:
                raise _exists_error(self.path) from error
            sync_path(self._folder)
        self._release()
        name = os.path.basename(self.path)
        return ShardSummary(name, self.n_samples, header.file_size, header.id.hex())

    def _finish(self, file: IO[bytes]) -> Header:
        self._payload.finish()
        for column in self._columns.values():
            column.finish()
        for validity in self._validity.values():
            validity.finish()
        if self._streamed is None:
            self._stream_largest()
        buffers, table = self._buffers_by_key(), SectionTable(file)
        counts = tuple(
            (key, buffer.n_bytes // VARIABLE_COUNT_STRIDES[key[0]])
            for key, buffer in buffers.items()
            if key[0] in VARIABLE_COUNT_STRIDES
        )
        planned = plan_sections(self.schema, self.n_samples, counts)
        specs = [spec for spec in planned if spec.key in buffers]
        # The streamed section comes first, because it is in the file already. The sort is stable:
        # the other sections keep their order.
        for spec in sorted(specs, key=lambda spec: buffers[spec.key] is not self._streamed):
            self._add(table, spec, buffers)
        required = self._payload.required | self.schema.required
        return table.close(self.n_samples, int(required))

    def _add(
        self, table: SectionTable, spec: SectionSpec, buffers: Mapping[Key, SectionBuffer]
    ) -> None:
        """Append a section that was not streamed; append the block hashes of an index section."""
        (kind, number, _), buffer = spec.key, buffers[spec.key]
        if kind == Kind.PAYLOAD:
            hash_ = self._payload.hash.intdigest()
        elif kind == Kind.COLUMN:
            hash_ = buffers[Kind.COLUMN_HASHES, number, 0].hash()
        elif kind in (Kind.SCHEMA, Kind.DICTIONARY):
            hash_ = buffer.hash()
        else:
            table.add_with_block_hashes(spec, buffer.pieces())
            return
        if buffer is self._streamed:
            table.add_entry(spec, buffer.n_bytes, hash_)
        else:
            table.add(spec, buffer.pieces(), hash_)

    def _buffers_by_key(self) -> dict[Key, SectionBuffer]:
        """Return the buffer of each section, by key; sections of block hashes have no buffer."""
        ids, payload = self.schema.field_id, self._payload
        found: dict[Key, SectionBuffer] = {}
        for name, column in self._columns.items():
            found[Kind.COLUMN, ids(name), 0] = column.data
            found[Kind.COLUMN_HASHES, ids(name), 0] = column.hashes
        if self.schema.records:
            found[Kind.PAYLOAD, NO_FIELD, 0] = payload.data
            found[Kind.INDEX, NO_FIELD, 0] = payload.index
        for name, shapes in payload.shapes.items():
            found[Kind.SHAPES, ids(name), 0] = shapes
        for name, stream in payload.streams.items():
            found[Kind.STREAMS, ids(name), 0] = stream.rows
            found[Kind.PACKETS, ids(name), 0] = stream.packets
            found[Kind.CHUNK_HASHES, ids(name), 0] = stream.chunk_hashes
        for name, validity in self._validity.items():
            found[Kind.VALIDITY, ids(name), 0] = validity.data
        for name, dictionary in payload.dictionaries.items():
            content = dictionary.content if dictionary else b""
            found[Kind.DICTIONARY, ids(name), 0] = SectionBuffer(content)
        found[Kind.SCHEMA, NO_FIELD, 0] = SectionBuffer(self.schema.to_json())
        return found

    def abort(self) -> None:
        """Remove the temporary file; nothing is published. Idempotent."""
        if self._file is None:
            return
        self._release()
        # Suppress a second error: the caller handles the error that led to this call.
        with contextlib.suppress(OSError):
            unlink(self._temporary)

    def _release(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # the error of a failed write was raised before
                self._file.close()
        self._file = None
        for buffer in self._all_buffers():
            if buffer is not self._streamed:
                with contextlib.suppress(OSError):
                    buffer.close()

    @property
    def _is_closed(self) -> bool:
        return self._file is None


def check_schema(schema: object) -> Schema:
    """Return `schema`; raise SchemaError unless it is a Schema, and all names are printable."""
    if not isinstance(schema, Schema):
        hint = ": write shardio.Schema({…})" if isinstance(schema, dict) else ""
        raise SchemaError(f"expected a shardio.Schema, found {type(schema).__name__}{hint}")
    if unknown := [name for name in schema if not name.isprintable()]:
        raise SchemaError(
            f"field {unknown[0]!r}: Unicode {unicodedata.unidata_version}, which this Python "
            "knows, has no such character; choose another name, or write with a newer Python"
        )
    return schema


def _exists_error(path: str) -> ShardExists:
    return ShardExists(f"{path}: already exists; shards are never overwritten")
