"""Batches are shown as a loader delivers them, in any order of requests."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

import shardio
from shardio import Array, Image, InvalidArgument, Text, Video
from shardio.media import demux, to_png
from shardio_tools.view.epochs import EpochBatches
from tests.media_made import scene, write_video
from tests.shards import flip

N = 23
FIELDS = shardio.Schema({"image": Image(), "label": Array("int64"), "score": Array("float32")})


def _write(path: Path, n: int = N) -> Path:
    with shardio.DatasetWriter(path, FIELDS, classes=["cat", "dog"], shard_bytes=5000) as writer:
        for i in range(n):
            picture = to_png(np.full((32, 32, 3), 10 * i, np.uint8))
            writer.append({"image": picture, "label": i % 3, "score": np.float32(i)})
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write(tmp_path_factory.mktemp("epochs") / "set")


@pytest.fixture
def dataset(folder: Path) -> Iterator[shardio.ShardDataset]:
    with shardio.open(folder) as opened:
        yield opened


def _params(**options: object) -> dict[str, str]:
    return {name: str(value) for name, value in options.items()}


@pytest.mark.parametrize("shuffle", ["none", "full", "blocks", "shards"])
def test_the_order_is_that_of_a_loader(dataset: shardio.ShardDataset, shuffle: Any) -> None:
    options: dict[str, Any] = {"seed": 5, "num_workers": 0, "output": "numpy", "decode": False}
    chosen = False if shuffle == "none" else shuffle
    with shardio.ShardLoader(dataset.path, 4, shuffle=chosen, **options) as loader:
        expected = [[batch.indices.tolist() for batch in loader] for _ in range(3)]
    epochs = EpochBatches(dataset.path)
    for epoch, batch in ((2, 3), (0, 0), (2, 5), (1, 2)):
        given = _params(epoch=epoch, batch=batch, batch_size=4, shuffle=shuffle, seed=5)
        found = epochs.describe(dataset, given)
        assert [each["row"] for each in found["samples"]] == expected[epoch][batch]
        assert (found["n_batches"], found["epoch"], found["batch"]) == (6, epoch, batch)
        assert (found["shuffle"], found["seed"], found["batch_size"]) == (shuffle, 5, 4)
    epochs.close()


def test_a_batch_without_a_loader_has_the_pictures_of_the_dataset(
    dataset: shardio.ShardDataset,
) -> None:
    epochs = EpochBatches(dataset.path)
    found = epochs.describe(dataset, {})
    assert (found["batch_size"], found["fixed"], found["transform"]) == (32, False, None)
    sample = found["samples"][4]
    shard = dataset.shards[int(dataset.locate(np.array([4]))[0])].name
    assert sample["origin"].startswith(f"{shard}, row ")
    assert (sample["row"], sample["label"], sample["valid"]) == (4, "dog", True)
    assert sample["thumb"] == "/thumbnail/4/image?size=256" and sample["skipped"] is None
    assert found["samples"][2]["label"] == "2"
    with pytest.raises(InvalidArgument, match="pictures of their own with --loader"):
        epochs.picture(0, 0, 0, "image")
    epochs.close()


def test_samples_without_pictures_have_the_first_of_their_values(tmp_path: Path) -> None:
    schema = shardio.Schema(
        {"n": Array("float32"), "tokens": Array("int64", (None,), optional=True), "text": Text()}
    )
    samples = [
        {"n": 0.5, "tokens": np.arange(990, 1_010), "text": "a" * 900},
        {"n": 2, "tokens": None, "text": ""},
    ]
    shardio.convert(samples, tmp_path / "set", schema=schema)
    epochs = EpochBatches(str(tmp_path / "set"))
    with shardio.open(tmp_path / "set") as dataset:
        first, second = epochs.describe(dataset, {})["samples"]
    numbers = " ".join(f"{n:,}" for n in range(990, 1_006))
    assert first["fields"] == [
        {"name": "text", "text": "a" * 200},
        {"name": "tokens", "text": f"int64 20: {numbers} …"},
        {"name": "n", "text": "0.5"},
    ]
    assert second["fields"][1]["text"] == "sample 1: the field 'tokens' is missing"
    epochs.close()


def test_weights_of_very_many_samples_are_not_read(
    dataset: shardio.ShardDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardio_tools.view.epochs._MAX_WEIGHTS", 22)
    with pytest.raises(InvalidArgument, match="up to 22 samples are read here.* has 23: use --lo"):
        EpochBatches(dataset.path).describe(dataset, _params(weights="score"))


def test_weights_draw_samples(dataset: shardio.ShardDataset) -> None:
    epochs = EpochBatches(dataset.path)
    found = epochs.describe(dataset, _params(weights="score", batch_size=23))
    rows = [each["row"] for each in found["samples"]]
    assert 0 not in rows and len(set(rows)) < 23 and found["weights"] == "score"
    for field, text in (("image", "not a column of numbers"), ("x", "'x' is not a column")):
        with pytest.raises(InvalidArgument, match=text):
            epochs.describe(dataset, _params(weights=field))
    with pytest.raises(InvalidArgument, match="set no shuffle"):
        epochs.describe(dataset, _params(weights="score", shuffle="full"))
    epochs.close()


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"batch": "1"}, "no batch 1 in epoch 0, which has 1"),
        ({"batch": "-1"}, "batch must be an integer from 0"),
        ({"epoch": "x"}, "epoch must be an integer from 0"),
        ({"batch_size": "0"}, "batch_size must be an integer from 1 to 256"),
        ({"batch_size": "257"}, "batch_size must be an integer from 1 to 256"),
        ({"seed": "9" * 30}, "seed must be an integer"),
        ({"shuffle": "some"}, "shuffle is one of none, full, blocks, shards; found 'some'"),
    ],
)
def test_invalid_options_are_errors(
    dataset: shardio.ShardDataset, params: dict[str, str], expected: str
) -> None:
    epochs = EpochBatches(dataset.path)
    with pytest.raises(InvalidArgument, match=expected):
        epochs.describe(dataset, params)
    epochs.close()


def test_clips_are_shown_by_their_first_frames(tmp_path: Path) -> None:
    for name, n in (("a", 20), ("b", 9)):
        write_video(tmp_path / "videos" / "x" / f"{name}.mp4", scene(n))
    shardio.convert(tmp_path / "videos", tmp_path / "set", workers=0, size=16, frames=4)
    with shardio.open(tmp_path / "set") as dataset:
        epochs = EpochBatches(dataset.path)
        samples = epochs.describe(dataset, {})["samples"]
        epochs.close()
    shown = [(each["row"], each["thumb"]) for each in samples]
    assert shown[1] == (0, "/frame/0/frames/4?size=256")
    assert shown[-1] == (1, "/frame/1/frames/4?size=256") and len(shown) == 7
    assert samples[1]["origin"].endswith("row 0, frames 4 to 7")


def test_videos_without_clips_are_samples_as_a_whole(tmp_path: Path) -> None:
    video = demux(str(write_video(tmp_path / "a.mp4", scene(5))))
    schema = shardio.Schema({"left": Video(), "right": Video()})
    with shardio.DatasetWriter(tmp_path / "set", schema) as writer:
        writer.append({"left": video, "right": video})
    with shardio.open(tmp_path / "set") as dataset:
        epochs = EpochBatches(dataset.path)
        (sample,) = epochs.describe(dataset, {})["samples"]
        epochs.close()
    assert (sample["row"], sample["thumb"]) == (0, "/thumbnail/0/left?size=256")


def _brighter(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    if sample["label"] == 2 and sample["score"] == 5:
        raise ValueError("sample 5 has no place here")
    image = np.moveaxis(sample["image"], -1, 0) / np.float32(255)
    return {"image": image, "label": sample["label"], "drawn": rng.integers(1 << 30)}


def _color(data: bytes) -> int:
    with Pillow.open(io.BytesIO(data)) as picture:
        return int(np.asarray(picture.convert("RGB")).mean().round())


def test_a_loader_is_shown_with_its_transform_and_what_it_skips(
    dataset: shardio.ShardDataset,
) -> None:
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 1}
    options["transform"] = _brighter
    epochs = EpochBatches(dataset.path, options)
    with shardio.ShardLoader(
        dataset.path, num_workers=0, output="numpy", on_error="skip", max_skips=99, **options
    ) as loader:
        expected = [list(loader) for _ in range(2)]
    failures = 0
    for epoch, batch in ((1, 5), (0, 0), *((0, n) for n in range(1, 6))):
        found = epochs.describe(dataset, _params(epoch=epoch, batch=batch, batch_size=9))
        right = expected[epoch][batch]
        assert found["fixed"] and found["transform"] == "_brighter" and found["batch_size"] == 4
        assert len(found["samples"]) == right.n_rows
        for i, sample in enumerate(found["samples"]):
            assert sample["valid"] == bool(right.valid[i])
            texts = {each["name"]: each["text"] for each in sample["fields"]}
            assert texts["drawn"] == f"{int(right['drawn'][i]):,}"
            if not sample["valid"]:
                failures += epoch == 0
                assert sample["row"] == 5 and sample["thumb"] is None
                assert sample["skipped"].startswith("TransformError: ")
                assert "sample 5 has no place here" in sample["skipped"]
                assert "replaced by" in sample["origin"]
                continue
            assert sample["row"] == int(right.indices[i])
            assert sample["thumb"] == f"/epoch/{epoch}/{batch}/{i}/image"
            picture = epochs.picture(epoch, batch, i, "image")
            assert abs(_color(picture.data) - 10 * sample["row"]) <= 3
    assert failures == 1
    epochs.close()


def test_pictures_of_a_batch_do_not_load_it_again(dataset: shardio.ShardDataset) -> None:
    calls = []

    def counted(sample: dict[str, Any]) -> dict[str, Any]:
        calls.append(sample["label"])
        return sample

    epochs = EpochBatches(dataset.path, {"batch_size": 4, "transform": counted})
    epochs.describe(dataset, {})
    n = len(calls)
    for i in range(4):
        epochs.picture(0, 0, i, "image")
    assert len(calls) == n
    for field, item, expected in (
        ("image", 4, "4 rows"),
        ("x", 0, "field 'x'"),
        ("label", 0, "no pic"),
    ):
        with pytest.raises(InvalidArgument, match=expected):
            epochs.picture(0, 0, item, field)
    epochs.close()


def test_a_loader_or_a_function_that_returns_one_is_shown_as_it_is(
    dataset: shardio.ShardDataset,
) -> None:
    def make() -> shardio.ShardLoader[Any]:
        return shardio.ShardLoader(dataset.path, 5, num_workers=0, output="numpy", shuffle=True)

    found = []
    for given in (make(), make, lambda: {"batch_size": 5, "shuffle": True}):
        epochs = EpochBatches(dataset.path, given)
        found.append(epochs.describe(dataset, _params(epoch=2, batch=1))["samples"])
        epochs.close()
    assert found[0] == found[1] == found[2] and len(found[0]) == 5


@pytest.mark.cpu_device
@pytest.mark.process
def test_tensors_are_shown_as_arrays(dataset: shardio.ShardDataset) -> None:
    epochs = EpochBatches(dataset.path, {"batch_size": 3, "output": "tinygrad", "num_workers": 0})
    found = epochs.describe(dataset, {})
    assert found["samples"][1]["thumb"] == "/epoch/0/0/1/image"
    picture = epochs.picture(0, 0, 1, "image")
    epochs.close()
    assert abs(_color(picture.data) - 10) <= 3


def test_a_batch_that_fails_shows_its_samples_and_the_error(tmp_path: Path) -> None:
    path = _write(tmp_path / "set")
    shard = sorted(path.rglob("*.shard"))[0]
    flip(shard, shard.read_bytes().index(b"\x89PNG") + 40)
    epochs = EpochBatches(str(path), {"batch_size": 4, "on_error": "raise"})
    with shardio.open(path) as dataset:
        found = epochs.describe(dataset, {})
    epochs.close()
    assert [each["row"] for each in found["samples"]] == [0, 1, 2, 3]
    assert not any(each["valid"] for each in found["samples"])
    assert "field 'image', sample 0" in found["text"]


def test_samples_of_another_dataset_have_no_row(
    dataset: shardio.ShardDataset, tmp_path: Path
) -> None:
    other = _write(tmp_path / "other", 3)
    epochs = EpochBatches(dataset.path, {"dataset": str(other), "batch_size": 2})
    found = epochs.describe(dataset, {})
    epochs.close()
    assert [each["row"] for each in found["samples"]] == [None, None]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (7, "a function that returns either; found int"),
        ({"batch_sise": 4}, "batch_sise"),
        ({"shuffle": "some"}, "shuffle"),
        (lambda: 1 / 0, "--loader: the function raised ZeroDivisionError: division by zero"),
        (lambda: sys.exit(4), "--loader: the function raised SystemExit: 4"),
    ],
)
def test_other_objects_are_no_loaders(
    dataset: shardio.ShardDataset, given: Any, expected: str
) -> None:
    with pytest.raises(InvalidArgument, match=expected):
        EpochBatches(dataset.path, given).describe(dataset, {})


def test_a_function_of_the_loader_that_needs_arguments_is_an_error(tmp_path: Path) -> None:
    def make(path: str) -> Any:
        return path

    epochs = EpochBatches(str(tmp_path), make)
    with pytest.raises(InvalidArgument, match=r"--loader: the function raised TypeError: .*'path'"):
        epochs.picture(0, 0, 0, "image")
