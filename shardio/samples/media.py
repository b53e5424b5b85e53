"""Images and audio of a dataset in a batch: decoded, of one size or of several."""

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
from shardio.format.schema import Schema
from shardio.format.types import Array, Audio, Field, Image
from shardio.format.types.streams import Streams
from shardio.media.audio import Sound
from shardio.shard.reader import ShardReader
from shardio.shard.verification import Rows
from shardio.views.clips import Clip

Sizes = Mapping[str, tuple[int, int]]
"""Height and width of the fields whose images all have the same size."""


def image_fields(schema: Schema, names: Iterable[str]) -> tuple[str, ...]:
    """Return those of some fields that hold images."""
    return tuple(name for name in names if isinstance(schema[name], Image))


def image_schema(schema: Schema, sizes: Sizes | None = None) -> Schema:
    """Return the schema of samples whose images are decoded: uint8 (height, width, 3).

    Args:
        schema: as stored.
        sizes: of fields with a common size; height and width of others vary from sample to sample.
    """
    return Schema(
        {name: _decoded(field, (sizes or {}).get(name)) for name, field in schema.items()}
    )


def _decoded(field: Field, size: tuple[int, int] | None) -> Field:
    if not isinstance(field, Image):
        return field
    return Array("uint8", (*(size or (None, None)), 3), optional=field.optional)


def common_sizes(dataset: Dataset, names: Iterable[str]) -> Sizes:
    """Return the sizes of fields whose images have one height and width in all selected samples.

    They are read from the index, 24 bytes per image, until one differs. Missing images do not
    count.

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
    """Return up to two distinct sizes of some images of a shard."""
    records = reader.records
    sizes = records.shapes(name, rows)[:, :2][records.present(name, rows)]
    if not len(sizes):
        return []
    others = sizes[(sizes != sizes[0]).any(1)]
    return [(int(height), int(width)) for height, width in (*sizes[:1], *others[:1])]


_NEARLY: Final = Fraction(199, 200)
"""Audio of at least this fraction of the longest is padded with silence, else kept as a list."""


@dataclass(frozen=True, slots=True)
class AudioField:
    """The format of the audio in one field; `n_samples` is None if it varies."""

    name: str
    rate: int
    channels: int
    n_samples: int | None

    @property
    def span(self) -> str:
        """The field with the range of the audio in this one."""
        return span_field(self.name)


@dataclass(frozen=True, slots=True)
class AudioSpec:
    """The format of the audio in some fields."""

    sound: Sound
    fields: tuple[AudioField, ...]

    def delivered(self, schema: Schema) -> Schema:
        """Return the schema of samples whose audio is decoded."""
        shapes = {field.name: (field.n_samples, field.channels) for field in self.fields}
        return audio_schema(schema, self.sound, shapes)


def span_field(name: str) -> str:
    """Return the name of the field with the range of another field's audio."""
    return f"{name}_span"


def audio_fields(schema: Schema, names: tuple[str, ...], sound: Any) -> tuple[str, ...]:
    """Return those of some fields that hold audio.

    Raises:
        InvalidArgument: `sound` is not a Sound, or there is no such field; or a name is taken.
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
    """Return the schema of samples whose audio is decoded.

    Audio of one length is never missing, silent.

    Args:
        schema: as stored.
        sound: the format.
        shapes: (samples, channels) of the fields, None for a varying one; for other fields only the
            channels of `sound` are known.
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
    """Measure the audio, and the clips it belongs to, in all selected rows; return its format.

    The lengths are in the index, 64 bytes per stream, all of which are read unless the options make
    them unnecessary. `video` is the field of the dataset's clips, if any. Returns None without
    names.

    Raises:
        InvalidArgument: sample rates or channels differ, and the option is not given; the videos
            have no stored length; or `where="random"` is combined with clips.
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
    """Return the number of samples nearest to a length in seconds; at least one."""
    return max(1, math.floor(seconds * rate + Fraction(1, 2)))


def clip_seconds(clip: Clip, duration: Fraction, n_frames: int) -> Fraction:
    """Return the length of a clip, until its next frame.

    `duration` is that of the video's n_frames.
    """
    if clip.rate is not None:
        return clip.frames / clip.rate
    return clip.frames * clip.stride * duration / n_frames


def _bounds(
    dataset: Dataset, name: str, measured: str, clip: Clip | None
) -> tuple[Fraction, Fraction] | None:
    """Return the minimum and maximum seconds of audio, or of clips with audio.

    None if there is none.

    The measured streams, or clips of them, are in the field `measured`; the audio is in `name`.

    Raises:
        InvalidArgument: a video has no stored length.
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
    """Return the common value of all audio streams of a field in the index; 1 if there is none."""
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
    """Yield the stream lines of a field, for all selected rows that have audio."""

    def look(part: ShardSamples) -> Streams:
        own = part.rows[part.reader(sound).records.present(sound, part.rows)]
        records = part.reader(name).records
        found: Streams = records.streams.lines(name, own, records.entries(name, own))
        return found

    for _, lines in scan(dataset, look):
        yield lines[lines["n_packets"] > 0]
