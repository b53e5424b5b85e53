"""Windows of tokens, over all documents of a dataset: `TokenView` and `TokenSource`.

A document is read and verified as a whole. Unless verify="always", later reads of an uncompressed,
mapped document touch only the part in the window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shardio._base.classes import cached_property
from shardio.batch.layout import FixedSlot
from shardio.dataset.dataset import Dataset, ShardSamples, scan
from shardio.errors import InvalidArgument, ShardCorrupt
from shardio.format.checksum import distinct
from shardio.format.schema import Schema
from shardio.format.sections import Entries
from shardio.format.types import Field
from shardio.samples.field_sources import BatchRows, Bytes, FieldSource, IndexChunk, Present
from shardio.samples.media import AudioField
from shardio.samples.packing import Pack, PackedWindows, WindowParts
from shardio.samples.view import SampleView, Table, Tables
from shardio.shard.verification import Rows


class TokenView(SampleView):
    """A view whose samples are windows of tokens of one field. It borrows the dataset.

    On first use, the lengths of documents are read from the index, 32 bytes per document, unless
    the field has a fixed shape. The documents of each source of a mixture are packed separately.

    Raises:
        InvalidArgument: the field cannot be packed with these options. On first use: the tokens do
            not fill a window.
        ShardCorrupt: (on first use) the index of the documents is damaged.
    """

    spans_rows = True

    def __init__(self, dataset: Dataset, pack: Pack) -> None:
        super().__init__(dataset)
        self.packing = resolve_pack(dataset.schema, pack)
        """The options of the windows, with the field of tokens."""

    def restore(self, tables: Tables) -> None:
        """Take the `tables` of an equal view."""
        sources, pack = self.dataset.rows.source_counts, self.packing
        self.__dict__["packed"] = PackedWindows(
            pack, tables["ends"], sources, tables["first_documents"]
        )

    @cached_property
    def packed(self) -> PackedWindows:
        """The windows, by their index."""
        dataset, pack = self.dataset, self.packing
        lengths = _lengths(dataset, pack) + (pack.eot is not None)
        ends = np.cumsum(lengths, dtype=np.int64)
        found = PackedWindows(pack, ends, dataset.rows.source_counts)
        dataset.rows.check_sources(found.n_windows, "its tokens do not fill a window")
        if lengths.any() and not len(found):
            whole = ' with rest="drop"' if pack.rest == "drop" else ""
            raise InvalidArgument(
                f"{dataset.path}: the {int(lengths.sum())} tokens of field {pack.name!r} are not "
                f"enough for a window of {pack.reach}{whole}"
            )
        return found

    @property
    def is_read(self) -> bool:
        """True if the lengths of the documents were read."""
        return "packed" in self.__dict__

    @property
    def options(self) -> tuple[Any, ...]:
        """The options of the view."""
        return (self.packing,)

    def __len__(self) -> int:
        return len(self.packed)

    @property
    def summary(self) -> str:
        """The number and the length of the windows."""
        count = f"{len(self)} " if self.is_read else ""
        return f"{count}windows of {self.packing.length} tokens, of {self.packing.name!r}"

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of the dataset that a sample is derived from."""
        return (self.packing.name,)

    def stored_fields(self, names: tuple[str, ...], *, is_explicit: bool) -> tuple[str, ...]:
        """Return the stored fields that the view reads for a loader with `fields=names`."""
        others = [name for name in names if name != self.packing.name]
        if others and is_explicit:
            raise InvalidArgument(
                f"a sample is a window, made of many rows' {self.packing.name!r}: leave {others} "
                "out of fields"
            )
        return self.fields

    def tables(self) -> Mapping[str, Table]:
        """Return the tables from which another process creates the view again."""
        return {
            "ends": Table(self.packed.ends, "where each document ends"),
            "first_documents": Table(
                self.packed.first_documents, "which document each window begins in"
            ),
        }

    def sample_schema(self, schema: Schema) -> Schema:
        """Return the schema of the view's samples, given the schema of the stored fields."""
        return self.packing.sample_schema(schema)

    def sources(self, audio: Mapping[str, AudioField]) -> dict[str, FieldSource]:
        """Return the source of the view's windows, by the name of the stored field."""
        return {self.packing.name: TokenSource(self.dataset, self.packed)}

    @property
    def source_ends(self) -> Rows:
        """The cumulative sample counts of a mixture's sources."""
        return np.cumsum(self.packed.n_windows)

    def at(self, numbers: Rows) -> Rows:
        """Return the row in which each window begins."""
        return self.dataset.rows.at(self.packed.first_documents[numbers])

    def covered_rows(self, numbers: Rows) -> Rows:
        """Return the row of every document that has a part in one of these windows."""
        return self.dataset.rows.at(distinct(self.packed.parts(numbers).documents))

    @property
    def stream_tokens(self) -> tuple[int, ...] | None:
        """The number of tokens of each source if the last window is padded; else None."""
        return self.packed.n_tokens if self.packing.rest == "pad" else None

    def no_shards_reason(self) -> str | None:
        """Return the reason why the samples are not in shard order."""
        return "a window of tokens may begin in one shard and end in another"


