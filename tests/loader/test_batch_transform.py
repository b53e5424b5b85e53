"""The limits of `batch_transform`, and the errors beyond them."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import ShardLoader
from shardio.errors import TransformError
from shardio.order.permutation import OF_BATCHES, OF_SAMPLES, SampleGenerators
from tests.loading import WORKERS, bits, two_fields

N, N_SHARDS = 22, 3  # the last batch of 8 has 6
Fields = dict[str, Any]


def _loader(folder: str, batch_size: int = 8, **options: Any) -> ShardLoader:
    return ShardLoader(folder, batch_size, **{"output": "numpy", "num_workers": 0, **options})


def draw(batch: Fields, rng: np.random.Generator) -> Fields:
    return {
        "label": batch["label"],
        "drawn": rng.random(len(batch["label"])),
        "python": random.random(),
        "numpy": np.random.random(),
    }


def draws(folder: str, **options: Any) -> list[Any]:
    with _loader(folder, **{"batch_transform": draw, "seed": 3, **options}) as loader:
        return [bits(batch) for _ in range(2) for batch in loader]


@WORKERS
def test_what_it_returns_becomes_the_batch(folder: str, num_workers: int) -> None:
    def halve(batch: Fields) -> Fields:
        image = batch["image"][:, ::2, ::2].astype(np.float32) / 255
        return {"image": image, "mean": image.mean(), "names": [f"n{i}" for i in batch["label"]]}

    given = list(two_fields(N))
    with _loader(folder, batch_transform=halve, num_workers=num_workers) as loader:
        for batch in loader:
            images = np.stack([given[i]["image"] for i in batch.indices.tolist()])
            expected = images[:, ::2, ::2].astype(np.float32) / 255
            assert list(batch) == ["image", "mean", "names"]
            assert batch["image"].dtype == np.float32
            assert np.array_equal(batch["image"], expected)
            assert batch["mean"] == expected.mean()
            assert batch["names"] == [f"n{i}" for i in batch.indices.tolist()]
            assert len(batch["image"]) == batch.n_rows == (6 if batch.step == 2 else 8)


@pytest.mark.parametrize("transform", [None, lambda sample: sample])
@pytest.mark.parametrize("collate", ["stack", "pad"])
def test_it_gets_and_may_return_the_whole_batch(every: str, transform: Any, collate: Any) -> None:
    options: Fields = {"transform": transform, "collate": collate, "shuffle": True}
    options["num_workers"] = 2
    with (
        _loader(every, **options) as plain,
        _loader(every, **options, batch_transform=lambda batch: batch) as loader,
    ):
        for expected, batch in zip(plain, loader, strict=True):
            said, found = bits(expected), bits(batch)
            assert [(name, values) for name, values, _ in found[4]] == [
                (name, values) for name, values, _ in said[4]
            ]
            assert found[:4] == said[:4]


def test_it_comes_after_transform_and_collate(folder: str) -> None:
    def cut(sample: Fields) -> Fields:
        return {"x": sample["image"][0, : 1 + int(sample["label"]) % 3], "label": sample["label"]}

    def measure(batch: Fields) -> Fields:
        return {"n": batch["x_mask"].sum(1), "label": batch["label"]}

    options: Fields = {"transform": cut, "collate": {"x": "pad"}, "num_workers": 2}
    with _loader(folder, **options, batch_transform=measure) as loader:
        found = [n for batch in loader for n in batch["n"].tolist()]
    assert found == [1 + i % 3 for i in range(N)]

    def gather(samples: list[Fields]) -> Fields:
        return {"total": sum(int(sample["label"]) for sample in samples)}

    def negate(batch: Fields) -> Fields:
        return {"total": -batch["total"]}

    with _loader(folder, collate=gather, batch_transform=negate) as loader:
        assert [int(batch["total"]) for batch in loader] == [-28, -92, -111]


@WORKERS
def test_shapes_may_differ_from_batch_to_batch(folder: str, num_workers: int) -> None:
    def scale(batch: Fields) -> Fields:
        n = 1 + int(batch["label"][0]) % 5
        return {"x": np.full((n, 1000 * n), n), "label": batch["label"]}

    given: Fields = {"batch_transform": scale, "num_workers": num_workers}
    for reuse in (False, True):
        with _loader(folder, **given, reuse=reuse) as loader:
            for batch in loader:
                n = 1 + 8 * batch.step % 5
                assert batch["x"].shape == (n, 1000 * n)
                assert (batch["x"] == n).all()


@pytest.mark.parametrize(("tail", "n_rows"), [("short", 6), ("pad", 8)])
def test_the_last_batch_is_as_short_as_it_would_arrive(folder: str, tail: Any, n_rows: int) -> None:
    def measure(batch: Fields) -> Fields:
        n = len(batch["label"])
        return {"n": np.full(n, n), "label": batch["label"], "row": list(map(str, range(n)))}

    with _loader(folder, batch_transform=measure, tail=tail) as loader:
        *_, last = loader
    assert last["n"].tolist() == [n_rows] * n_rows
    assert last["label"].tolist() == [16, 17, 18, 19, 20, 21, 16, 17][:n_rows]
    assert last["row"] == list(map(str, range(n_rows)))
    assert last.valid.tolist() == ([True] * 6 + [False] * 2)[:n_rows]
    assert last.indices.tolist() == last["label"].tolist()


@pytest.mark.parametrize(
    "given", [{"num_workers": 2}, {"num_workers": 1, "reuse": True}, {"prefetch": 5}]
)
def test_batch_transform_draws_ignore_the_number_of_workers(folder: str, given: Fields) -> None:
    assert draws(folder, **given) == draws(folder)


def test_draws_depend_on_seed_epoch_and_the_first_position(folder: str) -> None:
    plain = draws(folder)
    drawn = [dict((name, values) for name, values, _ in batch[4]) for batch in plain]
    for name in ("drawn", "python", "numpy"):
        assert len({repr(values[name]) for values in drawn}) == 6, name
    assert draws(folder, seed=4) != plain
    rows = [SampleGenerators(3, OF_BATCHES).at(0, 8 * step).random(8)[:6] for step in range(3)]
    with _loader(folder, batch_transform=draw, seed=3) as loader:
        for batch, expected in zip(loader, rows, strict=True):
            assert np.array_equal(batch["drawn"][:6], expected)


GOLDEN = [
    0xEFEB2096B9FE6DE2,
    0x01BFDD40AF9BFFF9,
    0x096207D91D42A970,
    0x1B8FA1E0A4957F27,
    0xBEBEDCB64F6F1292,
    0x9F8DB1A7767BB61F,
]


def test_streams_of_samples_and_batches_have_nothing_in_common() -> None:
    keys = [
        SampleGenerators(5, stream).key(1, position)
        for stream in (OF_SAMPLES, OF_BATCHES)
        for position in range(3)
    ]
    assert keys == GOLDEN
    assert SampleGenerators(5).key(1, 0) == keys[0]


@WORKERS
def test_what_it_raises_names_the_samples_of_the_batch(folder: str, num_workers: int) -> None:
    def fail(batch: Fields) -> Fields:
        if 8 in batch["label"]:
            raise ValueError("odd batch")
        return batch

    with _loader(folder, batch_transform=fail, num_workers=num_workers) as loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(TransformError) as caught:
            next(batches)
    text = str(caught.value)
    assert text.startswith(
        "batch_transform raised ValueError: odd batch\n  at the batch of sample "
    )
    assert "sample 1 of shard 000001-000.shard (position 8), sample 2" in text
    assert folder in text
    assert "in fail\n" in text
    assert "batched.py" not in text
    assert isinstance(caught.value.__cause__, ValueError)


@WORKERS
def test_errors_of_the_first_batch_are_raised_at_once(folder: str, num_workers: int) -> None:
    def fail(batch: Fields) -> Fields:
        raise SystemExit(3)

    with _loader(folder, batch_transform=fail, num_workers=num_workers) as loader:
        for _ in range(2):
            with pytest.raises(TransformError, match="raised SystemExit: 3"):
                iter(loader)


@pytest.mark.parametrize(
    ("odd", "text"),
    [
        (None, "a batch must be a dict of fields, found NoneType"),
        ({"x": np.zeros(3)}, r"the first batch had fields \['x', 't'\], this has \['x'\]"),
        ({"x": np.zeros((2, 2)), "t": list("ab")}, r"float64 of shape \(None,\), .* \(2, 2\)"),
        ({"x": np.zeros(2, int), "t": list("ab")}, r"float64 of shape \(None,\), this has int64"),
        ({"x": "x", "t": list("ab")}, "had float64 of shape .*, this has a str"),
        ({"x": np.zeros(3), "t": ["a"]}, "'t': expected a list of 8 values, found 1 values"),
        ({"x": np.zeros(3), "t": [b""] * 8}, "expected str, found bytes"),
    ],
    ids=["none", "field", "dimensions", "dtype", "text", "too few", "bytes"],
)
def test_a_batch_unlike_the_first_is_named_with_both(folder: str, odd: object, text: str) -> None:
    def differ(batch: Fields) -> Any:
        is_odd = 8 in batch["label"]
        return odd if is_odd else {"x": np.zeros(2), "t": ["a"] * len(batch["label"])}

    with _loader(folder, batch_transform=differ) as loader:
        batches = iter(loader)
        assert next(batches)["x"].shape == (2,)
        with pytest.raises(TransformError, match=text) as caught:
            next(batches)
    assert "(position 8)" in str(caught.value)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        ([1], "a batch must be a dict of fields, found list"),
        ({}, "a schema needs at least one field"),
        ({"x": {"a": 1}}, "'x': a dict cannot be put into a batch; return"),
        ({"x": "text"}, "'x': a str cannot be put into a batch"),
        ({"x": ["a", "b"]}, "'x': expected a list of 8 values, found 2 values"),
        ({"x": np.array(["a"])}, "'x': dtype <U1 is not one of"),
        ({"x": [object()] * 8}, "object cannot be put into a batch"),
    ],
)
def test_a_first_batch_that_cannot_be_one_is_refused(folder: str, made: object, text: str) -> None:
    with _loader(folder, batch_transform=lambda batch: made) as loader:
        with pytest.raises(TransformError, match=text):
            iter(loader)


@pytest.mark.parametrize(
    ("label", "text"),
    [
        (8, "while it worked on samples 1, 2, 3"),
        (0, "while it built the first batch, which begins"),
    ],
)
def test_a_worker_that_dies_in_it_names_the_batch(folder: str, label: int, text: str) -> None:
    def leave(batch: Fields) -> Fields:
        if label in batch["label"]:
            os._exit(3)
        return batch

    with _loader(folder, batch_transform=leave, num_workers=1) as loader:
        with pytest.raises(shardio.WorkerDied, match=f"exit code 3, {text}"):
            list(loader)
