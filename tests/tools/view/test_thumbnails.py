"""Thumbnails of samples are small pictures from a bounded cache."""

from __future__ import annotations

import io
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

import shardio
from shardio import Array, Audio, Bytes, Image, InvalidArgument, MediaError, Text, Video
from shardio.media import ClipDecoder, demux, sound_of, to_png
from shardio_tools.view.thumbnails import Picture, PictureCache, Thumbnails
from tests.media_made import quadrants, scene, write_sound, write_video

FIELDS = shardio.Schema(
    {
        "image": Image(optional=True),
        "video": Video(),
        "frames": Array("uint8", (4, 24, 40, 3)),
        "grey": Array("uint8", (32, 20)),
        "planes": Array("float32", (3, 30, 40)),
        "file": Bytes(),
        "note": Text(),
        "state": Array("float32", (None, 7)),
        "matrix": Array("float32", (80, 90)),
        "sound": Audio(),
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
        "state": np.cumsum(np.ones((50, 7), np.float32), axis=0),
        "matrix": np.full((80, 90), np.nan, np.float32),
        "sound": sound_of(str(write_sound(folder / "a.wav"))),
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


@pytest.mark.parametrize(("name", "size"), [("state", (128, 64)), ("sound", (128, 64))])
def test_curves_are_drawn_without_a_background(
    dataset: shardio.ShardDataset, name: str, size: tuple[int, int]
) -> None:
    data, media_type = Thumbnails().get(dataset, 0, name, 128)
    with Pillow.open(io.BytesIO(data)) as picture:
        assert (media_type, picture.mode, picture.size) == ("image/png", "RGBA", size)
        drawn = np.asarray(picture)[..., 3] > 0
    assert drawn.any(axis=0).all() and 0 < drawn.mean() < 0.5


def test_a_curve_rises_as_its_values_do(dataset: shardio.ShardDataset) -> None:
    with Pillow.open(io.BytesIO(Thumbnails().get(dataset, 0, "state", 128)[0])) as picture:
        drawn = np.asarray(picture)[..., 3] > 0
    heights = drawn.argmax(axis=0)
    assert heights[0] > 55 and heights[-1] < 8 and (np.diff(heights) <= 0).all()


def test_a_matrix_is_a_heat_map(dataset: shardio.ShardDataset) -> None:
    data, media_type = Thumbnails().get(dataset, 0, "matrix", 128)
    assert media_type == "image/png" and _pixels(data).shape == (160, 180, 3)


def test_frames_are_decoded_ahead_once_they_are_played_in_order(
    dataset: shardio.ShardDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[list[int]] = []
    decode = ClipDecoder.decode

    def counted(self: Any, stream: Any, frames: Any, out: Any) -> None:
        decoded.append(list(frames))
        decode(self, stream, frames, out)

    monkeypatch.setattr(ClipDecoder, "decode", counted)
    thumbnails = Thumbnails()
    for n in range(12):
        found = _pixels(thumbnails.frame(dataset, 0, "video", n, 512)[0])
        assert np.abs(found - scene(12)[n]).mean() < 16
    assert _pixels(thumbnails.frame(dataset, 0, "video", 3, 64)[0]).shape == (43, 64, 3)
    assert decoded == [[0], list(range(1, 9)), list(range(9, 12)), [3]]


def test_large_frames_are_decoded_one_by_one(
    dataset: shardio.ShardDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardio_tools.view.thumbnails._MAX_FRAME_BYTES", 96 * 64 * 3 * 2)
    thumbnails = Thumbnails()
    for n in (0, 1):
        thumbnails.frame(dataset, 0, "video", n, 512)
    closed: Any = SimpleNamespace(lineage=dataset.lineage, generation=dataset.generation)
    assert thumbnails.frame(closed, 0, "video", 2, 512).media_type == "image/jpeg"
    with pytest.raises(AttributeError):
        thumbnails.frame(closed, 0, "video", 3, 512)


def test_an_image_of_very_many_pixels_is_not_decoded(
    dataset: shardio.ShardDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardio_tools.view.stored.MAX_PIXELS", 19_999)
    for name in ("image", "file"):
        with pytest.raises(InvalidArgument, match="100 high × 200 wide pixels: at most 19,999"):
            Thumbnails().get(dataset, 0, name, 128)
        with pytest.raises(InvalidArgument, match="at most 19,999 are decoded"):
            Thumbnails().frame(dataset, 0, name, 0, 128)


def test_frames_of_arrays_and_images_are_pictures(dataset: shardio.ShardDataset) -> None:
    thumbnails = Thumbnails()
    for n in range(4):
        found = _pixels(thumbnails.frame(dataset, 0, "frames", n, 512)[0])
        assert found.shape == (24, 40, 3) and np.abs(found - 60 * n).max() < 4
    assert _pixels(thumbnails.frame(dataset, 0, "grey", 0, 512)[0]).shape == (32, 20, 3)
    assert _pixels(thumbnails.frame(dataset, 0, "image", 0, 100)[0]).shape == (50, 100, 3)
    assert _pixels(thumbnails.frame(dataset, 0, "file", 0, 512)[0]).shape == (100, 200, 3)


@pytest.mark.parametrize(
    ("name", "frame", "size", "expected"),
    [
        ("video", 12, 512, "there is no frame 12; the video has 12"),
        ("video", -1, 512, "there is no frame -1"),
        ("frames", 4, 512, "'frames' has no frame 4; it has 4"),
        ("image", 1, 512, "'image' has no frame 1; it has 1"),
        ("state", 0, 512, "'state' has no frame 0"),
        ("sound", 0, 512, "'sound' has no frame 0"),
        ("video", 0, 5000, "64 to 4096 pixels; found 5000"),
    ],
)
def test_a_frame_that_does_not_exist_is_an_error(
    dataset: shardio.ShardDataset, name: str, frame: int, size: int, expected: str
) -> None:
    with pytest.raises(InvalidArgument, match=expected):
        Thumbnails().frame(dataset, 0, name, frame, size)


def test_a_thumbnail_shows_the_value(dataset: shardio.ShardDataset) -> None:
    thumbnails = Thumbnails()
    for name, size in (("image", (64, 128)), ("planes", (90, 120))):
        found, expected = _pixels(thumbnails.get(dataset, 0, name, 128)[0]), quadrants(*size[::-1])
        assert np.abs(found - expected).mean() < 8
    assert np.abs(_pixels(thumbnails.get(dataset, 0, "frames", 128)[0]) - 120).max() < 4


def test_a_second_request_does_not_read_the_dataset(dataset: shardio.ShardDataset) -> None:
    thumbnails = Thumbnails()
    first = thumbnails.get(dataset, 0, "image", 128)
    closed: Any = SimpleNamespace(lineage=dataset.lineage, generation=dataset.generation)
    assert thumbnails.get(closed, 0, "image", 128) is first
    with pytest.raises(AttributeError, match="schema"):
        thumbnails.get(closed, 0, "image", 256)


def test_the_cache_drops_what_was_not_used_for_the_longest_time() -> None:
    cache = PictureCache(max_bytes=4_000)
    for key in "abc":
        cache.add(key, Picture(bytes(700), "image/png"))
    assert cache.get("a") is not None
    cache.add("d", Picture(bytes(700), "image/png"))
    assert [key for key in "abcd" if cache.get(key) is not None] == ["a", "c", "d"]
    assert cache.n_bytes == 3_600
    cache.add("d", Picture(bytes(100), "image/png"))
    assert cache.n_bytes == 3_000
    cache.add("big", Picture(bytes(5_000), "image/png"))
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