def resolve_pack(schema: Schema, pack: Pack) -> Pack:
    """Return the options of windows with `field` set to the field of tokens."""
    name = pack.field
    if name is None:
        fitting = [each for each in schema if _not_packable_reason(schema[each]) is None]
        if len(fitting) != 1:
            raise InvalidArgument(
                "pack needs one field of tokens, integers in one dimension; these are: "
                f"{', '.join(fitting) or 'none'}: choose one with dataset.pack(field, length=…)"
            )
        (name,) = fitting
    if name not in schema:
        raise InvalidArgument(f"pack: there is no field {name!r}; there are {', '.join(schema)}")
    array, reason = schema[name].array, _not_packable_reason(schema[name])
    if reason is not None or array is None:
        raise InvalidArgument(f"pack: field {name!r} {reason}; found {schema[name]!r}")
    limits = np.iinfo(array.numpy)
    for option, token in (("eot", pack.eot), ("pad", pack.pad)):
        if token is not None and not limits.min <= token <= limits.max:
            raise InvalidArgument(
                f"pack: {option} must be a token that field {name!r} of {array.dtype} can have, "
                f"from {limits.min} to {limits.max}; found {token}"
            )
    return replace(pack, field=name)


def _not_packable_reason(field: Field) -> str | None:
    array = field.array
    if array is None or array.numpy.kind not in "iu" or array.dtype == "bfloat16":
        return "must be an array of integers, to be packed as tokens"
    if len(array.shape) != 1:
        return "must have one dimension, the tokens of a document, to be packed"
    if field.optional:
        return "must not be optional: a missing document has no tokens to pack"
    return None


def _lengths(dataset: Dataset, pack: Pack) -> Rows:
    name, field, n = pack.name, pack.document_type(dataset.schema), len(dataset)
    if field.is_fixed:
        return np.full(n, field.shape[0], np.int64)
    lengths, itemsize = np.zeros(n, np.int64), field.numpy.itemsize

    def read_lengths(part: ShardSamples) -> Rows:
        n_bytes: Rows = part.reader(name).records.entries(name, part.rows)["n_bytes"]
        return n_bytes.astype(np.int64) // itemsize

    for part, found in scan(dataset, read_lengths):
        lengths[part.numbers] = found
    return lengths


Tokens = npt.NDArray[Any]
Record = bytes | memoryview

_PARTS_AHEAD: Final = 8192
"""The approximate number of parts computed at a time. A computation takes at least 100 µs."""

_MAX_LOOKAHEADS: Final = 4
"""The maximum number of index arrays (`numbers`) whose parts are cached: a worker may alternate
between several arrays."""


