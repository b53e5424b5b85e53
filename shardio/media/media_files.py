"""Decode image and video files to frames with exact times, or directly into a row of a batch.

Damage that FFmpeg would conceal with grey blocks or repeated frames is an error here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from shardio._base.callers import expand_home
from shardio._base.classes import Closing, undo_on_error
from shardio.errors import InvalidArgument, MediaError
from shardio.media.clip_decoder import ClipDecoder
from shardio.media.container import (
    check_complete,
    ffmpeg_errors,
    has_guessed_times,
    make_strict,
    open_container,
    prefix_errors,
    video_streams,
)
from shardio.media.demuxing import demux
from shardio.media.frames import FrameWriter
from shardio.media.image import decode_crop, decode_image, probe
from shardio.media.pixels import Pixels, display_matrix, frame_facts
from shardio.media.timestamps import (
    exact_duration,
    fill_missing_times,
    frame_interval,
    in_presentation_order,
    round_to_tick,
)

if TYPE_CHECKING:
    from av import VideoFrame
    from typing_extensions import Buffer


def library_versions() -> dict[str, str]:
    """Return the versions of PyAV and of the parts of FFmpeg that affect pixels."""
    import av

    parts = ("libavformat", "libavcodec", "libswscale")
    found = {part: ".".join(map(str, av.library_versions[part])) for part in parts}
    return {"av": av.__version__, **found}


class VideoFile(Closing):
    """An open video file and a decoder of its first video stream that is not a cover picture.

    If `fill_in_times` is True, FFmpeg guesses the times and durations that the container lacks.
    """

    def __init__(self, path: str, *, fill_in_times: bool = True) -> None:
        self.path = path
        self._container = open_container(path, path, fill_in_times=fill_in_times)
        with undo_on_error(self._container.close):
            streams = video_streams(self._container, path)
            self._stream, codec = streams[0], streams[0].codec_context
            make_strict(codec)
            with ffmpeg_errors(lambda: f"{path}: the decoder does not open"):
                codec.open(strict=False)
            if self._stream.time_base is None:
                raise MediaError(f"{path}: the video stream has no time base")
            self.time_base = self._stream.time_base
            self._is_guessed = has_guessed_times(self._container, self._stream)
            self._facts: dict[str, Any] = {"codec": codec.name, "stream": self._stream.index}
            self._facts["video_streams"] = len(streams)

    @property
    def interval(self) -> Fraction:
        """The seconds from one frame to the next, at the average frame rate of the stream."""
        return 1 / (self._stream.average_rate or Fraction(25))

    @property
    def seconds(self) -> Fraction | None:
        """The duration that the container declares; None if it declares none."""
        if self._stream.duration is not None:
            return self._stream.duration * self.time_base
        duration = self._container.duration
        if duration is None:
            return None
        # Matroska declares the time of the end: a segment of a recording does not begin at 0.
        start = self._container.start_time or 0
        return Fraction(duration - start if 0 < start < duration else duration, 1_000_000)

    def facts(self) -> dict[str, Any]:
        """Return the video's properties as JSON values; some are set when a frame is decoded."""
        return dict(self._facts)

    def pictures(
        self,
        size: int | tuple[int, int],
        wanted: Callable[[int], bool] = lambda n: True,
        *,
        pixels: str = "rgb",
    ) -> Iterator[tuple[int, Pixels | None]]:
        """Decode every frame once; yield pairs of (time, picture) in presentation order.

        The time is in ticks of `time_base`. The picture is a new array of uint8.

        Args:
            size: the (height, width) of the pictures, or an integer for both.
            wanted: a function of the index of a frame. If it returns False, the picture is None,
                and the frame is not converted.
            pixels: "rgb", or "yuv420" for the planes that encoders accept (see `FrameWriter`).

        Raises:
            MediaError: the file is damaged. Pictures yielded before the error stay valid.
        """
        aspect = self._stream.sample_aspect_ratio or Fraction(1)
        shape = (size, size) if isinstance(size, int) else size
        writer = FrameWriter(shape, aspect, None, pixels)
        return in_presentation_order(self._render_timed(writer, wanted))

    def _render_timed(
        self, writer: FrameWriter, wanted: Callable[[int], bool]
    ) -> Iterator[tuple[int, Pixels | None]]:
        import av

        n = 0
        rotation, display = 0, None
        try:
            for time, frame in self._timed_frames():
                # Do not read the display matrix of every frame. Reading PyAV's `side_data` creates
                # a reference cycle that includes the frame. Such cycles of 3 MB add up to a
                # gigabyte before the garbage collector runs.
                if not n or frame.rotation != rotation:
                    rotation, display = frame.rotation, display_matrix(frame)
                if not n:
                    self._facts |= frame_facts(frame)
                    if (aspect := self._stream.sample_aspect_ratio) and aspect != 1:
                        self._facts["pixel_aspect"] = f"{aspect.numerator}:{aspect.denominator}"
                yield time, writer.render(frame, display) if wanted(n) else None
                n += 1
            check_complete(self.path, self._container, self._stream, self._end)
        except MediaError as error:
            raise MediaError(f"{self.path}: breaks after {n} frames: {error}") from error
        except av.FFmpegError as error:
            raise MediaError(f"{self.path}: breaks after {n} frames: {error.strerror}") from error
        except ValueError as error:
            raise MediaError(f"{self.path}: {error}") from error
        if not n:
            raise MediaError(f"{self.path}: its video stream holds no frame")

    def _timed_frames(self) -> Iterator[tuple[int, VideoFrame]]:
        """Yield pairs of (time, frame); compute the times that the container does not store."""
        interval = frame_interval(self._stream.average_rate, self.time_base)
        counted = self._compute_times(interval) if self._is_guessed else None
        following = Fraction(0)
        for n, frame in enumerate(self._frames()):
            if frame.pts is None and counted is None:
                counted = self._compute_times(interval) if self._has_times() else []
            time = counted[n] if counted else frame.pts
            if time is None:  # no frame of the stream has a time
                time = round_to_tick(following)
                following += exact_duration(frame.duration, interval)
            yield time, frame

    def _compute_times(self, interval: Fraction) -> list[int]:
        """Decode the file a second time; return the time of every frame up to the first error.

        The times of frames before the first known time are computed backwards from this time, so
        these frames must be decoded and counted first. Keeping their pictures meanwhile would take
        too much memory.
        """
        import av

        times, durations = list[int | None](), list[int]()
        with VideoFile(self.path, fill_in_times=not self._is_guessed) as again:
            with contextlib.suppress(av.FFmpegError, MediaError):
                for frame in again._frames():
                    times.append(frame.pts)
                    durations.append(frame.duration or 0)
        return fill_missing_times(times, durations, interval)

    def _has_times(self) -> bool:
        """Return True if any packet has a time; in a raw stream, none has."""
        import av

        with VideoFile(self.path) as again:
            with contextlib.suppress(av.FFmpegError):
                packets = again._container.demux(again._stream)
                return any(packet.pts is not None for packet in packets)
        return False

    def _frames(self) -> Iterator[VideoFrame]:
        self._end = 0
        for packet in self._container.demux(self._stream):
            if packet.is_corrupt:
                raise MediaError("a packet is marked corrupt")
            if packet.pts is not None:
                self._end = max(self._end, packet.pts + (packet.duration or 0))
            for frame in packet.decode():
                if frame.is_corrupt:
                    raise MediaError("a frame does not decode without concealment")
                yield frame

    def close(self) -> None:
        """Release the file and the decoder. Pictures that were returned stay valid."""
        self._container.close()


