"""What the pictures of a dataset are in a batch: decoded, of one size or of several.

What the sound of a dataset is in a batch: of one length, or of several.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import numpy as np

from shardio.dataset.dataset import Dataset
from shardio.dataset.scan import ShardSamples, scan
from shardio.errors import InvalidArgument
from shardio.format.fields import Array, Audio, Field, Image
from shardio.format.schema import Schema
from shardio.format.streams import Streams
from shardio.shard.reader import ShardReader
from shardio.shard.verification import Rows
from shardio.views.audio_options import Sound
from shardio.views.clips import Clip

Sizes = Mapping[str, tuple[int, int]]
"""Height and width of those fields whose pictures all have the same."""


def image_fields(schema: Schema, names: Iterable[str]) -> tuple[str, ...]:
    """Those of some fields that hold pictures."""
    return tuple(name for name in names if isinstance(schema[name], Image))


def image_schema(schema: Schema, sizes: Sizes | None = None) -> Schema:
    """The schema of samples whose pictures are decoded: uint8 (height, width, 3).

    Args:
        schema: as they are stored.
        sizes: see there; height and width of all others vary from sample to sample.
    """
    return Schema(
        {name: _decoded(field, (sizes or {}).get(name)) for name, field in schema.items()}
    )


def _decoded(field: Field, size: tuple[int, int] | None) -> Field:
    if not isinstance(field, Image):
        return field
    return Array("uint8", (*(size or (None, None)), 3), optional=field.optional)


def common_sizes(dataset: Dataset, names: Iterable[str]) -> Sizes:
    """Look which fields' pictures have one height and width, in all samples that a dataset shows.

    That is in the index, 24 bytes for each picture, and is read until one differs. Pictures that
    are absent do not count.

    Raises:
        ShardCorrupt: that part of the index is damaged.
    """
    found = {name: _common_size(dataset, name) for name in names}
    return {name: size for name, size in found.items() if size is not None}


def _common_size(dataset: Dataset, name: str) -> tuple[int, int] | None:
    def look(part: ShardSamples) -> list[tuple[int, int]]:
        return _sizes_in(part.reader(name), name, part.rows)

    common: tuple[int, int] | None = None
    for _, sizes in scan(dataset, look, n=len(dataset), rows_of=dataset.rows.at):
        for size in sizes:
            if size != (common or size):
                return None
            common = size
    return common


def _sizes_in(reader: ShardReader, name: str, rows: Rows) -> list[tuple[int, int]]:
    """The sizes that some pictures of a shard have, each once; no more than two of them."""
    records = reader.records
    sizes = records.shapes(name, rows)[:, :2][records.present(name, rows)]
    if not len(sizes):
        return []
    others = sizes[(sizes != sizes[0]).any(1)]
    return [(int(height), int(width)) for height, width in (*sizes[:1], *others[:1])]


_NEARLY: Final = Fraction(199, 200)
"""What is at least so much of the longest is followed by silence rather than put into a list."""


@dataclass(frozen=True, slots=True)
class AudioField:
    """How the sound in one field arrives; `n_samples` is None where that varies."""

    name: str
    rate: int
    channels: int
    n_samples: int | None

    @property
    def span(self) -> str:
        """The field beside it that says where in it there is sound."""
        return span_field(self.name)


@dataclass(frozen=True, slots=True)
class AudioSpec:
    """How the sound in some fields arrives."""

    sound: Sound
    fields: tuple[AudioField, ...]

    def delivered(self, schema: Schema) -> Schema:
        """The schema of samples whose sound is decoded."""
        shapes = {field.name: (field.n_samples, field.channels) for field in self.fields}
        return audio_schema(schema, self.sound, shapes)


def span_field(name: str) -> str:
    """The name of the field that says where in the sound of another there is some."""
    return f"{name}_span"


def audio_fields(schema: Schema, names: tuple[str, ...], sound: Any) -> tuple[str, ...]:
    """Those of some fields that hold sound.

    Raises:
        InvalidArgument: `sound` is none, or is for no field; or a name is taken.
    """
    if not isinstance(sound, Sound | None):
        raise InvalidArgument(f"sound must be a shardio.views.Sound; found {sound!r}")
    found = tuple(name for name in names if isinstance(schema[name], Audio))
    if sound is not None and not found:
        raise InvalidArgument("sound needs a field of type Audio; of those that are read none is")
    for name in found:
        if span_field(name) in names:
            raise InvalidArgument(
                f"the sound of {name!r} adds {span_field(name)!r}, which is a field already: leave "
                "one of them out with `fields`"
            )
    return found


def audio_schema(
    schema: Schema, sound: Sound, shapes: Mapping[str, tuple[int | None, int]] | None = None
) -> Schema:
    """The schema of samples whose sound is decoded; where all have one length, none is silence.

    Args:
        schema: as they are stored.
        sound: how it arrives.
        shapes: (samples, channels) of the fields, None where that varies; nothing is known of
            others but how many channels `sound` asks for.
    """
    fields: dict[str, Field] = {}
    for name, field in schema.items():
        fields[name] = field
        if isinstance(field, Audio):
            shape = (shapes or {}).get(name, (None, sound.channels))
            fields[name] = Array(sound.dtype, shape, optional=field.optional and shape[0] is None)
            fields[span_field(name)] = Array("int64", (2,))
    return Schema(fields)


def measure_audio(
    dataset: Dataset, names: tuple[str, ...], sound: Sound, video: str | None
) -> AudioSpec | None:
    """Look how long the sounds are, and the clips that they are beside, in all rows that are shown.

    That is in the index, 64 bytes for each, all of which are read unless the options say it.
    `video` is the field that the dataset shows clips of, if it does. None where there are no names.

    Raises:
        InvalidArgument: the sounds are of several rates or numbers of channels, and none is asked
            for; or the videos do not say how long they are; or what is drawn is beside clips.
        ShardCorrupt: that part of the index is damaged.
    """
    if not names:
        return None
    if sound.where == "random" and dataset.rows.clips is not None:
        raise InvalidArgument(
            f"{dataset.path}: samples are clips of {video!r}, and their sound is what is heard "
            'meanwhile; where="random" is for sound alone: leave it out and pass '
            'clip=Clip(where="random"), or leave the videos out with `fields`'
        )
    return AudioSpec(sound, tuple(_field(dataset, name, sound, video) for name in names))


def _field(dataset: Dataset, name: str, sound: Sound, video: str | None) -> AudioField:
    rate, channels = sound.rate, sound.channels
    if rate is None:
        rate = _common(dataset, name, "height", "rate", "samples per second")
    if channels is None:
        channels = _common(dataset, name, "width", "channels", "channels")
    if sound.length is not None:
        return AudioField(name, rate, channels, n_samples(sound.length, rate))
    clip = None if dataset.rows.clips is None else dataset.rows.clips.clip
    if clip is None or video is None:
        lengths = _bounds(dataset, name, name, None)
    elif clip.rate is not None:
        lengths = (clip.frames / clip.rate,) * 2
    else:
        lengths = _bounds(dataset, name, video, clip)
    n = None
    if lengths is not None and lengths[0] >= _NEARLY * lengths[1]:
        n = n_samples(lengths[1], rate)
    return AudioField(name, rate, channels, n)


def n_samples(seconds: Fraction, rate: int) -> int:
    """How many samples of a rate are nearest to so many seconds; at least one."""
    return max(1, math.floor(seconds * rate + Fraction(1, 2)))


def clip_seconds(clip: Clip, duration: Fraction, n_frames: int) -> Fraction:
    """How long a clip of a video is, whose n_frames take so many seconds: until its next frame."""
    if clip.rate is not None:
        return clip.frames / clip.rate
    return clip.frames * clip.stride * duration / n_frames


def _bounds(
    dataset: Dataset, name: str, measured: str, clip: Clip | None
) -> tuple[Fraction, Fraction] | None:
    """The least and the most seconds of sounds, or of clips that have some; None where none has.

    Those are the streams, or clips of them, in the field `measured`; the sounds are in `name`.

    Raises:
        InvalidArgument: a video does not say how long it is.
    """
    low: Fraction | None = None
    high = Fraction(0)
    for lines in _lines(dataset, measured, name):
        known = lines if clip is None else lines[lines["n_frames"] >= clip.span]
        if not len(known):
            continue
        if clip is not None and not known["duration"].all():
            raise InvalidArgument(
                f"{dataset.path}: a video in field {measured!r} does not say how long it is, and "
                "so not how much sound a clip has: pass sound=Sound(seconds=…)"
            )
        amount = known["n_frames" if clip is None else "duration"].astype(np.float64)
        if clip is not None:
            amount *= known["numerator"] / known["denominator"]
        ratio = amount / known["height" if clip is None else "n_frames"]
        for i in (int(ratio.argmin()), int(ratio.argmax())):
            seconds = _seconds(known[i], clip)
            low, high = seconds if low is None else min(low, seconds), max(high, seconds)
    return None if low is None else (low, high)


def _seconds(line: np.void, clip: Clip | None) -> Fraction:
    n_frames = int(line["n_frames"])
    if clip is None:
        return Fraction(n_frames, int(line["height"]))
    time_base = Fraction(int(line["numerator"]), int(line["denominator"]))
    return clip_seconds(clip, int(line["duration"]) * time_base, n_frames)


def _common(dataset: Dataset, name: str, column: str, option: str, what: str) -> int:
    """The one value that all sounds of a field have in the index; 1 where there is none."""
    found: set[int] = set()
    for lines in _lines(dataset, name, name):
        found |= set(np.unique(lines[column])[:2].tolist())
        if len(found) > 1:
            several = " and ".join(map(str, sorted(found)[:2]))
            raise InvalidArgument(
                f"{dataset.path}: field {name!r} has sound of {several} {what}, and a batch needs "
                f"one number: pass sound=Sound({option}=…)"
            )
    return found.pop() if found else 1


def _lines(dataset: Dataset, name: str, sound: str) -> Iterator[Streams]:
    """What the index has of the streams of a field, of all rows shown that have some sound."""

    def look(part: ShardSamples) -> Streams:
        own = part.rows[part.reader(sound).records.present(sound, part.rows)]
        records = part.reader(name).records
        found: Streams = records.streams.lines(name, own, records.entries(name, own))
        return found

    for _, lines in scan(dataset, look):
        yield lines[lines["n_packets"] > 0]
