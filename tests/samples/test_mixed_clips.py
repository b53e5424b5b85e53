"""Clips of the videos of several datasets, mixed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio import Array, InvalidArgument, Schema, ShardDataset, ShardLoader, Video, mix
from shardio.dataset.manifest import load, publish_next
from shardio.samples.clips import Clip
from shardio.samples.mixture import Mixture
from tests.loading import make_loader, write_dataset
from tests.media_made import scene, write_video

pytestmark = pytest.mark.usefixtures("warm_zygote", "quick_disk")

SCHEMA = Schema(
    {"video": Video(optional=True), "label": Array("int64"), "at": Array("int64", (None,))}
)
LENGTHS = {"a": (9, None, 14, 2), "b": (21, 6)}
COUNTS = {"a": [4, 0, 7, 1], "b": [10, 3]}
"""Of clips of two frames."""
CLIP = Clip(2, size=(16, 16))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("mixed")
    made = {}
    for name, lengths in LENGTHS.items():
        samples = []
        for i, n in enumerate(lengths):
            video = None
            if n is not None:
                video = write_video(folder / f"{name}{i}.mp4", scene(n, 48, 32)).read_bytes()
            at = np.arange(0, (n or 0) // 2, 2)  # numbers of frames that something happens at
            samples.append({"video": video, "label": ord(name) * 10 + i, "at": at})
        made[name] = write_dataset(folder / name, len(lengths), 2, SCHEMA, iter(samples))
    return made


def loader(given: Any, clip: Clip | None = CLIP, **options: Any) -> ShardLoader:
    options = {"batch_size": 4, "num_workers": 0, "output": "numpy", "seed": 1, **options}
    options.setdefault("fields", ["video", "label"])
    return make_loader(given, clip=clip, **options)


def epoch(given: Any, clip: Clip | None = CLIP, **options: Any) -> list[tuple[int, int, bytes]]:
    """Of every clip its number, its video's label and its pixels."""
    with loader(given, clip, **options) as made:
        return [
            (int(index), int(label), pixels.tobytes())
            for batch in made
            for index, label, pixels in zip(
                batch.indices, batch["label"], batch["video"], strict=True
            )
        ]


def mixed(folders: dict[str, str], weights: Any = (12, 13), **options: Any) -> Mixture:
    return mix([folders["a"], folders["b"]], weights=list(weights), **options)


@pytest.mark.parametrize("shuffle", [False, True, "blocks"])
@pytest.mark.parametrize("per_video", [1, 3])
def test_each_source_keeps_its_clips(folders: dict[str, str], shuffle: Any, per_video: int) -> None:
    clip = Clip(2, size=(16, 16), per_video=per_video)
    alone = [pixels for name in "ab" for _, _, pixels in epoch(folders[name])]
    with mixed(folders) as made:
        found = epoch(made, clip, shuffle=shuffle)
        with loader(made, clip) as loading:
            labels = [sample["label"] for sample in loading.view]
            of = loading.view.sources_of([index for index, _, _ in found])
    assert sorted(index for index, _, _ in found) == list(range(25))
    assert all(pixels == alone[index] for index, _, pixels in found)
    assert all(label == labels[index] for index, label, _ in found)
    assert [int(label >= 980) for _, label, _ in found] == of.tolist()
    assert [labels.count(n) for n in (970, 971, 972, 973, 980, 981)] == sum(COUNTS.values(), [])


def test_mixed_clips_of_a_video_stay_together(folders: dict[str, str]) -> None:
    clip = Clip(2, size=(16, 16), per_video=7)
    with mixed(folders) as made:
        found = epoch(made, clip, shuffle=True)
    for own in ([f for f in found if f[1] < 980], [f for f in found if f[1] >= 980]):
        assert 1 + sum(one[1] != other[1] for one, other in itertools.pairwise(own)) <= 4


