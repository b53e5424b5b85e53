"""The format of decoded images and audio in a batch: one size for all samples, or varying sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio.dataset.dataset import Dataset, ShardSamples, scan
from shardio.errors import InvalidArgument
from shardio.format.schema import Schema
from shardio.format.types import Array, Field
from shardio.format.types.streams import Streams
from shardio.media.audio import Sound
from shardio.samples.clips import Clip
from shardio.shard.verification import Rows

Sizes = Mapping[str, tuple[int, int]]
"""The height and width of each field whose images all have the same size."""


def media_fields(schema: Schema, names: Iterable[str], medium: str) -> tuple[str, ...]:
    """Return the fields of a medium ("image", "video" or "audio") among `names`."""
    return tuple(name for name in names if schema[name].medium == medium)


def image_schema(schema: Schema, names: Iterable[str], sizes: Sizes | None = None) -> Schema:
    """Return the schema of samples whose images in `names` are decoded: uint8 (height, width, 3).

    Height and width vary, except in fields with a common size in `sizes`.
    """
    fields = dict(schema)
    for name in names:
        field = fields.get(name)
        if field and field.medium == "image":
            size = (sizes or {}).get(name) or (None, None)
            fields[name] = Array("uint8", (*size, 3), optional=field.optional)
    return Schema(fields)


def common_sizes(
    dataset: Dataset, names: Iterable[str], n: int, rows_of: Callable[[Rows], Rows]
) -> Sizes:
    """Return the size of each field in which all images of n samples have one size.

    Missing images are ignored. Sizes are read from the index, 24 bytes per image, until one
    differs. `rows_of` maps indices of samples to rows.
    """
    found = {name: _common_size(dataset, name, n, rows_of) for name in names}
    return {name: size for name, size in found.items() if size is not None}


def _common_size(
    dataset: Dataset, name: str, n: int, rows_of: Callable[[Rows], Rows]
) -> tuple[int, int] | None:
    def look(part: ShardSamples) -> set[tuple[int, int]]:
        records = part.reader(name).records
        shapes = records.shapes(name, part.rows)[records.present(name, part.rows)]
        return distinct_sizes(shapes[:, :2])

    common = set[tuple[int, int]]()
    for _, sizes in scan(dataset, look, n=n, rows_of=rows_of):
        common |= sizes
        if len(common) > 1:
            return None
    return common.pop() if common else None


def distinct_sizes(pairs: npt.NDArray[Any]) -> set[tuple[int, int]]:
    """Return up to two distinct sizes among pairs of (height, width)."""
    others = pairs[(pairs != pairs[:1]).any(1)]
    return {(int(height), int(width)) for height, width in (*pairs[:1], *others[:1])}


_NEARLY_EQUAL: Final = Fraction(199, 200)
"""All audio gets one length if the shortest is at least this fraction of the longest."""


@dataclass(frozen=True, slots=True)
class AudioField:
    """The format of the audio in one field; `n_samples` is None if the length varies."""

    name: str
    rate: int
    channels: int
    n_samples: int | None
    sound: Sound

    @property
    def span(self) -> str:
        """The name of the span field of this field; see `span_field`."""
        return span_field(self.name)


def span_field(name: str) -> str:
    """Return the name of the field with the range of samples that are not padding."""
    return f"{name}_span"


def audio_schema(schema: Schema, sounds: Mapping[str, Sound | AudioField]) -> Schema:
    """Return the schema of samples whose audio is decoded in the formats `sounds`.

    A field of fixed length is not optional, because missing audio is delivered as silence.
    """
    fields: dict[str, Field] = {}
    for name, field in schema.items():
        fields[name] = field
        if (audio := sounds.get(name)) is not None:
            length = audio.n_samples if isinstance(audio, AudioField) else None
            sound = audio.sound if isinstance(audio, AudioField) else audio
            is_optional = field.medium == "audio" and field.optional and length is None
            fields[name] = Array(sound.dtype, (length, audio.channels), optional=is_optional)
            fields[span_field(name)] = Array("int64", (2,))
    return Schema(fields)


def audio_field(dataset: Dataset, name: str, sound: Sound, clip: Clip | None) -> AudioField:
    """Return the format of the audio in a field, over the selected rows of a dataset.

    Options of `sound` that are None are read from the index, 96 bytes per stream; rate and channels
    must then be the same in all rows. `clip` is None if samples are not clips.
    """
    rate, channels = sound.rate, sound.channels
    if rate is None:
        rate = _common(dataset, name, "height", "rate", "samples per second")
    if channels is None:
        channels = _common(dataset, name, "width", "channels", "channels")
    if sound.length is not None:
        return AudioField(name, rate, channels, n_samples(sound.length, rate), sound)
    lengths, n = _seconds_range(dataset, name, clip), None
    if lengths is not None and lengths[0] >= _NEARLY_EQUAL * lengths[1]:
        n = n_samples(lengths[1], rate)
    return AudioField(name, rate, channels, n, sound)


def n_samples(seconds: Fraction, rate: int) -> int:
    """Return the number of audio samples nearest to a length in seconds; at least 1."""
    return max(1, math.floor(seconds * rate + Fraction(1, 2)))


def clip_seconds(clip: Clip, duration: Fraction, n_frames: int) -> Fraction:
    """Return the length of a clip in seconds, including the duration of the last frame.

    `duration` and `n_frames` are those of the whole video.
    """
    if clip.rate is not None:
        return clip.frames / clip.rate
    return clip.frames * clip.stride * duration / n_frames


def _seconds_range(
    dataset: Dataset, name: str, clip: Clip | None
) -> tuple[Fraction, Fraction] | None:
    """Return the minimum and maximum length of the audio, in seconds; None without audio."""
    if clip is not None and clip.rate is not None:
        return (clip.frames / clip.rate,) * 2
    measured = name if clip is None else clip.field or ""
    low: Fraction | None = None
    high = Fraction(0)
    for streams in _streams(dataset, measured, name):
        known = streams if clip is None else streams[streams["n_frames"] >= clip.span]
        if not len(known):
            continue
        if clip is not None and not known["duration"].all():
            raise InvalidArgument(
                f"{dataset.path}: a video in field {measured!r} has no stored length, so the "
                f"length of a clip's sound is unknown: pass decode={{{name!r}: Sound(seconds=…)}}"
            )
        amount = known["n_frames" if clip is None else "duration"].astype(np.float64)
        if clip is not None:
            amount *= known["numerator"] / known["denominator"]
        ratio = amount / known["height" if clip is None else "n_frames"]
        for i in (int(ratio.argmin()), int(ratio.argmax())):
            seconds = _seconds(known[i], clip)
            low, high = seconds if low is None else min(low, seconds), max(high, seconds)
    return None if low is None else (low, high)


def _seconds(stream: np.void, clip: Clip | None) -> Fraction:
    n_frames = int(stream["n_frames"])
    if clip is None:
        return Fraction(n_frames, int(stream["height"]))
    time_base = Fraction(int(stream["numerator"]), int(stream["denominator"]))
    return clip_seconds(clip, int(stream["duration"]) * time_base, n_frames)


def _common(dataset: Dataset, name: str, column: str, option: str, what: str) -> int:
    """Return the value of `column` in all audio streams of a field; 1 without streams."""
    found: set[int] = set()
    for streams in _streams(dataset, name, name):
        found |= set(np.unique(streams[column])[:2].tolist())
        if len(found) > 1:
            several = " and ".join(map(str, sorted(found)[:2]))
            raise InvalidArgument(
                f"{dataset.path}: field {name!r} has sound of {several} {what}, and a batch needs "
                f"one number: pass decode={{{name!r}: Sound({option}=…)}}"
            )
    return found.pop() if found else 1


def _streams(dataset: Dataset, name: str, sound: str) -> Iterator[Streams]:
    """Yield the stream table rows of the field `name`, for samples that have the field `sound`."""

    def read_streams(part: ShardSamples) -> Streams:
        own = part.rows[part.reader(sound).records.present(sound, part.rows)]
        records = part.reader(name).records
        found: Streams = records.stream_table(name, own, records.entries(name, own))
        return found

    for _, streams in scan(dataset, read_streams):
        yield streams[streams["n_packets"] > 0]
