"""Where in the files of a dataset clips of its videos lie, about: what decoding them will touch.

Used by `advice`. As in `extents`, maps are not touched, and what the index says is a hint. Which
packets a clip needs, the table of its video says, which is to be read first itself; here it is
taken that all frames have as many bytes, and what lies around is added.
"""

from __future__ import annotations

import os
from typing import Final

import numpy as np
import numpy.typing as npt

from shardio._engine.filling.extents import Files
from shardio._engine.filling.ranges import NOTHING, Ranges, joined
from shardio.dataset.dataset import Dataset
from shardio.format.checksum import CHUNK_BYTES
from shardio.format.index import ENTRY, ENTRY_DTYPE
from shardio.format.layout import NO_FIELD, Kind
from shardio.format.streams import PACKET, STREAM, STREAM_DTYPE
from shardio.samples.clip_draws import Cut
from shardio.shard.verification import Rows
from shardio.storage.file_access import open_shard

_MOST_AROUND: Final = 256 << 10
"""Bytes before and behind: a sixteenth of the video, up to this, as frames are not of one size."""
_HEAD_BYTES: Final = 4096
"""Of a record, before its packets: the parameters of the stream take less."""


class ClipExtents:
    """Where the packets of clips lie, and their tables. Borrows the dataset.

    Args:
        dataset: whose shards are opened when they are first asked about.
        cut: which clips there are.
        files: of fields that the videos are among.
    """

    def __init__(self, dataset: Dataset, cut: Cut, files: Files) -> None:
        self._dataset, self._cut, self._files = dataset, cut, files
        (self._numbers,) = (numbers for names, numbers in files.groups if cut.name in names)

    def ranges(self, rows: Rows, shards: Rows, starts: Rows) -> Ranges:
        """What decoding some clips touches; lines of the index are read, and waited for.

        Args:
            rows, shards: of their videos, in all shards.
            starts: their first frames.

        Raises:
            OSError: a file cannot be read.
        """
        local = rows - self._dataset.starts.take(shards)
        found = [
            self._of_shard(shard, local[shards == shard], starts[shards == shard])
            for shard in np.flatnonzero(np.bincount(shards)).tolist()
        ]
        return joined(found) if found else NOTHING

    def _of_shard(self, shard: int, local: Rows, starts: Rows) -> Ranges:
        reader, name = self._dataset.files.reader(shard, self._cut.name), self._cut.name
        stored, field = list(reader.schema.records), reader.schema.field_id(name)
        places = {each.key: each.offset for each in reader.sections}
        number = int(self._numbers[shard])
        fd = open_shard(self._files.path(number))
        try:
            first = places[Kind.INDEX, NO_FIELD, 0] + stored.index(name) * ENTRY.size
            entries = _lines(fd, first + local * (len(stored) * ENTRY.size), ENTRY_DTYPE)
            first = places[Kind.STREAMS, field, 0]
            lines = _lines(fd, first + local * STREAM.size, STREAM_DTYPE)
        finally:
            os.close(fd)
        tables = places[Kind.PACKETS, field, 0] + _numbers(lines, "first_packet") * PACKET.size
        table_ends = tables + _numbers(lines, "n_packets") * PACKET.size
        records = places[Kind.PAYLOAD, NO_FIELD, 0] + _numbers(entries, "offset")
        n_bytes = _numbers(entries, "n_bytes")
        begins, ends = self._parts(n_bytes, n_bytes / np.maximum(lines["n_frames"], 1), starts)
        heads = np.minimum(n_bytes, _HEAD_BYTES)
        base = int(self._files.starts[number])
        found = Ranges(
            np.concatenate([tables, records, records + begins]) + base,
            np.concatenate([table_ends, records + heads, records + ends]) + base,
        )
        is_right = (found.starts < found.ends) & (found.starts >= base)
        is_right &= found.ends <= int(self._files.starts[number + 1])
        return Ranges(found.starts[is_right], found.ends[is_right])

    def _parts(
        self, n_bytes: Rows, per_frame: npt.NDArray[np.float64], starts: Rows
    ) -> tuple[Rows, Rows]:
        """About which part of each record its clip needs, in whole chunks, as they are checked."""
        around = np.minimum(n_bytes // 16, _MOST_AROUND)
        begins = (starts * per_frame).astype(np.int64) - around
        ends = ((starts + self._cut.clip.span) * per_frame).astype(np.int64) + around
        begins = np.clip(begins, 0, n_bytes) & -CHUNK_BYTES
        return begins, np.clip(-(-ends // CHUNK_BYTES) * CHUNK_BYTES, 0, n_bytes)


def _numbers(lines: npt.NDArray[np.void], name: str) -> Rows:
    found: Rows = lines[name].astype(np.int64)
    return found


def _lines(fd: int, offsets: Rows, dtype: np.dtype[np.void]) -> npt.NDArray[np.void]:
    """What a file has at some offsets."""
    found = np.zeros(len(offsets), dtype)
    lines = found.view(np.uint8).reshape(len(offsets), dtype.itemsize)
    for line, offset in zip(lines, offsets.tolist(), strict=True):
        os.preadv(fd, [line.data], offset)
    return found
