"""`collate` on arrays of unequal shapes, compared with the samples."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import Array, Bytes, Schema, ShardLoader, Text
from shardio.errors import InsufficientMemory, SchemaError, TransformError
from tests.loading import WORKERS, write_dataset

N = 23  # the last batch of 5 has 3
Sample = dict[str, Any]

SCHEMA = Schema(
    {
        "label": Array("int64"),
        "points": Array("int16", (None, 2)),
        "cloud": Array("float64", (None, 3, None), codec="zstd"),
        "sparse": Array("uint8", (None,), optional=True),
        "bits": Array("bfloat16", (None,)),
        "note": Text(),
    }
)
ARRAYS = ("points", "cloud", "sparse", "bits")


def sample_of(i: int) -> Sample:
    return {
        "label": i,
        "points": np.arange(2 * (i % 5), dtype=np.int16).reshape(-1, 2) + i,
        "cloud": np.full((i % 3, 3, i % 4), i + 0.5),
        "sparse": np.full(i % 7, i, np.uint8) if i % 4 else None,
        "bits": np.arange(1, 1 + i % 6, dtype=np.uint16),
        "note": "n" * i,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("collate") / "set"
    return write_dataset(path, N, 3, SCHEMA, map(sample_of, range(N)))


def _loader(folder: str, batch_size: int = 5, **options: Any) -> ShardLoader:
    return ShardLoader(folder, batch_size, **{"output": "numpy", "num_workers": 0, **options})


def same(sample: Sample) -> Sample:
    return sample


def padded(values: list[Any], n_dims: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    there = [np.zeros((0,) * n_dims) if value is None else value for value in values]
    sizes = np.max([value.shape for value in there], axis=0)
    out, mask = np.zeros((len(values), *sizes)), np.zeros((len(values), *sizes), bool)
    for i, value in enumerate(there):
        out[i][tuple(map(slice, value.shape))] = value
        mask[i][tuple(map(slice, value.shape))] = True
    return out, mask


@WORKERS
@pytest.mark.parametrize("transform", [None, same])
@pytest.mark.parametrize("options", [{}, {"tail": "pad", "reuse": True}])
def test_padded_arrays_hold_every_value_with_zeros_behind_and_a_mask(
    folder: str, num_workers: int, transform: Any, options: dict[str, Any]
) -> None:
    given = {"num_workers": num_workers, "transform": transform, **options}
    n = 0
    with _loader(folder, shuffle=True, collate="pad", **given) as loader:
        for batch in loader:
            samples = [sample_of(i) for i in batch.indices.tolist()]
            n += int(batch.valid.sum())
            assert batch["label"].tolist() == [sample["label"] for sample in samples]
            assert batch["note"] == [sample["note"] for sample in samples]
            for name in ARRAYS:
                field = SCHEMA[name]
                assert isinstance(field, Array)
                values, mask = padded([sample[name] for sample in samples], len(field.shape))
                if transform is None and name == "cloud":  # its axis of 3 is 3 also when empty
                    values = values if values.shape[2] else np.zeros(batch[name].shape)
                assert batch[name].dtype == field.numpy
                assert np.array_equal(batch[name], values)
                assert np.array_equal(batch[f"{name}_mask"], mask.reshape(batch[name].shape))
            absent = [sample["sparse"] is None for sample in samples]
            assert (~batch.present("sparse")).tolist() == absent
    assert n == N


def test_a_shape_in_a_dict_makes_all_batches_of_one_shape(folder: str) -> None:
    with _loader(folder, collate={"points": (6, 2), "bits": (None,)}) as loader:
        found = list(loader)
    assert [batch["points"].shape for batch in found] == [(5, 6, 2)] * 4 + [(3, 6, 2)]
    assert {batch["bits"].shape[1] for batch in found} == {4, 5}
    assert all(isinstance(batch["cloud"], list) for batch in found)


@pytest.mark.parametrize(("transform", "error"), [(None, SchemaError), (same, TransformError)])
def test_oversized_value_reports_shape(folder: str, transform: Any, error: type[Exception]) -> None:
    with _loader(folder, collate={"points": (3, 2)}, transform=transform) as loader:
        with pytest.raises(error) as caught:
            list(loader)
    text = str(caught.value)
    assert (
        "pads to (3, 2), but the shape of sample 4 of shard 000000-000.shard (position 4)" in text
    )
    assert "is (4, 2)" in text
    assert folder in text


def test_a_batch_of_nothing_but_empty_arrays_has_no_room_for_values(folder: str) -> None:
    with _loader(folder, 1, collate="pad") as loader:
        batch = next(iter(loader))
    assert batch["points"].shape == batch["points_mask"].shape == (1, 0, 2)
    assert batch["cloud"].shape == (1, 0, 3, 0)
    assert batch["sparse"].shape == (1, 0)


@WORKERS
@pytest.mark.parametrize("transform", [None, same])
@pytest.mark.parametrize("options", [{}, {"tail": "pad", "reuse": True}])
def test_ragged_arrays_are_the_values_one_after_another(
    folder: str, num_workers: int, transform: Any, options: dict[str, Any]
) -> None:
    given = {"num_workers": num_workers, "transform": transform, **options}
    fields = ("points", "sparse", "bits", "note")
    with _loader(folder, shuffle=True, collate="ragged", fields=fields, **given) as loader:
        for batch in loader:
            samples = [sample_of(i) for i in batch.indices.tolist()]
            assert batch["note"] == [sample["note"] for sample in samples]
            for name in ("points", "sparse", "bits"):
                offsets = batch[f"{name}_offsets"]
                assert (offsets.dtype, offsets.shape) == (np.int64, (len(samples) + 1,))
                assert offsets[-1] == len(batch[name])
                for sample, a, b in zip(samples, offsets[:-1], offsets[1:], strict=True):
                    value = [] if sample[name] is None else sample[name]
                    assert np.array_equal(batch[name][a:b].reshape(-1), np.reshape(value, -1))


@pytest.mark.parametrize("transform", [None, same])
def test_ragged_arrays_of_other_inner_shapes_are_refused(folder: str, transform: Any) -> None:
    error = SchemaError if transform is None else TransformError
    collate = {"cloud": "ragged"}
    with _loader(folder, collate=collate, transform=transform) as loader:
        with pytest.raises(error, match=r"sample 0 .*\(0, 3, 0\), .*sample 1 .*\(1, 3, 1\): use"):
            list(loader)


def test_stacked_by_name_equal_shapes_are_one_array_and_others_an_error(tmp_path: Path) -> None:
    schema = Schema({"x": Array("int32", (None,), optional=True)})
    values = [[1, 2], None, [3, 4], None, None, None, [5], [6, 7], [8, 9]]
    samples = [{"x": None if v is None else np.array(v, np.int32)} for v in values]
    folder = write_dataset(tmp_path / "set", 9, 2, schema, samples)
    with _loader(folder, 3, collate={"x": "stack"}) as loader:
        batches = iter(loader)
        assert next(batches)["x"].tolist() == [[1, 2], [0, 0], [3, 4]]
        assert next(batches)["x"].shape == (3, 0)
        with pytest.raises(SchemaError) as caught:
            next(batches)
    text = str(caught.value)
    assert "sample 2 of shard 000001-000.shard (position 6) is (1,)" in text
    assert "sample 3 of shard 000001-000.shard (position 7) is (2,)" in text
    assert 'use "pad", "ragged" or "list"' in text


def rows(sample: Sample) -> Sample:
    n = 3 + int(sample["label"]) % 2
    return {"x": np.full((n, 5), n, np.float32), "n": n}


@WORKERS
def test_collate_takes_other_shapes_of_a_transform(folder: str, num_workers: int) -> None:
    found = {}
    for collate in ("pad", "ragged", "list"):
        options = {"transform": rows, "collate": collate, "num_workers": num_workers}
        with _loader(folder, 4, **options) as loader:
            found[collate] = next(iter(loader))
            assert found[collate]["n"].tolist() == [3, 4, 3, 4]
    assert found["pad"]["x"].shape == (4, 4, 5)
    assert found["pad"]["x_mask"].sum((1, 2)).tolist() == [15, 20, 15, 20]
    assert found["ragged"]["x"].shape == (14, 5)
    assert found["ragged"]["x_offsets"].tolist() == [0, 3, 7, 10, 14]
    assert [value.shape for value in found["list"]["x"]] == [(3, 5), (4, 5)] * 2


def test_where_shapes_may_differ_dtype_and_rank_may_not(folder: str) -> None:
    for odd in (np.zeros(3), np.zeros((2, 2), np.float32)):
        values = [np.zeros((2, 2)), odd]

        def pick(sample: Sample, values: list[Any] = values) -> Sample:
            return {"x": values[int(sample["label"]) > 0]}

        with _loader(folder, collate="list", transform=pick) as loader:
            with pytest.raises(TransformError, match="the first sample .* had float64"):
                list(loader)


def test_a_transform_may_return_the_same_array_with_other_values_each_time(folder: str) -> None:
    memory = np.zeros((2, 2))

    def reuse(sample: Sample) -> Sample:
        memory[:] = sample["label"]
        return {"x": memory}

    for collate in ("pad", "ragged", "list"):
        with _loader(folder, transform=reuse, collate=collate) as loader:
            values = np.reshape(np.concatenate(next(iter(loader))["x"]), (5, -1))
            assert values[:, 0].tolist() == [0, 1, 2, 3, 4]


def gather(samples: list[Sample]) -> Sample:
    width = max(len(sample["points"]) for sample in samples)
    out = np.zeros((2, width, len(samples)), np.int16)
    for i, sample in enumerate(samples):
        out[:, : len(sample["points"]), i] = sample["points"].T
    return {
        "points": out,
        "n": len(samples),
        "note": [sample["note"] for sample in samples],
        "is_sparse": np.array([sample["sparse"] is None for sample in samples]),
        "bits": [sample["bits"] for sample in samples],
        "drawn": random.random(),
    }


@pytest.mark.parametrize("transform", [None, same])
@pytest.mark.parametrize("tail", ["short", "pad"])
def test_a_function_makes_a_batch_of_samples(folder: str, transform: Any, tail: Any) -> None:
    with _loader(folder, collate=gather, transform=transform, tail=tail) as loader:
        for batch in loader:
            samples = [sample_of(i) for i in batch.indices.tolist()]
            expected = gather(samples)
            assert np.array_equal(batch["points"], expected["points"])
            assert batch["points"].dtype == np.int16
            assert batch["n"] == len(samples) == (3 if batch.n_rows == 3 else 5)
            assert batch["note"] == expected["note"]
            assert batch["is_sparse"].tolist() == expected["is_sparse"].tolist()
            assert all(map(np.array_equal, batch["bits"], expected["bits"]))
            assert batch.valid.sum() == min(5, N - 5 * batch.step)
        assert len({float(batch["drawn"]) for batch in loader}) == 5


LARGE = Schema({"x": Array("uint8", (None,)), "blob": Bytes()})


def outlier(n_bytes: int) -> Iterator[Sample]:
    for i in range(400):
        yield {"x": np.full(n_bytes if i == 301 else 8, 7, np.uint8), "blob": b"b"}


@pytest.fixture
def grown(tmp_path: Path) -> Callable[[int], str]:
    def make(n_bytes: int) -> str:
        return write_dataset(tmp_path / "large", 400, 2, LARGE, outlier(n_bytes))

    return make


@WORKERS
@pytest.mark.parametrize("transform", [None, same])
def test_blocks_grow_on_need(grown: Callable[[int], str], num_workers: int, transform: Any) -> None:
    options = {"num_workers": num_workers, "transform": transform, "memory_bytes": 8 << 20}
    with _loader(grown(200_000), 4, collate="pad", **options) as loader:
        widths = [batch["x"].shape[1] for batch in loader]
        assert widths == [8] * 75 + [200_000] + [8] * 24
        sums = [int(batch["x"].sum(dtype=np.int64)) for batch in loader]
    assert sums == [7 * 4 * 8] * 75 + [7 * (200_000 + 24)] + [7 * 4 * 8] * 24


@WORKERS
@pytest.mark.parametrize("transform", [None, same])
def test_batch_beyond_budget(grown: Callable[[int], str], num_workers: int, transform: Any) -> None:
    options = {"num_workers": num_workers, "transform": transform, "memory_bytes": 500_000}
    with _loader(grown(200_000), 4, collate="pad", **options) as loader:
        batches = iter(loader)
        for _ in range(75):
            next(batches)
        with pytest.raises(InsufficientMemory, match=r"block of 8\d{5} bytes; .* allows 500000"):
            next(batches)
        assert next(iter(loader))["x"].shape == (4, 8)


@pytest.mark.cpu_device
@WORKERS
@pytest.mark.parametrize("reuse", [False, True])
def test_padded_and_ragged_arrays_are_tensors(folder: str, num_workers: int, reuse: object) -> None:
    collate: Any = {"points": "pad", "sparse": "ragged", "bits": (8,)}
    given = {"shuffle": True, "num_workers": num_workers, "collate": collate, "reuse": reuse}
    names = ("points", "points_mask", "sparse", "sparse_offsets", "bits_mask")
    with _loader(folder, **given) as arrays, _loader(folder, output="tinygrad", **given) as loader:
        for expected, batch in zip(arrays, loader, strict=True):
            for name in names:
                assert batch[name].shape == expected[name].shape
                assert batch[name].tolist() == expected[name].tolist()
            assert batch["bits"].dtype.name == "__bf16"
            assert batch["bits"].shape == expected["bits"].shape


@pytest.mark.parametrize(
    ("collate", "widths"), [("pad", [3, 6, 6, 5, 1]), ({"sparse": (7,)}, [7] * 5)]
)
def test_reused_arrays_may_differ_in_shape(folder: str, collate: Any, widths: list[int]) -> None:
    given: Sample = {"collate": collate, "fields": ("label", "sparse")}
    device: Sample = {"output": "tinygrad", "device": "PYTHON", "reuse": True}
    seen = []
    with (
        _loader(folder, **given) as arrays,
        _loader(folder, **given, reuse=True) as reused,
        _loader(folder, **given, **device) as loader,
    ):
        for expected, array, tensor in zip(arrays, reused, loader, strict=True):
            for name in ("label", "sparse", "sparse_mask"):
                np.testing.assert_array_equal(array[name], expected[name])
                np.testing.assert_array_equal(tensor[name].numpy(), expected[name])
            seen.append(tensor["sparse"])
    assert [tensor.shape[1] for tensor in seen] == widths
    assert (seen[1] is seen[2] is seen[3]) == isinstance(collate, dict)


def test_ragged_batches_for_several_devices_are_refused(folder: str) -> None:
    with pytest.raises(shardio.InvalidArgument, match="'ragged' makes arrays .* use 'pad'"):
        _loader(folder, output="tinygrad", device=("CPU", "CPU:1"), collate={"points": "ragged"})


def test_what_does_not_go_with_the_dataset_is_refused_by_the_constructor(folder: str) -> None:
    with pytest.raises(shardio.InvalidArgument, match="collate names 'cloud'; the fields"):
        _loader(folder, fields=("points", "note"), collate={"cloud": "pad"})


@WORKERS
def test_what_a_transform_contradicts_is_refused_once_it_ran(folder: str, num_workers: int) -> None:
    options: Sample = {"collate": {"points": "pad"}, "num_workers": num_workers}
    with _loader(folder, transform=lambda sample: {"x": 1}, **options) as loader:
        for _ in range(2):
            with pytest.raises(shardio.InvalidArgument, match="names 'points'; .* sample are x"):
                iter(loader)
