from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio.errors import InvalidArgument, MediaError
from shardio.media import ClipDecoder, decode_crop, decode_image, demux, encode_jpeg
from shardio.media.media_files import load_clip, load_image
from shardio_tools import sample_clips
from tests.media.images_made import Pixels, saved, smooth


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    sample_clips.write_clips(folder, n_clips=1)
    return next(path for path in folder.rglob("*") if path.is_file())


def _row(*shape: int) -> Pixels:
    rows = np.zeros((3, *shape), np.uint8)
    return rows[1, ...]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize(
    ("fit", "size", "box"),
    [
        ("crop", (6, 6), (0, 2, 12, 12)),  # of 12 x 16 pixels
        ("crop", (4, 12), (3, 0, 5, 16)),
        ("stretch", (6, 6), (0, 0, 12, 16)),
    ],
)
def test_a_picture_fills_a_row_as_its_part_in_the_centre_or_all_of_it(
    kind: str, fit: Any, size: tuple[int, int], box: tuple[int, int, int, int]
) -> None:
    data, row = saved(smooth(), kind), _row(*size, 3)
    assert load_image(data, row, fit=fit) is row
    np.testing.assert_array_equal(row, decode_crop(data, box, size))


def test_a_picture_of_the_very_size_is_decoded_as_it_is() -> None:
    data, row = encode_jpeg(smooth()), _row(12, 16, 3)
    np.testing.assert_array_equal(load_image(data, row), decode_image(data))


def test_a_path_does_as_well_and_is_named_by_errors(tmp_path: Path) -> None:
    path, row = tmp_path / "a.jpg", _row(6, 6, 3)
    path.write_bytes(encode_jpeg(smooth()))
    np.testing.assert_array_equal(load_image(path, row), load_image(path.read_bytes(), row.copy()))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(MediaError, match=r"a\.jpg: "):
        load_image(str(path), row)


@pytest.mark.parametrize(
    ("out", "options", "found"),
    [
        (_row(6, 6), {}, "height x width x 3"),
        (_row(0, 6, 3), {}, r"height x width x 3, found \(0, 6, 3\)"),
        ([6, 6, 3], {}, "height x width x 3, found list"),
        (_row(6, 6, 3), {"fit": "fill"}, "expected one of crop, stretch"),
        (_row(6, 6, 3)[:, ::2], {}, "C-contiguous"),
    ],
)
def test_what_does_not_fit_is_refused(out: Any, options: Any, found: str) -> None:
    with pytest.raises(InvalidArgument, match=found):
        load_image(encode_jpeg(smooth()), out, **options)


def test_frames_of_a_video_fill_a_row(video: Path) -> None:
    row, expected = _row(4, 32, 48, 3), _row(4, 32, 48, 3)
    with ClipDecoder() as decoder:
        decoder.decode(demux(str(video)), [3, 5, 7, 9], expected)
    assert load_clip(video, row, start=3, step=2) is row
    np.testing.assert_array_equal(row, expected)
    np.testing.assert_array_equal(load_clip(video.read_bytes(), row, start=3, step=2), expected)


@pytest.mark.parametrize(
    ("out", "options", "said"),
    [
        (_row(4, 32, 32, 3), {"start": 10**6}, "frame"),
        (_row(4, 32, 32, 3), {"start": 1.5}, "expected an integer of at most"),
        (_row(4, 32, 32, 3), {"step": 0.5}, "expected an integer of at most"),
        (_row(4, 32, 32, 3), {"start": 10**30}, "expected an integer of at most"),
        (_row(32, 32, 3), {}, "frames x height x width x 3, found"),
        (_row(4, 0, 32, 3), {}, "frames x height x width x 3, found"),
        (None, {}, "frames x height x width x 3, found"),
    ],
)
def test_what_is_no_clip(video: Path, out: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        load_clip(video, out, **options)


def test_a_video_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    path.write_bytes(b"no video")
    with pytest.raises(MediaError, match=r"a\.mp4: "):
        load_clip(path, _row(4, 32, 32, 3))
