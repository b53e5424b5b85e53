"""Some videos of a shard, as far as clips need to know them: from the index alone, if it tells."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio.errors import InvalidArgument, ShardCorrupt
from shardio.format.streams import Streams
from shardio.shard.reader import ShardReader
from shardio.shard.verification import Rows
from shardio.views.clips import Clip
from shardio.views.events import check_inside, read_events
from shardio.views.frame_times import FrameTimes, n_times

_MOST_FRAMES: Final = 1 << 40
"""Of one video: at 1,000 per second it lasts 35 years, and is a lie."""
_MAX_DURATION: Final = (1 << 64) - 1


class Footage:
    """What there is to cut clips out of, in some rows of a shard.

    `lines` are those of the streams. `n_frames` is how many frames each has; where clips go by
    times, how many times there are for one, at the clip's rate.

    Raises:
        ShardCorrupt, InvalidArgument: the tables of a video cannot be right.
    """

    def __init__(self, reader: ShardReader, name: str, rows: Rows, clip: Clip) -> None:
        self._reader, self._name, self._rows, self._clip = reader, name, rows, clip
        self.lines: Streams = self._read()
        self.n_frames: Rows = self.lines["n_frames"].astype(np.int64)
        self._lengths: npt.NDArray[np.uint64] = self.lines["duration"].copy()
        if clip.goes_by_times:
            self._look_for_lengths()
        if clip.rate is not None:
            base = self.lines["numerator"], self.lines["denominator"]
            self.n_frames = n_times(self._lengths, *base, clip.rate)
            self._check_lengths()

    def _read(self) -> Streams:
        """What the index has of the videos."""
        records, rows = self._reader.records, self._rows
        found = records.streams.lines(self._name, rows, records.entries(self._name, rows))
        wrong = np.flatnonzero(found["n_frames"] > found["n_packets"])
        for i in wrong[:1].tolist():
            raise ShardCorrupt(
                "a video has more frames than packets",
                code="frames",
                path=records.streams.path,
                field=self._name,
                sample=int(rows[i]),
                expected=int(found["n_packets"][i]),
                found=int(found["n_frames"][i]),
            )
        return found

    def _look_for_lengths(self) -> None:
        """Find out from their packets how long those videos are whose lines do not say so."""
        unknown = (self.lines["duration"] == 0) & (self.lines["n_frames"] > 0)
        for i in np.flatnonzero(unknown).tolist():
            (stream,) = self._reader.records.values(self._name, self._rows[i : i + 1])
            self._lengths[i] = min(FrameTimes(stream).length, _MAX_DURATION)

    def _check_lengths(self) -> None:
        for i in np.flatnonzero(self.n_frames > _MOST_FRAMES)[:1].tolist():
            line = self.lines[i]
            raise InvalidArgument(
                f"{self._reader.path}, field {self._name!r}, sample {int(self._rows[i])}: a video "
                f"of {int(self._lengths[i])} ticks of {line['numerator']}/{line['denominator']} s "
                f"has more than {_MOST_FRAMES:,} frames at fps={self._clip.rate}"
            )

    def events(self, reader: ShardReader, name: str) -> tuple[Rows, npt.NDArray[Any]]:
        """How many events each video has, and all of them, those of the first first.

        Args:
            reader, name: of the file and the field that have them.

        Raises:
            InvalidArgument: one is outside of its video.
            ShardCorrupt: the field is damaged.
        """
        found = read_events(reader, name, self._rows)
        check_inside(reader, name, self._rows, found, self.lines, self._lengths)
        return found
