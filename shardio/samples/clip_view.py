"""ClipView: the clips of a dataset's videos, as samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio._base.classes import cached_property
from shardio.dataset.dataset import Dataset, ShardSamples, scan
from shardio.errors import InvalidArgument
from shardio.format.schema import Schema
from shardio.media.audio import Sound
from shardio.order.clip_groups import ClipGrouping
from shardio.order.permutation import OF_CLIPS, OF_CROPS
from shardio.samples.clips import Clip, ClipDraws, Clips, Events, time_field_names
from shardio.samples.decoding import AudioSource, ClipSource
from shardio.samples.field_sources import FieldSource, Keys
from shardio.samples.media import AudioField, distinct_sizes
from shardio.samples.video_index import VideoIndex, event_dtype
from shardio.samples.view import DividedView, Table, Tables, sums_at
from shardio.shard.verification import Rows

_OPTIONS: Final = ("frames", "stride", "step", "size")
"""The options of clips that a generation can store for its default view."""


class ClipView(DividedView):
    """A view whose samples are clips of the videos in one field. It borrows the dataset.

    On first use, 96 bytes per video are read from the index. With `fps` or `around`, the packet
    tables of videos whose duration the index does not store are read too.

    Raises:
        InvalidArgument: the field does not exist or has no videos. On first use: no video has a
            clip; the sizes of videos differ, and `size` is not given; the field of events is
            invalid, or an event lies outside its video.
        ShardCorrupt: (on first use) the index of the videos is damaged.
    """

    clip: Clip
    """The options of the clips, with the field of the videos."""

    def __init__(self, dataset: Dataset, clip: Clip) -> None:
        super().__init__(dataset)
        self.clip = resolve_field(dataset.schema, clip)
        self.video = self.clip.field or ""
        """The field of the videos."""
        self.videos = (self.video,)
        if self.clip.around is not None:
            event_dtype(dataset.schema, self.clip.around)

    def restore(self, tables: Tables) -> None:
        """Take the `tables` of an equal view in another process, instead of computing them."""
        clip = replace(self.clip, size=tuple(tables["size"].tolist()))
        events = Events(tables["events"], tables["values"]) if "events" in tables else None
        self.__dict__["clip_table"] = Clips(clip, tables["n_frames"], events)

    @cached_property
    def clip_table(self) -> Clips:
        """The clips, by their index; the options in `clip_table.clip` include the size."""
        return _find_clips(self.dataset, self.clip)

    @property
    def is_read(self) -> bool:
        """True if the clips are known, because the index of the videos was read."""
        return "clip_table" in self.__dict__

    @property
    def options(self) -> tuple[Any, ...]:
        """The options of the view."""
        return (self.clip,)

    @property
    def sample_ends(self) -> Rows:
        """The cumulative clip counts of the videos."""
        return self.clip_table.ends

    @property
    def summary(self) -> str:
        """The number and the options of the clips."""
        clip, count = self.clip, f"{len(self)} " if self.is_read else ""
        rate = f"stride {clip.stride}" if clip.rate is None else f"{float(clip.rate):g} per second"
        return f"{count}clips of {clip.frames} frames, {rate}, of {clip.field!r}"

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of the dataset that a sample contains or is derived from."""
        schema = self.dataset.schema
        return tuple(
            name for name in schema if name == self.video or schema[name].medium != "video"
        )

    def stored_fields(self, names: tuple[str, ...], *, is_explicit: bool) -> tuple[str, ...]:
        """Return the stored fields that the view reads for a loader with `fields=names`."""
        if self.video not in names:
            raise InvalidArgument(
                f"fields leaves out {self.video!r}, which the samples are clips of"
            )
        schema = self.dataset.schema
        others = [each for each in names if schema[each].medium == "video" and each != self.video]
        if others and is_explicit:
            raise InvalidArgument(
                f"samples are clips of {self.video!r}, one field of videos: leave {others} out of "
                "fields"
            )
        names = tuple(name for name in names if name not in others)
        times = time_field_names(self.video) if self.clip.times else ()
        if both := [name for name in times if name in names]:
            raise InvalidArgument(
                f"clips with times=True add {', '.join(both)}, which is a field already: leave it "
                "out with `fields`"
            )
        return names

    def tables(self) -> Mapping[str, Table]:
        """Return the tables from which another process creates the view again."""
        found = {
            "size": Table(np.array(self.clip_table.clip.size), "the size of clips"),
            "n_frames": Table(self.clip_table.n_frames, "how many frames each video has"),
        }
        if self.clip_table.events is not None:
            counts, values = self.clip_table.events
            found["events"] = Table(counts, "how many events each video has")
            found["values"] = Table(values, "the events of videos")
        return found

    def sample_schema(self, schema: Schema) -> Schema:
        """Return the schema of the view's samples, given the schema of the stored fields."""
        return self.clip_table.clip.sample_schema(schema)

    def sources(self, audio: Mapping[str, AudioField]) -> dict[str, FieldSource]:
        """Return the sources of clips and of their audio, by the name of the stored field."""
        made = ClipSource(self.dataset, self.clip_table)
        sounds = {n: AudioSource(self.dataset, each, made.clip_time) for n, each in audio.items()}
        return {self.video: made, **sounds}

    def no_shards_reason(self) -> str | None:
        """Return the reason why the samples are not in shard order; None if they are."""
        if self.clip_grouping is not None:
            return "per_video keeps the clips of a video together instead"
        return super().no_shards_reason()

    @property
    def clip_grouping(self) -> ClipGrouping | None:
        """The groups of clips that stay together in a shuffle; None if there are no groups."""
        if self.clip.per_video in (None, 1):
            return None
        parts = np.split(self.clip_table.ends, np.cumsum(self.dataset.rows.source_counts)[:-1])
        begins = [0, *self.source_ends]
        ends = [part - begin for part, begin in zip(parts, begins, strict=False)]
        return ClipGrouping(self.clip.per_video or 1, ends)

    def positions(self, numbers: Rows, seed: int, epoch: int) -> Rows:
        """Return the positions of samples in an unshuffled epoch, on which random clips depend."""
        if "random" not in (self.clip.where, self.clip.crop):
            return numbers
        position, ends = self.dataset.first_position, self.source_ends
        return np.array([position(int(n), ends, seed=seed, epoch=epoch) for n in numbers])

    def draws(self, numbers: Rows, keys: Keys) -> ClipDraws:
        """Draw the first frames and the crops of some clips."""
        clips = self.clip_table
        codes = clips.start_codes(numbers, clips.videos(numbers), keys.hashes(OF_CLIPS))
        if self.clip.crop == "center":
            return ClipDraws(codes)
        # The upper 32 bits of a hash give x, the lower 32 bits give y.
        return ClipDraws(codes, keys.hashes(OF_CROPS).view("<u4").reshape(-1, 2)[:, ::-1] / 2**32)

    def audio(self, sounds: Mapping[str, Sound]) -> dict[str, AudioField]:
        """Return the format of the audio in some fields; the audio covers the time of a clip."""
        if any(sound.where == "random" for sound in sounds.values()):
            raise InvalidArgument(
                f"{self.dataset.path}: samples are clips of {self.video!r}, and sound covers the "
                'time of a clip: leave where="random" out of Sound, and use '
                'dataset.clips(where="random"), or leave the videos out of `fields`'
            )
        return super().audio(sounds)


