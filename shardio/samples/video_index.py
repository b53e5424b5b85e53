"""Compute the frames of clips from the frame times and lengths of videos, and from events.

An *event* is a moment in a video, around which there is a clip: a value of the field `around` of
`dataset.clips`, in seconds from the first frame, or the number of a frame. Times are whole ticks of
a stream's time base, or exact fractions of a tick. A frame is *shown* from its own time until the
time of the next frame; the last frame is shown until the end of the video.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio._base.classes import cached_property
from shardio.errors import InvalidArgument, MediaError, ShardCorrupt
from shardio.format.schema import Schema
from shardio.format.types.streams import EncodedStream, PacketFlag, Packets, Streams, packet_flags
from shardio.samples.clips import Clip, Clips
from shardio.shard.reader import ShardReader
from shardio.shard.verification import Rows

Numbers = npt.NDArray[np.int64]

_MAX_TICKS: Final = (1 << 63) - 1
_MAX_PRODUCT: Final = float(1 << 62)
"""If a product is below this limit as a float, it fits in 64 bits in spite of rounding."""


class FrameTimes:
    """The presentation times of the frames of a video, computed on first use."""

    def __init__(self, stream: EncodedStream) -> None:
        self.stream, self.time_base = stream, stream.time_base

    @property
    def _unhidden_packets(self) -> Packets:
        is_hidden = packet_flags(self.stream.packets) & PacketFlag.HIDDEN
        found: Packets = self.stream.packets[is_hidden == 0]
        return found

    @cached_property
    def pts(self) -> Numbers:
        """The times of all frames in ticks, ascending.

        If several frames have the same time, only the last of them is shown.
        """
        found: Numbers = np.sort(self._unhidden_packets["pts"])
        n_frames = self.stream.n_frames
        if len(found) != n_frames or not n_frames:
            raise MediaError(f"a table of packets holds {len(found)} frames; expected {n_frames}")
        return found

    @cached_property
    def length(self) -> int:
        """The number of ticks from the first frame to the end of the last."""
        if self.stream.duration:
            return int(self.stream.duration)
        shown, times = self._unhidden_packets, self.pts[self._shown_frames[-2:]].tolist()
        last = int(shown["duration"][np.flatnonzero(shown["pts"] == times[-1])[-1]])
        # If the duration of the last frame is unknown (0), use that of the frame before.
        last = last or (times[1] - times[0] if len(times) > 1 else 1)
        return self.ticks_from_start(-1) + last

    @cached_property
    def _shown_frames(self) -> Numbers:
        """The indices of the frames that are shown: the last frame of each time."""
        return np.flatnonzero(np.append(self.pts[1:] != self.pts[:-1], True))

    def ticks_from_start(self, frame: int) -> int:
        """Return the number of ticks from the first frame to `frame`."""
        return int(self.pts[frame]) - int(self.pts[0])

    def frames_at(self, first: Fraction, every: Fraction, n: int) -> Numbers:
        """Return the frames shown `first` + i * `every` ticks after the first frame, for i < n."""
        start, parts = first.as_integer_ratio()
        step, step_parts = every.as_integer_ratio()
        start, step, parts = start * step_parts, step * parts, parts * step_parts
        begin = int(self.pts[0])
        ticks = [min(begin + (start + i * step) // parts, _MAX_TICKS) for i in range(n)]
        return np.searchsorted(self.pts, np.array(ticks, np.int64), "right") - 1

    def clamp(self, first: Fraction, reach: Fraction) -> Fraction:
        """Return `first`, moved so that it is in the video and more than `reach` ticks follow.

        A time before the first frame becomes 0. A time that is too late becomes the last whole tick
        that is early enough. The video must be longer than `reach`.
        """
        if first < 0:
            return Fraction(0)
        return first if first + reach < self.length else Fraction(self._latest(reach))

    def start_at_fraction(self, numerator: int, denominator: int, reach: Fraction) -> Fraction:
        """Return the time of a shown frame that is followed by more than `reach` ticks of video.

        If there are n such frames, the one with index n * numerator // denominator among them is
        chosen. The time is in ticks after the first frame.
        """
        latest = min(int(self.pts[0]) + self._latest(reach), _MAX_TICKS)
        n_starts = int(np.searchsorted(self.pts[self._shown_frames], latest, "right"))
        frame = int(self._shown_frames[numerator * n_starts // denominator])
        return Fraction(self.ticks_from_start(frame))

    def _latest(self, reach: Fraction) -> int:
        return self.length - 1 - math.floor(reach)


def n_times(
    lengths: npt.NDArray[np.uint64],
    numerators: npt.NDArray[np.uint32],
    denominators: npt.NDArray[np.uint32],
    fps: Fraction,
) -> Numbers:
    """Return, for each video, how many of the times 0, 1 / fps, 2 / fps, … are before its end.

    `lengths` are in ticks; `numerators` and `denominators` are those of the seconds per tick.
    Numerator and denominator of `fps` are below 2^31. Results are capped at 2^63 - 1.
    """
    dividends = numerators.astype(np.int64) * fps.numerator
    divisors = denominators.astype(np.int64) * fps.denominator
    fits = lengths.astype(np.float64) * dividends.astype(np.float64) < _MAX_PRODUCT
    found = np.empty(len(lengths), np.int64)
    products = lengths[fits].astype(np.int64) * dividends[fits]
    found[fits] = -(-products // np.maximum(divisors[fits], 1))
    for i in np.flatnonzero(~fits).tolist():
        exact = -(-int(lengths[i]) * int(dividends[i]) // int(divisors[i]))
        found[i] = min(exact, _MAX_TICKS)
    return found


Values = npt.NDArray[Any]

_SURELY_BELOW: Final = 1 - 1e-9
"""If x < p * _SURELY_BELOW for a product p of rounded floats, x is below the exact product."""


def event_dtype(schema: Schema, name: str) -> np.dtype[Any]:
    """Return the dtype of a field's events: float64 for seconds, or int64 for frame numbers."""
    field = schema.get(name)
    array = None if field is None else field.array or field.item
    if array and len(array.shape) <= 1:
        if array.dtype.startswith("float"):
            return np.dtype(np.float64)
        if array.dtype.startswith(("int", "uint")):
            return np.dtype(np.int64)
    what = "there is no such field" if field is None else f"found {field!r}"
    raise InvalidArgument(
        f"around={name!r} must be a field of floats (seconds) or integers (frame numbers): single "
        f"numbers, lists, or arrays of one dimension; {what}"
    )


