"""Statistics per channel: of arrays, and of the pixels of images and videos."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import shardio
from shardio import Array, DatasetWriter, Image, Schema, Video
from shardio.errors import InvalidArgument, MediaError
from shardio.maintenance import compute_stats, split, statistics
from shardio.media import decode_image, encode_jpeg
from shardio.transforms import Normalize
from tests.maintenance.datasets import write
from tests.media_made import scene, write_video
from tests.transforms.pictures import generator, picture

pytestmark = pytest.mark.usefixtures("quick_disk")


def check_channels(found: Any, values: npt.ArrayLike) -> None:
    """Compare statistics of a field with those of all its values, (…, channels)."""
    flat = np.asarray(values, np.float64)
    flat = flat.reshape(-1, flat.shape[-1])
    np.testing.assert_allclose(found["channels"]["mean"], flat.mean(0), rtol=1e-9)
    np.testing.assert_allclose(found["channels"]["std"], flat.std(0), rtol=1e-9)
    assert found["mean"] == pytest.approx(flat.mean(), rel=1e-9)
    assert found["std"] == pytest.approx(flat.std(), rel=1e-9)
    assert found["count"] == flat.size


@pytest.mark.parametrize("chunk", [1 << 20, 600])
@pytest.mark.parametrize(
    ("dtype", "shape", "n_pictures"),
    [
        ("uint8", (20, 30, 3), 6),
        ("uint8", (5, 20, 30, 3), 30),
        ("float32", (7,), None),
        ("float64", (50, 7), None),
        ("int16", (9, 8, 2), None),
    ],
)
def test_arrays_have_statistics_per_channel(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    shape: Any,
    n_pictures: int,
    chunk: int,
) -> None:
    monkeypatch.setattr(statistics, "_CHUNK_ITEMS", chunk)
    values = (generator().normal(100, 30, (6, *shape)) + np.arange(shape[-1])).astype(dtype)
    schema = Schema({"x": Array(dtype, shape)})
    folder = write(tmp_path / "d", 6, 2, schema=schema, samples=[{"x": each} for each in values])
    found = compute_stats(folder).stats["fields"]["x"]
    check_channels(found, values)
    assert found.get("pictures") == n_pictures


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("uint8", (28, 28)),
        ("int64", (3,)),
        ("float32", (65,)),
        ("float32", (9, 9, 5)),
        ("uint8", ()),
    ],
)
def test_other_arrays_have_none(tmp_path: Path, dtype: str, shape: Any) -> None:
    schema = Schema({"x": Array(dtype, shape)})
    folder = write(tmp_path / "d", 1, schema=schema, samples=[{"x": np.ones(shape, dtype)}])
    assert {"channels", "pictures"}.isdisjoint(compute_stats(folder).stats["fields"]["x"])


def test_a_channel_without_a_finite_value_has_no_mean(tmp_path: Path) -> None:
    values = np.array([[1, np.nan, 1e200], [2, np.inf, -1e200], [np.nan, np.nan, 0]])
    schema = Schema({"x": Array("float64", (3,))})
    folder = write(tmp_path / "d", 3, 3, schema=schema, samples=[{"x": each} for each in values])
    found = compute_stats(folder).stats["fields"]["x"]
    assert (found["count"], found["not_finite"], found["min"]) == (5, 4, -1e200)
    assert found["channels"] == {"mean": [1.5, None, 0.0], "std": [0.5, None, None]}


# --- decoded --------------------------------------------------------------------------------


@pytest.fixture
def pictures(tmp_path: Path) -> tuple[Path, list[npt.NDArray[np.uint8]]]:
    """Return a dataset of JPEGs of several sizes, one missing, in several shards; and pixels."""
    pytest.importorskip("simplejpeg", reason="simplejpeg is not installed")
    files = [encode_jpeg(picture(16 + i, 24, seed=i)) for i in range(5)]
    folder = tmp_path / "pictures"
    with DatasetWriter(folder, Schema({"image": Image(optional=True)}), shard_bytes=4096) as writer:
        for file in (*files, None):
            writer.append({"image": file})
    return folder, [decode_image(file) for file in files]


def all_pixels(pictures: Sequence[npt.NDArray[np.uint8]]) -> npt.NDArray[np.uint8]:
    return np.concatenate([each.reshape(-1, 3) for each in pictures])


@pytest.mark.process
def test_images_are_decoded_on_request(pictures: Any) -> None:
    folder, pixels = pictures
    assert compute_stats(folder).stats["fields"] == {}
    report = compute_stats(folder, decode=True, workers=0)
    found = report.stats["fields"]["image"]
    check_channels(found, all_pixels(pixels))
    assert (found["pictures"], found["missing"]) == (5, 1)
    assert (found["smallest"], found["largest"]) == ([16, 24, 3], [20, 24, 3])
    with shardio.open(folder) as dataset:
        assert dataset.stats == {"whole": report.stats}
        assert len(dataset.shards) > 1
    assert compute_stats(folder, decode=True).generation == report.generation  # with workers


def test_statistics_without_decoding_keep_those_of_pixels(pictures: Any) -> None:
    folder, _ = pictures
    decoded = compute_stats(folder, decode=True, workers=0)
    again = compute_stats(folder)
    assert (again.stats, again.generation) == (decoded.stats, decoded.generation)


def test_frames_of_videos_are_spread_evenly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "_FRAME_BYTES", 3 * 64 * 96 * 3)  # three frames at a time
    folder = tmp_path / "videos"
    with DatasetWriter(folder, Schema({"video": Video()})) as writer:
        for n in (20, 3):
            path = write_video(tmp_path / f"{n}.mp4", scene(n))
            writer.append({"video": path.read_bytes()})
    with shardio.open(folder) as dataset:
        long, short = (
            np.concatenate([sample["video"] for sample in dataset.select([i]).clips(1)])
            for i in range(2)
        )
    for frames, numbers in ((4, [2, 7, 12, 17]), (1, [10]), (None, [*range(20)])):
        found = compute_stats(folder, decode=True, frames=frames).stats["fields"]["video"]
        of_short = short[1:2] if frames == 1 else short
        check_channels(found, all_pixels([*long[numbers], *of_short]))
        assert found["frames_per_video"] == frames
        assert found["pictures"] == len(numbers) + len(of_short)
    with pytest.raises(InvalidArgument, match="frames must be 1 or more, or None for all; found 0"):
        compute_stats(folder, decode=True, frames=0)


def test_a_damaged_picture_is_an_error_that_names_it(tmp_path: Path) -> None:
    pytest.importorskip("simplejpeg", reason="simplejpeg is not installed")
    file = encode_jpeg(picture())
    folder = tmp_path / "d"
    with DatasetWriter(folder, Schema({"image": Image()})) as writer:
        writer.append({"image": file})
        writer.append({"image": file[: len(file) // 2]})
    with pytest.raises(MediaError, match=r"\.shard, field 'image', sample 1: "):
        compute_stats(folder, decode=True, workers=0)
    with shardio.open(folder) as dataset:
        assert dataset.generation == 1


# --- Normalize ------------------------------------------------------------------------------


def normalized(transform: Any, pixels: Sequence[npt.NDArray[np.uint8]]) -> npt.NDArray[Any]:
    return np.concatenate([transform({"x": each})["x"].reshape(-1, 3) for each in pixels])


def test_a_normalize_of_a_dataset_makes_mean_0_and_deviation_1(pictures: Any) -> None:
    folder, pixels = pictures
    compute_stats(folder, decode=True, workers=0)
    with shardio.open(folder) as dataset:
        found = normalized(Normalize.of(dataset, dtype="float32"), pixels)
        levels = np.concatenate([each.reshape(-1, 3) for each in pixels]) / 255
        np.testing.assert_allclose(Normalize.of(dataset).mean, levels.mean(0), atol=1e-6)
        np.testing.assert_allclose(Normalize.of(dataset).std, levels.std(0), atol=1e-6)
        assert Normalize.of(dataset, dtype="float16")({"x": pixels[0]})["x"].dtype == np.float16
    np.testing.assert_allclose(found.mean(0), 0, atol=1e-4)
    np.testing.assert_allclose(found.std(0), 1, atol=1e-4)


def test_statistics_of_another_part_are_named(pictures: Any) -> None:
    folder, _ = pictures
    split(folder, {"train": 0.5, "val": 0.5})
    compute_stats(folder, subset="train", decode=True, workers=0)
    train = re.escape(f"Normalize.of(shardio.open('{folder}', subset='train')), or run `shardio")
    for subset in ("val", None):
        with shardio.open(folder, subset=subset) as dataset:
            with pytest.raises(InvalidArgument, match=f"pixels of image: take those of .*{train}"):
                Normalize.of(dataset)
    with shardio.open(folder, subset="train") as dataset:
        assert Normalize.of(dataset).mean[0] > 0
    compute_stats(folder, decode=True, workers=0)


def test_several_fields_are_combined_unless_named(tmp_path: Path) -> None:
    left, right = generator().integers(0, 200, (2, 5, 8, 9, 3), np.uint8)
    right = right[:, :4] + np.uint8(50)
    schema = Schema({"left": Array("uint8", (8, 9, 3)), "right": Array("uint8", (4, 9, 3))})
    samples = [{"left": a, "right": b} for a, b in zip(left, right, strict=True)]
    folder = write(tmp_path / "d", 5, schema=schema, samples=samples)
    compute_stats(folder)
    with shardio.open(folder) as dataset:
        found = normalized(Normalize.of(dataset), [left, right])
        np.testing.assert_allclose(found.mean(0), 0, atol=1e-4)
        np.testing.assert_allclose(found.std(0), 1, atol=1e-4)
        one = Normalize.of(dataset, fields="right")({"left": left, "right": right})
    assert one["left"] is left
    np.testing.assert_allclose(one["right"].reshape(-1, 3).mean(0), 0, atol=1e-4)


def test_a_subset_has_its_own_statistics(tmp_path: Path) -> None:
    schema = Schema({"x": Array("uint8", (8, 8, 3))})
    folder = write(
        tmp_path / "d", 8, schema=schema, samples=[{"x": picture(8, 8, i)} for i in range(8)]
    )
    shardio.maintenance.split(folder, {"train": 0.5, "val": 0.5})
    compute_stats(folder)
    with shardio.open(folder, subset="train") as dataset:
        words = (
            rf"{folder}: .* pixels of x: take those of the whole dataset, Normalize.of\(.*, or run "
            rf"`shardio stats {folder} --subset train --decode`, and"
        )
        with pytest.raises(InvalidArgument, match=words):
            Normalize.of(dataset)
        pixels = [sample["x"] for sample in dataset]
    compute_stats(folder, subset="train")
    with shardio.open(folder, subset="train") as dataset:
        np.testing.assert_allclose(normalized(Normalize.of(dataset), pixels).mean(0), 0, atol=1e-4)


def test_a_view_has_the_statistics_of_its_dataset(tmp_path: Path) -> None:
    folder = tmp_path / "videos"
    with DatasetWriter(folder, Schema({"video": Video()})) as writer:
        writer.append({"video": write_video(tmp_path / "a.mp4", scene(5)).read_bytes()})
    with shardio.open(folder) as dataset:
        with pytest.raises(InvalidArgument, match="of video: run `shardio stats"):
            Normalize.of(dataset.clips(2))
    compute_stats(folder, decode=True)
    with shardio.open(folder) as dataset:
        assert repr(Normalize.of(dataset.clips(2))) == repr(Normalize.of(dataset))


def test_what_has_no_statistics_is_refused(pictures: Any, tmp_path: Path) -> None:
    folder, _ = pictures
    schema = Schema({"x": Array("uint8", (8, 8))})
    grey = write(tmp_path / "d", 1, schema=schema, samples=[{"x": np.ones((8, 8), np.uint8)}])
    with pytest.raises(InvalidArgument, match=r"an opened dataset, such as .*found 'out/'"):
        Normalize.of("out/")
    with shardio.open(grey) as dataset, pytest.raises(InvalidArgument, match="no field has pict"):
        Normalize.of(dataset)
    with shardio.mix([str(folder), str(folder)], weights=[1, 1]) as mixture:
        with pytest.raises(InvalidArgument, match="a mixture of .* pass one of its datasets"):
            Normalize.of(mixture)
