from __future__ import annotations

from typing import Any

import pytest

from shardio import Array, Bytes, Json, List, Schema, Text
from shardio.batch.collation import DEFAULT_COLLATION, CollateRule, Collation, parse_collate
from shardio.errors import InvalidArgument

SCHEMA = Schema(
    {
        "label": Array("int64"),
        "image": Array("uint8", (4, 6)),
        "points": Array("bfloat16", (None, 2), optional=True),
        "note": Text(),
        "boxes": List(Array("float32", (None,))),
    }
)


def shapes(collate: object, schema: Schema = SCHEMA) -> dict[str, Any]:
    batch, _ = parse_collate(collate).expand(schema)
    return {name: (f.dtype, f.shape) for name, f in batch.items() if isinstance(f, Array)}


FIXED = {"label": ("int64", ()), "image": ("uint8", (4, 6))}


def test_without_a_word_batches_have_the_schema_of_the_samples() -> None:
    assert parse_collate("stack") == DEFAULT_COLLATION
    assert DEFAULT_COLLATION.expand(SCHEMA) == (SCHEMA, ())
    assert DEFAULT_COLLATION.relax_shapes(SCHEMA) == SCHEMA


@pytest.mark.parametrize("collate", ["pad", {"points": "pad"}, {"points": (9, None)}])
def test_what_is_padded_has_a_dimension_more_and_a_mask_of_its_shape(collate: object) -> None:
    whole = (None, None, None)
    expected = {"points": ("bfloat16", whole), "points_mask": ("bool", whole)}
    assert shapes(collate) == FIXED | expected
    batch, (join,) = parse_collate(collate).expand(SCHEMA)
    assert list(batch) == ["label", "image", "points", "points_mask", "note", "boxes"]
    assert batch["points"].optional
    assert join.field == SCHEMA["points"]


@pytest.mark.parametrize("collate", ["ragged", {"points": "ragged"}])
def test_what_is_ragged_has_as_many_dimensions_and_offsets(collate: object) -> None:
    expected = {"points": ("bfloat16", (None, None)), "points_offsets": ("int64", (None,))}
    assert shapes(collate) == FIXED | expected


def test_what_is_stacked_by_name_is_one_array_although_it_varies() -> None:
    assert shapes({"points": "stack"}) == FIXED | {"points": ("bfloat16", (None, None, None))}


@pytest.mark.parametrize("collate", ["list", {"points": "list"}, {"note": "list"}])
def test_lists_are_what_varying_arrays_are_anyway(collate: object) -> None:
    assert parse_collate(collate).expand(SCHEMA) == (SCHEMA, ())


@pytest.mark.parametrize("collate", ["pad", "ragged", "list", lambda samples: samples])
def test_of_what_a_transform_makes_every_dimension_may_vary(collate: object) -> None:
    loose = parse_collate(collate).relax_shapes(SCHEMA)
    assert loose["image"] == Array("uint8", (None, None))
    assert loose["points"] == Array("bfloat16", (None, None), optional=True)
    assert all(loose[name] == SCHEMA[name] for name in ("label", "note", "boxes"))


def test_a_dict_loosens_the_fields_that_it_names_alone() -> None:
    loose = parse_collate({"image": "pad"}).relax_shapes(SCHEMA)
    assert loose["image"] == Array("uint8", (None, None))
    assert loose["points"] == SCHEMA["points"]


def test_a_function_is_left_as_it_is() -> None:
    assert parse_collate(len) == Collation(function=len)


def test_a_shape_is_what_a_field_is_padded_to() -> None:
    assert parse_collate({"points": [3, None]}).by_field == {
        "points": CollateRule("pad", (3, None))
    }


@pytest.mark.parametrize(
    ("collate", "text"),
    [
        ("padded", "collate must be one of 'stack', 'pad', 'ragged', 'list', a dict.*'padded'"),
        (None, "found None"),
        ({"points": "padded"}, "must map a field to one of 'stack'.*'padded'"),
        ({"points": ()}, r"found \(\)"),
        ({"points": (0, 2)}, r"found \(0, 2\)"),
        ({"points": (True, 2)}, r"found \(True, 2\)"),
        ({"other": "pad"}, "names 'other'; the fields of a sample are label, image"),
        ({"note": "pad"}, "'note' is Text, which is always a list"),
        ({"image": "pad"}, r"'image' has the shape \(4, 6\) in every sample"),
        ({"points": (3,)}, r"\(None, 2\), where None varies, and cannot be padded to \(3,\)"),
        ({"points": (3, 1)}, r"cannot be padded to \(3, 1\)"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_what_can(collate: object, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        parse_collate(collate).expand(SCHEMA)


def test_numbers_that_were_stored_as_json_name_the_schema_that_pads_them() -> None:
    schema = Schema({"tokens": Json()})
    for rule in ("pad", "ragged"):
        with pytest.raises(InvalidArgument, match=r"'tokens': shardio.Array\(\"int64\", \(None"):
            parse_collate({"tokens": rule}).expand(schema)


@pytest.mark.parametrize(("collate", "name"), [("pad", "x_mask"), ("ragged", "x_offsets")])
def test_a_field_that_has_the_name_of_a_mask_is_in_the_way(collate: str, name: str) -> None:
    schema = Schema({"x": Array("int64", (None,)), name: Bytes()})
    with pytest.raises(InvalidArgument, match=f"of 'x' adds '{name}', which is a field already"):
        parse_collate(collate).expand(schema)
