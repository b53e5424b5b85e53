"""Clips by time and around events, and the times beside them, as a loader gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shardio import (
    Array,
    EncodedStream,
    InvalidArgument,
    List,
    Schema,
    ShardDataset,
    ShardLoader,
    Text,
    Video,
)
from shardio.format.types import Field
from shardio.format.types.streams import PacketFlag, pack_packets, packet_flags, packet_sizes
from shardio.media import ClipDecoder, demux
from shardio.samples.clips import Clip
from tests.loading import WORKERS, check_workers_agree, make_loader, write_dataset
from tests.media_made import scene, write_video

HEIGHT, WIDTH = 32, 48
UNEVEN = [0, 1, 2, 5, 9, 10, 11, 12, 20, 21, 22, 26, 30, 31, 32, 33, 34, 40, 41, 45]
Streams = list[EncodedStream | None]
Found = list[tuple[int, npt.NDArray[np.uint8], list[int], list[int]]]


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> Streams:
    """Of even and of uneven times, with B-frames; one is absent, one too short, one is odd."""
    folder = tmp_path_factory.mktemp("files")

    def made(name: str, times: list[int], rate: int) -> EncodedStream:
        base, options = Fraction(1, rate), {"bf": "2", "g": "6"}
        images = scene(len(times), WIDTH, HEIGHT)
        path = folder / f"{name}.mkv"
        write_video(path, images, rate=rate, times=times, time_base=base, codec_options=options)
        return demux(str(path))

    even = made("even", list(range(50)), 25)
    uneven = made("uneven", [90 + time for time in UNEVEN], 30)
    return [uneven, None, even, made("short", [0, 1], 25), odd(made("odd", UNEVEN, 30))]


def odd(stream: EncodedStream) -> EncodedStream:
    """Return the stream with early, simultaneous and hidden frames, and no known length."""
    order = np.argsort(stream.packets["pts"], kind="stable")
    pts, flags = stream.packets["pts"] - 333, packet_flags(stream.packets)
    pts[order[7]] = pts[order[8]]
    flags[order[[11, 16]]] |= PacketFlag.HIDDEN
    packets = pack_packets(packet_sizes(stream.packets), flags, pts, np.zeros(len(pts)))
    return replace(stream, packets=packets, n_frames=stream.n_frames - 2, duration=0)


def written(folder: Path, streams: Streams, events: Any = None, field: Field | None = None) -> str:
    """Write a dataset of the videos in two shards, and of events of each of them."""
    fields: dict[str, Field] = {"video": Video(optional=True), "label": Array("int64")}
    if field is not None:
        fields["event"] = field
    samples = [{"video": stream, "label": i} for i, stream in enumerate(streams)]
    for sample, of_video in zip(samples, events or [], strict=False):
        sample["event"] = of_video
    return write_dataset(folder, len(samples), 2, Schema(fields), iter(samples))


@pytest.fixture(scope="module")
def folder(streams: Streams, tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(tmp_path_factory.mktemp("clips") / "set", streams)


def loader_of(folder: Any, clip: Clip, **options: Any) -> ShardLoader:
    return make_loader(
        folder, clip=clip, **{"num_workers": 0, "output": "numpy", "batch_size": 4, **options}
    )


def epoch(folder: Any, clip: Clip, **options: Any) -> Found:
    """Every clip of an epoch: its video's label, its pixels, the times of its frames, and units."""
    with loader_of(folder, clip, **options) as loader:
        return [
            (int(label), np.array(pixels), pts.tolist(), base.tolist())
            for batch in loader
            for label, pixels, pts, base in zip(
                batch["label"],
                batch["video"],
                batch["video_pts"],
                batch["video_time_base"],
                strict=True,
            )
        ]


