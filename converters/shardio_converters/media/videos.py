"""The converter of videos, which stores whole videos, or clips of decoded frames."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from importlib.metadata import version
from itertools import islice
from typing import Any, ClassVar, Final

import numpy as np

from shardio import (
    Array,
    Audio,
    Converter,
    EncodedStream,
    Input,
    InvalidArgument,
    MediaError,
    Outcome,
    Schema,
    Text,
    Video,
    media,
)
from shardio.errors import UnsupportedEnvironment
from shardio_converters.media.audio import AudioTrack, is_media, with_audio_facts
from shardio_converters.media.store_trial import choose_by_trial
from shardio_converters.options import check_choice, check_flag, check_number

STORES: Final = ("raw", "planes", "jpeg", "h264", "packets")
AUTO: Final = "auto"
# The default and the largest crf of each codec
CODECS: Final = {"h264": (19, 51), "hevc": (20, 51), "av1": (30, 63)}
JPEG_QUALITY: Final = 90
GOP: Final = 16
PLANES_GOP: Final = 4

# The product of frames and stride fits in 64 bits
LIMITS: Final = {"frames": 1 << 31, "stride": 1 << 31, "step": 1 << 62, "size": media.MAX_SIDE}
_STORES_OF: Final = {
    "codec": ("h264", "planes"),
    "gop": ("h264", "planes"),
    "quality": ("h264", "jpeg"),
    "check": ("packets",),
    "fps": ("raw", "planes", "jpeg", "h264"),
}
# Not all encoders accept frames of fewer or more pixels in height or width
_MIN_CODED: Final = 16
_MAX_CODED: Final = 8192


def _complete_options(options: Any) -> Mapping[str, Any]:
    """Check all options; return the values of missing options, and the standard form of others."""
    found = {"step": options.step}
    if options.step is None:
        found["step"] = options.frames * options.stride
    for name, most in LIMITS.items():
        check_number(name, found.get(name, getattr(options, name)), 1, most)
    store = options.store
    check_choice("store", store, (*STORES, AUTO))
    _check_limits(options)
    if store == AUTO:
        options.candidates()  # raises InvalidArgument if there are none
        return found
    for name, stores in _STORES_OF.items():
        if getattr(options, name) is not None and store not in stores:
            raise InvalidArgument(
                f"{name} is for store {' or '.join(map(repr, stores))}; found store {store!r}"
            )
    if options.fps is not None:
        found["fps"] = str(_rate(options.fps))
    check_flag("check", options.check)
    check_flag("audio", options.audio)
    if options.audio is False:
        found["audio"] = None  # False means the same as an option that is not given.
    if store == "h264":
        found |= _encoder_options(options)
    if store == "planes":
        found |= _planes_options(options)
    if store == "jpeg":
        found["quality"] = JPEG_QUALITY if options.quality is None else options.quality
        check_number("quality", found["quality"], 1, 100)
    return found


def _check_limits(options: Any) -> None:
    disk, rate = options.disk, options.rate
    is_limited = disk is not None or rate is not None
    if options.store != AUTO and is_limited:
        raise InvalidArgument(
            "disk (--disk) and rate (--rate) are limits for store='auto' (--store auto); found "
            f"store {options.store!r}"
        )
    if options.store == AUTO and not is_limited:
        raise InvalidArgument(
            "store='auto' (--store auto) needs a limit: disk (--disk), the maximum size in "
            "bytes, rate (--rate), the minimum number of clips per second, or both"
        )
    if disk is not None:
        check_number("disk", disk, 1, 1 << 62)
    if rate is not None and (type(rate) not in (int, float) or not 0 < rate <= sys.float_info.max):
        raise InvalidArgument(f"rate is {rate!r}; it must be a number of clips per second, above 0")


def _encoder_options(options: Any) -> dict[str, Any]:
    codec = options.codec or "h264"
    check_choice("codec", codec, [*CODECS])
    usual, most = CODECS[codec]
    gop = GOP if options.gop is None else options.gop
    quality = usual if options.quality is None else options.quality
    check_number("gop", gop, 1, 1 << 16)
    check_number("quality", quality, 0, most)
    if options.size % 2 or not _MIN_CODED <= options.size <= _MAX_CODED:
        raise InvalidArgument(
            f"size is {options.size}; for store 'h264' it must be even, from {_MIN_CODED} to "
            f"{_MAX_CODED}; store 'raw' (--store raw) takes any"
        )
    return {"codec": codec, "gop": gop, "quality": quality}


def _planes_options(options: Any) -> dict[str, Any]:
    codec = options.codec or media.PLANES_CODECS[0]
    check_choice("codec", codec, [*media.PLANES_CODECS])
    gop = PLANES_GOP if options.gop is None else options.gop
    check_number("gop", gop, 1, 1 << 16)
    if options.size % 2:
        raise InvalidArgument(
            f"size is {options.size}; for store 'planes' it must be even; store 'raw' (--store "
            "raw) takes any"
        )
    return {"codec": codec, "gop": gop}


def _rate(fps: Any) -> Fraction:
    try:
        rate = Fraction(str(fps))
    except (ValueError, ZeroDivisionError):
        rate = Fraction(0)
    if not 0 < rate <= 1000 or isinstance(fps, bool):
        raise InvalidArgument(
            f"fps is {fps!r}; it must be a number of frames per second, up to 1000, such as 10, "
            "12.5 or '30000/1001'"
        )
    return rate


_COMPARED: Final = 32  # the maximum number of frames that `Videos.error` compares
_FACTS: Final = {
    **{name: name for name in ("codec", "stream", "video_streams", "width", "height")},
    **{name: name for name in ("pixel_format", "range", "matrix", "rotation")},
    "sample_aspect": "pixel_aspect",
}
"""The names in the report for parameters of a stream whose packets are stored unchanged."""


Encoder = media.StreamEncoder | media.JpegEncoder | media.PlanesEncoder


@dataclass(frozen=True, kw_only=True)
class Videos(Converter):
    """A converter that stores whole videos, or clips of decoded frames.

    A clip has every `stride`-th frame of a part of the video, `frames` in all; a new clip starts
    every `step` frames. Frames are scaled so that their short side has `size` pixels, and the
    central square is used. With `fps`, only the first frame of each interval of 1 / `fps` seconds
    is used.

    A sample of store `raw` is a clip: `frames`, uint8 of shape (frames, size, size, 3) in RGB,
    `pts`, and `time_base`, the unit of `pts` in seconds as a fraction. A sample of the other stores
    is a whole video in the field `frames`: encoded by `codec` with a keyframe every `gop` frames
    (`h264`), a JPEG per frame (`jpeg`), the 4:2:0 planes of each frame without loss (`planes`), or
    the unchanged packets of the file (`packets`). The default view of the dataset has the clips
    that `raw` would store. `fitted` replaces the store `auto` by one that meets the limits `disk`
    and `rate`.

    With `audio`, samples contain the unchanged packets of the first audio track, whose times count
    from the same zero as those of the video; a clip contains all packets that are needed to decode
    the audio of its time span.
    """

    kind: ClassVar[str] = "videos"
    version: ClassVar[str] = "1"

    frames: int = 16
    """Frames per clip."""
    stride: int = 1
    """Use every N-th frame for a clip."""
    step: int | None = None
    """Frames from one clip's start to the next (default: frames x stride, no overlap)."""
    size: int = 112
    """Height and width of a frame."""
    store: str = field(default="h264", metadata={"metavar": "NAME"})
    """h264 (default), raw, planes, jpeg, packets; auto chooses by --disk and --rate."""
    disk: int | None = field(default=None, metadata={"metavar": "N", "unit": "bytes"})
    """For --store auto: maximum size of the dataset, in bytes or with a unit, such as 200GB."""
    rate: float | None = field(default=None, metadata={"metavar": "X"})
    """For --store auto: minimum number of random clips that all CPUs of this machine decode per
    second, together."""
    fps: str | int | float | None = field(default=None, metadata={"metavar": "RATE"})
    """Frame rate to sample, such as 10 or 30000/1001."""
    codec: str | None = None
    """Codec for --store h264: h264 (default), hevc or av1; for --store planes: zstd (default) or
    raw, which is not compressed."""
    gop: int | None = None
    """A keyframe every N frames (default: 16 for --store h264, 4 for --store planes)."""
    quality: int | None = None
    """CRF for --store h264, lower is better (default: 19; hevc: 20; av1: 30), or JPEG quality for
    --store jpeg, 1 to 100 (default: 90)."""
    check: bool | None = None
    """Decode every frame once to find damage (kind videos: only with --store packets)."""
    audio: bool | None = None
    """Also store the audio, as unchanged packets."""

    def __post_init__(self) -> None:
        # Set omitted options, too: equal conversions then record equal options in their datasets.
        for name, value in _complete_options(self).items():
            object.__setattr__(self, name, value)

    def candidates(self) -> list[Videos]:
        """Return a converter for each store that accepts the options given for `auto`."""
        found, failures = list[Videos](), list[str]()
        for store in STORES:
            try:
                found.append(self._with_store(store))
            except InvalidArgument as error:
                failures.append(f"{store}: {error}")
        if not found:
            raise InvalidArgument(f"no store accepts these options: {'; '.join(failures)}")
        return found

    def _with_store(self, store: str) -> Videos:
        return replace(self, store=store, disk=None, rate=None)

    def inherited(self, recorded: Mapping[str, Any]) -> Videos:
        """Return a converter with the recorded store instead of `auto`."""
        store = recorded.get("store")
        if self.store != AUTO or store not in STORES:
            return self
        try:
            return self._with_store(store)
        except InvalidArgument as error:
            error.add_note(f"store='auto' (--store auto) keeps the recorded store {store!r}")
            raise

    def fitted(self, inputs: Sequence[Input]) -> Videos:
        """Return a converter with the store that a trial chooses, instead of `auto`."""
        if self.store != AUTO:
            return self
        choice = choose_by_trial(self, inputs)
        found = self._with_store(choice.store)
        object.__setattr__(found, "store_choice", choice)
        return found

    def schema(self) -> Schema:
        """Return the fields of a sample."""
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

    def label_is_class(self) -> bool:
        """Return True: each sample has the label of its input."""
        return True

    def view(self) -> Mapping[str, Any]:
        """Return the default view: clips, or rows if each row is a clip already."""
        if self.store == "raw":
            return {"kind": "rows"}
        clips = {"frames": self.frames, "stride": self.stride, "step": self.step}
        return {"kind": "clips", **clips, "size": [self.size, self.size]}

    def libraries(self) -> Mapping[str, str]:
        """Return the versions of the libraries that determine the bytes; check the encoder."""
        found = dict(media.library_versions())
        if self.store == AUTO:
            for each in self.candidates():
                found |= each.libraries()
        if self.store == "jpeg":
            found["simplejpeg"] = version("simplejpeg")
        if self.store == "planes":
            found["zstandard"] = version("zstandard")
        if self.store == "h264":
            try:
                media.StreamEncoder(16, 16, Fraction(1), codec=self.codec or "h264")
            except UnsupportedEnvironment as error:
                raise UnsupportedEnvironment(
                    f"{error}; --store raw (exact frames, many times the bytes) and --store "
                    "packets need no encoder"
                ) from error
        return found

    def samples(self, source: Input) -> Generator[Mapping[str, Any], None, Outcome]:
        """Yield the samples of one file."""
        if not is_media(source):
            return Outcome("unsupported")
        track = AudioTrack(source.path, is_wanted=self.audio is True)
        made = self._clips if self.store == "raw" else self._whole
        return (yield from with_audio_facts(made(source, track), track))

    def _clips(
        self, source: Input, track: AudioTrack
    ) -> Generator[Mapping[str, Any], None, Outcome]:
        with media.VideoFile(source.path) as video:
            time_base = np.array(video.time_base.as_integer_ratio(), np.int64)
            if self.fps is None:
                pictures = video.pictures(self.size, self._is_used)
            else:
                pictures = _resample(video.pictures(self.size), video.time_base, Fraction(self.fps))
            interval = video.interval if self.fps is None else 1 / Fraction(self.fps)
            seconds = self.frames * self.stride * interval
            window: deque[tuple[int, Any]] = deque(maxlen=self.span)
            n_frames = n_clips = 0
            for picture in pictures:
                window.append(picture)
                n_frames += 1
                if n_frames < self.span or (n_frames - self.span) % self._step:
                    continue
                clip = [*window][:: self.stride]
                yield {
                    "frames": np.stack([pixels for _, pixels in clip]),
                    **track.part(window[0][0] * video.time_base, seconds),
                    "label": source.label,
                    "source": source.name,
                    "pts": np.array([time for time, _ in clip], np.int64),
                    "time_base": time_base,
                }
                n_clips += 1
            detail = {"frames": n_frames, **video.facts()}
        if not n_clips:
            return self._too_short(n_frames, detail)
        n_left = n_frames - max(n_clips * self._step, (n_clips - 1) * self._step + self.span)
        return Outcome("converted", detail={**detail, "dropped": max(0, n_left)})

    def _whole(
        self, source: Input, track: AudioTrack
    ) -> Generator[Mapping[str, Any], None, Outcome]:
        """Yield the whole video of a file as one sample; if it is damaged, up to the damage."""
        failure: MediaError | None = None
        if self.store == "packets":
            stream, facts = self.packets(source.path)
        else:
            with media.VideoFile(source.path) as video:
                stream, n_retimed, failure = self.encode(video)
                facts = video.facts()
            if n_retimed:
                facts["retimed"] = n_retimed
        detail = {"frames": stream.n_frames, **facts}
        is_long_enough = stream.n_frames >= self.span
        if is_long_enough:
            label = {"label": source.label, "source": source.name}
            yield {"frames": stream, **track.whole(), **label}
        n_clips = max(0, -(-(stream.n_frames - self.span + 1) // self._step))
        if failure is not None:
            reason = str(failure).removeprefix(f"{source.path}: ")
            return Outcome("broken", reason, {**detail, "clips": n_clips})
        if not is_long_enough:
            return self._too_short(stream.n_frames, detail)
        return Outcome("converted", detail={**detail, "clips": n_clips})

    def error(self, source: Input, sample: Mapping[str, Any]) -> tuple[float, int] | None:
        """Return the sum and the number of squared differences between stored and original pixels.

        Only the file's first frames are compared. Return None if frames are stored without loss.
        """
        if self.store in ("raw", "packets"):
            return None
        stream = sample["frames"]
        with media.VideoFile(source.path) as video, media.ClipDecoder() as decoder:
            pictures = islice(self.pictures(video, "rgb"), min(_COMPARED, stream.n_frames))
            wanted = np.stack([picture for _, picture in pictures if picture is not None])
            found = np.empty(wanted.shape, np.uint8)
            decoder.decode(stream, list(range(len(found))), found)
        difference = found.astype(np.int64) - wanted
        return float((difference**2).sum()), found.size

    def packets(
        self, path: str, n_packets: int | None = None
    ) -> tuple[EncodedStream, dict[str, Any]]:
        """Return the packets of a file as a stream, and the facts to report.

        `n_packets` is the number of packets to read, from the beginning; None reads all.
        """
        stream = media.demux(path, check=self.check, n_packets=n_packets)
        short, long = sorted((stream.width, stream.height))
        if 2 * long * self.size >= short * (2 * media.MAX_SIDE + 1):
            raise MediaError(
                f"{path}: frames of {stream.width}x{stream.height} pixels, scaled so that their "
                f"short side is {self.size}, would have a long side of over {media.MAX_SIDE}"
            )
        known = stream.parameters
        return stream, {name: known[key] for key, name in _FACTS.items() if key in known}

    def pictures(
        self, video: media.VideoFile, pixels: str
    ) -> Iterator[tuple[int, media.Pixels | None]]:
        """Return an iterator over the frames to store: their times, and their scaled pixels."""
        found = video.pictures(self.size, pixels=pixels)
        return found if self.fps is None else _resample(found, video.time_base, Fraction(self.fps))

    def encode(
        self, video: media.VideoFile, n_frames: int | None = None
    ) -> tuple[EncodedStream, int, MediaError | None]:
        """Encode the first `n_frames` frames of a video; None encodes all.

        Return the stream, the number of frames whose times were changed because they did not
        increase, and the error at which decoding failed, or None.
        """
        pictures = self.pictures(video, "rgb" if self.store == "jpeg" else "yuv420")
        encoder = self._encoder(video.time_base)
        rising, failure = media.MonotonicTimestamps(), None
        try:
            for time, picture in islice(pictures, n_frames):
                if picture is not None:
                    encoder.add(rising(time), picture)
        except MediaError as error:
            failure = error
        try:
            return encoder.finish(), rising.n_changed, failure
        except MediaError as error:
            raise failure or MediaError(f"{video.path}: {error}") from error

    def _encoder(self, time_base: Fraction) -> Encoder:
        # In the result of `_complete_options`, the options of the encoder are never None.
        size, made = self.size, _complete_options(self)
        if self.store == "jpeg":
            return media.JpegEncoder(size, size, time_base, quality=made["quality"])
        codec, gop = made["codec"], made["gop"]
        if self.store == "planes":
            return media.PlanesEncoder(size, size, time_base, gop=gop, codec=codec)
        return media.StreamEncoder(size, size, time_base, gop=gop, crf=made["quality"], codec=codec)

    def _too_short(self, n_frames: int, detail: Mapping[str, Any]) -> Outcome:
        reason = f"{n_frames} frames; one clip spans {self.span}"
        return Outcome("empty", reason, detail)

    @property
    def _step(self) -> int:
        return self.step or 1  # `step` is never None here, because __post_init__ sets it.

    @property
    def span(self) -> int:
        """The number of frames of the video from the first to the last frame of a clip."""
        return (self.frames - 1) * self.stride + 1

    def _is_used(self, n: int) -> bool:
        """Return True if the n-th frame is in a clip; the pixels of other frames are not needed."""
        first = max(0, -(-(n - self.span + 1) // self._step))
        return any(
            (n - k * self._step) % self.stride == 0 for k in range(first, n // self._step + 1)
        )


def _resample(
    frames: Iterable[tuple[int, media.Pixels | None]], time_base: Fraction, rate: Fraction
) -> Iterator[tuple[int, media.Pixels | None]]:
    """Yield the first frame of each interval of 1 / `rate` seconds, with its time unchanged.

    `time_base` is the unit of the times. If times start again in the middle of the video, the
    intervals continue as if the times had increased.
    """
    ticks, rising = 1 / (rate * time_base), media.MonotonicTimestamps()
    begin: int | None = None
    latest = -1
    for time, picture in frames:
        shown = rising(time)
        begin = shown if begin is None else begin
        interval = (shown - begin) // ticks
        if interval > latest:
            latest = interval
            yield time, picture
