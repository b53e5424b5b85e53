"""Values of stored samples decode and show themselves."""

from __future__ import annotations

import copy
import io
import pickle
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

import shardio
from shardio import DatasetWriter, EncodedStream, Image, MediaError, Schema, Video
from shardio.format.types import EncodedImage
from shardio.media import decode_image, demux, encode_jpeg, pillow_image
from shardio.media.values import StoredImage, StoredVideo, thumbnail
from tests.media.images_made import decoded, saved, smooth
from tests.media_made import scene, write_video

FRAMES = 30


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Iterator[shardio.ShardDataset]:
    folder = tmp_path_factory.mktemp("values")
    stream = demux(str(write_video(folder / "a.mp4", scene(FRAMES))))
    with DatasetWriter(folder / "set", Schema({"image": Image(), "video": Video()})) as writer:
        writer.append({"image": encode_jpeg(smooth(48, 64)), "video": stream})
        writer.append({"image": saved(smooth(48, 64), "PNG"), "video": stream})
    with shardio.open(folder / "set") as opened:
        yield opened


def test_an_image_decodes(dataset: shardio.ShardDataset) -> None:
    for sample in dataset:
        image = sample["image"]
        assert np.array_equal(image.decode(), decode_image(bytes(image)))
        assert image.decode("grey").shape == (48, 64, 1)
        assert np.array_equal(np.asarray(image.to_pil()), image.decode())


def test_an_image_is_still_the_bytes_of_its_file(dataset: shardio.ShardDataset) -> None:
    image, plain = dataset[1]["image"], saved(smooth(48, 64), "PNG")
    assert isinstance(image, EncodedImage) and image == plain and hash(image) == hash(plain)
    assert (len(image), bytes(image), image.shape) == (len(plain), plain, (48, 64, 3))
    with Pillow.open(io.BytesIO(image)) as picture:
        assert picture.size == (64, 48)
    assert np.frombuffer(image, np.uint8).tobytes() == plain
    for again in (pickle.loads(pickle.dumps(image)), copy.deepcopy(image)):
        assert (type(again), again, again.shape) == (StoredImage, plain, (48, 64, 3))


def test_an_array_of_an_image_is_an_error_that_names_decode(dataset: shardio.ShardDataset) -> None:
    image = dataset[0]["image"]
    with pytest.raises(TypeError, match=r"value\.decode\(\) returns its pixels"):
        np.asarray(image)
    with pytest.raises(TypeError, match=r"value\.decode\(\) returns its pixels"):
        np.stack([image, image])


def test_pillow_is_answered_with_to_pil(dataset: shardio.ShardDataset) -> None:
    with pytest.raises(AttributeError, match=r"write image\.to_pil\(\), an image of Pillow"):
        Pillow.fromarray(dataset[0]["image"])
    with pytest.raises(AttributeError, match=r"write video\.to_pil\(frame\), an image of Pillow"):
        Pillow.fromarray(dataset[0]["video"])


def test_a_video_decodes_all_frames_a_slice_or_a_list(dataset: shardio.ShardDataset) -> None:
    video = dataset[0]["video"]
    expected = decoded(video, range(FRAMES), (64, 96, 3))
    assert issubclass(type(video), EncodedStream)
    for found, part in (
        (video.decode(), expected),
        (np.asarray(video), expected),
        (video.decode(5, 11, 2), expected[5:11:2]),
        (video.decode(-3), expected[-3:]),
        (video.decode(stop=4), expected[:4]),
        (video.decode(step=-1), expected[::-1]),
        (video.decode(FRAMES), expected[:0]),
        (video.decode(frames=[7, 0, -1]), expected[[7, 0, -1]]),
    ):
        assert found.dtype == np.uint8 and np.array_equal(found, part)
    assert video.decode(0, 2, size=(32, 32)).shape == (2, 32, 32, 3)
    assert np.asarray(video, np.float32).dtype == np.float32
    assert np.array_equal(np.asarray(video.to_pil(3)), expected[3])
    again = pickle.loads(pickle.dumps(video))
    assert type(again) is StoredVideo and np.array_equal(again.decode(0, 2), expected[:2])