def clip_frames(clips: Clips, start_code: int, times: FrameTimes) -> Numbers:
    """Return the frames of a clip; `Clips.start_codes` explains `start_code`.

    `times` are computed only if `Clip.depends_on_times`.
    """
    clip = clips.clip
    if not clip.depends_on_times:
        return np.asarray(clips.frames(start_code))
    if clip.rate is None:
        return np.asarray(clips.frames(_first_frame_around(clip, _event(clips, start_code), times)))
    every = 1 / (clip.rate * times.time_base)
    reach = (clip.frames - 1) * every
    if clip.around is not None:
        first = _ticks_of(_event(clips, start_code), times) - clip.n_before * every
        first = times.clamp(first, reach)
    elif clip.where == "all":
        first = start_code * every
    else:
        first = times.start_at_fraction(start_code, clips.start_code_divisor, reach)
    return times.frames_at(first, every, clip.frames)


def _event(clips: Clips, number: int) -> int | float:
    if clips.events is None:
        raise AssertionError("clips around events need `events`")
    found: int | float = clips.events.values[number].item()
    return found


def _ticks_of(event: float, times: FrameTimes) -> Fraction:
    if isinstance(event, int):
        return Fraction(times.ticks_from_start(event))
    return Fraction(event) / times.time_base


def _first_frame_around(clip: Clip, event: float, times: FrameTimes) -> int:
    frame = event
    if not isinstance(event, int):
        (frame,) = times.frames_at(_ticks_of(event, times), Fraction(0), 1).tolist()
    last = len(times.pts) - clip.span
    return max(0, min(int(frame) - clip.n_before * clip.stride, last))


_MAX_FRAMES: Final = 1 << 40
"""The maximum number of frames of a video: 35 years at 1,000 per second; more means damage."""
_MAX_DURATION: Final = (1 << 64) - 1


