"""Windows of tokens, gathered from the documents that they are made of, straight into a block.

Used by `fill`. A document is read, and checked, as a whole; each window copies its part of it. Of
documents that are checked already, and lie raw in a map, the part alone is touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shardio.dataset import ShardDataset
from shardio.errors import ShardCorrupt
from shardio.format.checksum import distinct
from shardio.format.index import ENTRY_DTYPE
from shardio.format.layout import NO_FIELD, Kind
from shardio.packing import Pack, Packed, Parts
from shardio.units import Rows, Units, Verify

Tokens = npt.NDArray[Any]
Record = bytes | memoryview


class _RawShard(NamedTuple):
    """A shard whose documents lie raw in a map: which record of a row each is, and their places.

    `offsets` are from `start` on, by row, as the index has them: right where a record is checked.
    """

    content: memoryview
    units: Units
    record: int
    start: int
    offsets: npt.NDArray[np.uint64]


class PackedTokens:
    """Fills windows of tokens of a dataset that shows them, which it borrows.

    `verify` is as the dataset has it.
    """

    def __init__(self, dataset: ShardDataset, pack: Pack, verify: Verify = "first") -> None:
        self._dataset, self._pack = dataset, pack
        self._field, self.name = pack.documents(dataset.schema), pack.name
        self._made = pack.made(self._field)
        self.names: Final = tuple(self._made)
        """The fields that a window has."""
        self._is_raw = verify == "first" and self._field.codec == "raw"
        self._is_raw &= not self._field.is_fixed and dataset.access == "mmap"
        self._shards: dict[int, _RawShard] = {}

    def close(self) -> None:
        """Let go of the shards' maps. Idempotent."""
        self._shards.clear()

    def fill(self, outs: Mapping[str, Tokens], numbers: Rows) -> None:
        """Write some windows.

        Args:
            outs: every field that a window has, C-contiguous, (windows, length).
            numbers: which windows.

        Raises:
            ShardCorrupt: naming the sample.
        """
        pack, name = self._pack, self.name
        parts = self._packed.parts(numbers)
        tokens = outs[name]
        if pack.targets:
            stream = np.empty((len(numbers), pack.reach), tokens.dtype)
            self._copy(stream, parts)
            tokens[...] = stream[:, :-1]
            outs[f"{name}_targets"][...] = stream[:, 1:]
        else:
            self._copy(tokens, parts)
        if pack.apart:
            _number(outs[f"{name}_segments"], outs[f"{name}_positions"], parts)
        if pack.has_mask:
            self._mask(outs[f"{name}_mask"], parts)

    def of_sample(self, number: int) -> dict[str, Tokens]:
        """The fields of one window, in new memory."""
        outs = {n: np.empty((1, self._pack.length), f.numpy) for n, f in self._made.items()}
        self.fill(outs, np.array([number]))
        return {name: out[0] for name, out in outs.items()}

    @property
    def _packed(self) -> Packed:
        packed = (
            self._dataset.packed
        )  # late: a worker is told of it after it has opened the dataset
        if packed is None:
            raise AssertionError("a recipe that packs is for a dataset that shows windows")
        return packed

    def _copy(self, out: Tokens, parts: Parts) -> None:
        """The tokens themselves, eot and padding included."""
        pack, itemsize, width = self._pack, out.itemsize, out.shape[1]
        records, firsts = self._records(parts)
        places, counts = parts.windows * width + parts.places, parts.counts
        if pack.eot is not None:
            counts = counts - parts.is_last
            out.reshape(-1)[(places + counts)[parts.is_last]] = pack.eot
        for short in np.flatnonzero(parts.n_tokens < width).tolist():
            out[short, parts.n_tokens[short] :] = pack.pad
        memory = out.view(np.uint8).reshape(-1).data
        places, counts = places * itemsize, counts * itemsize
        columns = places, places + counts, firsts, firsts + counts
        offsets = (column.tolist() for column in columns)
        # A slice of a memoryview costs a third of an array's.
        for to, end, first, last, record in zip(*offsets, records, strict=True):
            memory[to:end] = record[first:last]

    def _records(self, parts: Parts) -> tuple[list[Record], Rows]:
        """What each part is copied from, and with which byte of that it begins."""
        firsts = parts.firsts * self._field.numpy.itemsize
        if self._is_raw and (found := self._in_maps(parts.documents)) is not None:
            maps, starts = found
            return maps, firsts + starts
        documents, which = np.unique(parts.documents, return_inverse=True)
        records = self._read(documents)
        return [records[k] for k in which.tolist()], firsts

    def _in_maps(self, documents: Rows) -> tuple[list[Record], Rows] | None:
        """The map that each of some documents lies in, and where; None unless all are checked."""
        rows = self._dataset.shown_rows(documents)
        shards = self._dataset.locate(rows)
        local = rows - self._dataset.starts.take(shards)
        starts = np.empty(len(rows), np.int64)
        for shard in distinct(shards).tolist():
            raw = self._shards.get(shard)
            if raw is None:
                raw = self._shards[shard] = self._open(shard)
            is_here = shards == shard
            some = local[is_here]
            if not raw.units.are_records_checked(raw.record, some):
                return None
            starts[is_here] = raw.offsets[some].astype(np.int64) + raw.start
        return [self._shards[shard].content for shard in shards.tolist()], starts

    def _open(self, shard: int) -> _RawShard:
        reader = self._dataset.reader(shard, self.name)
        if not isinstance(reader.content, memoryview):
            raise AssertionError("a dataset with access='mmap' has mapped its shards")
        stored = list(reader.schema.records)
        k = stored.index(self.name)
        index = next(s for s in reader.sections if s.key == (Kind.INDEX, NO_FIELD, 0))
        entries = np.frombuffer(reader.content, ENTRY_DTYPE, index.count, index.offset)
        offsets = entries["offset"][k :: len(stored)]
        return _RawShard(reader.content, reader.units, k, reader.records.offset, offsets)

    def _read(self, documents: Rows) -> list[Record]:
        """Whole documents, verified."""
        dataset, name = self._dataset, self.name
        rows = dataset.shown_rows(documents)
        shards = dataset.locate(rows)
        if self._field.is_column:
            out = np.empty((len(rows), self._field.row_bytes or 0), np.uint8)
            gather = dataset.gather(name)
            gather.gather(gather.place(rows, shards), rows, shards, out)
            return [row.data for row in out]
        records: list[Record] = [b""] * len(rows)
        for shard in distinct(shards).tolist():
            places = np.flatnonzero(shards == shard)
            local = rows[places] - dataset.starts[shard]
            found = self._read_shard(shard, local, documents[places])
            for place, record in zip(places.tolist(), found, strict=True):
                records[place] = record
        return records

    def _read_shard(self, shard: int, local: Rows, documents: Rows) -> list[Record]:
        records, name = self._dataset.reader(shard, self.name).records, self.name
        entries = records.entries(name, local)
        n_bytes = entries["n_bytes"].astype(np.int64)
        itemsize = self._field.numpy.itemsize
        wrong = n_bytes != self._packed.lengths(documents) * itemsize
        if not self._field.is_fixed:
            wrong |= records.shapes(name, local)[:, 0] * np.uint64(itemsize) != entries["n_bytes"]
        for i in np.flatnonzero(wrong)[:1].tolist():
            what = "the stored shape, or the length at opening, does not account for the bytes"
            error = ShardCorrupt(what, code="shape", found=int(n_bytes[i]))
            place = records.offset + int(entries["offset"][i])
            raise records.placed(error, name, int(local[i]), place)
        return list(records.read(name, local, entries))

    def _mask(self, out: npt.NDArray[np.bool_], parts: Parts) -> None:
        """Where tokens count: not in padding, nor where the target is of another document."""
        pack = self._pack
        out.fill(True)
        n_tokens = parts.n_tokens - pack.targets
        for short in np.flatnonzero(n_tokens < pack.length).tolist():
            out[short, n_tokens[short] :] = False
        if pack.targets and pack.apart:
            last = parts.places + parts.counts - 1
            is_inside = parts.is_last & (last < pack.length)
            out[parts.windows[is_inside], last[is_inside]] = False


def _number(segments: Tokens, positions: Tokens, parts: Parts) -> None:
    """Which of a window's documents each token is of, from 1 up, and how far it is in there.

    Where the window has its targets, the token behind it is left out.
    """
    n, length = segments.shape
    counts = np.minimum(parts.counts, length - parts.places)  # 0 of what is a target only
    n_tokens = np.minimum(parts.n_tokens, length)
    firsts = np.searchsorted(parts.windows, np.arange(n))
    numbers = (np.arange(len(counts)) - firsts[parts.windows] + 1).astype(np.int32)
    starts = parts.windows * length + parts.places
    of_tokens = np.repeat(numbers, counts)
    if (n_tokens == length).all():
        segments.reshape(-1)[:] = of_tokens
        positions.reshape(-1)[:] = np.arange(n * length) - np.repeat(starts, counts)
        return
    is_token = np.arange(length) < n_tokens[:, None]
    segments.fill(0)
    positions.fill(0)
    segments[is_token] = of_tokens
    positions[is_token] = np.flatnonzero(is_token) - np.repeat(starts, counts)