Fit = Literal["crop", "stretch"]
_FITS: Final = ("crop", "stretch")
_MAX_FRAMES: Final = 1 << 31
"""The maximum of `start` and `step`. No video has more frames than this."""


def load_image(
    source: str | os.PathLike[str] | Buffer, out: Pixels, *, fit: Fit = "crop"
) -> Pixels:
    """Decode a picture into `out` and return `out`. The shape of `out` sets the size.

    Args:
        source: a path, or the bytes of a file.
        out: an array of uint8, height x width x 3, C-contiguous, such as a row of a batch. After an
            error, its contents are undefined.
        fit: "crop" to use the largest centred part with the aspect ratio of `out`; "stretch" to use
            the whole picture, with a changed aspect ratio.

    Raises:
        MediaError: the picture is damaged, truncated, too large or in an unknown format.
        InvalidArgument: an option is invalid, or `out` does not fit.
        FileNotFoundError: there is no such file.
    """
    if fit not in _FITS:
        raise InvalidArgument(f"fit: expected one of {', '.join(_FITS)}, found {fit!r}")
    _check_out(out, "height", "width", "3")
    if not isinstance(source, str | os.PathLike):
        return _decode_to_fit(source, out, fit)
    path = os.fspath(expand_home(source))
    with open(path, "rb") as file:
        data = file.read()
    with prefix_errors(path):
        return _decode_to_fit(data, out, fit)


