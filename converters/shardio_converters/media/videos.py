"""Videos to videos that any clip is decoded from, or to clips of decoded frames."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Final

import numpy as np

from shardio import Array, Audio, Input, MediaError, Outcome, Schema, Text, Video
from shardio.media import (
    Picture,
    Rising,
    VideoFile,
    library_versions,
)
from shardio_converters.media import video_options, video_stores
from shardio_converters.media.inputs import is_media
from shardio_converters.media.video_sound import Sound, with_sound

VIEW_KEYS: Final = ("frames", "stride", "step")


@dataclass(frozen=True, kw_only=True)
class Videos:
    """Stores every video for clips of `frames` frames, `stride` frames apart; or cuts it into them.

    A clip starts every `step` frames; by default where the one before it ends. The short side is
    scaled to `size` pixels, then the centre is cropped square. `fps` takes the first frame of each
    interval of that rate, and none twice.

    Stores:
        h264: the default; a sample is a video, encoded anew at `size` by `codec`, with a keyframe
            every `gop` frames. Lossy: `quality` is the codec's crf, lower is better.
        raw: a sample is a clip, exact. `frames` uint8 (frames, size, size, 3), RGB; `pts` int64
            (frames,), every frame's time in units of `time_base` int64 (2,), a fraction of seconds
            as numerator and denominator.
        jpeg: a sample is a video, every frame a JPEG at `size`; `quality` is 1 to 100.
        packets: a sample is a video, its packets untouched; `size` is what clips of it are
            decoded at. `check` decodes every frame once, whatever the container says.

    A sample that is a video has it in `frames`, and clips are the default view of the dataset:
    those that `raw` would hold. All have `label` int64, and `source`, the file's name below the
    source folder. With `audio` all have an optional field `audio`, the packets of the file's first
    sound untouched, with times on the clock of the video's; a clip has those around it.

    Raises:
        InvalidArgument: an option is not acceptable.
    """

    kind: ClassVar[str] = "videos"
    version: ClassVar[str] = "1"

    frames: int = 16
    stride: int = 1
    step: int | None = None
    size: int = 112
    store: str = "h264"
    fps: str | int | float | None = None
    codec: str | None = None
    gop: int | None = None
    quality: int | None = None
    check: bool | None = None
    audio: bool | None = None

    def __post_init__(self) -> None:
        # Said or not, the same values are recorded: the options that give the same bytes are.
        for name, value in video_options.settled(self).items():
            object.__setattr__(self, name, value)

    def schema(self) -> Schema:
        """Give the fields of a sample."""
        sound = {"audio": Audio(optional=True)} if self.audio else {}
        if self.store != "raw":
            return Schema({"frames": Video(), **sound, "label": Array("int64"), "source": Text()})
        return Schema(
            {
                "frames": Array("uint8", (self.frames, self.size, self.size, 3)),
                **sound,
                "label": Array("int64"),
                "source": Text(),
                "pts": Array("int64", (self.frames,)),
                "time_base": Array("int64", (2,)),
            }
        )

    def view(self) -> Mapping[str, Any]:
        """Say what the samples of a loader are: the clips that `raw` would hold."""
        if self.store == "raw":
            return {"kind": "rows"}
        numbers = {name: getattr(self, name) for name in VIEW_KEYS}
        return {"kind": "clips", **numbers, "size": [self.size, self.size]}

    def libraries(self) -> Mapping[str, str]:
        """Give the versions of PyAV and FFmpeg, which decide over the pixels."""
        return {**library_versions(), **video_stores.libraries(self.store, self.codec)}

    def samples(self, source: Input) -> Generator[Mapping[str, Any], None, Outcome]:
        """Yield the samples of one file."""
        if not is_media(source):
            return Outcome("unsupported")
        sound = Sound(source.path, is_wanted=self.audio is True)
        made = self._clips if self.store == "raw" else self._whole
        return (yield from with_sound(made(source, sound), sound))

    def _clips(self, source: Input, sound: Sound) -> Generator[Mapping[str, Any], None, Outcome]:
        """Yield the clips of one file."""
        with VideoFile(source.path) as video:
            time_base = np.array(video.time_base.as_integer_ratio(), np.int64)
            if self.fps is None:
                pictures = video.pictures(self.size, self._is_used)
            else:
                pictures = picked(video.pictures(self.size), video.time_base, Fraction(self.fps))
            interval = video.interval if self.fps is None else 1 / Fraction(self.fps)
            seconds = self.frames * self.stride * interval
            clips = _Clips(pictures, self._span, self._step)
            n_clips = 0
            for window in clips:
                yield {
                    "frames": np.stack([picture for _, picture in window[:: self.stride]]),
                    **sound.part(window[0][0] * video.time_base, seconds),
                    "label": source.label,
                    "source": source.name,
                    "pts": np.array([time for time, _ in window[:: self.stride]], np.int64),
                    "time_base": time_base,
                }
                n_clips += 1
            detail = {"frames": clips.n_frames, **video.facts()}
        if not n_clips:
            return self._too_short(clips.n_frames, detail)
        n_left = clips.n_frames - max(n_clips * self._step, (n_clips - 1) * self._step + self._span)
        return Outcome("converted", detail={**detail, "dropped": max(0, n_left)})

    def _whole(self, source: Input, sound: Sound) -> Generator[Mapping[str, Any], None, Outcome]:
        """Yield one file as one video; of one that breaks midway, what comes before the break."""
        failure: MediaError | None = None
        if self.store == "packets":
            stream, facts = video_stores.packets(source.path, self.size, check=self.check)
        else:
            with VideoFile(source.path) as video:
                pixels = video_stores.pixels_of(self.store)
                pictures = video.pictures(self.size, pixels=pixels)
                if self.fps is not None:
                    pictures = picked(pictures, video.time_base, Fraction(self.fps))
                encoder = video_stores.encoder_for(self, video.time_base)
                stream, n_retimed, failure = video_stores.encoded(encoder, pictures, source.path)
                facts = video.facts()
            if n_retimed:
                facts["retimed"] = n_retimed
        detail = {"frames": stream.n_frames, **facts}
        is_long_enough = stream.n_frames >= self._span
        if is_long_enough:
            label = {"label": source.label, "source": source.name}
            yield {"frames": stream, **sound.whole(), **label}
        n_clips = max(0, -(-(stream.n_frames - self._span + 1) // self._step))
        if failure is not None:
            reason = str(failure).removeprefix(f"{source.path}: ")
            return Outcome("broken", reason, {**detail, "clips": n_clips})
        if not is_long_enough:
            return self._too_short(stream.n_frames, detail)
        return Outcome("converted", detail={**detail, "clips": n_clips})

    def error(self, source: Input, sample: Mapping[str, Any]) -> tuple[float, int] | None:
        """Compare the first frames of a stored video with its source's, at the stored size.

        The sum of squared differences, and of how many values; None where nothing is lost.
        """
        if self.store in ("raw", "packets"):
            return None
        with VideoFile(source.path) as video:
            found = video.pictures(self.size)
            if self.fps is not None:
                found = picked(found, video.time_base, Fraction(self.fps))
            return video_stores.error(sample["frames"], found)

    def _too_short(self, n_frames: int, detail: Mapping[str, Any]) -> Outcome:
        reason = f"{n_frames} frames; one clip spans {self._span}"
        return Outcome("empty", reason, detail)

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


def picked(
    frames: Iterable[tuple[int, Picture | None]], time_base: Fraction, rate: Fraction
) -> Iterator[tuple[int, Picture | None]]:
    """The first frame of each interval of 1 / `rate` seconds from the first on, times unchanged."""
    ticks, rising = 1 / (rate * time_base), Rising()
    begin: int | None = None
    latest = -1
    for time, picture in frames:
        shown = rising(time)
        begin = shown if begin is None else begin
        interval = (shown - begin) // ticks
        if interval > latest:
            latest = interval
            yield time, picture


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
