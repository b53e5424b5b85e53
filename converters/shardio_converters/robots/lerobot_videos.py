"""The videos of a LeRobot data set, of which each episode gets its own frames."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Final

import numpy as np

from shardio import EncodedStream, MediaError
from shardio.media import SpanReader, times_of
from shardio_converters.robots.lerobot_sets import Footage, Numbers

_HALF: Final = 0.5  # of the time from one frame to the next


class Cameras:
    """Owns the files of videos that are open, one of each camera, as episodes lie in order."""

    def __init__(self, paths: Mapping[str, str], fps: Fraction, *, check: bool | None) -> None:
        self._paths, self._fps, self._check = paths, fps, check
        self._open: dict[str, tuple[str, SpanReader]] = {}

    def cut(self, camera: str, footage: Footage, times: Numbers) -> EncodedStream:
        """Cut out a camera's view of an episode, whose frames are shown at `times`, in seconds.

        Raises:
            MediaError: the file is missing or damaged, or has other frames then.
        """
        if footage.name not in self._paths:
            raise MediaError(f"{footage.name} is missing")
        if not np.isfinite(times).all():
            raise MediaError("a timestamp is no number")
        half = 1 / (2 * self._fps)
        begin = footage.begin + Fraction(float(times[0])) - half
        end = None
        if footage.end is not None:
            last = footage.begin + Fraction(float(times[-1]))
            end = max(last + half, footage.end - half)
        stream = self._reader(camera, footage.name).cut(begin, end, footage.begin)
        self._refuse_other_times(stream, footage, times)
        return stream

    def _refuse_other_times(self, stream: EncodedStream, footage: Footage, times: Numbers) -> None:
        path, shown = self._paths[footage.name], times_of(stream)
        if len(shown) != len(times):
            raise MediaError(
                f"{path}: expected {len(times):,} frames from second {float(footage.begin):g} on, "
                f"found {len(shown):,}"
            )
        seconds = shown * float(stream.time_base)
        wrong = np.flatnonzero(np.abs(seconds - times) * float(self._fps) >= _HALF)
        if len(wrong):
            n = int(wrong[0])
            raise MediaError(
                f"{path}: expected frame {n:,} at second {times[n]:g} of the episode, found it at "
                f"{seconds[n]:g}"
            )

    def _reader(self, camera: str, name: str) -> SpanReader:
        known = self._open.get(camera)
        if known is not None and known[0] == name:
            return known[1]
        if known is not None:
            self._open.pop(camera)[1].close()
        reader = SpanReader(self._paths[name], check=self._check)
        self._open[camera] = name, reader
        return reader

    def close(self) -> None:
        """Close the files."""
        for _, reader in self._open.values():
            reader.close()
        self._open.clear()