class Model:
    """A video played: which frames it shows at which times, by trying all of them."""

    def __init__(self, stream: EncodedStream) -> None:
        flags = packet_flags(stream.packets) & PacketFlag.HIDDEN
        times = stream.packets["pts"].tolist()
        self.times = sorted(time for time, flag in zip(times, flags, strict=True) if not flag)
        self.base, self.stream = stream.time_base, stream
        last = stream.duration - (self.times[-1] - self.times[0])
        self.last = last if stream.duration else self.times[-1] - self.times[-2]

    def clip(self, first: Fraction, fps: Fraction, n: int) -> list[int] | None:
        """Return the frames from a time on, in seconds; None if the video ends before the last."""
        seconds = [first + k / fps for k in range(n)]
        if seconds[-1] >= (self.times[-1] + self.last - self.times[0]) * self.base:
            return None
        shown = [(time - self.times[0]) * self.base for time in self.times]
        return [max(i for i, at in enumerate(shown) if at <= wanted) for wanted in seconds]

    def every(self, fps: Fraction, n: int, step: int) -> Iterator[list[int]]:
        k = 0
        while found := self.clip(k * step / fps, fps, n):
            yield found
            k += 1

    def startable(self, fps: Fraction, n: int) -> list[list[int]]:
        starts = [(time - self.times[0]) * self.base for time in sorted({*self.times})]
        return [found for start in starts if (found := self.clip(start, fps, n))]

    def pixels(self, frames: list[int]) -> npt.NDArray[np.uint8]:
        out = np.empty((len(frames), HEIGHT, WIDTH, 3), np.uint8)
        with ClipDecoder() as decoder:
            decoder.decode(self.stream, frames, out)
        return out


def check(streams: Streams, found: Found, expected: list[tuple[int, list[int]]]) -> None:
    assert [label for label, *_ in found] == [video for video, _ in expected]
    for (_, pixels, pts, base), (video, frames) in zip(found, expected, strict=True):
        model = Model(streams[video])  # type: ignore[arg-type]
        assert pts == [model.times[frame] for frame in frames]
        assert base == [model.base.numerator, model.base.denominator]
        np.testing.assert_array_equal(pixels, model.pixels(frames))


@WORKERS
@pytest.mark.parametrize(("fps", "step"), [(Fraction(25, 2), 5), (40, None)])
def test_all_clips_by_time_have_the_frames_on_show_then(
    folder: str, streams: Streams, num_workers: int, fps: Any, step: int | None
) -> None:
    clip = Clip(6, fps=fps, step=step, times=True)
    expected = [
        (video, frames)
        for video, stream in enumerate(streams)
        if stream is not None
        for frames in Model(stream).every(Fraction(fps), 6, step or 6)
    ]
    assert {video for video, _ in expected} == {0, 2, 4}
    check(streams, epoch(folder, clip, num_workers=num_workers), expected)


@pytest.mark.parametrize("where", ["random", "uniform"])
def test_clips_by_time_begin_where_one_can(folder: str, streams: Streams, where: Any) -> None:
    clip, starts = Clip(5, fps=10, where=where, per_video=12, times=True), set()
    found = epoch(folder, clip, shuffle=True)
    assert sorted(label for label, *_ in found) == [0] * 12 + [2] * 12 + [4] * 12
    known = {
        video: Model(stream).startable(Fraction(10), 5)
        for video, stream in enumerate(streams)
        if stream is not None
    }
    expected = []
    for label, _, pts, _ in found:
        times = Model(streams[label]).times  # type: ignore[arg-type]
        (frames,) = [each for each in known[label] if [times[i] for i in each] == pts]
        starts.add((label, frames[0]))
        expected.append((label, frames))
    check(streams, found, expected)
    if where == "random":
        assert len(starts) > 20
        assert epoch(folder, clip, shuffle=True, seed=1)[0][2] != found[0][2]


EVENTS: dict[str, tuple[Field, list[Any], list[list[float]]]] = {
    "one number": (Array("float32"), [0.5, 9, 1, 0.07, 0.25], [[0.5], [1.0], [0.25]]),
    "a few": (
        Array("int16", (2,), optional=True),
        [[3, 19], [0, 0], None, [0, 1], [0, 2]],
        [[3, 19], [], [0, 2]],
    ),
    "any number": (
        Array("float64", (None,), codec="zstd"),
        [[1.4, 0], [], [], [0], [0.1, 0.7, 0.7]],
        [[1.4, 0.0], [], [0.1, 0.7, 0.7]],
    ),
    "any, unsigned": (Array("uint64", (None,)), [[], [], [49], [1], []], [[], [49], []]),
    "a list": (
        List(Array("int64"), optional=True),
        [[4], None, [0, 12], [], None],
        [[4], [0, 12], []],
    ),
}


def values_of(name: str, field: Field, events: list[Any]) -> list[Any]:
    dtype = field.element.numpy if isinstance(field, List) else field.numpy  # type: ignore[attr-defined]
    if isinstance(field, List):
        return [each and [np.array(value, dtype) for value in each] for each in events]
    return [None if each is None else np.array(each, dtype) for each in events]


