"""Clips of stored videos: which there are, and that each has the pixels of its frames."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shardio import (
    Array,
    Batch,
    InvalidArgument,
    Schema,
    ShardDataset,
    ShardLoader,
    ShardReader,
    Video,
    WeightedSampler,
)
from shardio.dataset.manifest import load, publish_next
from shardio.errors import ChecksumMismatch, MediaError, ShardCorrupt
from shardio.format.checksum import CHUNK_BYTES
from shardio.format.layout import Kind
from shardio.media import VideoFile
from shardio.samples import decoding
from shardio.samples.clips import Clip, Clips
from shardio.samples.field_sources import Keys
from tests.loading import (
    WORKERS,
    bits,
    check_resumes,
    check_workers_agree,
    make_loader,
    write_dataset,
)
from tests.media_made import scene, write_video

SCHEMA = Schema({"video": Video(optional=True), "label": Array("int64")})
LENGTHS = (23, 9, None, 40, 3, 16)
"""Of one video there is nothing, one is too short for most clips."""
HEIGHT, WIDTH = 48, 80
Pixels = npt.NDArray[np.uint8]
Frames = Callable[..., Pixels]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path | None]:
    folder = tmp_path_factory.mktemp("files")
    return [
        write_video(
            folder / f"{i}.mp4",
            [np.roll(image, 11 * i, axis=1) for image in scene(n, WIDTH, HEIGHT)],
            codec_options={"bf": "2", "g": "8"},
        )
        if n is not None
        else None
        for i, n in enumerate(LENGTHS)
    ]


def samples_of(files: list[Path | None]) -> Iterator[dict[str, Any]]:
    for i, path in enumerate(files):
        yield {"video": None if path is None else path.read_bytes(), "label": i}


@pytest.fixture(scope="module")
def folder(files: list[Path | None], tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("clips") / "set"
    return write_dataset(made, len(files), 2, SCHEMA, samples_of(files))


@pytest.fixture(scope="module")
def frames(files: list[Path | None]) -> Frames:
    """Return a function that decodes all frames of a video with another decoder, cached."""
    known: dict[Any, Pixels] = {}

    def of(video: int, size: Any = (HEIGHT, WIDTH), pixels: str = "rgb") -> Pixels:
        key = video, size, pixels
        if key not in known:
            with VideoFile(str(files[video])) as file:
                found = [picture for _, picture in file.pictures(size, pixels=pixels)]
            known[key] = np.stack([np.asarray(picture) for picture in found if picture is not None])
        return known[key]

    return of


def loader_of(folder: Any, clip: Clip | None = None, **options: Any) -> ShardLoader:
    options = {"num_workers": 0, "output": "numpy", "batch_size": 4, **options}
    return make_loader(folder, clip=clip, **options)


def epoch(folder: Any, clip: Clip | None = None, **options: Any) -> list[tuple[int, int, Pixels]]:
    """Every clip of an epoch: its number, its video's label, its pixels."""
    with loader_of(folder, clip, **options) as loader:
        return clips_in(iter(loader))


def clips_in(batches: Iterator[Batch]) -> list[tuple[int, int, Pixels]]:
    return [
        (int(index), int(label), np.array(pixels))
        for batch in batches
        for index, label, pixels in zip(batch.indices, batch["label"], batch["video"], strict=True)
    ]


def start_of(pixels: Pixels, whole: Pixels, clip: Clip) -> int:
    """Return the first frame of a clip: the one from which on all of them are the same."""
    starts = [
        start
        for start in range(len(whole) - clip.span + 1)
        if np.array_equal(pixels, whole[start : start + clip.span : clip.stride])
    ]
    assert len(starts) == 1
    return starts[0]


ALL = Clip(4, 2, step=5)


