"""Nested records, lists of arrays and dictionaries: what they take, and what they give back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio import Array, List, Schema, ShardLoader, ShardReader, ShardWriter, Text
from shardio.errors import InvalidArgument, SchemaError, ShardCorrupt
from shardio.format.codecs import Codec, cached_dictionary
from shardio.format.layout import Kind, Required
from shardio.format.sections import codecs
from shardio.format.types.arrays import pack_list, unpack_list
from shardio.maintenance import verify_shard
from shardio.shard.section_writers import TRAINING_BYTES
from tests.loading import write_dataset
from tests.shards import write_samples

pytestmark = pytest.mark.usefixtures("warm_zygote", "quick_disk")

NESTED = Schema(
    {
        "label": Array("int64"),
        "camera": {"id": Text(), "lens": {"focus": Array("float32"), "name": Text()}},
    }
)
FLAT = {"label": 1, "camera.id": "a", "camera.lens.focus": 2.0, "camera.lens.name": "b"}
DEEP = {"label": 1, "camera": {"id": "a", "lens": {"focus": 2.0, "name": "b"}}}
MIXED = {"label": 1, "camera.id": "a", "camera": {"lens": {"focus": 2.0}, "lens.name": "b"}}


def test_a_nested_schema_is_the_same_as_one_with_dotted_names() -> None:
    flat = Schema({name: NESTED[name] for name in FLAT})
    assert flat == NESTED
    assert NESTED.groups == {"camera", "camera.lens"}
    assert Schema.from_json(NESTED.to_json()) == NESTED
    assert NESTED.required == Required.NESTED_NAMES


def test_a_sample_may_be_given_nested_or_dotted_and_is_read_dotted(tmp_path: Path) -> None:
    path = write_samples(tmp_path / "a.shard", NESTED, (FLAT, DEEP, MIXED))
    with ShardReader(path) as reader:
        assert list(reader) == [FLAT] * 3


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({**DEEP, "camera.id": "c"}, "'camera.id' is given twice"),
        ({"label": 1, "camera": {"id": "a"}}, r"fields missing: \['camera.lens.focus'"),
        ({**DEEP, "camera": 5}, r"not in the schema: \['camera'\]"),
        ({**FLAT, "camera": {"x": 1}}, r"not in the schema: \['camera.x'\]"),
    ],
)
def test_sample_must_fit_a_nested_schema(tmp_path: Path, given: dict[str, Any], text: str) -> None:
    with ShardWriter(tmp_path / "a.shard", NESTED) as writer:
        with pytest.raises(SchemaError, match=text):
            writer.append(given)
        writer.append(DEEP)


def test_a_nested_record_can_be_asked_for_by_its_name(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "set", 1, 1, NESTED, [DEEP])
    with ShardLoader(folder, 1, output="numpy", num_workers=0, fields=["camera"]) as loader:
        (batch,) = loader
        assert list(batch) == ["camera.id", "camera.lens.focus", "camera.lens.name"]
        lens = {"focus": np.array([2], np.float32), "name": ["b"]}
        assert batch["camera"] == {"id": ["a"], "lens": lens}
        with pytest.raises(KeyError, match="camera.x"):
            _ = batch["camera.x"]
    with pytest.raises(InvalidArgument, match="fields must be different names among label"):
        ShardLoader(folder, 1, fields=["camera.lens", "camera"])


BOXES = Array("int32", (None, 2, None))


def boxes(*shapes: tuple[int, int]) -> list[np.ndarray[Any, Any]]:
    return [np.arange(a * 2 * b, dtype=np.int32).reshape(a, 2, b) for a, b in shapes]


def _set(place: int, value: int) -> Any:
    def change(record: bytearray) -> bytearray:
        record[place : place + 8] = value.to_bytes(8, "little")
        return record

    return change


CHANGES = {
    "cut": lambda record: record[:-4],
    "longer": lambda record: record + bytes(4),
    "no head": lambda record: record[:60],
    "more arrays": _set(0, 4),
    "fewer arrays": _set(0, 1),
    "far more arrays": _set(0, 1 << 63),
    "a huge dimension": _set(8, 1 << 62),
    "an empty array": _set(16, 0),
    "padding": _set(40, 1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_list_record_whose_numbers_do_not_account_for_its_bytes_is_refused(change: Any) -> None:
    record = change(bytearray(pack_list(BOXES, boxes((2, 3), (1, 1)))))
    with pytest.raises(ShardCorrupt) as caught:
        unpack_list(BOXES, bytes(record))
    assert caught.value.code in ("list", "shape")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.zeros((2, 1, 2, 1), np.int32), "expected a list of arrays, found ndarray"),
        ([np.zeros((1, 2), np.int32)], r"field 'boxes\[0\]': expected shape \(any, 2, any\)"),
        ([*boxes((1, 1)), np.zeros((1, 2, 1))], r"field 'boxes\[1\]': expected dtype int32"),
        ([*boxes((1, 1)), None], "field 'boxes': expected a list of arrays, found None in it"),
        (None, "expected a list of arrays, found None, which only a field with optional=True"),
    ],
)
def test_what_is_no_list_of_such_arrays_is_refused(tmp_path: Path, value: Any, text: str) -> None:
    with ShardWriter(tmp_path / "a.shard", Schema({"boxes": List(BOXES)})) as writer:
        with pytest.raises(SchemaError, match=text):
            writer.append({"boxes": value})
        writer.append({"boxes": boxes((1, 2))})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((Text(),), "the element of a List must be an Array"),
        ((Array("int8", codec="zstd"),), "give codec and optional to the List itself"),
        ((Array("int8", optional=True),), "give codec and optional to the List itself"),
        ((Array("int8"), "lzma"), "unknown codec 'lzma'"),
    ],
)
def test_a_list_that_cannot_be_stored_is_refused(arguments: Any, text: str) -> None:
    with pytest.raises(SchemaError, match=text):
        List(*arguments)


CAPTIONS = Schema({"text": Text("zstd_dictionary"), "plain": Text("zstd")})


def caption(i: int) -> str:
    return f'{{"id": {i}, "license": "CC-BY-4.0", "source": "camera {i % 7} of the north hall"}}'


def _all(reader: ShardReader, name: str) -> Any:
    return reader.records.entries(name, np.arange(len(reader)))


def test_short_records_that_are_alike_shrink_by_a_dictionary_and_come_back(tmp_path: Path) -> None:
    texts = [caption(i) for i in range(2000)]
    made = ({"text": text, "plain": text} for text in texts)
    path = write_samples(tmp_path / "a.shard", CAPTIONS, made)
    with ShardReader(path) as reader:
        assert [sample["text"] for sample in reader] == texts
        entries = {name: _all(reader, name) for name in CAPTIONS}
        stored = {name: each["stored"] & ((1 << 48) - 1) for name, each in entries.items()}
        sizes = {name: int(each.sum()) for name, each in stored.items()}
        assert sizes["text"] < sizes["plain"] / 2
        assert set(codecs(entries["text"]).tolist()) == {Codec.ZSTD_DICTIONARY}
        (dictionary,) = (s for s in reader.sections if s.kind == Kind.DICTIONARY)
        assert 0 < dictionary.size <= 64 << 10
    assert verify_shard(path) == []


@pytest.mark.parametrize("texts", [[], ["a" * 500], [caption(0)] * 10])
def test_too_few_texts_train_no_dictionary(tmp_path: Path, texts: list[str]) -> None:
    made = ({"text": text, "plain": text} for text in texts)
    path = write_samples(tmp_path / "a.shard", CAPTIONS, made)
    with ShardReader(path) as reader:
        assert [sample["text"] for sample in reader] == texts
        (dictionary,) = (s for s in reader.sections if s.kind == Kind.DICTIONARY)
        assert dictionary.size == 0
        assert Codec.ZSTD_DICTIONARY not in codecs(_all(reader, "text"))
    assert verify_shard(path) == []


def test_values_that_wait_for_a_dictionary_are_those_that_were_given(tmp_path: Path) -> None:
    schema = Schema({"a": Array("int64", (None,)), "text": Text("zstd_dictionary")})
    array = np.zeros(4, np.int64)
    with ShardWriter(tmp_path / "a.shard", schema) as writer:
        for i in range(3):
            array[:] = i
            writer.append({"a": array, "text": "x"})
    with ShardReader(tmp_path / "a.shard") as reader:
        assert [sample["a"].tolist() for sample in reader] == [[i] * 4 for i in range(3)]


def test_no_more_waits_for_a_dictionary_than_is_said(tmp_path: Path) -> None:
    schema = Schema({"blob": Array("uint8", (None,)), "text": Text("zstd_dictionary")})
    blob = np.zeros(8 << 20, np.uint8)
    writer = ShardWriter(tmp_path / "a.shard", schema)
    for _ in range(3):
        writer.append({"blob": blob, "text": "x"})
    assert writer._payload.data.n_bytes == 0
    for _ in range(2):
        writer.append({"blob": blob, "text": "x"})
    assert 5 * len(blob) > TRAINING_BYTES
    assert writer._payload.data.n_bytes >= 4 * len(blob)
    writer.abort()


@pytest.mark.parametrize("content", [b"no dictionary", b"\x37\xa4\x30\xec" + b"\xff" * 100])
def test_what_is_no_dictionary_is_refused(content: bytes) -> None:
    with pytest.raises(ShardCorrupt, match="not a zstd dictionary") as caught:
        cached_dictionary(content)
    assert caught.value.code == "dictionary"