def test_sources_must_agree_on_clips_unless_given(folders: dict[str, str], tmp_path: Path) -> None:
    copies = []
    for i, step in enumerate((2, 2, 5)):
        with ShardDataset(folders["b"]) as whole:
            samples = [dict(each) for each in whole]
            copy = write_dataset(tmp_path / str(i), len(samples), 1, SCHEMA, iter(samples))
        view = {"kind": "clips", "frames": 2, "stride": 1, "step": step, "size": [16, 16]}
        publish_next(copy, load(copy), view=view)
        copies.append(copy)
    with mix(copies[:2], weights=[1, 1]) as alike:
        assert len(epoch(alike, None)) == 26
        assert alike.view["step"] == 2
    with mix(copies[1:], weights=[1, 1]) as unlike:
        assert len(epoch(unlike, CLIP)) == 26
        message = "'step': 2.*'step': 5.*choose them with mixture"
        with pytest.raises(InvalidArgument, match=message):
            loader(unlike, None)
        with loader(unlike, None, fields=["label"]) as rows:
            assert len(rows.dataset) == 4


@pytest.mark.parametrize(
    "clip",
    [
        Clip(2, fps=20, where="random", per_video=2, size=(16, 16), times=True),
        Clip(2, around="at", per_video=2, size=(16, 16), times=True),
    ],
)
def test_mixed_clips_by_time_and_around_events(folders: dict[str, str], clip: Clip) -> None:
    def run(given: Any, **options: Any) -> list[tuple[int, bytes, bytes]]:
        with loader(given, clip, **options) as loading:
            return [
                (int(index), pixels.tobytes(), pts.tobytes())
                for batch in loading
                for index, pixels, pts in zip(
                    batch.indices, batch["video"], batch["video_pts"], strict=True
                )
            ]

    with mixed(folders, (1, 1), exhausted="repeat") as made:
        found = run(made, shuffle=True)
        assert run(made, shuffle=True, num_workers=2) == found
    alone = [clip[1:] for name in "ab" for clip in run(folders[name])]
    assert {index for index, *_ in found} == set(range(len(alone)))
    if clip.around is not None:  # else what is drawn depends on the position
        assert all(alone[index] == (pixels, pts) for index, pixels, pts in found)


def test_a_source_without_a_clip_is_left_out(folders: dict[str, str]) -> None:
    with (
        ShardDataset(folders["a"]) as whole,
        whole.select([1, 3]) as short,
        mix([folders["b"], short], weights=[1, 1]) as made,
        pytest.raises(
            InvalidArgument, match="a selection.*none of its videos has a clip; leave it out"
        ),
    ):
        loader(made, Clip(8, size=(16, 16)))


@pytest.mark.parametrize("exhausted", ["stop", "repeat"])
@pytest.mark.parametrize("random", [{"where": "random", "per_video": 90}, {"crop": "random"}])
def test_sample_like_epoch(folders: dict[str, str], exhausted: Any, random: dict[str, Any]) -> None:
    with mixed(folders, (2, 3), exhausted=exhausted) as made:
        view = made.clips(2, size=(16, 12), **random)
        found: dict[int, bytes] = {}
        for index, _, pixels in epoch(made, view.clip, seed=5):
            found.setdefault(index, pixels)
        assert exhausted == "stop" or len(found) == len(view)
        for index in (*list(found)[::17], *list(found)[-3:]):
            sample = view.sample(index, seed=5)
            assert sample["video"].tobytes() == found[index], index
        for index in set(range(len(view))) - set(found):
            assert view[index]["video"].shape == (2, 16, 12, 3)


@pytest.mark.parametrize("wrong", [-1, True, "x", 1.5, None])
def test_seeds_and_epochs_must_not_be_negative(folders: dict[str, str], wrong: Any) -> None:
    with ShardDataset(folders["a"]) as dataset:
        view = dataset.clips(2)
        for name in ("seed", "epoch"):
            with pytest.raises(InvalidArgument, match=f"{name} must be an integer from 0 up"):
                view.sample(0, **{name: wrong})
        assert view.sample(0, seed=3, epoch=2**70)["label"] == 970
