"""Optional fields: None is stored, read, batched and checked, and is no value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio import Array, Bytes, Json, List, Schema, ShardLoader, ShardReader, ShardWriter, Text
from shardio.errors import ChecksumMismatch, SchemaError
from shardio.format.layout import Kind
from shardio.maintenance import verify_shard
from tests.loading import write_dataset
from tests.maintenance.datasets import place
from tests.shards import flip, write_samples

pytestmark = pytest.mark.usefixtures("warm_zygote", "quick_disk")

SCHEMA = Schema(
    {
        "number": Array("int64"),
        "pose": Array("float32", (3,), optional=True),
        "packed": Array("int16", (40,), codec="zstd", optional=True),
        "points": Array("uint8", (None, 2), optional=True),
        "parts": List(Array("int8", (2,)), optional=True),
        "note": Text(optional=True),
        "blob": Bytes("zstd", optional=True),
        "meta": Json(optional=True),
    }
)
EMPTY: dict[str, Any] = {
    "pose": np.zeros(3, np.float32),
    "packed": np.zeros(40, np.int16),
    "points": np.zeros((0, 2), np.uint8),
    "parts": [],
    "note": "",
    "blob": b"",
    "meta": {},
}


def sample(i: int) -> dict[str, Any]:
    """Every third sample has all fields, every third has empty ones, every third has none."""
    if i % 3 == 2:
        return {"number": i}
    if i % 3:
        return {"number": i, **EMPTY}
    full = {"pose": np.full(3, i), "packed": np.full(40, i), "points": np.full((i % 4, 2), i)}
    as_dtype = {n: v.astype(SCHEMA[n].dtype) for n, v in full.items()}  # type: ignore[attr-defined]
    parts = [np.full(2, i, np.int8)] * 2
    return {"number": i, **as_dtype, "parts": parts, "note": "a", "blob": b"b", "meta": [i]}


def write(path: Path, n: int = 20) -> Path:
    return write_samples(path, SCHEMA, map(sample, range(n)))


@pytest.mark.parametrize("name", list(SCHEMA.optional))
def test_none_and_absent_read_as_none_and_empty_as_empty(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "a.shard")
    made = ({**dict.fromkeys(SCHEMA), **sample(i)} for i in range(20))
    assert path.read_bytes() == write_samples(tmp_path / "b.shard", SCHEMA, made).read_bytes()
    with ShardReader(path) as reader:
        assert reader.present(name).tolist() == [i % 3 != 2 for i in range(20)]
        assert reader.present(name, [-1, 2]).tolist() == [True, False]
        assert reader.present("number").all()
        assert reader[2][name] is None
        np.testing.assert_equal(reader[1][name], EMPTY[name])
        np.testing.assert_equal(reader[6][name], sample(6)[name])
    assert verify_shard(path) == []


def test_only_an_optional_field_may_be_none_or_left_out(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "a.shard", SCHEMA) as writer:
        with pytest.raises(SchemaError, match=r"fields missing: \['number'\]"):
            writer.append({})
        with pytest.raises(SchemaError, match="field 'number': expected int64, found None, which"):
            writer.append({"number": None})


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_tells_which_rows_are_there(tmp_path: Path, workers: int) -> None:
    folder = write_dataset(tmp_path / "set", 20, 4, SCHEMA, map(sample, range(20)))
    with ShardLoader(folder, 8, output="numpy", num_workers=workers) as loader:
        for batch in loader:
            numbers = batch["number"].tolist()
            for name in SCHEMA.optional:
                there = [i % 3 != 2 for i in numbers]
                assert batch.present(name).tolist() == there
                for value, i, is_there in zip(batch[name], numbers, there, strict=True):
                    if is_there:
                        np.testing.assert_equal(value, sample(i)[name])
                    elif name in ("pose", "packed"):
                        assert not value.any()
                    else:
                        assert value is None
            assert batch.present("number").all()
            with pytest.raises(KeyError, match="'nothing': this batch has number, pose"):
                batch.present("nothing")


@pytest.mark.parametrize("first", [0, 2])
def test_transform_gets_and_may_return_none(tmp_path: Path, first: int) -> None:
    made = map(sample, range(first, 20))
    folder = write_dataset(tmp_path / "set", 20 - first, 1, SCHEMA, made)
    for workers in (0, 1):
        options: Any = {"output": "numpy", "num_workers": workers, "transform": lambda found: found}
        with ShardLoader(folder, 7, **options) as loader:
            for batch in loader:
                there = [i % 3 != 2 for i in batch["number"].tolist()]
                for name in SCHEMA.optional:
                    assert batch.present(name).tolist() == there
                    nones = [value is None for value in batch[name]]
                    assert nones == [not t and name not in ("pose", "packed") for t in there]


def test_a_changed_bit_of_the_bitmap_is_found_by_a_reader_and_an_verify(tmp_path: Path) -> None:
    path = write(tmp_path / "a.shard")
    flip(path, place(path, Kind.VALIDITY, "note")[0])
    with ShardReader(path) as reader, pytest.raises(ChecksumMismatch, match="validity.*note"):
        _ = reader[0]["note"]
    assert {finding.code for finding in verify_shard(path)} >= {"checksum"}