def default_clip(view: Mapping[str, Any]) -> Clip:
    """Return the options of clips in a dataset's stored view; `Clip()` if its samples are rows."""
    return Clip(**{name: view[name] for name in _OPTIONS if name in view})


def resolve_field(schema: Schema, clip: Clip) -> Clip:
    """Return the options of clips with `field` set to the field of the videos."""
    videos = [name for name in schema if schema[name].medium == "video"]
    known, wanted = ", ".join(videos) or "none", clip.field
    if not videos or wanted not in (None, *videos):
        what = "a field of videos" if wanted is None else f"{wanted!r}, a field of videos"
        raise InvalidArgument(f"clips need {what}; the fields of videos are: {known}")
    if wanted is None and len(videos) > 1:
        raise InvalidArgument(
            f"clips are of one field of videos; of {known} choose one with dataset.clips(field=…)"
        )
    # Set the field even if it was omitted: equal clips then have equal options, and loaders of
    # equal clips accept each other's states.
    return replace(clip, field=wanted or videos[0])


def _find_clips(dataset: Dataset, clip: Clip) -> Clips:
    name, around = clip.field or "", clip.around
    n_frames = np.zeros(len(dataset), np.int64)
    sizes: set[tuple[int, int]] = set()
    owners: list[Rows] = [np.zeros(0, np.int64)]
    moments = [np.zeros(0, np.int64 if around is None else event_dtype(dataset.schema, around))]

    def look(part: ShardSamples) -> tuple[VideoIndex, tuple[Rows, npt.NDArray[Any]] | None]:
        videos = VideoIndex(part.reader(name), name, part.rows, clip)
        return videos, None if around is None else videos.events(part.reader(around), around)

    for part, (videos, events) in scan(dataset, look):
        n_frames[part.numbers] = videos.n_frames
        has_clip = videos.n_frames >= clip.span
        if events is not None:  # Keep the events of videos that are long enough for a clip.
            counts, values = events
            moments.append(values[np.repeat(has_clip, counts)].astype(moments[0].dtype))
            counts = counts * has_clip
            owners.append(np.repeat(part.numbers, counts))
            has_clip = counts > 0
        if len(sizes) < 2:
            streams = videos.streams[has_clip]
            sizes |= distinct_sizes(np.stack([streams["height"], streams["width"]], axis=1))
    events_found = None
    if around is not None:
        videos_of_events = np.concatenate(owners)
        values = np.concatenate(moments)[np.argsort(videos_of_events, kind="stable")]
        counts = np.bincount(videos_of_events, minlength=len(dataset)).astype(np.int64)
        events_found = Events(counts, values)
    clip = replace(clip, size=clip.size or common_size(dataset, clip, name, sizes))
    clips = Clips(clip, n_frames, events_found)
    if n_frames.any() and not len(clips):
        raise InvalidArgument(_no_clips_message(dataset, clip, name, int(n_frames.max())))
    source_ends = sums_at(clips.ends, np.cumsum(dataset.rows.source_counts))
    dataset.rows.check_sources(np.diff(source_ends, prepend=0), "none of its videos has a clip")
    return clips


