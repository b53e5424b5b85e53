"""Defects that fuzzing found, one test each: the smallest input that shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio import Array, List, Schema, ShardReader, ShardWriter
from shardio.conversion.journal import PLAN_FILE, RECORD_FILE, Unit, read_plan, read_record
from shardio.errors import DatasetCorrupt, SchemaError
from shardio.format.checksum import hash_bytes, pack_hashes
from shardio.format.layout import PAGE, Kind, Section
from shardio.maintenance import repair, verify_dataset, verify_shard
from shardio.storage.fs import to_checksummed_json
from tests.fuzz import seeds
from tests.fuzz.parts import Parts


@pytest.mark.parametrize("file_size", [0, 1, PAGE - 1, 1 << 46, (1 << 64) - 1])
def test_repair_makes_no_file_of_a_claimed_size(tmp_path: Path, file_size: int) -> None:
    parts = Parts.of(seeds.shards()["small"])
    parts.header["file_size"] = file_size
    (tmp_path / "s.shard").write_bytes(parts.seal())
    with pytest.raises(DatasetCorrupt, match="the section table does not end where the last page"):
        repair(tmp_path / "s.shard", tmp_path / "out")


@pytest.mark.parametrize("n_bytes", [1, 95, 96, 97, PAGE - 1])
def test_repair_of_less_than_a_page_says_that_it_is_too_short(tmp_path: Path, n_bytes: int) -> None:
    (tmp_path / "s.shard").write_bytes(seeds.shards()["small"][:n_bytes])
    with pytest.raises(DatasetCorrupt, match="too short to be a shard"):
        repair(tmp_path / "s.shard", tmp_path / "out")


@pytest.mark.parametrize("key", ["settings", "units", "replaces", "appends"])
@pytest.mark.parametrize("value", [None, 1.5, "text"])
def test_a_conversions_plan_is_checked(tmp_path: Path, key: str, value: object) -> None:
    does = {"replaces": False, "appends": False}
    plan: dict[str, Any] = {"version": 2, "settings": {}, "units": [], **does}
    (tmp_path / PLAN_FILE).write_bytes(to_checksummed_json(plan))
    assert read_plan(tmp_path) is not None
    (tmp_path / PLAN_FILE).write_bytes(to_checksummed_json({**plan, key: value}))
    with pytest.raises(DatasetCorrupt, match=r"plan\.json: expected settings, units, replaces"):
        read_plan(tmp_path)


@pytest.mark.parametrize("name", ["a\0.shard", "../other.shard", "{0}/other.shard", 7, None, {}])
def test_a_unit_that_names_no_file_is_converted_anew(tmp_path: Path, name: object) -> None:
    folder = tmp_path / "unit"
    folder.mkdir()
    (tmp_path / "other.shard").write_bytes(seeds.shards()["small"])
    with ShardReader(tmp_path / "other.shard") as reader:
        shard = {"samples": len(reader), "bytes": reader.header.file_size, "id": reader.id}
    named = name.format(tmp_path) if isinstance(name, str) else name
    record = {"inputs": [], "shards": [{"name": named, **shard}], "stopped": False}
    (folder / RECORD_FILE).write_bytes(to_checksummed_json(record))
    assert read_record(folder, Unit(0, 0, ())) is None
    (tmp_path / "other.shard").rename(folder / "here.shard")
    record["shards"] = [{"name": "here.shard", **shard}]
    (folder / RECORD_FILE).write_bytes(to_checksummed_json(record))
    assert read_record(folder, Unit(0, 0, ())) is not None


def test_a_bool_that_is_none_is_not_laundered_by_repair(tmp_path: Path) -> None:
    schema = Schema({"flag": Array("bool", (2,)), "mask": List(Array("bool", (None,)))})
    broken = np.array([1, 2, 0], np.uint8).view(np.bool_)
    with ShardWriter(tmp_path / "w.shard", schema) as writer:
        writer.append({"flag": [True, False], "mask": [broken[::2]]})
        for sample in ({"flag": broken[:2], "mask": []}, {"flag": broken[::2], "mask": [broken]}):
            with pytest.raises(SchemaError, match="a bool in it is neither 0 nor 1"):
                writer.append(sample)
    parts = Parts.of((tmp_path / "w.shard").read_bytes())
    column, hashes = parts.find(Kind.COLUMN, 0), parts.find(Kind.COLUMN_HASHES, 0)
    assert column is not None and hashes is not None
    parts.contents[column] = b"\2\0"
    parts.contents[hashes] = pack_hashes([hash_bytes(b"\2\0")])
    (tmp_path / "s.shard").write_bytes(parts.seal())
    report = repair(tmp_path / "s.shard", tmp_path / "out")
    assert report.n_lost == 1
    assert verify_dataset(tmp_path / "out", workers=0).findings == ()


@pytest.mark.parametrize("field", [0, 1, 26_219, 65_535])
def test_a_section_of_a_kind_to_come_is_skipped(tmp_path: Path, field: int) -> None:
    parts = Parts.of(seeds.shards()["small"])
    parts.sections.insert(-1, Section(40_000, field, 0, 0, 32, 4, 8, 0))  # the schema is last
    parts.contents.insert(-1, bytes(range(32)))
    content = bytearray(parts.seal())
    path = tmp_path / "s.shard"
    path.write_bytes(content)
    with ShardReader(path) as reader:
        assert len(list(reader)) == len(reader)
        (place,) = [s.offset for s in reader.sections if s.kind == 40_000]
    assert verify_shard(path) == []
    content[place] ^= 1
    path.write_bytes(content)
    assert [finding.code for finding in verify_shard(path)] == ["checksum"]


def test_an_optional_column_takes_no_memory_for_claimed_rows(tmp_path: Path) -> None:
    schema = Schema({"n": Array("int64"), "x": Array("uint8", (1 << 44,), optional=True)})
    with ShardWriter(tmp_path / "s.shard", schema):
        pass
    with ShardReader(tmp_path / "s.shard") as reader:
        assert len(reader) == 0
    assert repair(tmp_path / "s.shard", tmp_path / "out").is_whole