@WORKERS
def test_all_clips_have_their_frames_pixels(folder: str, frames: Frames, num_workers: int) -> None:
    found = epoch(folder, ALL, num_workers=num_workers)
    expected = [
        (video, start)
        for video, n in enumerate(LENGTHS)
        for start in range(0, (n or 0) - ALL.span + 1, 5)
    ]
    assert [index for index, _, _ in found] == list(range(len(expected)))
    for (_, label, pixels), (video, start) in zip(found, expected, strict=True):
        assert (label, start_of(pixels, frames(video), ALL)) == (video, start)


@pytest.mark.parametrize(
    ("pixels", "size"),
    [("rgb", 32), ("rgb-fast", 32), ("rgb-fast", None), ("yuv420", 32), ("yuv420", None)],
)
@pytest.mark.parametrize("where", ["random", "uniform"])
def test_clips_are_scaled_cropped_and_in_planes_as_asked(
    folder: str, frames: Frames, pixels: Any, size: int | None, where: Any
) -> None:
    side = None if size is None else (size, size)
    clip = Clip(3, 3, where=where, per_video=2, size=side, pixels=pixels)
    found = epoch(folder, clip)
    height, width = side or (HEIGHT, WIDTH)
    shape = (height * 3 // 2, width) if pixels == "yuv420" else (height, width, 3)
    long = [video for video, n in enumerate(LENGTHS) if (n or 0) >= clip.span]
    assert [label for _, label, _ in found] == [video for video in long for _ in range(2)]
    for _, label, made in found:
        assert made.shape == (3, *shape)
        start_of(made, frames(label, side or (HEIGHT, WIDTH), pixels), clip)


def test_random_clips_begin_anywhere_and_anew_in_each_epoch(folder: str, frames: Frames) -> None:
    clip = Clip(2, where="random", per_video=40)

    def starts(found: list[tuple[int, int, Pixels]]) -> list[int]:
        chosen = [pixels for _, label, pixels in found if label == 1]
        return [start_of(pixels, frames(1), clip) for pixels in chosen]

    with loader_of(folder, clip) as loader:
        first, second = starts(clips_in(iter(loader))), starts(clips_in(iter(loader)))
    assert {*first} == {*range(8)}
    assert first != second
    assert starts(epoch(folder, clip)) == first
    assert starts(epoch(folder, clip, seed=1)) != first


def test_the_place_of_a_crop_is_drawn_for_each_clip(folder: str, frames: Frames) -> None:
    clip = Clip(2, step=2, size=(HEIGHT, HEIGHT), crop="random")
    places: set[int] = set()
    for _, label, pixels in epoch(folder, clip):
        whole, n = frames(label), WIDTH - HEIGHT + 1
        fits = [
            left
            for left in range(n)
            if any(
                np.array_equal(pixels[0], image[:, left : left + HEIGHT]) for image in whole[::2]
            )
        ]
        assert fits
        places |= {*fits}
    assert len(places) > 10
    center = epoch(folder, Clip(2, step=2, size=(HEIGHT, HEIGHT)))
    left = (WIDTH - HEIGHT) // 2
    np.testing.assert_array_equal(center[0][2], frames(0)[:2, :, left : left + HEIGHT])


def test_starts_and_crops_are_drawn_as_they_always_were(folder: str) -> None:
    with ShardDataset(folder) as dataset:
        view = dataset.clips(2, where="random", per_video=3, size=(16, 24), crop="random")
        codes, places = view.draws(np.arange(3), Keys(seed=7, epoch=3, positions=np.arange(10, 13)))
    assert codes.tolist() == [15, 18, 16]
    assert places is not None
    assert (places * 2**32).astype(np.int64).tolist() == [
        [120798781, 1162110323],
        [2939149569, 1094852406],
        [1586697510, 2364649199],
    ]


@pytest.mark.parametrize("where", ["all", "random", "uniform"])
@pytest.mark.parametrize("transform", [None, dict])
def test_who_makes_the_batches_makes_no_difference(folder: str, where: Any, transform: Any) -> None:
    clip = Clip(4, 2, where=where, per_video=3, size=(16, 24), crop="random")
    options: dict[str, Any] = {"shuffle": True, "seed": 5, "transform": transform}
    check_workers_agree(partial(loader_of, folder, clip, **options))


def test_clips_without_the_loop_filter_are_the_same_whoever_makes_them(folder: str) -> None:
    clip = Clip(3, where="random", per_video=3, loop_filter=False)
    check_workers_agree(partial(loader_of, folder, clip, shuffle=True))
    exact, quick = epoch(folder, replace(clip, loop_filter=True)), epoch(folder, clip)
    assert [one[:2] for one in exact] == [one[:2] for one in quick]
    differences = [
        np.abs(a.astype(int) - b).mean() for (*_, a), (*_, b) in zip(exact, quick, strict=True)
    ]
    assert 0 < max(differences) < 5


@WORKERS
def test_an_epoch_goes_on_where_it_was_left(folder: str, num_workers: int) -> None:
    clip = Clip(3, where="random", per_video=3)
    check_resumes(partial(loader_of, folder, clip, shuffle=True, num_workers=num_workers))


GROUPED: dict[str, Any] = {"clip": Clip(3, per_video=4), "shuffle": True}


@pytest.mark.parametrize(
    ("given", "other", "said"),
    [
        # Where clips lie has nothing to do with their pixels, nor with how many lie together.
        ({"clip": Clip(3)}, {"clip": Clip(3, size=(16, 16))}, None),
        ({"clip": Clip(3)}, {"clip": Clip(3, step=3, field="video")}, None),
        ({"clip": Clip(3)}, {"clip": Clip(3, per_video=4)}, None),
        ({"clip": Clip(3)}, {"clip": Clip(4)}, "the state's view is 'clips"),
        ({"clip": Clip(3)}, {"clip": Clip(3, 2)}, "the state's view is 'clips"),
        ({"clip": Clip(3)}, {"clip": Clip(3, step=2)}, "the state's view is 'clips"),
        ({"clip": Clip(3)}, {"clip": Clip(3, where="random")}, "the state's view is 'clips"),
        ({"clip": Clip(3)}, {"fields": ["label"]}, "that of this loader of .* is ''"),
        (GROUPED, GROUPED, None),
        (GROUPED, GROUPED | {"clip": Clip(3, per_video=2)}, "the state's per_video is 4, that of"),
    ],
)
def test_a_state_is_for_the_same_clips_in_the_same_order(
    folder: str, given: dict[str, Any], other: dict[str, Any], said: str | None
) -> None:
    with loader_of(folder, **given) as loader:
        state = json.loads(json.dumps(loader.state_dict()))
    refused = pytest.raises(InvalidArgument, match=said) if said else contextlib.nullcontext()
    with loader_of(folder, **other) as loader, refused:
        loader.load_state_dict(state)


@WORKERS
def test_clips_are_cut_from_a_selection(folder: str, frames: Frames, num_workers: int) -> None:
    with ShardDataset(folder) as dataset, dataset.select([5, 2, 3]) as chosen:
        found = epoch(chosen, Clip(16, step=8), num_workers=num_workers)
        assert len(chosen) == 3
    assert [label for _, label, _ in found] == [5, 3, 3, 3, 3]
    np.testing.assert_array_equal(found[2][2], frames(3)[8:24])


def test_clips_go_by_windows_weights_and_samplers(folder: str) -> None:
    clip = Clip(2, step=1)
    n = len(epoch(folder, clip))
    in_blocks = epoch(folder, clip, shuffle="blocks")
    assert sorted(index for index, _, _ in in_blocks) == list(range(n))
    assert [index for index, _, _ in epoch(folder, clip, sampler=[n - 1, 3, 3])] == [n - 1, 3, 3]
    weights = np.zeros(n)
    weights[7] = 1
    assert {index for index, _, _ in epoch(folder, clip, sampler=WeightedSampler(weights))} == {7}
    with pytest.raises(InvalidArgument, match=f"weights must be {n} numbers"):
        loader_of(folder, clip, sampler=WeightedSampler([1.0] * len(LENGTHS)))


@pytest.mark.parametrize("where", ["all", "uniform", "random"])
@pytest.mark.parametrize("shuffle", [True, "blocks"])
def test_so_many_clips_of_a_video_lie_together(folder: str, where: Any, shuffle: Any) -> None:
    clip, others = Clip(2, where=where, per_video=4), Clip(2, where=where)
    found = epoch(folder, clip, shuffle=shuffle)
    labels = [label for _, label, _ in found]
    assert sorted(index for index, _, _ in found) == list(range(len(found)))
    n_runs = 1 + sum(one != other for one, other in itertools.pairwise(labels))
    counts = [labels.count(video) for video in range(6)]
    if where == "all":  # across the ends of videos in blocks, and what is left over last
        assert n_runs <= sum(-(-n // 4) for n in counts) + 5 * (shuffle == "blocks")
    else:
        assert (counts, n_runs) == ([4, 4, 0, 4, 4, 4], 5)
    assert len(epoch(folder, others, shuffle=shuffle)) == len(found) // (1 if where == "all" else 4)


@pytest.mark.parametrize("crop", ["center", "random"])
def test_neighbours_share_decoding(folder: str, monkeypatch: pytest.MonkeyPatch, crop: Any) -> None:
    decoded = []
    real = decoding.ClipSource._decode

    def counting(self: Any, shard: int, row: int, wanted: Any) -> None:
        decoded.append(len(wanted[0]))
        real(self, shard, row, wanted)

    monkeypatch.setattr(decoding.ClipSource, "_decode", counting)
    n_passes = []
    for n in (1, 8):
        decoded.clear()
        clip = Clip(2, per_video=n, size=(16, 16), crop=crop)
        epoch(folder, clip, shuffle=True, batch_size=8)
        assert sum(decoded) == 11 + 4 + 20 + 1 + 8
        n_passes.append(len(decoded))
    # 2, 1, 3, 1 and 1 of them, of which a batch's end cuts five at most.
    assert n_passes[1] <= 13 < n_passes[0]


def test_two_draws_of_one_sample_are_two_clips(folder: str, frames: Frames) -> None:
    clip = Clip(2, where="random")
    found = epoch(folder, clip, sampler=[2] * 12)
    assert {label for _, label, _ in found} == {3}
    assert len({start_of(pixels, frames(3), clip) for _, _, pixels in found}) > 4


def test_a_batch_says_which_clips_it_has_and_where_they_come_from(folder: str) -> None:
    with loader_of(folder, Clip(8, step=8), batch_size=50, tail="pad") as loader:
        (batch,) = loader
        counts = [2, 1, 0, 5, 0, 2]
        rows = [row for row, n in enumerate(counts) for _ in range(n)]
        assert len(loader) == 1
        assert batch["video"].shape == (50, 8, HEIGHT, WIDTH, 3)
        assert batch.valid.tolist() == [i < 10 for i in range(50)]
        assert batch.indices[:10].tolist() == list(range(10))
        origins = [[row // 3, row % 3] for row in rows]
        assert batch.origins[:10].tolist() == origins
        assert len(loader.view) == 10
        assert [loader.view[i]["label"] for i in range(10)] == rows


@pytest.mark.parametrize(("name", "most"), [("_MAX_VIDEO_STREAMS", 1), ("_MAX_PACKETS", 30)])
def test_of_so_many_videos_something_is_kept(
    folder: str, monkeypatch: pytest.MonkeyPatch, name: str, most: int
) -> None:
    clip = Clip(2, where="random", per_video=6)
    with loader_of(folder, clip, shuffle=True) as loader:
        expected = [bits(batch) for batch in loader]
    monkeypatch.setattr(decoding, name, most)
    with loader_of(folder, clip, shuffle=True) as loader:
        assert [bits(batch) for batch in loader] == expected


def test_videos_are_preloaded_whole(folder: str) -> None:
    with ShardDataset(folder) as dataset:
        videos = [sample["video"] for sample in dataset if sample["video"] is not None]
        assert dataset.preload(["video"]) > sum(len(video.data) for video in videos)


def damaged(files: list[Path | None], made: Path) -> str:
    """Write a dataset in which a packet of the fourth video does not begin as it should."""
    copy = write_dataset(made, len(files), 2, SCHEMA, samples_of(files))
    path = Path(copy) / "000001-000.shard"
    with ShardReader(path) as reader:
        stream = reader[0]["video"]
        packet = bytes(stream.data[int(stream.packets["offset"][10]) :][:200])
    content = bytearray(path.read_bytes())
    content[content.index(packet)] ^= 0x10  # of how many bytes the first part has
    path.write_bytes(content)
    return copy


@WORKERS
def test_damage_is_named(files: list[Path | None], tmp_path: Path, num_workers: int) -> None:
    copy = damaged(files, tmp_path / "set")
    where = r"000001-000\.shard.*field 'video'.*sample 0"
    with pytest.raises(ChecksumMismatch, match=where):
        epoch(copy, ALL, num_workers=num_workers)
    with pytest.raises(MediaError, match=r"000001-000\.shard, field 'video', sample 0: "):
        epoch(copy, ALL, num_workers=num_workers, verify="off")
    clip = Clip(16, where="uniform")
    with loader_of(copy, clip, on_error="skip", max_skips=3, num_workers=num_workers) as loader:
        (batch,) = loader
        assert batch.valid.tolist() == [True, False, True]
        assert [(skip.index, skip.error) for skip in batch.skipped] == [(1, "ChecksumMismatch")]
        assert batch["label"].tolist()[1] in (0, 5)
        assert batch["video"][1].any()


def test_a_video_is_checked_as_far_as_a_clip_touches_it(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (24, 128, 192, 3), np.uint8)
    path = write_video(tmp_path / "a.mp4", list(noise), codec_options={"g": "4", "crf": "1"})
    schema = Schema({"video": Video()})
    made = write_dataset(tmp_path / "set", 1, 1, schema, [{"video": path.read_bytes()}])
    shard = Path(made) / "000000-000.shard"
    with ShardReader(shard) as reader:
        stream = reader[0]["video"]
        assert len(stream.data) > 8 * CHUNK_BYTES
        tail = bytes(stream.data[len(stream.data) - 100 :])
    content = bytearray(shard.read_bytes())
    content[content.index(tail)] ^= 1
    shard.write_bytes(content)
    with loader_of(made, Clip(4, step=20), batch_size=1) as loader:
        batches = iter(loader)
        assert next(batches)["video"].any()
        with pytest.raises(ChecksumMismatch, match="field 'video'.*sample 0"):
            next(batches)


def test_a_table_of_other_frames_is_refused(files: list[Path | None], tmp_path: Path) -> None:
    made = write_dataset(tmp_path / "set", len(files), 1, SCHEMA, samples_of(files))
    path = Path(made) / "000000-000.shard"
    with ShardReader(path) as reader:
        section = next(s for s in reader.sections if s.kind == Kind.STREAMS)
    content = bytearray(path.read_bytes())
    content[section.offset + 24] = 200  # n_frames of the first
    path.write_bytes(content)
    with pytest.raises(ChecksumMismatch, match="field 'video'"):
        loader_of(made)
    with pytest.raises(ShardCorrupt, match="more frames than packets") as caught:
        loader_of(made, verify="off")
    assert caught.value.sample == 0


def test_the_dataset_has_the_default_clips(files: list[Path | None], tmp_path: Path) -> None:
    schema = Schema({"video": Video(optional=True), "label": Array("int64")})
    made = write_dataset(tmp_path / "set", len(files), 2, schema, samples_of(files))
    assert [pixels.shape[0] for _, _, pixels in epoch(made)] == [16] * 4
    view = {"kind": "clips", "frames": 4, "stride": 2, "step": 5, "size": [16, 24]}
    publish_next(made, load(made), view=view)
    by_default, asked = epoch(made), epoch(made, Clip(4, 2, step=5, size=(16, 24)))
    assert len(by_default) == len(asked) > 0
    for (_, _, one), (_, _, other) in zip(by_default, asked, strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(epoch(made, Clip(16))) == 4


def test_a_loader_without_the_video_has_rows(folder: str) -> None:
    with loader_of(folder, fields=["label"], batch_size=6) as loader:
        (batch,) = loader
        assert batch["label"].tolist() == list(range(6))


def test_of_several_videos_one_is_asked_for(files: list[Path | None], tmp_path: Path) -> None:
    schema = Schema({"left": Video(), "label": Array("int64"), "right": Video()})
    path = [files[0], files[3]]
    data = [each.read_bytes() for each in path if each is not None]
    sample = {"left": data[0], "right": data[1], "label": 1}
    made = write_dataset(tmp_path / "set", 1, 1, schema, [sample])
    with pytest.raises(InvalidArgument, match=r"choose one of left, right with dataset.clips\("):
        loader_of(made)
    with pytest.raises(InvalidArgument, match=r"leave \['right'\] out of"):
        loader_of(made, Clip(field="left"), fields=["left", "right"])
    for name, names, n in (("left", ["left", "label"], 1), ("right", ["label", "right"], 2)):
        with loader_of(made, Clip(field=name)) as loader:
            (batch,) = loader
            assert (list(batch), len(batch[name])) == (names, n)
    with loader_of(made, fields=["right"]) as loader:
        assert len(next(iter(loader))["right"]) == 2


def test_videos_of_several_sizes_need_one(files: list[Path | None], tmp_path: Path) -> None:
    other = write_video(tmp_path / "a.mp4", scene(20, 64, 32))
    samples = [{"video": path.read_bytes()} for path in (files[0], other) if path is not None]
    made = write_dataset(tmp_path / "set", 2, 1, Schema({"video": Video()}), samples)
    with pytest.raises(InvalidArgument, match=r"of 32x64 and of 48x80 pixels.*clips\(size="):
        loader_of(made)
    with loader_of(made, Clip(size=(24, 24))) as loader:
        assert next(iter(loader))["video"].shape == (2, 16, 24, 24, 3)
    with loader_of(made, Clip(22)) as loader:  # only one is so long
        assert next(iter(loader))["video"].shape == (1, 22, HEIGHT, WIDTH, 3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clip": Clip(41)}, "no video in field 'video' .* 41 frames; the longest has 40"),
        ({"clip": Clip(field="label")}, "'label', a field of videos.*videos are: video"),
        ({"clip": Clip(), "fields": ["label"]}, "fields leaves out 'video'"),
        ({"clip": Clip(), "decode": False}, "clips of 'video' need decode=True"),
        ({"decode": False}, "whose packets cannot be put into a batch"),
        ({"collate": {"video": "pad"}}, "has the shape .*16, 48, 80, 3.* in every sample"),
    ],
)
def test_clips_that_cannot_be_are_refused(folder: str, options: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        loader_of(folder, **options)


def test_an_empty_dataset_has_no_clips(tmp_path: Path) -> None:
    made = write_dataset(
        tmp_path / "set", 2, 1, SCHEMA, [{"video": None, "label": i} for i in range(2)]
    )
    with loader_of(made) as loader:
        assert (len(loader), list(loader)) == (0, [])
    assert len(Clips(Clip(), np.zeros(0, np.int64))) == 0
