"""Pictures become samples: untouched, as JPEG or as pixels; damaged ones are listed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import Input, InvalidArgument
from shardio.media import decode_crop, decode_image, probe
from shardio_converters.media.images import Images
from tests.converters.helpers import convert as convert_folder
from tests.converters.helpers import write
from tests.media.images_made import exif, saved, smooth

pytestmark = pytest.mark.usefixtures("quick_disk")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of two classes, a damaged one, one without a suffix, and what is none."""
    folder = tmp_path_factory.mktemp("pictures")
    files: dict[str, str | bytes] = {
        "cats/a.jpg": saved(smooth(40, 60), "JPEG", quality=95),
        "cats/b.png": saved(smooth(30, 20), "PNG"),
        "cats/cut.jpg": saved(smooth(80, 80), "JPEG")[:-200],
        "dogs/bits.png": bytes(30) + saved(smooth(), "PNG"),
        "dogs/turned.jpg": saved(smooth(24, 48), "JPEG", exif=exif(6)),
        "dogs/unnamed": saved(smooth(16, 16), "WEBP", lossless=True),
        "top.gif": saved(smooth(18, 18), "GIF"),
        "notes.txt": b"notes",
        "empty.jpeg": b"",
    }
    write(folder, files)
    return folder


convert = partial(convert_folder, kind="images")
FINE = ["cats/a.jpg", "cats/b.png", "dogs/turned.jpg", "dogs/unnamed", "top.gif"]


def test_originals_are_the_files_and_all_are_counted(root: Path, tmp_path: Path) -> None:
    report = convert(root, tmp_path / "out")
    assert report.counts == {"converted": 5, "broken": 3, "unsupported": 1}
    assert [one.name for one in report.broken] == ["cats/cut.jpg", "dogs/bits.png", "empty.jpeg"]
    assert all(one.reason and str(root) not in one.reason for one in report.broken)
    with shardio.open(tmp_path / "out") as dataset:
        assert [sample["source"] for sample in dataset] == FINE
        assert [int(sample["label"]) for sample in dataset] == [0, 0, 1, 1, -1]
        assert dataset.classes == ("cats", "dogs")
        for sample in dataset:
            assert bytes(sample["image"]) == (root / sample["source"]).read_bytes()
        turned = dataset.inputs[4]["detail"]
        assert (turned["height"], turned["width"], turned["orientation"]) == (48, 24, 6)
        assert dict(dataset.view) == {"kind": "rows"}
        options = dataset.converter["options"].keys()
        assert options == {"store", "keep_partial", "on_error", "shard_bytes"}


@pytest.mark.parametrize("size", [None, 16])
def test_raw_holds_the_pixels_as_shown(root: Path, tmp_path: Path, size: int | None) -> None:
    convert(root, tmp_path / "out", store="raw", size=size)
    with shardio.open(tmp_path / "out") as dataset:
        assert str(dataset.schema["image"]) == str(Images(store="raw", size=size).schema()["image"])
        for sample in dataset:
            data = (root / sample["source"]).read_bytes()
            wanted = decode_image(data)
            if size is not None:
                height, width = wanted.shape[:2]
                side = min(height, width)
                box = ((height - side) // 2, (width - side) // 2, side, side)
                wanted = decode_crop(data, box, (size, size))
            assert np.array_equal(sample["image"], wanted)


def test_jpeg_is_encoded_anew_at_its_quality(root: Path, tmp_path: Path) -> None:
    n_bytes = []
    for quality in (30, 95):
        convert(root, tmp_path / str(quality), store="jpeg", quality=quality, size=32)
        with shardio.open(tmp_path / str(quality)) as dataset:
            stored = [bytes(sample["image"]) for sample in dataset]
        assert {(f.format, f.height, f.width) for f in map(probe, stored)} == {("JPEG", 32, 32)}
        n_bytes.append(sum(map(len, stored)))
    assert n_bytes[1] > n_bytes[0] + 500
    assert Images(store="jpeg") == Images(store="jpeg", quality=90)
    whole = next(Images(store="jpeg").samples(Input("a.jpg", str(root / "cats/a.jpg"), 0, 0)))
    assert np.abs(decode_image(whole["image"]).astype(int) - smooth(40, 60)).mean() < 5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"store": "png"}, "store is 'png'; it must be one of original, jpeg, raw"),
        ({"size": 32}, "size is for store 'jpeg' or 'raw'"),
        ({"store": "raw", "size": 0}, "size is 0; it must be a whole number from 1 up"),
        ({"store": "raw", "quality": 5}, "quality is for store 'jpeg'; found store 'raw'"),
        ({"store": "jpeg", "quality": 101}, "quality is 101"),
    ],
)
def test_options_are_checked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        Images(**options)


def test_the_real_pictures_convert_and_videos_are_none(media_root: Path, tmp_path: Path) -> None:
    report = convert(media_root / "images", tmp_path / "out")
    assert report.counts == {"converted": 11}
    with pytest.raises(InvalidArgument, match="no file of the kind 'images': 8 files"):
        convert(media_root / "broken", tmp_path / "none")


def test_a_loader_delivers_pictures_of_every_store(root: Path, tmp_path: Path) -> None:
    for store in ("jpeg", "raw"):
        convert(root, tmp_path / store, store=store, size=20)
        with shardio.ShardLoader(tmp_path / store, 5, num_workers=0, output="numpy") as loader:
            (batch,) = list(loader)
            assert batch["image"].shape == (5, 20, 20, 3)
            assert batch["label"].tolist() == [0, 0, 1, 1, -1]