def _no_clips_message(dataset: Dataset, clip: Clip, name: str, longest: int) -> str:
    if longest >= clip.span:
        return f"{dataset.path}: field {clip.around!r} has no event in a video as long as a clip"
    text = f"{dataset.path}: no video in field {name!r} lasts as long as a clip of frames="
    if clip.rate is None:
        needed = f"{clip.frames}, stride={clip.stride}, {clip.span} frames"
        return f"{text}{needed}; the longest has {longest}"
    return f"{text}{clip.frames}, fps={clip.rate}; the longest has {longest} frames at that rate"


def common_size(
    dataset: Dataset, clip: Clip, name: str, sizes: set[tuple[int, int]], method: str = "clips"
) -> tuple[int, int]:
    """Return the common size of a field's videos, given up to two distinct sizes; raise for two."""
    found = sorted(sizes)
    if len(found) > 1:
        shown = " and of ".join(f"{height}x{width}" for height, width in found[:2])
        raise InvalidArgument(
            f"{dataset.path}: field {name!r} has videos of {shown} pixels, and a batch needs one "
            f"size: pass dataset.{method}(size=(height, width), …)"
        )
    height, width = found[0] if found else (2, 2)
    if clip.pixels == "yuv420" and (height % 2 or width % 2):
        raise InvalidArgument(
            f"{dataset.path}: field {name!r} has videos of {height}x{width} pixels, and "
            'pixels="yuv420" needs even sizes: pass dataset.clips(size=(height, width), …)'
        )
    return height, width
