"""Windows of tokens, gathered from the documents that they are made of, straight into a block.

Used by `fill`. A document is read, and checked, as a whole; each window copies its part of it. Of
documents that lie raw in a map, and are checked already, the part alone is touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shardio.dataset import ShardDataset
from shardio.errors import ShardCorrupt
from shardio.format.checksum import distinct
from shardio.format.index import Entries
from shardio.packing import Pack, Packed, Parts
from shardio.units import Rows, Verify

Tokens = npt.NDArray[Any]
Record = bytes | memoryview

_PARTS_AHEAD: Final = 8192
"""About so many parts are worked out at a time: it takes 50 µs whatever their number."""


class _Ahead(NamedTuple):
    """What `numbers[first:last]` are made of, and the shard of each part."""

    numbers: Rows
    first: int
    last: int
    parts: Parts
    shards: Rows


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
        self._is_raw = verify != "always" and self._field.codec == "raw"
        self._is_raw &= not self._field.is_fixed and dataset.access == "mmap"
        self._maps: dict[int, memoryview] = {}
        """Of shards with a document that was read."""
        self._places: Rows = np.zeros(0, np.int64)
        """Where each raw document lies in the map of its shard; 0 before it is checked."""
        self._ahead: _Ahead | None = None

    def close(self) -> None:
        """Let go of the shards' maps. Idempotent."""
        self._maps.clear()
        self._places, self._ahead = np.zeros(0, np.int64), None

    def fill(self, outs: Mapping[str, Tokens], numbers: Rows, chosen: slice = slice(None)) -> None:
        """Write some windows.

        Args:
            outs: every field that a window has, C-contiguous, (windows, length).
            numbers: windows; not changed as long as this object is there.
            chosen: which of them are written. Those behind may be worked out already.

        Raises:
            ShardCorrupt: naming the sample.
        """
        pack, name = self._pack, self.name
        first, last, _ = chosen.indices(len(numbers))
        parts, shards = self._parts(numbers, first, last)
        content = b"".join(self._pieces(parts, shards))
        stream = np.frombuffer(content, outs[name].dtype).reshape(-1, pack.reach)
        outs[name][...] = stream[:, : pack.length]
        if pack.targets:
            outs[f"{name}_targets"][...] = stream[:, 1:]
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

    def _parts(self, numbers: Rows, first: int, last: int) -> tuple[Parts, Rows]:
        """What `numbers[first:last]` are made of, and the shard of each part."""
        ahead = self._ahead
        if (
            ahead is None
            or ahead.numbers is not numbers
            or not ahead.first <= first <= last <= ahead.last
        ):
            ahead = self._ahead = self._look_ahead(numbers, first, last)
        parts, within = ahead.parts.of_windows(first - ahead.first, last - ahead.first)
        return parts, ahead.shards[within]

    def _look_ahead(self, numbers: Rows, first: int, last: int) -> _Ahead:
        packed = self._packed
        n_ahead = _PARTS_AHEAD * len(packed) // (len(packed) + len(packed.ends))
        last = max(last, min(first + n_ahead, len(numbers)))
        parts = packed.parts(numbers[first:last])
        return _Ahead(numbers, first, last, parts, self._shards(parts.documents))

    def _shards(self, documents: Rows) -> Rows:
        return self._dataset.locate(self._dataset.shown_rows(documents))

    def _pieces(self, parts: Parts, shards: Rows) -> list[Record]:
        """The bytes that some windows have together, eot and padding included."""
        itemsize, counts = self._field.numpy.itemsize, parts.counts
        if self._pack.eot is not None:
            counts = counts - parts.is_last
        records, firsts = self._records(parts, shards)
        firsts = firsts + parts.firsts * itemsize
        bounds = firsts.tolist(), (firsts + counts * itemsize).tolist()
        pieces = [record[i:j] for record, i, j in zip(records, *bounds, strict=True)]
        tails = self._tails(parts)
        if tails is None:
            return pieces
        both: list[Record] = [b""] * (2 * len(pieces))
        both[::2], both[1::2] = pieces, tails
        return both

    def _tails(self, parts: Parts) -> list[bytes] | None:
        """What comes behind each part: eot, padding, or nothing; None where nothing does at all."""
        pack, dtype = self._pack, self._field.numpy
        missing = pack.reach - parts.n_tokens
        is_short = bool(missing.any())
        if pack.eot is None and not is_short:
            return None
        either = b"", b"" if pack.eot is None else np.array(pack.eot, dtype).tobytes()
        tails = [either[is_last] for is_last in parts.is_last.tolist()]
        if is_short:
            pad = np.array(pack.pad, dtype).tobytes()
            lasts = np.searchsorted(parts.windows, np.arange(len(missing)), "right") - 1
            for i in np.flatnonzero(missing).tolist():
                tails[lasts[i]] += int(missing[i]) * pad
        return tails

    def _records(self, parts: Parts, shards: Rows) -> tuple[Iterable[Record], Rows]:
        """What holds each part's document, checked, and with which byte the document begins."""
        documents = parts.documents
        if not self._is_raw:
            read, which = np.unique(documents, return_inverse=True)
            records = [memoryview(record) for record in self._read(read)]
            return map(records.__getitem__, which.tolist()), np.zeros(len(which), np.int64)
        if not len(self._places):
            self._places = np.zeros(len(self._packed.ends), np.int64)
        places = self._places.take(documents)
        if not places.all():
            self._read(distinct(documents[places == 0]))
            places = self._places.take(documents)
        return map(self._maps.__getitem__, shards.tolist()), places

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
        reader, name = self._dataset.reader(shard, self.name), self.name
        records = reader.records
        entries = records.entries(name, local)
        self._check_lengths(shard, local, documents, entries)
        found = list(records.read(name, local, entries))
        if self._is_raw and isinstance(reader.content, memoryview):
            self._maps[shard] = reader.content
            self._places[documents] = entries["offset"].astype(np.int64) + records.offset
        return found

    def _check_lengths(self, shard: int, local: Rows, documents: Rows, entries: Entries) -> None:
        """Make sure that documents are as long as it was said when windows were cut.

        Raises:
            ShardCorrupt: naming the first that is not.
        """
        records, name = self._dataset.reader(shard, self.name).records, self.name
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
    numbers = (np.arange(1, len(counts) + 1) - firsts[parts.windows]).astype(np.int32)
    starts = (parts.windows * length + parts.places).astype(np.int32)
    of_tokens, starts = np.repeat(numbers, counts), np.repeat(starts, counts)
    if (n_tokens == length).all():
        segments.reshape(-1)[:] = of_tokens
        places = np.arange(n * length, dtype=np.int32)
        np.subtract(places, starts, out=positions.reshape(-1))
        return
    is_token = np.arange(length) < n_tokens[:, None]
    segments.fill(0)
    positions.fill(0)
    segments[is_token] = of_tokens
    positions[is_token] = np.flatnonzero(is_token) - starts