class _Lookahead(NamedTuple):
    """The parts of the windows `numbers[first:last]`.

    Attributes:
        bounds: the index of each window's first part.
        shards: the shard of each part.
        ranges: the location of the parts' bytes if all documents are verified, else None.
        tails: the bytes to append to each part (end-of-text token, padding), or None.
        is_short: True if any window has padding.
    """

    numbers: Rows
    first: int
    last: int
    parts: WindowParts
    bounds: list[int]
    shards: Rows
    ranges: _ByteRanges | None
    tails: list[bytes] | None
    is_short: bool


class _ByteRanges(NamedTuple):
    """The byte range of each part, in the record of its document or in the map of its shard."""

    records: list[Record]
    starts: list[int]
    stops: list[int]

    def bytes_of(self, parts: slice) -> list[Record]:
        ranges = self.records[parts], self.starts[parts], self.stops[parts]
        return [record[i:j] for record, i, j in zip(*ranges, strict=True)]


class TokenSource(FieldSource):
    """A source of windows of tokens."""

    def __init__(self, dataset: Dataset, windows: PackedWindows) -> None:
        pack = windows.pack
        self._windows, self._pack = windows, pack
        self._field = pack.document_type(dataset.schema)
        self._window_fields = pack.window_fields(self._field)
        super().__init__(dataset, pack.name, tuple(self._window_fields))
        self._is_raw = dataset.verify != "always" and self._field.codec == "raw"
        self._is_raw &= not self._field.is_fixed and dataset.access == "mmap"
        # All files must be able to stay open, because `_maps` keeps their maps open.
        self._is_raw &= not dataset.files.is_partial
        self._maps: dict[int, memoryview] = {}
        """The maps of the shards from which a document was read."""
        self._document_offsets: Rows = np.zeros(0, np.int64)
        """The offset of each raw document in its shard's map; 0 until the document is verified."""
        self._lookaheads: dict[int, _Lookahead] = {}
        """Cached lookaheads by the id of `numbers`, latest last. They keep `numbers` alive."""

    def close(self) -> None:
        """Release the maps of the shards. Idempotent."""
        self._maps.clear()
        self._document_offsets = np.zeros(0, np.int64)
        self._lookaheads.clear()

    def read_sample(self, chunk: IndexChunk, k: int) -> dict[str, Any]:
        """Return the fields of one window."""
        outs = {
            n: np.empty((1, self._pack.length), f.numpy) for n, f in self._window_fields.items()
        }
        self.fill(outs, chunk.numbers, slice(k, k + 1), chunk.stream_tokens)
        return {name: out[0] for name, out in outs.items()}

    def fill_fixed(
        self, batch: BatchRows, slot: FixedSlot, out: Bytes, present: Present | None
    ) -> None:
        """Write all fields of the windows if `slot` is the field of tokens; else do nothing."""
        if slot.name == self.name:
            layout, n_read = batch.layout, batch.n_read
            outs = {s.name: layout.fixed_rows(batch.memory.bytes, s, n_read) for s in layout.fixed}
            self.fill(outs, batch.chunk.numbers, batch.part, batch.chunk.stream_tokens)

    def fill(
        self,
        outs: Mapping[str, Tokens],
        numbers: Rows,
        part: slice = slice(None),
        n_tokens: tuple[int, ...] | None = None,
    ) -> None:
        """Write the windows `numbers[part]`; the parts of later windows may be computed too.

        `outs` holds an array for every field of a window, (windows, length). `numbers` must not
        change while this object exists; calls with the same `numbers` must pass the same
        `n_tokens`.
        """
        pack, name = self._pack, self.name
        first, last, _ = part.indices(len(numbers))
        ahead = self._look_ahead(numbers, first, last, n_tokens)
        first, last = first - ahead.first, last - ahead.first
        part_range = slice(ahead.bounds[first], ahead.bounds[last])
        content = b"".join(self._read_parts(ahead, part_range))
        stream = np.frombuffer(content, outs[name].dtype).reshape(-1, pack.reach)
        outs[name][...] = stream[:, : pack.length]
        if pack.targets:
            outs[f"{name}_targets"][...] = stream[:, 1:]
        if pack.apart:
            parts = ahead.parts.of_windows(first, last, part_range)
            _write_segments_and_positions(
                outs[f"{name}_segments"], outs[f"{name}_positions"], parts
            )
        if pack.has_mask:
            outs[f"{name}_mask"].fill(True)
            if ahead.is_short or (pack.targets and pack.apart):
                parts = ahead.parts.of_windows(first, last, part_range)
                self._mask(outs[f"{name}_mask"], parts)

    def _look_ahead(
        self, numbers: Rows, first: int, last: int, n_tokens: tuple[int, ...] | None
    ) -> _Lookahead:
        ahead = self._lookaheads.get(id(numbers))
        if ahead is not None and ahead.first <= first <= last <= ahead.last:
            return ahead
        packed = self._windows
        n_ahead = _PARTS_AHEAD * len(packed) // (len(packed) + len(packed.ends))
        last = max(last, min(first + n_ahead, len(numbers)))
        parts = packed.parts(numbers[first:last], n_tokens)
        bounds = np.searchsorted(parts.windows, np.arange(last - first + 1)).tolist()
        shards = self._shards(parts.documents)
        ranges = None
        if self._is_raw and self._are_verified(parts.documents):
            ranges = self._find_ranges(parts, shards)
        is_short = bool((parts.n_tokens < self._pack.reach).any())
        tails = self._tails(parts) if is_short or self._pack.eot is not None else None
        ahead = _Lookahead(numbers, first, last, parts, bounds, shards, ranges, tails, is_short)
        self._lookaheads.pop(id(numbers), None)
        while len(self._lookaheads) >= _MAX_LOOKAHEADS:
            del self._lookaheads[next(iter(self._lookaheads))]
        self._lookaheads[id(numbers)] = ahead
        return ahead

    def _shards(self, documents: Rows) -> Rows:
        return self._dataset.locate(self._dataset.rows.at(documents))

    def _read_parts(self, ahead: _Lookahead, part_range: slice) -> list[Record]:
        """Return the bytes of the parts in a slice, with end-of-text tokens and padding."""
        if ahead.ranges is not None:
            pieces = ahead.ranges.bytes_of(part_range)
        else:
            parts, shards = ahead.parts.select(part_range), ahead.shards[part_range]
            pieces = self._find_ranges(parts, shards).bytes_of(slice(None))
        if ahead.tails is None:
            return pieces
        both: list[Record] = [b""] * (2 * len(pieces))
        both[::2], both[1::2] = pieces, ahead.tails[part_range]
        return both

    def _tails(self, parts: WindowParts) -> list[bytes]:
        pack, dtype = self._pack, self._field.numpy
        missing = pack.reach - parts.n_tokens
        tail_choices = b"", b"" if pack.eot is None else np.array(pack.eot, dtype).tobytes()
        tails = [tail_choices[is_last] for is_last in parts.is_last.tolist()]
        pad = np.array(pack.pad, dtype).tobytes()
        lasts = np.searchsorted(parts.windows, np.arange(len(missing)), "right") - 1
        for i in np.flatnonzero(missing).tolist():
            tails[lasts[i]] += int(missing[i]) * pad
        return tails

    def _are_verified(self, documents: Rows) -> bool:
        if not len(self._document_offsets):
            self._document_offsets = np.zeros(len(self._windows.ends), np.int64)
        return bool(self._document_offsets.take(documents).all())

    def _find_ranges(self, parts: WindowParts, shards: Rows) -> _ByteRanges:
        itemsize, documents, counts = self._field.numpy.itemsize, parts.documents, parts.counts
        if self._pack.eot is not None:
            counts = counts - parts.is_last
        if self._is_raw:
            if not self._are_verified(documents):
                self._read(distinct(documents[self._document_offsets.take(documents) == 0]))
            starts = self._document_offsets.take(documents) + parts.starts * itemsize
            records: list[Record] = list(map(self._maps.__getitem__, shards.tolist()))
        else:
            read, which = np.unique(documents, return_inverse=True)
            found = [memoryview(record) for record in self._read(read)]
            starts = parts.starts * itemsize
            records = list(map(found.__getitem__, which.tolist()))
        return _ByteRanges(records, starts.tolist(), (starts + counts * itemsize).tolist())

    def _read(self, documents: Rows) -> list[Record]:
        dataset, name = self._dataset, self.name
        rows = dataset.rows.at(documents)
        shards = dataset.locate(rows)
        if self._field.column is not None:
            out = np.empty((len(rows), self._field.row_bytes or 0), np.uint8)
            dataset.gather(name).gather(rows, shards, out)
            return [row.data for row in out]
        records: list[Record] = [b""] * len(rows)
        for shard in distinct(shards).tolist():
            indices = np.flatnonzero(shards == shard)
            local = rows[indices] - dataset.shard_starts[shard]
            found = self._read_shard(shard, local, documents[indices])
            for i, record in zip(indices.tolist(), found, strict=True):
                records[i] = record
        return records

    def _read_shard(self, shard: int, local: Rows, documents: Rows) -> list[Record]:
        reader, name = self._dataset.files.reader(shard, self.name), self.name
        records = reader.records
        entries = records.entries(name, local)
        self._check_lengths(shard, local, documents, entries)
        found = list(records.read(name, local, entries))
        if self._is_raw and isinstance(reader.content, memoryview):
            self._maps[shard] = reader.content
            self._document_offsets[documents] = entries["offset"].astype(np.int64) + records.offset
        return found

    def _check_lengths(self, shard: int, local: Rows, documents: Rows, entries: Entries) -> None:
        """Check documents' sizes against their stored shapes and the lengths that windows use."""
        records, name = self._dataset.files.reader(shard, self.name).records, self.name
        n_bytes = entries["n_bytes"].astype(np.int64)
        itemsize = self._field.numpy.itemsize
        wrong = n_bytes != self._windows.lengths(documents) * itemsize
        if not self._field.is_fixed:
            wrong |= records.shapes(name, local)[:, 0] * np.uint64(itemsize) != entries["n_bytes"]
        for i in np.flatnonzero(wrong)[:1].tolist():
            what = "its size does not match its stored shape, or its length at opening"
            error = ShardCorrupt(what, code="shape", found=int(n_bytes[i]))
            offset = records.offset + int(entries["offset"][i])
            raise records.add_location(error, name, int(local[i]), offset)

    def _mask(self, out: npt.NDArray[np.bool_], parts: WindowParts) -> None:
        """Set the mask to False in padding and where a target is missing or in another document."""
        pack = self._pack
        n_tokens = parts.n_tokens - pack.targets
        for short in np.flatnonzero(n_tokens < pack.length).tolist():
            out[short, n_tokens[short] :] = False
        if pack.targets and pack.apart:
            last = parts.offsets + parts.counts - 1
            is_inside = parts.is_last & (last < pack.length)
            out[parts.windows[is_inside], last[is_inside]] = False


def _write_segments_and_positions(segments: Tokens, positions: Tokens, parts: WindowParts) -> None:
    """Write the segment and position of each token, except for tokens that are only targets."""
    n, length = segments.shape
    counts = np.minimum(parts.counts, length - parts.offsets)  # 0 if the part is only a target
    n_tokens = np.minimum(parts.n_tokens, length)
    firsts = np.searchsorted(parts.windows, np.arange(n))
    numbers = (np.arange(1, len(counts) + 1) - firsts[parts.windows]).astype(np.int32)
    starts = (parts.windows * length + parts.offsets).astype(np.int32)
    of_tokens, starts = np.repeat(numbers, counts), np.repeat(starts, counts)
    if (n_tokens == length).all():
        segments.reshape(-1)[:] = of_tokens
        offsets = np.arange(n * length, dtype=np.int32)
        np.subtract(offsets, starts, out=positions.reshape(-1))
        return
    is_token = np.arange(length) < n_tokens[:, None]
    segments.fill(0)
    positions.fill(0)
    segments[is_token] = of_tokens
    positions[is_token] = np.flatnonzero(is_token) - starts
