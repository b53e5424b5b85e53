"""A new codec is one entry of the registry: a shard that uses it is written, read and verified."""

from __future__ import annotations

import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from shardio import Array, Bytes, List, Schema, ShardCorrupt, ShardReader, ShardWriter, Text
from shardio.errors import SchemaError
from shardio.format.codecs import BY_CODE, SPECS, CodecSpec, Dictionary
from shardio.maintenance import verify_shard

CODE = 77


def compress(record: memoryview, dictionary: Dictionary | None) -> tuple[int, memoryview]:
    return CODE, memoryview(zlib.compress(record, 1))


def decompress(stored: memoryview, n_bytes: int, dictionary: Dictionary | None) -> bytes:
    unpacker = zlib.decompressobj()
    try:
        record = unpacker.decompress(stored, n_bytes + 1)
    except zlib.error as error:
        raise ShardCorrupt(f"the record is no zlib stream ({error})", code="zlib") from error
    if len(record) != n_bytes or unpacker.unused_data or not unpacker.eof:
        raise ShardCorrupt("the zlib stream has another size", code="zlib")
    return record


ZLIB = CodecSpec("zlib", CODE, compress, decompress, max_ratio=1032)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the codec: the one entry."""
    monkeypatch.setitem(SPECS, ZLIB.name, ZLIB)
    monkeypatch.setitem(BY_CODE, ZLIB.code, ZLIB)


def write(path: Path) -> list[dict[str, object]]:
    schema = Schema(
        {
            "text": Text("zlib"),
            "blob": Bytes("zlib", optional=True),
            "points": Array("float32", (None, 3), codec="zlib"),
            "parts": List(Array("int64", (None,)), codec="zlib"),
        }
    )
    rng = np.random.default_rng(0)
    samples: list[dict[str, object]] = [
        {
            "text": "again and again " * (i % 7),
            "blob": None if i % 3 == 0 else rng.bytes(40 + i),  # which nothing shrinks
            "points": np.zeros((i, 3), np.float32),
            "parts": [np.arange(i, dtype=np.int64), np.zeros(50, np.int64)],
        }
        for i in range(40)
    ]
    with ShardWriter(path, schema) as writer:
        for sample in samples:
            writer.append(sample)
    return samples


@pytest.mark.usefixtures("registered")
def test_a_shard_with_a_new_codec_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "a.shard"
    samples = write(path)
    with ShardReader(path) as reader:
        assert {field.codec for field in reader.schema.values()} == {"zlib"}
        for found, sample in zip(reader, samples, strict=True):
            assert found["text"] == sample["text"]
            assert found["blob"] == sample["blob"]
            np.testing.assert_array_equal(found["points"], sample["points"])
            for part, expected in zip(found["parts"], sample["parts"], strict=True):  # type: ignore[call-overload]
                np.testing.assert_array_equal(part, expected)
    assert verify_shard(path, workers=0) == []


@pytest.mark.usefixtures("registered")
def test_every_flipped_byte_of_a_shard_with_a_new_codec_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.shard"
    write(path)
    content = path.read_bytes()
    for place in range(0, len(content), 997):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        assert verify_shard(path, workers=0), place


def test_without_its_entry_a_codec_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SchemaError, match="unknown codec 'zlib'"):
        Text("zlib")
    with monkeypatch.context() as patch:
        patch.setitem(SPECS, ZLIB.name, ZLIB)
        patch.setitem(BY_CODE, ZLIB.code, ZLIB)
        write(tmp_path / "a.shard")
    # In a process that has never seen the schema.
    program = "import sys, shardio; shardio.ShardReader(sys.argv[1])"
    command = [sys.executable, "-c", program, str(tmp_path / "a.shard")]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 1
    said = found.stderr.splitlines()[-1]
    assert "field 'text' has codec 77, which this version cannot read" in said