@pytest.mark.parametrize("name", EVENTS)
@pytest.mark.parametrize("lead", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("fps", [12, None])
def test_there_is_a_clip_around_each_event(
    streams: Streams, tmp_path: Path, name: str, lead: float, fps: int | None
) -> None:
    field, stored, kept = EVENTS[name]
    made = written(tmp_path / "set", streams, values_of(name, field, stored), field)
    clip = Clip(6, 1 if fps else 2, fps=fps, around="event", lead=lead, times=True)
    expected = [
        (video, around(Model(streams[video]), event, clip))  # type: ignore[arg-type]
        for video, events in zip((0, 2, 4), kept, strict=True)
        for event in events
    ]
    check(streams, epoch(made, clip), expected)


def around(model: Model, event: float, clip: Clip) -> list[int]:
    """Return the frames of a clip that is moved inside if need be."""
    before = {0.0: 0, 0.5: 2, 1.0: 5}[clip.lead or 0.0]
    starts = [(time - model.times[0]) * model.base for time in model.times]
    at = starts[event] if isinstance(event, int) else Fraction(event)
    if clip.rate is None:
        frame = max(i for i, start in enumerate(starts) if start <= at)
        start = min(max(0, frame - 2 * before), len(starts) - 11)
        return list(range(start, start + 11, 2))
    first = max(Fraction(0), at - before / clip.rate)
    while not (found := model.clip(first, clip.rate, 6)):
        first = Fraction(-(-first // model.base) - 1) * model.base  # the whole tick before it
    return found


@pytest.fixture(scope="module")
def with_events(streams: Streams, tmp_path_factory: pytest.TempPathFactory) -> str:
    field, stored, _ = EVENTS["any number"]
    folder = tmp_path_factory.mktemp("events") / "set"
    return written(folder, streams, values_of("any number", field, stored), field)


VIEWS: list[Clip] = [
    Clip(4, fps=12.5, where="random", per_video=3, times=True, size=(16, 16), crop="random"),
    Clip(4, 2, around="event", times=True),
    Clip(4, fps=9, around="event", lead=0.2),
]


@pytest.mark.parametrize(("clip", "transform"), [*zip(VIEWS, [None, dict, None], strict=True)])
def test_any_worker_makes_the_same_batches(with_events: str, clip: Clip, transform: Any) -> None:
    options: dict[str, Any] = {"shuffle": True, "seed": 5, "transform": transform, "batch_size": 2}
    make = partial(loader_of, with_events, clip, fields=["video", "label"], **options)
    check_workers_agree(make)
    with make() as loader:
        assert ("video_pts" in next(iter(loader))) is clip.times


def test_events_go_along_with_what_was_selected(with_events: str, streams: Streams) -> None:
    clip = Clip(2, fps=10, around="event", lead=0, times=True)
    with ShardDataset(with_events) as dataset, dataset.select([4, 2, 0, 4]) as chosen:
        found = epoch(chosen, clip, num_workers=2)
    seconds = [(4, 0.1), (4, 0.7), (4, 0.7), (0, 1.4), (0, 0.0), (4, 0.1), (4, 0.7), (4, 0.7)]
    check(
        streams,
        found,
        [
            (video, Model(streams[video]).clip(Fraction(at), Fraction(10), 2) or [])  # type: ignore[arg-type]
            for video, at in seconds
        ],
    )


def test_clips_by_frame_have_times_as_well(folder: str, streams: Streams) -> None:
    found = epoch(folder, Clip(3, 2, step=9, times=True))
    lengths = {0: 20, 2: 50, 4: 18}
    expected = [
        (video, [start, start + 2, start + 4])
        for video, n in lengths.items()
        for start in range(0, n - 4, 9)
    ]
    check(streams, found, expected)
    with loader_of(folder, Clip(3, 2, step=9)) as loader:
        assert list(next(iter(loader))) == ["video", "label"]


def test_functions_of_the_user_get_the_times_beside_the_clip(folder: str) -> None:
    names = []

    def note(sample: dict[str, Any]) -> dict[str, Any]:
        names.append(list(sample))
        return {**sample, "seconds": sample["video_pts"] * sample["video_time_base"][0] / 30}

    def joined(samples: list[dict[str, Any]]) -> dict[str, Any]:
        return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}

    clip, beside = Clip(3, fps=8, times=True), ["video", "video_pts", "video_time_base", "label"]
    plain = [pts for _, _, pts, _ in epoch(folder, clip)]
    assert [pts for _, _, pts, _ in epoch(folder, clip, transform=note)] == plain
    assert {*map(tuple, names)} == {tuple(beside)}
    assert [pts for _, _, pts, _ in epoch(folder, clip, collate=joined)] == plain
    shifts: dict[str, Any] = {"batch_transform": lambda batch: {**batch, "label": batch["label"]}}
    assert [pts for _, _, pts, _ in epoch(folder, clip, **shifts)] == plain
    with loader_of(folder, clip) as loader:
        assert list(next(iter(loader))) == beside


@pytest.mark.parametrize(
    ("field", "event", "words"),
    [
        (Array("float64"), 2.0, "an event at 2.0 s is outside the video, which ends 2 s after its"),
        (Array("float32"), -0.1, "an event at -0.1"),
        (Array("float64"), float("nan"), "an event at nan s"),
        (Array("float64"), float("inf"), "an event at inf s"),
        (Array("int64"), 50, "an event at frame 50 is outside the video, which has 50 frames"),
        (Array("int8"), -1, "an event at frame -1"),
        (Array("uint64"), (1 << 64) - 1, "an event at frame 18446744073709551615"),
    ],
)
@pytest.mark.parametrize("fps", [5, None])
def test_an_event_outside_of_its_video_is_named(
    streams: Streams, tmp_path: Path, field: Field, event: float, words: str, fps: int | None
) -> None:
    events = values_of("", field, [0, 77, event, 0, 0])
    made = written(tmp_path / "set", streams, events, field)
    with pytest.raises(InvalidArgument) as caught:
        loader_of(made, Clip(3, fps=fps, around="event"))
    assert words in str(caught.value)
    assert "000001-000.shard, field 'event', sample 0: " in str(caught.value)
    with ShardDataset(made) as dataset, dataset.select([0, 1, 3, 4]) as chosen:
        assert len(epoch(chosen, Clip(3, fps=fps, around="event", times=True))) == 2


def test_the_last_moment_of_a_video_is_inside(streams: Streams, tmp_path: Path) -> None:
    field = Array("float64")
    events = values_of("", field, [0, 0, np.nextafter(2.0, 0), 0, 0])
    made = written(tmp_path / "set", streams, events, field)
    found = epoch(made, Clip(3, fps=25, around="event", times=True))
    (pts,) = [pts for label, _, pts, _ in found if label == 2]
    assert pts == [1880, 1920, 1960]  # of the milliseconds of Matroska


CAN_BE: dict[str, Callable[[], Clip]] = {
    "no video in field 'video' lasts as long as a clip of frames=99, fps=10; the longest has 20": (
        lambda: Clip(99, fps=10)
    ),
    "around='goal' must be a field of floats.*there is no such field": (
        lambda: Clip(around="goal")
    ),
    "around='note' must be .*found Text": lambda: Clip(around="note"),
    "around='table' must be": lambda: Clip(around="table"),
    "around='flag' must be": lambda: Clip(around="flag"),
    "field 'none' has no event in a video as long as a clip": lambda: Clip(around="none", frames=4),
    "times=True add video_pts, which is a field already": lambda: Clip(times=True),
}


@pytest.mark.parametrize("words", CAN_BE)
def test_clips_that_cannot_be_are_refused(streams: Streams, tmp_path: Path, words: str) -> None:
    fields = {
        "video": Video(),
        "note": Text(),
        "table": Array("float32", (2, 2)),
        "flag": Array("bool"),
        "none": Array("float32", (None,)),
        "video_pts": Array("int64"),
    }
    sample: dict[str, Any] = {"video": streams[2], "note": "", "flag": True}
    sample["table"] = np.zeros((2, 2), np.float32)
    sample |= {"none": np.zeros(0, np.float32), "video_pts": 0}
    made = write_dataset(tmp_path / "set", 1, 1, Schema(fields), [sample])
    with pytest.raises(InvalidArgument, match=words):
        loader_of(made, CAN_BE[words]())
    with loader_of(made, Clip(times=True), fields=["video", "flag"]) as loader:
        assert list(next(iter(loader)))[1:3] == ["video_pts", "video_time_base"]


def test_tables_that_cannot_be_are_refused(streams: Streams, tmp_path: Path) -> None:
    assert streams[2] is not None
    long = replace(streams[2], duration=1 << 63)
    made = write_dataset(tmp_path / "a", 1, 1, Schema({"video": Video()}), [{"video": long}])
    with pytest.raises(InvalidArgument, match="sample 0: a video of 9223372036854775808 ticks of"):
        loader_of(made, Clip(fps=25))
    with loader_of(made, Clip()) as loader:  # by frame its length says nothing
        assert len(loader) == 1
