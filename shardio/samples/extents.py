"""Compute the byte ranges of a dataset's files that are touched when some samples are read.

All files are treated as if they were concatenated, so one offset identifies a byte of any file.
Index entries are not verified. They are read through file descriptors, because reading a truncated
file through its memory map kills the process. The ranges of clips are estimated, as if all frames
had the same size.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shardio.dataset.dataset import Dataset
from shardio.format.checksum import CHUNK_BYTES, distinct, rows_per_unit
from shardio.format.layout import NO_FIELD, Kind
from shardio.format.sections import DIMENSION, ENTRY, ENTRY_DTYPE, stored_bytes
from shardio.format.types.streams import PACKET, STREAM, STREAM_DTYPE
from shardio.samples.clips import Clip
from shardio.shard.verification import Rows
from shardio.storage.file_access import open_shard


class Ranges(NamedTuple):
    """Byte ranges from `starts` to `ends`, exclusive."""

    starts: Rows
    ends: Rows

    @property
    def n_bytes(self) -> int:
        """The sum of the sizes; overlaps count twice."""
        return int((self.ends - self.starts).sum())


NO_RANGES: Final = Ranges(np.empty(0, np.int64), np.empty(0, np.int64))


def concatenate_ranges(parts: Sequence[Ranges]) -> Ranges:
    """Return all ranges in one `Ranges`, without merging."""
    if not parts:
        return NO_RANGES
    starts = [each.starts for each in parts]
    return Ranges(np.concatenate(starts), np.concatenate([each.ends for each in parts]))


def merge_ranges(ranges: Ranges, grain: int) -> Ranges:
    """Return the union of ranges, ascending, rounded outwards to multiples of `grain`."""
    filled = ranges.ends > ranges.starts
    starts = ranges.starts[filled] & -grain
    if not len(starts):
        return NO_RANGES
    order = np.argsort(starts, kind="stable")
    starts = starts[order]
    ends = np.maximum.accumulate((ranges.ends[filled][order] + (grain - 1)) & -grain)
    is_first = np.concatenate([[True], starts[1:] > ends[:-1]])
    return Ranges(starts[is_first], ends[np.append(is_first[1:], True)])


def blocks_of(ranges: Ranges, size: int) -> Rows:
    """Return the indices of all blocks of `size` bytes that overlap a range, ascending."""
    filled = ranges.ends > ranges.starts
    firsts, lasts = ranges.starts[filled] // size, (ranges.ends[filled] - 1) // size
    counts = lasts - firsts + 1
    before = np.cumsum(counts) - counts
    numbers: Rows = np.repeat(firsts - before, counts) + np.arange(int(counts.sum()))
    return distinct(numbers)


GAP_BYTES: Final = 4 << 20
"""Each file begins at a multiple of this size, after a gap of at least this size, so that a range
that is rounded to smaller multiples never overlaps another file."""


class ShardFileNumbers:
    """The files in which some fields are stored, numbered in the order of concatenation.

    Each entry of `groups` is a pair: fields that are stored in the same files, and for each shard
    the number of its file. In a mixture, several shards have the same file if a dataset is a source
    more than once. `sizes` and `starts` are indexed by file number.
    """

    def __init__(self, dataset: Dataset, fields: Sequence[str]) -> None:
        self._dataset = dataset
        inside = [name for name in fields if name not in dataset.column_groups]
        beside = [[name] for name in fields if name in dataset.column_groups]
        names = [inside, *beside] if inside else beside
        self.groups: list[tuple[list[str], Rows]] = []
        self._shards: list[tuple[str, Rows]] = []
        sizes = [np.zeros(0, np.int64)]
        n_files = 0
        for group in names:
            numbers = dataset.files.file_numbers(group[0])
            firsts = np.zeros(int(numbers.max(initial=-1)) + 1, np.int64)
            firsts[numbers[::-1]] = np.arange(len(numbers))[::-1]
            self.groups.append((group, numbers + n_files))
            self._shards.append((group[0], firsts))
            sizes.append(dataset.files.summaries(group[0]).sizes[firsts])
            n_files += len(firsts)
        self.sizes: Rows = np.concatenate(sizes)
        taken = -(-self.sizes // GAP_BYTES) * GAP_BYTES + GAP_BYTES
        self.starts: Rows = np.concatenate([[0], np.cumsum(taken)])

    def path(self, number: int) -> str:
        """Return the path of a file."""
        for name, shards in self._shards:
            if number < len(shards):
                return self._dataset.files.path(int(shards[number]), name)
            number -= len(shards)
        raise IndexError(f"there is no file {number}")

    @contextlib.contextmanager
    def open_file(self, number: int) -> Iterator[int]:
        """Open a file; the descriptor is closed at the end of the `with` block."""
        fd = open_shard(self.path(number))
        try:
            yield fd
        finally:
            os.close(fd)

    @property
    def n_bytes(self) -> int:
        """The total size of all files in bytes."""
        return int(self.sizes.sum())

    def pieces(self, ranges: Ranges) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        """Yield the number of each file, with the offsets and sizes of its ranges."""
        files = np.searchsorted(self.starts, ranges.starts, side="right") - 1
        offsets = (ranges.starts - self.starts[files]).tolist()
        sizes = (ranges.ends - ranges.starts).tolist()
        pairs = list(zip(offsets, sizes, strict=True))
        cuts = [0, *(np.flatnonzero(np.diff(files)) + 1).tolist(), len(pairs)]
        for first, last in zip(cuts, cuts[1:], strict=False):
            if first < last:
                yield int(files[first]), pairs[first:last]


class _Section:
    """The sections of one kind, one for each shard, in the files that store the field `name`.

    `starts` lists the offset of each shard's file in the concatenation.
    """

    def __init__(self, dataset: Dataset, kind: Kind, name: str, starts: Rows) -> None:
        self._dataset, self._kind, self._name, self._starts = dataset, kind, name, starts
        self._offsets: Rows = np.full(len(starts), -1, np.int64)

    def offsets(self, shards: Rows) -> Rows:
        if self._offsets.take(shards).min(initial=0) < 0:
            for shard in distinct(shards).tolist():
                reader = self._dataset.files.reader(shard, self._name)
                is_shared = self._kind in (Kind.INDEX, Kind.PAYLOAD)
                field = NO_FIELD if is_shared else reader.schema.field_id(self._name)
                offset = reader.units.sections[self._kind, field, 0].offset
                self._offsets[shard] = self._starts[shard] + offset
        return self._offsets.take(shards)

    def items(self, numbers: Rows, shards: Rows, stride: int, n_bytes: int) -> Ranges:
        starts = self.offsets(shards) + numbers * stride
        return Ranges(starts, starts + n_bytes)


class _ColumnExtents:
    """The ranges of a column's rows, and of units (rows that share a hash) to be verified."""

    def __init__(self, dataset: Dataset, name: str, starts: Rows, verify: str) -> None:
        self._name, self._verify, self._reader = name, verify, dataset.files.reader
        field = dataset.schema.columns[name]
        self._stride, self._row_bytes = field.stride, field.row_bytes or 0
        self._per_unit = rows_per_unit(self._row_bytes, field.stride)
        self._rows = _Section(dataset, Kind.COLUMN, name, starts)
        self._hashes = _Section(dataset, Kind.COLUMN_HASHES, name, starts)

    def ranges(self, local: Rows, shards: Rows) -> list[Ranges]:
        found = [self._rows.items(local, shards, self._stride, self._row_bytes)]
        if self._verify == "off":
            return found
        units = local // self._per_unit
        is_unverified = self._must_verify(units, shards)
        if is_unverified.any():
            units, shards = units[is_unverified], shards[is_unverified]
            found.append(self._hashes.items(units, shards, DIMENSION.size, DIMENSION.size))
            if self._per_unit > 1:
                n_bytes = self._per_unit * self._stride
                found.append(self._rows.items(units, shards, n_bytes, n_bytes))
        return found

    def _must_verify(self, units: Rows, shards: Rows) -> npt.NDArray[np.bool_]:
        """Return a mask of the units that must be verified. Such a unit is read as a whole."""
        if self._verify == "always":
            return np.ones(len(units), np.bool_)
        name, reader = self._name, self._reader
        pairs = zip(units.tolist(), shards.tolist(), strict=True)
        unverified = [not reader(shard, name).units.is_checked(name, unit) for unit, shard in pairs]
        return np.array(unverified, np.bool_)