def _decode_to_fit(data: Buffer, out: Pixels, fit: Fit) -> Pixels:
    facts, (height, width) = probe(data), out.shape[:2]
    if (facts.height, facts.width) == (height, width):
        return decode_image(data, out=out)
    tall, wide = facts.height, facts.width
    if fit == "crop":
        scale = min(tall / height, wide / width)
        tall, wide = max(1, round(height * scale)), max(1, round(width * scale))
    top, left = (facts.height - tall) // 2, (facts.width - wide) // 2
    return decode_crop(data, (top, left, tall, wide), (height, width), out=out)


def load_clip(
    source: str | os.PathLike[str] | bytes, out: Pixels, *, start: int = 0, step: int = 1
) -> Pixels:
    """Decode frames of a video into `out` and return `out`.

    The shape of `out` sets the number of frames and their size. Each frame is cropped to the
    largest centred part with the aspect ratio of `out`. The whole file is read. If you need many
    clips of long videos, convert the videos to a dataset instead.

    Args:
        source: a path, or the bytes of a file.
        out: an array of uint8, frames x height x width x 3, such as a row of a batch. After an
            error, its contents are undefined.
        start: the index of the first frame in presentation order.
        step: the difference between the indices of consecutive frames.

    Raises:
        MediaError: the video is damaged, or there is no decoder for it.
        InvalidArgument: the video has fewer frames, or `out` has the wrong shape.
        FileNotFoundError: there is no such file.
    """
    _check_out(out, "frames", "height", "width", "3")
    _check_n_frames("start", start)
    _check_n_frames("step", step)
    frames = start + step * np.arange(len(out))
    data = source if isinstance(source, bytes) else os.fspath(expand_home(source))
    named = contextlib.nullcontext() if isinstance(data, bytes) else prefix_errors(data)
    with named, ClipDecoder() as decoder:
        decoder.decode(demux(data), frames, out)
    return out


def _check_out(out: Any, *axes: str) -> None:
    shape: tuple[int, ...] | None = getattr(out, "shape", None)
    if shape is None or len(shape) != len(axes) or shape[-1] != 3 or 0 in shape[-3:]:
        found = type(out).__name__ if shape is None else shape
        raise InvalidArgument(f"out: expected pixels of {' x '.join(axes)}, found {found}")


def _check_n_frames(name: str, value: Any) -> None:
    if not isinstance(value, int | np.integer) or abs(int(value)) > _MAX_FRAMES:
        raise InvalidArgument(
            f"{name}: expected an integer of at most {_MAX_FRAMES} frames, found {value!r}"
        )
