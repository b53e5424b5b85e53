"""Thumbnails of samples are small pictures from a bounded cache."""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image as Pillow

import shardio
from shardio import Array, Bytes, Image, InvalidArgument, MediaError, Text, Video
from shardio.media import demux, to_png
from shardio_tools.view.thumbnails import PictureCache, Thumbnails
from tests.media_made import quadrants, scene, write_video

FIELDS = shardio.Schema(
    {
        "image": Image(optional=True),
        "video": Video(),
        "frames": Array("uint8", (4, 24, 40, 3)),
        "grey": Array("uint8", (32, 20)),
        "planes": Array("float32", (3, 30, 40)),
        "file": Bytes(),
        "note": Text(),
    }
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Iterator[shardio.ShardDataset]:
    folder = tmp_path_factory.mktemp("thumbnails")
    video = demux(str(write_video(folder / "a.mp4", scene(12))))
    picture = to_png(quadrants(200, 100))
    sample = {
        "image": picture,
        "video": video,
        "frames": np.stack([np.full((24, 40, 3), 60 * n, np.uint8) for n in range(4)]),
        "grey": np.full((32, 20), 77, np.uint8),
        "planes": np.moveaxis(quadrants(40, 30), -1, 0).astype(np.float32) / 255,
        "file": picture,
        "note": "nothing to see",
    }
    with shardio.DatasetWriter(folder / "set", FIELDS) as writer:
        writer.append(sample)
        writer.append({**sample, "image": None, "file": picture[:90]})
    with shardio.open(folder / "set") as opened:
        yield opened


def _pixels(data: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    with Pillow.open(io.BytesIO(data)) as picture:
        return np.asarray(picture.convert("RGB")).astype(np.int64)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("image", (64, 128, 3)),
        ("video", (64, 96, 3)),
        ("frames", (72, 120, 3)),
        ("grey", (128, 80, 3)),
        ("planes", (90, 120, 3)),
        ("file", (64, 128, 3)),
    ],
)
def test_each_kind_of_picture_has_a_thumbnail(
    dataset: shardio.ShardDataset, name: str, shape: tuple[int, ...]
) -> None:
    data, media_type = Thumbnails().get(dataset, 0, name, 128)
    assert (media_type, _pixels(data).shape) == ("image/jpeg", shape)


def test_a_thumbnail_shows_the_value(dataset: shardio.ShardDataset) -> None:
    thumbnails = Thumbnails()
    for name, size in (("image", (64, 128)), ("planes", (90, 120))):
        found, expected = _pixels(thumbnails.get(dataset, 0, name, 128)[0]), quadrants(*size[::-1])
        assert np.abs(found - expected).mean() < 8
    assert np.abs(_pixels(thumbnails.get(dataset, 0, "frames", 128)[0]) - 120).max() < 4


def test_a_second_request_does_not_read_the_dataset(dataset: shardio.ShardDataset) -> None:
    thumbnails = Thumbnails()
    first = thumbnails.get(dataset, 0, "image", 128)
    assert thumbnails.get(None, 0, "image", 128) is first
    with pytest.raises(AttributeError):
        thumbnails.get(None, 0, "image", 256)


def test_the_cache_drops_what_was_not_used_for_the_longest_time() -> None:
    cache = PictureCache(max_bytes=4_000)
    for key in "abc":
        cache.add(key, (bytes(700), "image/png"))
    assert cache.get("a") is not None
    cache.add("d", (bytes(700), "image/png"))
    assert [key for key in "abcd" if cache.get(key) is not None] == ["a", "c", "d"]
    assert cache.n_bytes == 3_600
    cache.add("d", (bytes(100), "image/png"))
    assert cache.n_bytes == 3_000
    cache.add("big", (bytes(5_000), "image/png"))
    assert cache.n_bytes == 0


@pytest.mark.parametrize(
    ("row", "name", "size", "expected"),
    [
        (2, "image", 128, "there is no sample 2; the dataset has 2"),
        (-1, "image", 128, "there is no sample -1"),
        (0, "nothing", 128, "there is no field 'nothing'; the fields are: image, video"),
        (0, "image", 63, "64 to 512 pixels; found 63"),
        (0, "image", 513, "64 to 512 pixels; found 513"),
        (0, "note", 128, "sample 0: the field 'note' has no picture"),
        (1, "image", 128, "sample 1: the field 'image' is missing"),
    ],
)
def test_a_request_without_an_answer_is_an_error(
    dataset: shardio.ShardDataset, row: int, name: str, size: int, expected: str
) -> None:
    with pytest.raises(InvalidArgument, match=expected):
        Thumbnails().get(dataset, row, name, size)


def test_a_damaged_picture_is_an_error_and_is_not_cached(dataset: shardio.ShardDataset) -> None:
    thumbnails = Thumbnails()
    with pytest.raises(MediaError):
        thumbnails.get(dataset, 1, "file", 128)
    assert thumbnails.n_bytes == 0