def test_frames_that_a_video_has_not(dataset: shardio.ShardDataset) -> None:
    video = dataset[0]["video"]
    for frames in ([FRAMES], [-FRAMES - 1]):
        text = f"no frame {frames[0]}; the video has {FRAMES} frames"
        with pytest.raises(shardio.InvalidArgument, match=text):
            video.decode(frames=frames)
    with pytest.raises(shardio.InvalidArgument, match="found both"):
        video.decode(2, frames=[1])
    with pytest.raises(ValueError, match="a new array"):
        np.asarray(video, copy=False)


def test_what_is_no_array_says_how_to_decode_it(dataset: shardio.ShardDataset) -> None:
    video: Any = dataset[0]["video"]
    for take in (lambda: video[0], lambda: video[::2], lambda: list(video)):
        with pytest.raises(TypeError, match=r"write video\.decode\(start, stop, step\), or"):
            take()
    for name in ("shape", "numpy", "get_frame"):
        with pytest.raises(AttributeError, match=rf"no attribute '{name}': write .*video\.decode"):
            getattr(video, name)
    with pytest.raises(AttributeError, match=r"no attribute 'num_frames': write video\.n_frames"):
        video.num_frames  # noqa: B018
    with pytest.raises(TypeError, match=r"has no length: write video\.n_frames"):
        len(video)
    assert video


def test_an_image_says_how_to_get_pixels_or_an_image_of_pillow(
    dataset: shardio.ShardDataset,
) -> None:
    image: Any = dataset[0]["image"]
    decode, to_pil = r"image\.decode\(\)", r"image\.to_pil\(\)"
    for name, hint in {"numpy": decode, "mean": decode, "resize": to_pil}.items():
        with pytest.raises(AttributeError, match=rf"no attribute '{name}': write {hint}"):
            getattr(image, name)


@pytest.mark.parametrize(
    ("values", "options", "text"),
    [
        (
            ([0, 5],),
            {},
            r"or the indices of frames, as video\.decode\(frames=\[…\]\); found \[0, 5",
        ),
        ((1.5,), {}, "decode takes integers, .*; found 1.5"),
        ((0, 5, 0), {}, "step must not be 0"),
        ((), {"end": 5}, "has no option 'end': write stop="),
        ((), {"frame": 5}, r"has no option 'frame': write video\.decode\(frames=\["),
        ((), {"frames": 3}, r"frames must be a list of indices, such as \[0, 5\]; found 3"),
        ((), {"frames": [0.5]}, "frames must be a list of indices"),
        ((), {"frames": slice(3)}, "frames must be a list of indices"),
        ((), {"size": 224}, r"size must be \(height, width\); found 224"),
    ],
)
def test_frames_asked_for_as_elsewhere_get_a_hint(
    dataset: shardio.ShardDataset, values: tuple[Any, ...], options: dict[str, Any], text: str
) -> None:
    with pytest.raises((shardio.InvalidArgument, TypeError), match=text):
        dataset[0]["video"].decode(*values, **options)


def test_a_repr_is_one_short_line(dataset: shardio.ShardDataset) -> None:
    sample = dataset[1]
    assert (
        repr(sample["image"])
        == f"StoredImage(48 high × 64 wide, 3 channels, {len(sample['image']):,} bytes)"
    )
    assert str(sample["image"]) == repr(sample["image"])
    assert repr(sample["video"]) == "StoredVideo(h264, 64 high × 96 wide, 30 frames, 1.20 s)"


