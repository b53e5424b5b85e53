"""The order of the axes of pictures and clips in batches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import Array, InvalidArgument, Schema, ShardLoader
from shardio.map_view import MapView
from tests.loading import WORKERS, write_dataset
from tests.media_made import scene, write_video

N, BATCH = 6, 4
SCHEMA = Schema(
    {
        "picture": Array("uint8", (4, 6, 3)),
        "varying": Array("uint8", (None, None, 3)),
        "clip": Array("uint8", (2, 5, 7, 3)),
        "joints": Array("float32", (5, 4, 3)),
        "plane": Array("uint8", (4, 6)),
        "label": Array("int64"),
    }
)


def _sample(i: int) -> dict[str, Any]:
    rng = np.random.default_rng(i)
    return {
        "picture": rng.integers(0, 256, (4, 6, 3), np.uint8),
        "varying": rng.integers(0, 256, (5 + i, 8, 3), np.uint8),
        "clip": rng.integers(0, 256, (2, 5, 7, 3), np.uint8),
        "joints": rng.normal(size=(5, 4, 3)).astype(np.float32),
        "plane": rng.integers(0, 256, (4, 6), np.uint8),
        "label": i,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("layout") / "set"
    return write_dataset(path, N, 2, SCHEMA, map(_sample, range(N)))


def loader(folder: Any, **options: Any) -> ShardLoader:
    given = {"layout": "CHW", "output": "numpy", "num_workers": 0}
    return ShardLoader(folder, BATCH, **{**given, **options})


def first(folder: Any, **options: Any) -> shardio.Batch:
    with loader(folder, **options) as made:
        return next(iter(made))


@WORKERS
@pytest.mark.parametrize("reuse", [False, True])
def test_pictures_and_clips_arrive_with_the_channels_first(
    folder: str, num_workers: int, reuse: object
) -> None:
    with loader(folder, num_workers=num_workers, reuse=reuse) as made:
        for batch in made:
            for row, i in enumerate(batch.indices.tolist()):
                sample = _sample(i)
                picture = batch["picture"][row]
                assert np.array_equal(picture, sample["picture"].transpose(2, 0, 1))
                assert np.array_equal(batch["varying"][row], sample["varying"].transpose(2, 0, 1))
                assert np.array_equal(batch["clip"][row], sample["clip"].transpose(0, 3, 1, 2))


def test_other_arrays_keep_their_axes(folder: str) -> None:
    batch = first(folder)
    for name in ("joints", "plane", "label"):
        expected = np.stack([np.asarray(_sample(i)[name]) for i in batch.indices])
        assert np.array_equal(batch[name], expected)


def test_the_pixels_are_not_copied(folder: str) -> None:
    batch = first(folder)
    _, block, _ = batch.filled_block
    assert np.shares_memory(batch["picture"], block)
    assert batch["picture"].transpose(0, 2, 3, 1).flags.c_contiguous
    assert np.shares_memory(batch["varying"][0], block)


def test_the_default_and_hwc_are_the_order_of_the_dataset(folder: str) -> None:
    for layout in (None, "HWC"):
        batch = first(folder, layout=layout)
        assert batch["picture"].shape == (BATCH, 4, 6, 3)
        assert batch["varying"][1].shape == (6, 8, 3)


@pytest.mark.parametrize("layout", ["NCHW", "chw", "hwc", "", True, 3])
def test_another_layout_is_refused_with_those_there_are(folder: str, layout: Any) -> None:
    with pytest.raises(InvalidArgument, match="layout must be one of 'HWC', 'CHW'; found"):
        loader(folder, layout=layout)


def test_tinygrad_tensors_are_permuted_also_over_reused_memory(folder: str) -> None:
    with loader(folder, output="tinygrad", device="PYTHON", reuse=True) as made:
        for batch in made:
            tensor = batch["picture"]
            assert tensor.shape == (batch.n_rows, 3, 4, 6)
            expected = [_sample(i)["picture"].transpose(2, 0, 1) for i in batch.indices]
            assert np.array_equal(tensor.realize().numpy(), np.stack(expected))
            varying = [_sample(i)["varying"].transpose(2, 0, 1) for i in batch.indices]
            for found, wanted in zip(batch["varying"], varying, strict=True):
                assert np.array_equal(found.numpy(), wanted)


def _scaled(sample: Mapping[str, Any]) -> dict[str, Any]:
    picture = sample["picture"] / np.float32(255)
    return {"picture": picture, "crop": sample["picture"][:2, :2], "joints": sample["joints"]}


@WORKERS
def test_what_a_function_makes_of_a_picture_is_permuted(folder: str, num_workers: int) -> None:
    batch = first(folder, transform=_scaled, num_workers=num_workers)
    expected = np.stack([_sample(i)["picture"] for i in batch.indices]) / np.float32(255)
    assert np.array_equal(batch["picture"], expected.transpose(0, 3, 1, 2))
    assert batch["crop"].shape == (BATCH, 3, 2, 2)
    assert batch["joints"].shape == (BATCH, 5, 4, 3)


def test_what_a_function_returns_with_the_channels_first_stays(folder: str) -> None:
    def turned(sample: Mapping[str, Any]) -> dict[str, Any]:
        return {"picture": sample["picture"].transpose(2, 0, 1)}

    batch = first(folder, transform=turned)
    assert batch["picture"].shape == (BATCH, 3, 4, 6)


def test_functions_of_batches_are_given_the_order_of_the_dataset(folder: str) -> None:
    seen = []

    def halves(batch: dict[str, Any]) -> dict[str, Any]:
        seen.append(batch["picture"].shape)
        return {"picture": batch["picture"] / np.float32(2)}

    batch = first(folder, batch_transform=halves)
    assert set(seen) == {(BATCH, 4, 6, 3)}
    assert batch["picture"].shape == (BATCH, 3, 4, 6)


@pytest.mark.parametrize("option", ["batch_transform", "collate"])
def test_each_call_is_given_pictures_of_unequal_sizes_in_the_order_of_the_dataset(
    folder: str, option: str
) -> None:
    shapes: list[tuple[int, ...]] = []

    def corner(given: Any) -> dict[str, Any]:
        rows = [each["varying"] for each in given] if option == "collate" else given["varying"]
        shapes.extend(each.shape for each in rows)
        return {"varying": np.stack([each[:2, :5] for each in rows])}

    batch = first(folder, **{option: corner})
    assert {shape[1:] for shape in shapes} == {(8, 3)}
    assert batch["varying"].shape == (BATCH, 3, 2, 5)


def test_padded_pictures_and_their_masks_are_permuted(folder: str) -> None:
    batch = first(folder, collate={"varying": "pad"}, fields=["varying"])
    assert batch["varying"].shape == batch["varying_mask"].shape == (BATCH, 3, 8, 8)
    assert batch["varying_mask"][0].sum() == 3 * 5 * 8
    assert np.array_equal(batch["varying"][0][:, :5], _sample(0)["varying"].transpose(2, 0, 1))


def test_ragged_pictures_are_refused(folder: str) -> None:
    with pytest.raises(InvalidArgument, match="'ragged' of 'varying' exclude each other.*'pad'"):
        loader(folder, collate="ragged")


@pytest.mark.parametrize("layout", ["HWC", "CHW"])
def test_the_schema_and_the_batch_show_the_shapes_that_arrive(folder: str, layout: str) -> None:
    with loader(folder, layout=layout) as made:
        schema, batch = made.schema, next(iter(made))
    is_first = layout == "CHW"
    assert schema["picture"] == Array("uint8", (3, 4, 6) if is_first else (4, 6, 3))
    assert schema["clip"] == Array("uint8", (2, 3, 5, 7) if is_first else (2, 5, 7, 3))
    assert schema["joints"] == SCHEMA["joints"]
    axes = zip(*(pixels.shape for pixels in batch["varying"]), strict=True)
    sizes = [f"{min(n)}–{max(n)}" if min(n) < max(n) else f"{n[0]}" for n in axes]
    assert sizes.index("3") == (0 if is_first else 2) and "–" in "".join(sizes)
    assert f"varying {batch.n_rows} arrays of uint8 ({', '.join(sizes)})" in repr(batch)


def test_the_schema_is_that_of_what_a_transform_makes(folder: str) -> None:
    with loader(folder, transform=_scaled, num_workers=1) as made:
        assert made.schema["picture"] == Array("float32", (3, 4, 6))


def test_a_map_view_takes_the_layout(folder: str) -> None:
    with MapView(folder, layout="CHW") as view:
        sample = view[2]
    assert np.array_equal(sample["picture"], _sample(2)["picture"].transpose(2, 0, 1))
    assert np.array_equal(sample["varying"], _sample(2)["varying"].transpose(2, 0, 1))


def test_a_remote_loader_refuses_it_with_what_to_write(folder: str) -> None:
    with pytest.raises(InvalidArgument, match=r"layout is not an option.*movedim\(-1, -3\)"):
        shardio.connect("tcp://127.0.0.1:1", 4, layout="CHW")  # type: ignore[call-overload]


def test_decoded_pictures_and_clips(tmp_path: Path) -> None:
    pytest.importorskip("simplejpeg", reason="pictures are decoded")
    from shardio.media import encode_jpeg

    schema = Schema({"image": shardio.Image(), "video": shardio.Video()})
    video = write_video(tmp_path / "a.mp4", scene(8, 32, 24)).read_bytes()
    image = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
    with shardio.DatasetWriter(tmp_path / "set", schema) as writer:
        writer.append({"image": encode_jpeg(image), "video": video})
    arrived = {}
    for pixels in ("rgb", "rgb-fast", "yuv420"):
        with shardio.open(tmp_path / "set") as dataset:
            clips = dataset.clips(4, pixels=pixels)
            for layout in ("HWC", "CHW"):
                arrived[pixels, layout] = first(clips, layout=layout)
    chw, hwc = arrived["rgb", "CHW"], arrived["rgb", "HWC"]
    assert np.array_equal(chw["image"], hwc["image"].transpose(0, 3, 1, 2))
    assert np.array_equal(chw["video"], hwc["video"].transpose(0, 1, 4, 2, 3))
    assert chw["video"].shape == (2, 4, 3, 24, 32)
    chw, hwc = arrived["rgb-fast", "CHW"], arrived["rgb-fast", "HWC"]
    assert np.array_equal(chw["video"], hwc["video"].transpose(0, 1, 4, 2, 3))
    assert arrived["yuv420", "CHW"]["video"].shape == arrived["yuv420", "HWC"]["video"].shape
    with shardio.open(tmp_path / "set") as dataset:
        steps = dataset.windows({"video": [-1, 0]}, fps=25)
        chw, hwc = (first(steps, layout=layout) for layout in ("CHW", "HWC"))
    assert chw["video"].shape == (BATCH, 2, 3, 24, 32)
    assert np.array_equal(chw["video"], hwc["video"].transpose(0, 1, 4, 2, 3))
    assert np.array_equal(chw["video_mask"], hwc["video_mask"])


def test_notebooks_show_pictures_of_both_layouts_and_the_shapes_that_arrive(tmp_path: Path) -> None:
    pytest.importorskip("simplejpeg", reason="thumbnails are encoded")
    schema = Schema({"image": Array("uint8", (None, None, 3))})
    samples = [{"image": np.zeros((30 + i, 40, 3), np.uint8)} for i in range(N)]
    path = write_dataset(tmp_path / "set", N, 1, schema, samples)
    for layout, shape in (("HWC", "30 × 40 × 3"), ("CHW", "3 × 30 × 40")):
        html = first(path, layout=layout)._repr_html_()
        assert html.count("<img") == BATCH and shape in html
