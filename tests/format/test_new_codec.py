"""A new codec is one entry of the registry: a shard that uses it is written, read and verified."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio import (
    Array,
    Batch,
    Bytes,
    DatasetWriter,
    List,
    Schema,
    ShardCorrupt,
    ShardLoader,
    ShardReader,
    ShardWriter,
    Text,
)
from shardio.errors import SchemaError
from shardio.format.codecs import BY_CODE, SPECS
from shardio.maintenance import verify_shard
from tests.corruption.forge import Forgery
from tests.format.strategies import opened
from tests.format.zlib_codec import ZLIB


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the codec: the one entry."""
    monkeypatch.setitem(SPECS, ZLIB.name, ZLIB)
    monkeypatch.setitem(BY_CODE, ZLIB.code, ZLIB)


def schema() -> Schema:
    return Schema(
        {
            "text": Text("zlib"),
            "blob": Bytes("zlib", optional=True),
            "points": Array("float32", (None, 3), codec="zlib"),
            "parts": List(Array("int64", (None,)), codec="zlib"),
        }
    )


def samples() -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [
        {
            "text": "again and again " * (i % 7),
            "blob": None if i % 3 == 0 else rng.bytes(40 + i),  # which nothing shrinks
            "points": np.zeros((i, 3), np.float32),
            "parts": [np.arange(i, dtype=np.int64), np.zeros(50, np.int64)],
        }
        for i in range(40)
    ]


def write(made: ShardWriter | DatasetWriter) -> None:
    with made as writer:
        for sample in samples():
            writer.append(sample)


@pytest.fixture
def path(registered: None, tmp_path: Path) -> Path:
    write(ShardWriter(tmp_path / "a.shard", schema()))
    return tmp_path / "a.shard"


def test_a_shard_with_a_new_codec_is_read_as_it_was_written(path: Path) -> None:
    with ShardReader(path) as reader:
        assert {field.codec for field in reader.schema.values()} == {"zlib"}
        for found, sample in zip(reader, samples(), strict=True):
            assert found["text"] == sample["text"]
            assert found["blob"] == sample["blob"]
            np.testing.assert_array_equal(found["points"], sample["points"])
            for part, expected in zip(found["parts"], sample["parts"], strict=True):
                np.testing.assert_array_equal(part, expected)
    assert verify_shard(path) == []


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_record_that_is_no_such_stream_is_refused(path: Path, is_cut: object) -> None:
    forgery = Forgery.of(path.read_bytes())
    n_stored = int(forgery.entry("text", 6)[1]["stored"]) & (1 << 48) - 1
    if is_cut:
        forgery.change_entry("text", 6, n_bytes=97)  # it holds 96
    else:
        forgery.change_record("text", 6, bytes(n_stored))
    path.write_bytes(forgery.seal())
    assert [finding.code for finding in verify_shard(path)] == ["zlib"]
    with ShardReader(path) as reader, pytest.raises(ShardCorrupt, match="zlib stream"):
        reader[6]


@pytest.mark.usefixtures("registered")
def test_records_with_a_new_codec_are_loaded(tmp_path: Path) -> None:
    write(DatasetWriter(tmp_path / "d", schema()))
    with ShardLoader(tmp_path / "d", 8, num_workers=0) as loader:
        batches: list[Batch[Any]] = list(loader)
    texts = [text for batch in batches for text in batch["text"]]
    assert texts == [sample["text"] for sample in samples()]


@pytest.mark.process
def test_without_its_entry_a_codec_is_unknown(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "field 'text' has codec 77, which this version cannot read" in opened(path)
    monkeypatch.delitem(SPECS, ZLIB.name)
    with pytest.raises(SchemaError, match="unknown codec 'zlib'"):
        Text("zlib")
