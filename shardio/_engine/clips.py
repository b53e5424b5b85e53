"""Decode clips of stored videos, into the rows of a block or for the user's transform.

Used by `fill`. What is opened of a video, its tables and its decoder, is kept for its next clip.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from shardio.closing import Closing
from shardio.cutting import Cut, Cuts
from shardio.dataset import ShardDataset
from shardio.errors import InvalidArgument, MediaError
from shardio.format.streams import EncodedStream
from shardio.media.clips import ClipDecoder
from shardio.media.framing import Place
from shardio.spent import DECODE, SPENT, now_ns
from shardio.units import Rows

Pixels = npt.NDArray[np.uint8]
Clip = tuple[range, Pixels]
"""The frames of a clip, and where they go."""

_MOST_STREAMS: Final = 2048
"""Opening one takes about as long as decoding 12 frames of 112x112; it keeps 5 KB."""
_MOST_PACKETS: Final = 1 << 19
"""Of all streams that are open; 18 MB of tables."""


class VideoClips(Closing):
    """Decodes clips of the videos in one field of a dataset, which it borrows.

    It owns decoders until `close`, and is closed before the dataset.
    """

    def __init__(self, dataset: ShardDataset, cut: Cut) -> None:
        self._dataset, self._cut, self.name = dataset, cut, cut.name
        self._decoder = ClipDecoder(max_streams=_MOST_STREAMS)
        self._n_packets = 0
        self._streams: OrderedDict[tuple[int, int], EncodedStream] = OrderedDict()

    def fill(self, out: Pixels, rows: Rows, shards: Rows, cuts: Cuts, part: slice) -> None:
        """Decode the clips of a batch, those of one video together.

        Args:
            out: (clips, *the shape of one).
            rows, shards: of their videos, in all shards.
            cuts, part: where they begin, and which of the cuts they are.

        Raises:
            ShardCorrupt, MediaError: naming the sample.
        """
        starts = cuts.starts[part].tolist()
        groups: dict[tuple[int, int, Place | None], list[Clip]] = {}
        local = (rows - self._dataset.starts.take(shards)).tolist()
        for i, (shard, row) in enumerate(zip(shards.tolist(), local, strict=True)):
            place = cuts.place(part.start + i)
            groups.setdefault((shard, row, place), []).append((self._frames(starts[i]), out[i]))
        for (shard, row, place), clips in groups.items():
            self._decode(shard, row, clips, place)

    def of_sample(self, shard: int, row: int, start: int, place: Place | None) -> Pixels:
        """One clip in new memory; the row is that in its shard."""
        made = np.empty([n or 0 for n in self._cut.array.shape], np.uint8)
        self._decode(shard, row, [(self._frames(start), made)], place)
        return made

    def _frames(self, start: int) -> range:
        clip = self._cut.clip
        return range(start, start + clip.span, clip.stride)

    def _decode(self, shard: int, row: int, clips: Sequence[Clip], place: Place | None) -> None:
        start_ns = now_ns()
        try:
            stream = self._stream(shard, row)
            self._decoder.decode_many(stream, clips, crop=place, pixels=self._cut.clip.pixels)
        except (MediaError, InvalidArgument) as error:
            path = self._dataset.reader(shard, self.name).path
            raise MediaError(f"{path}, field {self.name!r}, sample {row}: {error}") from error
        SPENT.sums_ns[DECODE] += now_ns() - start_ns

    def _stream(self, shard: int, row: int) -> EncodedStream:
        """The stream of a video, one of the latest or read anew."""
        found = self._streams.get((shard, row))
        if found is None:
            records = self._dataset.reader(shard, self.name).records
            (found,) = records.values(self.name, np.array([row]))
            self._streams[shard, row] = found
            self._n_packets += len(found.packets)
            self._forget()
        else:
            self._streams.move_to_end((shard, row))
        return found

    def _forget(self) -> None:
        """Let go of the streams that were used longest ago, but not of the latest."""
        while len(self._streams) > 1 and (
            len(self._streams) > _MOST_STREAMS or self._n_packets > _MOST_PACKETS
        ):
            _, stream = self._streams.popitem(last=False)
            self._n_packets -= len(stream.packets)
            self._decoder.forget(stream)

    def close(self) -> None:
        """Release the decoders, and the streams that are open."""
        self._decoder.close()
        self._streams.clear()
        self._n_packets = 0
