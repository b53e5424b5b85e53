"""Videos to clips: runs of decoded frames at training size, with label, source and exact times."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from shardio import Array, Input, InvalidArgument, MediaError, Outcome, Schema, Text
from shardio.media import (
    HEAD_BYTES,
    MAX_SIDE,
    Picture,
    VideoFile,
    has_media_signature,
    has_media_suffix,
    library_versions,
)

STORES = ("raw",)
LIMITS: Final = {"frames": 1 << 31, "stride": 1 << 31, "step": 1 << 62, "size": MAX_SIDE}
"""The largest value of each number: a clip's span, their product, is counted in 64 bits."""


@dataclass(frozen=True, kw_only=True)
class Videos:
    """Cuts every video into clips of `frames` frames, `stride` frames apart, decoded and resized.

    A clip starts every `step` frames; by default where the one before it ends. The short side is
    scaled to `size` pixels, then the centre is cropped square. `store="raw"` keeps decoded frames.

    Fields: `frames` uint8 (frames, size, size, 3), RGB; `label` int64; `source` the file's name
    below the source folder; `pts` int64 (frames,), every frame's time in units of `time_base`
    int64 (2,), a fraction of seconds as numerator and denominator.

    Raises:
        InvalidArgument: an option is not acceptable.
    """

    kind: ClassVar[str] = "videos"
    version: ClassVar[str] = "1"

    frames: int = 16
    stride: int = 1
    step: int | None = None
    size: int = 112
    store: str = "raw"

    def __post_init__(self) -> None:
        if self.step is None:
            # Said or not, the same step is recorded: the options that give the same bytes are.
            object.__setattr__(self, "step", self.frames * self.stride)
        for name, most in LIMITS.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise InvalidArgument(
                    f"{name} is {value!r}; it must be a whole number from 1 up to {most:,}"
                )
        if self.store not in STORES:
            raise InvalidArgument(f"store is {self.store!r}; it must be one of {', '.join(STORES)}")

    def schema(self) -> Schema:
        """Give the fields of a clip."""
        return Schema(
            {
                "frames": Array("uint8", (self.frames, self.size, self.size, 3)),
                "label": Array("int64"),
                "source": Text(),
                "pts": Array("int64", (self.frames,)),
                "time_base": Array("int64", (2,)),
            }
        )

    def libraries(self) -> Mapping[str, str]:
        """Give the versions of PyAV and FFmpeg, which decide over the pixels."""
        return library_versions()

    def samples(self, source: Input) -> Generator[Mapping[str, Any], None, Outcome]:
        """Yield the clips of one file."""
        if not _is_media(source):
            return Outcome("not_video")
        with VideoFile(source.path) as video:
            time_base = np.array(video.time_base.as_integer_ratio(), np.int64)
            clips = _Clips(video.pictures(self.size, self._is_used), self._span, self._step)
            n_clips = 0
            for window in clips:
                yield {
                    "frames": np.stack([picture for _, picture in window[:: self.stride]]),
                    "label": source.label,
                    "source": source.name,
                    "pts": np.array([time for time, _ in window[:: self.stride]], np.int64),
                    "time_base": time_base,
                }
                n_clips += 1
            detail = {"frames": clips.n_frames, **video.facts()}
        if not n_clips:
            reason = f"{clips.n_frames} frames; one clip spans {self._span}"
            return Outcome("too_short", reason, detail)
        n_left = clips.n_frames - max(n_clips * self._step, (n_clips - 1) * self._step + self._span)
        return Outcome("converted", detail={**detail, "dropped": max(0, n_left)})

    @property
    def _step(self) -> int:
        return self.step or 1  # never None once __post_init__ has run

    @property
    def _span(self) -> int:
        """Frames from a clip's first to its last, both counted."""
        return (self.frames - 1) * self.stride + 1

    def _is_used(self, n: int) -> bool:
        """Whether the n-th frame belongs to any clip: others need not be converted."""
        first = max(0, -(-(n - self._span + 1) // self._step))
        return any(
            (n - k * self._step) % self.stride == 0 for k in range(first, n // self._step + 1)
        )


class _Clips:
    """Cuts a stream of frames into windows of `span` frames, one every `step` frames."""

    def __init__(self, frames: Iterator[tuple[int, Picture | None]], span: int, step: int) -> None:
        self._frames, self._span, self._step = frames, span, step
        self.n_frames = 0

    def __iter__(self) -> Iterator[list[tuple[int, Any]]]:
        window: deque[tuple[int, Any]] = deque(maxlen=self._span)
        for frame in self._frames:
            window.append(frame)
            start = self.n_frames + 1 - self._span
            self.n_frames += 1
            if start >= 0 and start % self._step == 0:
                yield list(window)


def _is_media(source: Input) -> bool:
    """Whether the file is one that should hold video or sound, by its bytes or its suffix.

    Raises:
        MediaError: it cannot be read, so nobody knows.
    """
    try:
        with open(source.path, "rb") as file:
            return has_media_signature(file.read(HEAD_BYTES)) or has_media_suffix(source.name)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP) and not has_media_suffix(source.name):
            return False  # a link to nowhere: there is nothing to be read
        raise MediaError(f"{source.path}: cannot be read: {error.strerror}") from error
