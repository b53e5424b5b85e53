"""Schemas: what may be stored, and the one form in which it is written down."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from shardio import ShardWriter
from shardio.errors import SchemaError, ShardUnsupported
from shardio.format.layout import Required
from shardio.format.schema import Schema, group_parts
from shardio.format.types import Array, Bytes, Image, Json, List, Text
from tests.format.strategies import SCHEMAS


@given(schema=SCHEMAS)
def test_a_schema_that_is_written_is_read_again(schema: Schema) -> None:
    again = Schema.from_json(schema.to_json())
    assert again == schema
    assert dict(again) == dict(schema)
    assert list(again) == list(schema)
    assert hash(again) == hash(schema)


def test_a_schema_is_stored_in_canonical_json_with_integer_codes() -> None:
    schema = Schema({"x": Array("float32", (None, 3), codec="zstd"), "größe": Text()})
    assert schema.to_json().decode() == (
        '{"fields":[{"codec":1,"dtype":11,"id":0,"name":"x","shape":[-1,3],"type":1},'
        '{"codec":0,"id":1,"name":"größe","type":3}]}'
    )


def test_the_order_of_fields_is_part_of_a_schema() -> None:
    a, b = Text(), Bytes()
    assert Schema({"a": a, "b": b}) != Schema({"b": b, "a": a}) != {"b": b, "a": a}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "at least one field"),
        ({"": Text()}, "non-empty string"),
        ({1: Text()}, "non-empty string; found 1$"),
        ({"a..b": Text()}, "part of a dotted name is empty"),
        ({".a": Text()}, "part of a dotted name is empty"),
        ({"a": Text(), "a.b": Text()}, "names of fields and of nested records"),
        ({"a": {"b": Text()}, "a.b": Text()}, "two fields are named 'a.b'"),
        ({"a": {}}, "'a' has no fields"),
        ({"a\n": Text()}, r"^field 'a\\n': only printable characters"),
        ({"a\u0378\u200b": Text()}, "printable characters"),
        ({"a\ue000": Text()}, "printable characters"),
        ({"ä" * 128: Text()}, f"^field '{'ä' * 40}…': a name has at most 255 bytes, found 256$"),
        ({"\ud800": Text()}, r"^field '\\ud800' cannot be written in UTF-8$"),
        (
            {"a": str},
            "expected one of Array, Bytes, Text, Json, List, Image, Video, Audio, or a dict",
        ),
        (
            {"a": Text},
            "expected one of Array, Bytes, Text, Json, List, Image, Video, Audio, or a dict",
        ),
        ({"a": Text}, r"or a dict; write Text\(\)$"),
        ({"a": Array}, r"or a dict; write Array\(dtype, shape\)$"),
        ({"a": "image"}, r"or a dict; write Image\(\)$"),
        ({"a": str}, r"or a dict; write Text\(\)$"),
        ({"a": "float32"}, r"or a dict; write Array\('float32'\)$"),
        ({"a": 3}, "or a dict$"),
        ([("a", Text())], "write the fields as a dict, .*; found list"),
        ({str(i): Text() for i in range(1025)}, "at most 1024"),
    ],
)
def test_fields_that_cannot_be_stored_are_refused(fields: Any, text: str) -> None:
    with pytest.raises(SchemaError, match=text):
        Schema(fields)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("complex64",), "unknown dtype 'complex64'; known: bool, int8"),
        (("float8_e4m3",), "unknown dtype"),
        (("a",), "unknown dtype 'a'; known: bool, int8"),
        (("float",), "unknown dtype 'float'; write 'float32', or 'float64' for the precision of"),
        (("int",), r"unknown dtype 'int'; did you mean 'int64'\?"),
        (("double",), r"did you mean 'float64'\?"),
        (("half",), r"did you mean 'float16'\?"),
        (("<f4",), r"did you mean 'float32'\?"),
        (("torch.Int16",), r"did you mean 'int16'\?"),
        (("bfloat",), r"did you mean 'bfloat16'\?"),
        (("string",), r"unknown dtype 'string'; for text, write Text\(\)"),
        ((np.dtype("U4"),), r"for text, write Text\(\)"),
        (((10, 20), "float32"), r"write Array\('float32', \(10, 20\)\)$"),
        (((10, 20),), r"takes the dtype before the shape: write Array\('uint8', \(10, 20\)\)$"),
        (("uint8", (0,)), "from 1 up"),
        (("uint8", (-1,)), "from 1 up"),
        (("uint8", (True,)), "from 1 up"),
        (("uint8", (2.0,)), "from 1 up"),
        (("uint8", (1,) * 17), "at most 16"),
        (("uint8", (1 << 48,)), "fewer than 2\\^48"),
        (("uint8", (None, 1 << 49)), "fewer than 2\\^48"),
        (("uint8", (), "gzip"), "unknown codec 'gzip'"),
    ],
)
def test_arrays_that_cannot_be_stored_are_refused(arguments: Any, text: str) -> None:
    with pytest.raises(SchemaError, match=text):
        Array(*arguments)


def test_a_name_may_have_255_bytes_of_utf_8() -> None:
    name = "ä" * 127 + "a"
    assert list(Schema.from_json(Schema({name: Text()}).to_json())) == [name]


def test_the_longest_row_is_what_48_bits_can_say() -> None:
    assert Array("uint8", ((1 << 48) - 1,)).row_bytes == (1 << 48) - 1


def test_a_name_of_a_later_unicode_is_read_and_not_written(tmp_path: Path) -> None:
    name = "a\u0378"  # which no version has yet, as this one lacks those of later ones
    schema = Schema({name: Text()})
    assert list(Schema.from_json(schema.to_json())) == [name]
    with pytest.raises(SchemaError, match=r"Unicode \d+\.\d+\.\d+, which this Python knows"):
        ShardWriter(tmp_path / "a.shard", schema)
    assert not list(tmp_path.iterdir())


def test_a_dtype_may_be_given_as_numpy_gives_it() -> None:
    assert Array(np.float32, (2,)) == Array("float32", (2,))
    assert Array(np.dtype(">i2")) == Array("int16")


@pytest.mark.parametrize(
    ("field", "row_bytes", "stride"),
    [
        (Array("bool"), 1, 1),
        (Array("uint8", (63,)), 63, 63),
        (Array("uint8", (64,)), 64, 64),
        (Array("uint8", (65,)), 65, 128),
        (Array("float64", (3, 5)), 120, 128),
    ],
)
def test_rows_from_64_bytes_up_begin_on_64_bytes(field: Array, row_bytes: int, stride: int) -> None:
    assert (field.row_bytes, field.stride) == (row_bytes, stride)


def test_only_raw_arrays_of_fixed_shape_are_columns() -> None:
    assert Array("uint8", (2,)).column == Array("uint8", (2,))
    assert Array("uint8", (2,), codec="zstd").column is None
    assert Array("uint8", (None,)).column is None
    with pytest.raises(SchemaError, match="no stride"):
        _ = Array("uint8", (None,)).stride


SOME = Schema(
    {
        "image": Image(optional=True),
        "camera": {"id": Text("zstd_dictionary"), "lens": {"focus": Array("float32")}},
        "boxes": List(Array("float32", (None, 4)), optional=True),
        "size": Array("int64", (2,)),
    }
)


def test_a_schema_says_how_each_field_is_stored_and_what_readers_need() -> None:
    assert list(SOME.columns) == ["camera.lens.focus", "size"]
    assert list(SOME.records) == ["image", "camera.id", "boxes"]
    assert [SOME.field_id(name) for name in SOME] == [0, 1, 2, 3, 4]
    assert SOME.optional == ("image", "boxes")
    assert SOME.groups == {"camera", "camera.lens"}
    assert SOME.required == (
        Required.IMAGES
        | Required.LISTS
        | Required.OPTIONAL_FIELDS
        | Required.NESTED_NAMES
        | Required.ZSTD_DICTIONARY
    )
    assert Schema({"a": Text("zstd"), "b": Json()}).required == Required(0)
    assert group_parts(SOME, "camera") == ["id", "lens"]
    assert group_parts(SOME, "camera.lens") == ["focus"]


def test_a_schema_shows_itself_as_it_is_written() -> None:
    shown = repr(SOME)
    assert "'image': Image(optional=True)" in shown
    assert "'camera.id': Text(codec='zstd_dictionary')" in shown
    assert shown.endswith(", …})")
    assert "'boxes': List(Array('float32', (None, 4)), optional=True)" in repr(
        Schema({"boxes": SOME["boxes"]})
    )
    table = SOME.html_table("bytes", lambda name: f"<{len(name)}>")
    assert table.count("<tr") == len(SOME) + 1
    assert "zstd_dictionary" in table
    assert "&lt;17&gt;" in table  # what `describe` returns of camera.lens.focus, escaped


def test_a_sample_without_nested_records_is_taken_as_it_is() -> None:
    flat, sample = Schema({"a": Text()}), {"a": "x", "b": {"c": 1}}
    assert flat.flatten(sample) is sample
    given = {"camera": {"id": "x", "lens": 3}, "size": {"w": 1}, "other": {}}
    assert SOME.flatten(given) == {
        "camera.id": "x",
        "camera.lens": 3,  # for the writer to refuse
        "size": {"w": 1},
        "other": {},
    }


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"\xff", "^the schema is not JSON in UTF-8: "),
        (b"[]", 'must be an object with the single key "fields"$'),
        (b'{"fields":{}}', '^"fields" of the schema must be a list$'),
        (b'{"fields":[7]}', "^field 0 of the schema is not an object$"),
        (
            b'{"fields":[{"codec":0,"id":true,"name":"a","type":3}]}',
            "^field 'a' of the schema: 'id' must be an integer$",
        ),
        (
            b'{"fields":[{"codec":0,"id":4,"name":"a","type":3}]}',
            "^field 'a': expected id 0, found 4$",
        ),
        (
            b'{"fields":[{"codec":0,"id":0,"name":"a","type":3},'
            b'{"codec":0,"id":1,"name":"a","type":2}]}',
            "^two fields are named 'a'$",
        ),
        (
            b'{"fields": [{"codec":0,"id":0,"name":"a","type":3}]}',
            "^the schema is not in canonical form$",
        ),
    ],
)
def test_a_stored_schema_that_breaks_a_rule_says_which(content: bytes, text: str) -> None:
    with pytest.raises(SchemaError, match=text):
        Schema.from_json(content)


def test_codes_of_later_versions_are_named_with_their_field() -> None:
    for entry, what in (
        (b'"codec":9,"id":0,"name":"a","type":3', "codec 9"),
        (b'"codec":0,"id":0,"name":"a","type":77', "field type 77"),
    ):
        with pytest.raises(ShardUnsupported) as caught:
            Schema.from_json(b'{"fields":[{' + entry + b"}]}")
        assert str(caught.value) == f"field 'a' has {what}, which this version cannot read"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *((name, r"write list\(schema\)$") for name in ("names", "column_names", "field_names")),
        *((name, r"write dict\(schema\)$") for name in ("fields", "types", "features", "to_dict")),
        *((name, r"write schema\[name\]\.dtype$") for name in ("dtype", "dtypes")),
        *((name, r"write schema\[name\]\.shape$") for name in ("shape", "shapes")),
        ("x", r"write schema\['x'\]$"),
        ("y", "'Schema' object has no attribute 'y'$"),
    ],
)
def test_an_attribute_of_another_schema_is_answered(name: str, words: str) -> None:
    with pytest.raises(AttributeError, match=words):
        getattr(Schema({"x": Array("int8"), "label": Text()}), name)


def test_an_unknown_field_is_answered_with_the_fields() -> None:
    schema = Schema({"x": Array("int8"), "label": Text()})
    assert (len(schema), schema["x"], list(schema)) == (2, Array("int8"), ["x", "label"])
    with pytest.raises(KeyError, match="the schema: no field 'labels'; did you mean 'label'"):
        schema["labels"]
    with pytest.raises(KeyError, match="no field 'zz'; its fields are x, label"):
        schema["zz"]
    with pytest.raises(KeyError, match="no field '0'"):
        schema[0]  # type: ignore[index]
    assert "labels" not in schema and schema.get("labels") is None
    assert schema.get("x") == Array("int8") and schema.get("labels", 1) == 1


def test_a_schema_is_copied_and_pickled() -> None:
    schema = Schema({"x": Array("int8"), "a.b": Text()})
    for again in (copy.copy(schema), copy.deepcopy(schema), pickle.loads(pickle.dumps(schema))):
        assert again == schema and again.groups == {"a"}