class VideoIndex:
    """The index data of the videos in some rows of a shard, from which clips are computed.

    `streams` are the rows of the stream table for these videos. `n_frames` is the number of frames
    of each video at the rate of the clips: all frames of the video or, with `fps`, one frame for
    each of the times 0, 1 / fps, … before its end.
    """

    def __init__(self, reader: ShardReader, name: str, rows: Rows, clip: Clip) -> None:
        self._reader, self._name, self._rows = reader, name, rows
        self.streams: Streams = self._read()
        self.n_frames: Rows = self.streams["n_frames"].astype(np.int64)
        self._lengths: npt.NDArray[np.uint64] = self.streams["duration"].copy()
        if clip.depends_on_times:
            unknown = (self.streams["duration"] == 0) & (self.streams["n_frames"] > 0)
            for i in np.flatnonzero(unknown).tolist():
                (stream,) = reader.records.values(name, rows[i : i + 1])
                self._lengths[i] = min(FrameTimes(stream).length, _MAX_DURATION)
        if clip.rate is not None:
            base = self.streams["numerator"], self.streams["denominator"]
            self.n_frames = n_times(self._lengths, *base, clip.rate)
            for i in np.flatnonzero(self.n_frames > _MAX_FRAMES)[:1].tolist():
                ticks = f"ticks of {base[0][i]}/{base[1][i]} s"
                raise InvalidArgument(
                    f"{reader.path}, field {name!r}, sample {int(rows[i])}: a video of "
                    f"{int(self._lengths[i])} {ticks} has more than {_MAX_FRAMES:,} frames at "
                    f"fps={clip.rate}"
                )

    def _read(self) -> Streams:
        records, rows = self._reader.records, self._rows
        found = records.stream_table(self._name, rows, records.entries(self._name, rows))
        wrong = np.flatnonzero(found["n_frames"] > found["n_packets"])
        for i in wrong[:1].tolist():
            raise ShardCorrupt(
                "a video has more frames than packets",
                code="frames",
                path=records.units.path,
                field=self._name,
                sample=int(rows[i]),
                expected=int(found["n_packets"][i]),
                found=int(found["n_frames"][i]),
            )
        return found

    def events(self, reader: ShardReader, name: str) -> tuple[Rows, Values]:
        """Return the event count of each video, and all events in the order of the videos.

        Videos without a value have no events. `reader` reads the file that stores the field `name`
        of the events.

        Raises:
            InvalidArgument: an event is outside its video.
        """
        counts, values = self._read_events(reader, name)
        owners = np.repeat(np.arange(len(self._rows)), counts)
        is_time = values.dtype.kind == "f"
        if is_time:
            wrong = self._find_outside(values, owners)
        else:
            n_frames = self.streams["n_frames"].astype(np.int64)
            wrong = np.flatnonzero((values < 0) | (values >= n_frames[owners]))
        for i in wrong.tolist():
            video, value = int(owners[i]), values[i].item()
            if not (n := int(self.streams["n_frames"][video])):
                continue  # the video is missing
            event, length = f"at frame {value}", f"has {n} frames"
            if is_time:
                seconds = float(self._seconds(video))
                event, length = f"at {value} s", f"ends {seconds:.6g} s after its first frame"
            raise InvalidArgument(
                f"{reader.path}, field {name!r}, sample {int(self._rows[video])}: an event {event} "
                f"is outside the video, which {length}; correct it, or leave the sample out with "
                "dataset.select"
            )
        return counts, values

    def _read_events(self, reader: ShardReader, name: str) -> tuple[Rows, Values]:
        rows = self._rows
        if name in reader.schema.columns:
            every = reader.column(name, rows).reshape(len(rows), -1)
            is_there = reader.present(name, rows)
            return np.where(is_there, every.shape[1], 0), every[is_there].reshape(-1)
        field = reader.schema[name]
        array = field.array or field.item
        none = np.zeros(0, array.numpy if array else np.int64)
        found: list[Values] = []
        for value in reader.records.values(name, rows):
            parts = value if isinstance(value, list) else [] if value is None else [value]
            found.append(np.concatenate([none, *map(np.ravel, parts)]))
        return np.array([len(each) for each in found], np.int64), np.concatenate([none, *found])

    def _find_outside(self, values: Values, owners: Rows) -> Rows:
        """Return the indices of the `values`, events in seconds, that are outside their videos."""
        ticks = self.streams["numerator"] / np.maximum(self.streams["denominator"], 1)
        is_clear = (values >= 0) & (values < (self._lengths * ticks)[owners] * _SURELY_BELOW)
        wrong = [
            i
            for i in np.flatnonzero(~is_clear).tolist()
            if not np.isfinite(values[i])
            or not 0 <= Fraction(float(values[i])) < self._seconds(int(owners[i]))
        ]
        return np.array(wrong, np.int64)

    def _seconds(self, video: int) -> Fraction:
        stream, length = self.streams[video], int(self._lengths[video])
        return Fraction(length * int(stream["numerator"]), max(1, int(stream["denominator"])))
