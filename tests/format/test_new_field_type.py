"""A new field type is one class and one entry: it is written, read, verified and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio import Array, DatasetWriter, Schema, ShardLoader, ShardReader, ShardWriter
from shardio.errors import SchemaError
from shardio.format.types import FIELD_TYPES
from shardio.maintenance import diff, verify_dataset, verify_shard
from tests.corruption.forge import Forgery, codes_of
from tests.format.points import Points
from tests.format.strategies import opened

N = 24


@pytest.fixture
def schema(monkeypatch: pytest.MonkeyPatch) -> Schema:
    """Register the type, with the one entry that it needs, and return a schema of it."""
    monkeypatch.setitem(FIELD_TYPES, Points.code, Points)
    fields = {"cloud": Points(), "packed": Points("zstd"), "maybe": Points(optional=True)}
    return Schema({**fields, "label": Array("int64")})


def sample(i: int) -> dict[str, Any]:
    cloud = np.random.default_rng(i).random((i % 5, 3), np.float32)
    packed = np.full((99, 3), i, np.float32)
    return {"cloud": cloud, "packed": packed, "maybe": None if i % 3 else cloud, "label": i}


def samples() -> list[dict[str, Any]]:
    return [sample(i) for i in range(N)]


def write(made: ShardWriter | DatasetWriter) -> None:
    with made as writer:
        for each in samples():
            writer.append(each)


@pytest.fixture
def path(tmp_path: Path, schema: Schema) -> Path:
    write(ShardWriter(tmp_path / "a.shard", schema))
    return tmp_path / "a.shard"


def test_a_shard_with_a_new_type_is_read_as_it_was_written(path: Path, schema: Schema) -> None:
    with ShardReader(path, verify="always") as reader:
        assert reader.schema == schema
        for found, expected in zip(reader, samples(), strict=True):
            for name in schema:
                np.testing.assert_array_equal(found[name], expected[name])
    assert verify_shard(path) == []


def test_a_value_that_does_not_fit_is_refused(tmp_path: Path, schema: Schema) -> None:
    with ShardWriter(tmp_path / "a.shard", schema) as writer:
        with pytest.raises(SchemaError, match="field 'cloud': a point is not finite"):
            writer.append({**samples()[0], "cloud": np.full((4, 3), np.nan, np.float32)})
        writer.append(samples()[0])
    assert verify_shard(tmp_path / "a.shard") == []


def test_verification_applies_the_rule_of_the_type(path: Path) -> None:
    forgery = Forgery.of(path.read_bytes())
    forgery.change_record("cloud", 2, np.full((2, 3), np.inf, np.float32).tobytes())
    assert codes_of(forgery.seal()) == ["value"]


def test_load_verify_and_diff_a_new_type(tmp_path: Path, schema: Schema) -> None:
    folder, other = tmp_path / "a", tmp_path / "b"
    for each in (folder, other):
        write(DatasetWriter(each, schema))
    assert verify_dataset(folder, workers=0).findings == ()
    assert diff(folder, other).is_same
    with ShardLoader(folder, 8, num_workers=0, collate={"cloud": "pad"}) as loader:
        batches = list(loader)
    assert [len(batch["packed"]) for batch in batches] == [8, 8, 8]
    for i, expected in enumerate(samples()):
        batch, row = batches[i // 8], i % 8
        maybe: Any = batch["maybe"][row]
        found = None if maybe is None else maybe.numpy()
        np.testing.assert_array_equal(found, expected["maybe"])
        np.testing.assert_array_equal(batch["packed"][row].numpy(), expected["packed"])
        padded, mask = batch["cloud"].numpy()[row], batch["cloud_mask"].numpy()[row]
        np.testing.assert_array_equal(padded[mask.any(-1)], expected["cloud"])


@pytest.mark.process
def test_without_its_entry_a_type_is_unknown(path: Path) -> None:
    assert "field 'cloud' has field type 201, which this version cannot read" in opened(path)