def test_show_displays_a_picture_in_a_notebook_and_opens_a_viewer_elsewhere(
    dataset: shardio.ShardDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(Pillow.Image, "show", lambda picture: shown.append(picture.size))
    dataset[0]["image"].show()
    dataset[0]["video"].show()
    assert shown == [(64, 48), (8 * 96, 64)]
    shell, display = ModuleType("IPython"), ModuleType("IPython.display")
    shell.__dict__["get_ipython"] = object
    display.__dict__["display"] = lambda picture: shown.append(("notebook", picture.size))
    monkeypatch.setitem(sys.modules, "IPython", shell)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    dataset[0]["image"].show()
    assert shown[2:] == [("notebook", (64, 48))]


def test_without_pillow_the_error_says_what_to_install(
    dataset: shardio.ShardDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    pillow_image.cache_clear()
    try:
        with pytest.raises(shardio.ShardioError, match=r"Pillow.*pip install"):
            dataset[0]["video"].to_pil()
        assert dataset[0]["video"].decode(0, 1).shape == (1, 64, 96, 3)
    finally:
        pillow_image.cache_clear()


def size_of(jpeg: bytes | None) -> tuple[int, int]:
    assert jpeg is not None and len(jpeg) < 4000
    with Pillow.open(io.BytesIO(jpeg)) as picture:
        assert picture.format == "JPEG"
        return picture.size


def test_thumbnails_are_small_whatever_the_picture(dataset: shardio.ShardDataset) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (2160, 3840, 3), np.uint8)
    assert size_of(thumbnail(noise)) == (96, 54)
    assert size_of(thumbnail(StoredImage(encode_jpeg(noise), 2160, 3840, 3))) == (96, 54)
    assert size_of(thumbnail(noise[:28, :28, 0])) == (84, 84)
    assert size_of(thumbnail(noise[:16, :16])) == (96, 96)
    assert size_of(thumbnail(noise[:96, :96].transpose(2, 0, 1))) == (96, 96)
    assert size_of(thumbnail(noise[:64, :96][np.newaxis].repeat(5, axis=0))) == (96, 64)
    assert size_of(thumbnail(dataset[0]["video"])) == (96, 64)


def test_a_thumbnail_shows_the_picture() -> None:
    pixels = smooth(96, 96)
    small = thumbnail(pixels)
    assert small is not None
    error = decode_image(small).astype(int) - pixels
    assert abs(error).mean() < 4


@pytest.mark.parametrize("kind", ["float16", "float32", "float64"])
def test_a_picture_of_floats_has_the_thumbnail_of_its_levels(kind: str) -> None:
    pixels = smooth(32, 40)
    levels = (pixels / 255).astype(kind)
    assert thumbnail(levels) == thumbnail(pixels)
    assert thumbnail(levels.transpose(2, 0, 1)) == thumbnail(pixels)
    assert thumbnail(np.stack([levels] * 3).transpose(0, 3, 1, 2)) == thumbnail(pixels)
    whole = np.round((pixels - pixels.min()) * (255 / np.ptp(pixels))).astype(np.uint8)
    normalized = thumbnail((levels - levels.dtype.type(0.5)) * 4)
    assert normalized is not None
    error = decode_image(normalized).astype(int) - decode_image(thumbnail(whole) or b"")
    assert abs(error).max() <= 8
    levels[0, 0], levels[1, 1] = np.nan, np.inf
    assert thumbnail(levels) is not None
    flat = decode_image(thumbnail(np.full((32, 32, 1), 7.0)) or b"")
    assert flat.max() < 8


def test_what_is_no_picture_or_is_damaged_has_no_thumbnail() -> None:
    jpeg = encode_jpeg(smooth())
    with pytest.raises(MediaError):
        decode_image(jpeg[:-40])
    for value in (
        StoredImage(jpeg[:-40], 12, 16, 3),
        StoredImage(b"nothing", 12, 16, 3),
        np.zeros((64, 64), np.float32),
        np.zeros((30, 17, 3), np.float32),
        np.zeros((64, 64, 3), np.int32),
        np.zeros((4, 64, 3), np.uint8),
        np.zeros((0, 64, 64, 3), np.uint8),
        np.zeros((64, 64, 2), np.uint8),
        np.zeros(64, np.uint8),
        b"bytes",
        None,
    ):
        assert thumbnail(value) is None
