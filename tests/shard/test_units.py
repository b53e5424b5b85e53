"""Units: what has been checked is marked, in a table that may be shared."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from shardio import Array, Schema, Text
from shardio.errors import ChecksumMismatch
from shardio.format.layout import Kind
from shardio.shard.reader import ShardReader
from shardio.shard.writer import ShardWriter
from tests.shards import flip

SCHEMA = Schema(
    {
        "large": Array("uint8", (4096,)),  # a hash per row
        "small": Array("float32", (25,)),  # 128 bytes each: a hash per 512 rows
        "text": Text(),
        "dims": Array("int8", (None,)),
    }
)
N = 600


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("units") / "a.shard"
    with ShardWriter(path, SCHEMA) as writer:
        for i in range(N):
            row = {"large": np.full(4096, i % 251, np.uint8), "small": np.full(25, i, np.float32)}
            writer.append({**row, "text": str(i), "dims": np.zeros(i % 3, np.int8)})
    return path


@pytest.fixture
def own(shard: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(shard, tmp_path / "b.shard"))


def rows(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(numbers, np.int64)


@pytest.mark.parametrize("kind", [Kind.INDEX, Kind.SHAPES, Kind.COLUMN_HASHES, Kind.BLOCK_HASHES])
def test_a_damaged_index_names_its_section_when_read(own: Path, kind: Kind) -> None:
    with ShardReader(own) as reader:
        damaged = [s for s in reader.sections if s.kind == kind]
    flip(own, *(section.offset for section in damaged))
    names = {(section.name, section.offset) for section in damaged}
    with ShardReader(own) as reader:
        for _ in range(2):
            with pytest.raises(ChecksumMismatch) as caught:
                reader[0]
            assert (caught.value.section, caught.value.offset) in names


def test_a_damaged_record_among_checked_ones_is_refused(own: Path) -> None:
    with ShardReader(own) as reader:
        place = reader.records.offset + int(reader.records.entries("text", rows(401))["offset"][0])
    flip(own, place)
    with ShardReader(own) as reader:
        assert list(reader.records.values("text", rows(400, 402))) == ["400", "402"]
        for _ in range(2):
            with pytest.raises(ChecksumMismatch) as caught:
                list(reader.records.values("text", rows(400, 401, 402)))
            assert (caught.value.field, caught.value.sample) == ("text", 401)


def test_both_blocks_of_an_item_are_checked(tmp_path: Path) -> None:
    schema, path = Schema({"a": Array("uint8", (None, None, None))}), tmp_path / "a.shard"
    with ShardWriter(path, schema) as writer:
        for _ in range(200):
            writer.append({"a": np.zeros((0, 1, 2), np.uint8)})
    with ShardReader(path) as reader:
        (shapes,) = (s for s in reader.sections if s.kind == Kind.SHAPES)
        assert reader[170]["a"].shape == (0, 1, 2)  # the last number of its 24 bytes is in block 1
    flip(path, shapes.offset + 4096)
    with ShardReader(path) as reader:
        assert reader[169]["a"].shape == (0, 1, 2)
        with pytest.raises(ChecksumMismatch) as caught:
            reader[170]
        assert (caught.value.section, caught.value.offset) == (shapes.name, shapes.offset + 4096)
