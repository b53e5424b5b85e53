"""Pictures arrive as pixels: straight into the batch, stacked where all have one size."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shardio import Array, Image, InvalidArgument, Schema, ShardDataset, ShardLoader
from shardio.errors import MediaError, SchemaError, TransformError
from shardio.format.types import EncodedImage
from shardio.media import decode_image, encode_jpeg
from shardio.samples.media import common_sizes
from tests.loading import WORKERS, write_dataset
from tests.media.images_made import exif, saved, smooth

pytestmark = pytest.mark.usefixtures("warm_zygote", "quick_disk")

N, BATCH = 12, 5
PICTURES = Schema({"image": Image(), "label": Array("int64")})
OPTIONAL = Schema({"image": Image(optional=True), "label": Array("int64")})
Pixels = npt.NDArray[np.uint8]


def pixels_of(i: int, height: int = 12, width: int = 16) -> Pixels:
    return np.roll(smooth(height, width), i, axis=0)


def equal_sizes() -> list[dict[str, Any]]:
    """JPEG and PNG, one of them lying on its side, all of them shown as 12 x 16."""
    made = []
    for i in range(N):
        data = encode_jpeg(pixels_of(i)) if i % 2 else saved(pixels_of(i), "PNG")
        if i == 3:
            data = saved(pixels_of(i, 16, 12), "JPEG", exif=exif(6))
        made.append({"image": data, "label": i})
    return made


def several_sizes() -> list[dict[str, Any]]:
    return [{"image": encode_jpeg(pixels_of(i, 8 + i, 16)), "label": i} for i in range(N)]


@pytest.fixture(scope="module")
def equal(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("pictures") / "equal"
    return write_dataset(made, N, 2, PICTURES, equal_sizes())


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("pictures") / "several"
    return write_dataset(made, N, 2, PICTURES, several_sizes())


def decoded(samples: list[dict[str, Any]]) -> list[Pixels]:
    return [decode_image(sample["image"]) for sample in samples]


def epoch(folder: str, **options: Any) -> list[Any]:
    options.setdefault("num_workers", 0)
    found: list[Any] = []
    with ShardLoader(folder, BATCH, output="numpy", **options) as loader:
        for batch in loader:
            for i, label in enumerate(batch["label"].tolist()):
                value = batch["image"][i]
                found.append((label, None if value is None else np.array(value)))
    return [value for _, value in sorted(found, key=lambda pair: pair[0])]


def same(found: list[Any], expected: list[Any]) -> bool:
    return all(map(np.array_equal, found, expected)) and len(found) == len(expected)


@WORKERS
@pytest.mark.parametrize("sizes", ["equal", "several"])
def test_equal_sizes_stack(request: pytest.FixtureRequest, sizes: str, num_workers: int) -> None:
    folder = request.getfixturevalue(sizes)
    with ShardLoader(folder, BATCH, num_workers=num_workers, output="numpy") as loader:
        images: Any = next(iter(loader))["image"]
    if sizes == "equal":
        assert isinstance(images, np.ndarray)
        assert (images.shape, images.dtype) == ((BATCH, 12, 16, 3), np.uint8)
    else:
        assert isinstance(images, list)
    made = equal_sizes() if sizes == "equal" else several_sizes()
    assert same(epoch(folder, num_workers=num_workers, shuffle=True), decoded(made))


def test_a_selection_of_pictures_of_one_size_is_stacked(several: str, tmp_path: Path) -> None:
    made = several_sizes()[:2] * 3
    folder = write_dataset(tmp_path / "set", 6, 1, PICTURES, made)
    with ShardDataset(folder) as dataset, dataset.select([0, 2, 4]) as chosen:
        with ShardLoader(chosen, 3, num_workers=0, output="numpy") as loader:
            assert next(iter(loader))["image"].shape == (3, 8, 16, 3)
        with ShardLoader(dataset, 3, num_workers=0, output="numpy") as loader:
            assert isinstance(next(iter(loader))["image"], list)


def test_a_bare_list_of_files_comes_with_decode_false(equal: str) -> None:
    with ShardLoader(equal, N, num_workers=0, output="numpy", decode=False) as loader:
        assert next(iter(loader))["image"] == [sample["image"] for sample in equal_sizes()]


@WORKERS
def test_a_transform_gets_pixels_and_decides_stacking(several: str, num_workers: int) -> None:
    def cut(sample: dict[str, Any]) -> dict[str, Any]:
        return {"image": sample["image"][:8, ::2], "label": sample["label"]}

    with ShardLoader(several, N, num_workers=num_workers, output="numpy", transform=cut) as loader:
        found = next(iter(loader))["image"]
    assert found.shape == (N, 8, 8, 3)
    assert same(list(found), [each[:8, ::2] for each in decoded(several_sizes())])


def test_a_transform_that_leaves_sizes_unequal_is_told_what_to_ask_for(several: str) -> None:
    with pytest.raises(TransformError, match="collate"):
        epoch(several, transform=dict)
    assert same(epoch(several, transform=dict, collate="list"), decoded(several_sizes()))


@WORKERS
@pytest.mark.parametrize("transform", [None, dict])
def test_pictures_can_be_padded(several: str, num_workers: int, transform: Any) -> None:
    with ShardLoader(
        several, N, num_workers=num_workers, output="numpy", collate="pad", transform=transform
    ) as loader:
        batch = next(iter(loader))
        found, mask = batch["image"].copy(), batch["image_mask"].copy()
    assert found.shape == mask.shape == (N, 8 + N - 1, 16, 3)
    for i, expected in enumerate(decoded(several_sizes())):
        np.testing.assert_array_equal(found[i][mask[i]].reshape(expected.shape), expected)
        assert not found[i][~mask[i]].any()


def test_pictures_that_cannot_be_stacked_are_named(several: str) -> None:
    with pytest.raises(SchemaError, match="the shapes of a batch must be the same") as caught:
        epoch(several, collate={"image": "stack"})
    assert not isinstance(caught.value, TransformError)


@pytest.mark.parametrize("sizes", ["equal", "several"])
@pytest.mark.parametrize("transform", [None, dict])
def test_a_picture_may_be_absent(tmp_path: Path, sizes: str, transform: Any) -> None:
    made = equal_sizes() if sizes == "equal" else several_sizes()
    for i in (0, 7):
        made[i]["image"] = None
    folder = write_dataset(tmp_path / "set", N, 2, OPTIONAL, made)
    with ShardLoader(
        folder, N, num_workers=0, output="numpy", transform=transform, collate="list"
    ) as loader:
        batch = next(iter(loader))
        present = batch.present("image").tolist()
        found = [np.array(each) for each in itertools.compress(batch["image"], present)]
    assert present == [i not in (0, 7) for i in range(N)]
    assert same(found, decoded([sample for sample in made if sample["image"] is not None]))


@WORKERS
def test_an_undecodable_picture_is_named_or_skipped(tmp_path: Path, num_workers: int) -> None:
    made = equal_sizes()
    cut = made[5]["image"][:-30]
    made[5]["image"] = EncodedImage(cut, 12, 16, 3)
    folder = write_dataset(tmp_path / "set", N, 2, PICTURES, made)
    with pytest.raises(MediaError, match=r"000000-000\.shard, field 'image', sample 5: JPEG"):
        epoch(folder, num_workers=num_workers)
    options: dict[str, Any] = {"on_error": "skip", "max_skips": 1, "output": "numpy"}
    with ShardLoader(folder, N, num_workers=num_workers, **options) as loader:
        (batch,) = loader
    assert batch.valid.tolist() == [i != 5 for i in range(N)]
    assert [(skip.index, skip.error) for skip in batch.skipped] == [(5, "MediaError")]


@pytest.mark.parametrize("others", [12, 13])
def test_a_size_unlike_the_index_is_an_error(tmp_path: Path, others: int) -> None:
    made = [{"image": EncodedImage(encode_jpeg(pixels_of(0)), 11, 16, 3), "label": 0}]
    made.append({"image": EncodedImage(encode_jpeg(pixels_of(1)), others - 1, 16, 3), "label": 1})
    folder = write_dataset(tmp_path / "set", 2, 1, PICTURES, made)
    with pytest.raises(MediaError, match="field 'image', sample 0"):
        epoch(folder)


def test_a_picture_that_is_said_to_be_enormous_takes_no_memory(tmp_path: Path) -> None:
    data = encode_jpeg(pixels_of(0))
    made = [{"image": EncodedImage(data, side, 1 << 20, 3), "label": 0} for side in (1 << 20, 5)]
    folder = write_dataset(tmp_path / "set", 2, 1, PICTURES, made)
    with pytest.raises(MediaError, match="sample 0: a picture of 1048576x1048576 pixels"):
        epoch(folder)


def test_common_sizes_ignore_missing_pictures(equal: str, several: str, tmp_path: Path) -> None:
    with ShardDataset(equal) as one, ShardDataset(several) as other:
        assert common_sizes(one, ["image"], len(one), one.rows.at) == {"image": (12, 16)}
        assert common_sizes(other, ["image"], len(other), other.rows.at) == {}
    made = [{"image": None, "label": i} for i in range(4)]
    with ShardDataset(write_dataset(tmp_path / "none", 4, 2, OPTIONAL, made)) as nothing:
        assert common_sizes(nothing, ["image"], len(nothing), nothing.rows.at) == {}


def test_decode_is_checked(equal: str) -> None:
    with pytest.raises(InvalidArgument, match="decode must be one of True, False"):
        ShardLoader(equal, 2, decode=1)  # type: ignore[call-overload]