class _RecordExtents:
    def __init__(
        self, dataset: Dataset, names: Sequence[str], files: ShardFileNumbers, numbers: Rows
    ) -> None:
        self._dataset, self._names = dataset, names
        self._files, self._numbers = files, numbers
        starts, self._ends = files.starts[numbers], files.starts[numbers + 1]
        self._entries: dict[int, tuple[int, list[int]]] = {}
        self._index = _Section(dataset, Kind.INDEX, names[0], starts)
        self._payload = _Section(dataset, Kind.PAYLOAD, names[0], starts)
        self._starts = starts
        n_dims = {name: len(dataset.schema[name].stored_dims) for name in names}
        self._shapes = [
            (_Section(dataset, Kind.SHAPES, name, starts), n * DIMENSION.size)
            for name, n in n_dims.items()
            if n
        ]

    def _entries_of(self, shard: int) -> tuple[int, list[int]]:
        """Return the size of an index row, and the positions of the fields' entries in the row."""
        found = self._entries.get(shard)
        if found is None:
            stored = list(self._dataset.files.reader(shard, self._names[0]).schema.records)
            found = len(stored) * ENTRY.size, [stored.index(name) for name in self._names]
            self._entries[shard] = found
        return found

    def tables(self, local: Rows, shards: Rows) -> list[Ranges]:
        row_bytes = np.array([self._entries_of(shard)[0] for shard in shards.tolist()], np.int64)
        starts = self._index.offsets(shards) + local * row_bytes
        shapes = [section.items(local, shards, size, size) for section, size in self._shapes]
        return [Ranges(starts, starts + row_bytes), *shapes]

    def ranges(self, local: Rows, shards: Rows) -> Ranges:
        """Return the valid ranges of the records of some rows. Reads the index."""
        order = np.lexsort((local, shards))
        local, shards = local[order], shards[order]
        cuts = np.flatnonzero(np.diff(shards)) + 1
        parts = [
            self._read_index(int(shards[part[0]]), local[part])
            for part in np.split(np.arange(len(order)), cuts)
        ]
        entries = np.concatenate(parts)
        starts = self._payload.offsets(shards)[:, None] + entries["offset"].astype(np.int64)
        ends = starts + stored_bytes(entries).astype(np.int64)
        is_valid = (starts <= ends) & (starts >= self._starts[shards][:, None])
        is_valid &= ends <= self._ends[shards][:, None]
        return Ranges(starts[is_valid], ends[is_valid])

    def _read_index(self, shard: int, local: Rows) -> npt.NDArray[np.void]:
        """Return the index entries of ascending rows of one shard, as an array (rows, fields)."""
        number, (row_bytes, chosen) = np.array([shard]), self._entries_of(shard)
        first = int(self._index.offsets(number)[0] - self._starts[shard])
        entries = np.zeros((len(local), row_bytes // ENTRY.size), ENTRY_DTYPE)
        content = entries.view(np.uint8).reshape(len(local), row_bytes)
        cuts = [0, *(np.flatnonzero(np.diff(local) != 1) + 1).tolist(), len(local)]
        with self._files.open_file(int(self._numbers[shard])) as fd:
            for begin, end in zip(cuts, cuts[1:], strict=False):
                offset = first + int(local[begin]) * row_bytes
                os.preadv(fd, [content[begin:end].reshape(-1).data], offset)
        return entries[:, chosen]


class Extents:
    """The byte ranges of some fields. Borrows the dataset, whose shards are opened on demand.

    Units (rows that share a hash) that must be verified, according to `verify`, are read as a
    whole. Videos and audio, each as a whole, are included only if `with_streams` is True.
    """

    def __init__(
        self, dataset: Dataset, fields: Sequence[str], verify: str, *, with_streams: bool = False
    ) -> None:
        self.files = ShardFileNumbers(dataset, fields)
        self._dataset = dataset
        self._columns: list[_ColumnExtents] = []
        self._records: list[_RecordExtents] = []
        for names, numbers in self.files.groups:
            starts = self.files.starts[numbers]
            columns = [name for name in names if name in dataset.schema.columns]
            self._columns += [_ColumnExtents(dataset, name, starts, verify) for name in columns]
            stored = dataset.schema.records
            streams = {n for n, f in stored.items() if f.is_streamed}
            records = [n for n in names if n in stored and (with_streams or n not in streams)]
            if records:
                self._records.append(_RecordExtents(dataset, records, self.files, numbers))

    def fixed(self, rows: Rows, shards: Rows) -> Ranges:
        """Return all ranges that are read for some rows, except those of their records."""
        local = rows - self._dataset.shard_starts.take(shards)
        found = [each for column in self._columns for each in column.ranges(local, shards)]
        found += [each for records in self._records for each in records.tables(local, shards)]
        return concatenate_ranges(found)

    def records(self, rows: Rows, shards: Rows) -> Ranges:
        """Return the ranges of the records of some rows. Reads the index."""
        if not self._records:
            return NO_RANGES
        local = rows - self._dataset.shard_starts.take(shards)
        return concatenate_ranges([each.ranges(local, shards) for each in self._records])


_MAX_MARGIN: Final = 256 << 10
"""The margin before and after a clip is a sixteenth of the video, but at most this many bytes."""


class ClipExtents:
    """The byte ranges that clips need: packets, and the tables of the videos."""

    def __init__(self, dataset: Dataset, clip: Clip, files: ShardFileNumbers) -> None:
        self._dataset, self._clip, self._files = dataset, clip, files
        self._name = clip.field or ""
        (self._numbers,) = (numbers for names, numbers in files.groups if self._name in names)

    def ranges(self, rows: Rows, shards: Rows, first_frames: Rows) -> Ranges:
        """Return the ranges that are read to decode some clips; `rows` are the videos' rows."""
        local = rows - self._dataset.shard_starts.take(shards)
        found = [
            self._of_shard(shard, local[shards == shard], first_frames[shards == shard])
            for shard in np.flatnonzero(np.bincount(shards)).tolist()
        ]
        return concatenate_ranges(found) if found else NO_RANGES

    def _of_shard(self, shard: int, local: Rows, first_frames: Rows) -> Ranges:
        reader, name = self._dataset.files.reader(shard, self._name), self._name
        stored, field = list(reader.schema.records), reader.schema.field_id(name)
        sections = reader.units.sections
        number = int(self._numbers[shard])
        with self._files.open_file(number) as fd:
            first = sections[Kind.INDEX, NO_FIELD, 0].offset + stored.index(name) * ENTRY.size
            entries = _read_items(fd, first + local * (len(stored) * ENTRY.size), ENTRY_DTYPE)
            first = sections[Kind.STREAMS, field, 0].offset
            streams = _read_items(fd, first + local * STREAM.size, STREAM_DTYPE)
        tables = (
            sections[Kind.PACKETS, field, 0].offset
            + _numbers(streams, "first_packet") * PACKET.size
        )
        table_ends = tables + _numbers(streams, "n_packets") * PACKET.size
        records = sections[Kind.PAYLOAD, NO_FIELD, 0].offset + _numbers(entries, "offset")
        n_bytes = _numbers(entries, "n_bytes")
        heads = _numbers(streams, "parameter_bytes") + _numbers(streams, "extradata_bytes")
        per_frame = (n_bytes - heads) / np.maximum(streams["n_frames"], 1)
        begins, ends = self._parts(n_bytes, heads, per_frame, first_frames)
        base = int(self._files.starts[number])
        found = Ranges(
            np.concatenate([tables, records, records + begins]) + base,
            np.concatenate([table_ends, records + heads, records + ends]) + base,
        )
        is_valid = (found.starts < found.ends) & (found.starts >= base)
        is_valid &= found.ends <= int(self._files.starts[number + 1])
        return Ranges(found.starts[is_valid], found.ends[is_valid])

    def _parts(
        self, n_bytes: Rows, heads: Rows, per_frame: npt.NDArray[np.float64], first_frames: Rows
    ) -> tuple[Rows, Rows]:
        """Estimate which bytes of each record a clip needs, rounded to chunks that have a hash."""
        margins = np.minimum(n_bytes // 16, _MAX_MARGIN)
        begins = heads + (first_frames * per_frame).astype(np.int64) - margins
        ends = heads + ((first_frames + self._clip.span) * per_frame).astype(np.int64) + margins
        begins = np.clip(begins, 0, n_bytes) & -CHUNK_BYTES
        return begins, np.clip(-(-ends // CHUNK_BYTES) * CHUNK_BYTES, 0, n_bytes)


def _numbers(items: npt.NDArray[np.void], name: str) -> Rows:
    found: Rows = items[name].astype(np.int64)
    return found


def _read_items(fd: int, offsets: Rows, dtype: np.dtype[np.void]) -> npt.NDArray[np.void]:
    found = np.zeros(len(offsets), dtype)
    items = found.view(np.uint8).reshape(len(offsets), dtype.itemsize)
    for item, offset in zip(items, offsets.tolist(), strict=True):
        os.preadv(fd, [item.data], offset)
    return found
