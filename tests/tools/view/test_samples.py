"""A sample is described as JSON values, each field by its kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import Array, InvalidArgument
from shardio_tools.view.samples import Links, describe_sample, kind_of, thumbnail_fields
from tests.shards import EVERY_FIELD, MEDIA_FIELDS, every_field_sample, flip, media_sample


def _write(path: Path, schema: shardio.Schema, samples: list[dict[str, Any]]) -> Path:
    with shardio.DatasetWriter(path, schema, classes=["cat", "dog"]) as writer:
        for sample in samples:
            writer.append(sample)
    return path


def _fields(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in found["fields"]}


def test_every_kind_of_field_is_described(tmp_path: Path) -> None:
    path = _write(tmp_path / "set", EVERY_FIELD, [every_field_sample(i) for i in range(9)])
    with shardio.open(path) as dataset:
        for row in range(9):
            found = describe_sample(dataset, row)
            assert json.loads(json.dumps(found, allow_nan=False)) == found
            assert (found["row"], found["n"], found["index"]) == (row, 9, row)
            assert list(_fields(found)) == list(EVERY_FIELD)
            assert found["damaged"] is None
        fields, sample = _fields(describe_sample(dataset, 7)), every_field_sample(7)
    kinds = {name: each["kind"] for name, each in fields.items()}
    assert kinds["frames"] == "video" and kinds["points"] == "array" and kinds["boxes"] == "list"
    assert fields["label"]["value"] == 7 and fields["meta"]["value"] == sample["meta"]
    assert fields["note"]["value"] == sample["note"] and not fields["note"]["truncated"]
    assert fields["raw"]["hex"] == sample["raw"].hex()
    assert fields["points"]["shape"] == [2, 2]
    assert fields["points"]["preview"] == sample["points"].ravel().tolist()
    bits = sample["bits"].astype(np.uint32) << 16
    assert fields["bits"]["preview"] == [float(each) for each in bits.view(np.float32)]
    assert [each["shape"] for each in fields["boxes"]["items"]] == [[0, 4], [1, 4], [2, 4]]
    assert fields["camera.lens.focus"]["value"] == 7 / 8


def test_a_missing_value_has_no_links(tmp_path: Path) -> None:
    path = _write(tmp_path / "set", EVERY_FIELD, [every_field_sample(0)])
    with shardio.open(path) as dataset:
        found = _fields(describe_sample(dataset, 0))["maybe"]
    assert found["missing"] and found["original"] is None and found["kind"] == "array"


def test_numbers_that_json_lacks_are_texts(tmp_path: Path) -> None:
    schema = shardio.Schema(
        {"x": Array("float64"), "n": Array("uint64"), "v": Array("float32", (3,))}
    )
    samples = [{"x": np.inf, "n": 2**63, "v": np.array([np.nan, 1, 2], np.float32)}]
    with shardio.open(_write(tmp_path / "set", schema, samples)) as dataset:
        found = _fields(describe_sample(dataset, 0))
    assert (found["x"]["value"], found["n"]["value"]) == ("inf", str(2**63))
    assert found["v"]["preview"] == ["nan", 1.0, 2.0]
    assert (found["v"]["min"], found["v"]["max"]) == (1.0, 2.0)


def test_a_label_has_the_name_of_its_class(tmp_path: Path) -> None:
    schema = shardio.Schema({"label": Array("int64"), "other": Array("int64")})
    path = _write(tmp_path / "set", schema, [{"label": 1, "other": 1}, {"label": 9, "other": 0}])
    with shardio.open(path) as dataset:
        first, second = (_fields(describe_sample(dataset, row)) for row in (0, 1))
    assert first["label"]["label"] == "dog" and "label" not in first["other"]
    assert "label" not in second["label"]


def test_links_quote_names_and_can_have_another_root(tmp_path: Path) -> None:
    schema = shardio.Schema({"a/b ü?": Array("float32", (9, 2))})
    path = _write(tmp_path / "set", schema, [{"a/b ü?": np.zeros((9, 2), np.float32)}])
    with shardio.open(path) as dataset:
        (found,) = describe_sample(dataset, 0)["fields"]
        (exported,) = describe_sample(dataset, 0, Links("data"))["fields"]
    assert found["series"] == "/series/0/a%2Fb%20%C3%BC%3F"
    assert exported["original"] == "data/original/0/a%2Fb%20%C3%BC%3F"


def test_a_damaged_field_is_reported_and_the_others_are_shown(tmp_path: Path) -> None:
    schema = shardio.Schema({name: EVERY_FIELD[name] for name in ("note", "blob", "label")})
    samples = [{name: every_field_sample(2)[name] for name in schema}]
    path = _write(tmp_path / "set", schema, samples)
    (shard,) = path.rglob("*.shard")
    data = shard.read_bytes()
    flip(shard, data.index(samples[0]["note"].encode()))
    with shardio.open(path) as dataset:
        found = describe_sample(dataset, 0)
    fields = _fields(found)
    assert (
        "field 'note'" in fields["note"]["damaged"]
        and found["damaged"] == fields["note"]["damaged"]
    )
    assert fields["label"]["value"] == 2 and fields["blob"]["hex"] == (b"abc" * 2).hex()


def test_media_is_described_without_decoding(tmp_path: Path) -> None:
    path = _write(tmp_path / "set", MEDIA_FIELDS, [media_sample(i) for i in range(3)])
    with shardio.open(path) as dataset:
        found = _fields(describe_sample(dataset, 2))
    assert found["video"]["kind"] == "video" and found["video"]["n_frames"] == 6
    assert (found["image"]["height"], found["image"]["width"]) == (32, 40)
    assert found["sound"]["kind"] == "audio"


def test_kinds_are_known_from_the_schema_alone() -> None:
    arrays = {
        "tokens": (Array("uint16", (None,)), "tokens"),
        "text.input_ids": (Array("int32", (512,)), "tokens"),
        "tokens_mask": (Array("bool", (None,)), "array"),
        "clip": (Array("uint8", (16, 112, 112, 3)), "video"),
        "picture": (Array("uint8", (3, 64, 64)), "image"),
        "depth": (Array("float32", (64, 64)), "array"),
        "state": (Array("float32", (7,)), "array"),
        "x": (Array("float32"), "scalar"),
    }
    assert {name: kind_of(name, field) for name, (field, _) in arrays.items()} == {
        name: kind for name, (_, kind) in arrays.items()
    }
    assert thumbnail_fields(MEDIA_FIELDS) == ["video", "image", "sound"]


def test_a_row_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    path = _write(tmp_path / "set", EVERY_FIELD, [every_field_sample(0)])
    with shardio.open(path) as dataset, pytest.raises(InvalidArgument, match="no sample 1; the"):
        describe_sample(dataset, 1)
