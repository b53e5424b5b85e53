from __future__ import annotations

import numpy as np
import pytest

from shardio import Array, Bytes, Json, Schema, Text
from shardio.batch.schema_inference import check_sample, infer_schema
from shardio.errors import SchemaError
from shardio.format.types import DTYPES
from shardio.format.types.arrays import numpy_dtype

SOURCE = Schema(
    {
        "fixed": Array("uint8", (4, 4)),
        "points": Array("int16", (None, 2)),
        "bits": Array("bfloat16", (3,)),
        "words": Array("bfloat16", (None,)),
        "note": Text(),
    }
)


def infer(value: object, name: str = "x", source: Schema | None = None) -> object:
    return infer_schema({name: value}, source)[name]


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (np.zeros((2, 3), np.float32), Array("float32", (2, 3))),
        (np.zeros((0, 3), np.float32), Array("float32", (None, 3))),
        (np.array(5, np.int8), Array("int8")),
        (np.int16(5), Array("int16")),
        (np.float16(5), Array("float16")),
        (np.bool_(True), Array("bool")),
        (True, Array("bool")),
        (5, Array("int64")),
        (-(2**63), Array("int64")),
        (5.0, Array("float64")),
        (np.zeros(2, ">i4"), Array("int32", (2,))),
        (np.zeros((4, 4))[::2, ::2], Array("float64", (2, 2))),
        ("", Text()),
        (np.str_("größe"), Text()),
        (b"", Bytes()),
        (np.bytes_(b"abc"), Bytes()),
        (bytearray(b"a"), Bytes()),
        (memoryview(b"a"), Bytes()),
        (None, Json()),
        ({}, Json()),
        ({"a": [1]}, Json()),
        ([1, 2], Json()),
        ((1, "a"), Json()),
    ],
)
def test_every_kind_of_value_has_its_field(value: object, field: object) -> None:
    assert infer(value) == field


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype_that_can_be_stored_is_inferred(dtype: str) -> None:
    stored = "uint16" if dtype == "bfloat16" else dtype
    assert infer(np.zeros(3, numpy_dtype(dtype))) == Array(stored, (3,))


# What the source says of a field that keeps its name.


def test_what_varies_in_the_source_varies_here() -> None:
    assert infer(np.zeros((7, 2), np.int16), "points", SOURCE) == Array("int16", (None, None))


def test_what_was_made_of_a_varying_field_is_fixed_when_it_is_of_another_kind() -> None:
    assert infer(np.zeros((7, 2), np.float32), "points", SOURCE) == Array("float32", (7, 2))
    assert infer(np.zeros(14, np.int16), "points", SOURCE) == Array("int16", (14,))
    assert infer(np.zeros((7, 2), np.int16), "other", SOURCE) == Array("int16", (7, 2))


def test_a_fixed_field_may_be_given_another_shape() -> None:
    assert infer(np.zeros((2, 2), np.uint8), "fixed", SOURCE) == Array("uint8", (2, 2))


def test_bits_of_bfloat16_stay_bfloat16_and_other_uint16_stays_uint16() -> None:
    assert infer(np.zeros(3, np.uint16), "bits", SOURCE) == Array("bfloat16", (3,))
    assert infer(np.zeros(3, np.uint16), "words", SOURCE) == Array("bfloat16", (None,))
    assert infer(np.zeros(3, np.uint16), "fixed", SOURCE) == Array("uint16", (3,))
    assert infer(np.zeros(3, np.float32), "bits", SOURCE) == Array("float32", (3,))


def test_a_field_may_become_something_else_altogether() -> None:
    assert infer("text", "fixed", SOURCE) == Text()
    assert infer(1, "note", SOURCE) == Array("int64")


# Later samples.

FIRST = {
    "image": np.zeros((2, 3), np.uint8),
    "points": np.zeros((5, 2), np.int16),
    "count": 7,
    "note": "a",
    "meta": None,
}
SCHEMA = infer_schema(FIRST, SOURCE)


def changed(**values: object) -> dict[str, object]:
    return {**FIRST, **values}


@pytest.mark.parametrize(
    "sample",
    [
        FIRST,
        dict(reversed(FIRST.items())),
        changed(count=np.int64(3)),
        changed(points=np.zeros((0, 9), np.int16)),
        changed(image=np.zeros((2, 3), np.uint8)[::-1]),
        changed(count=np.array(3, ">i8"), points=np.zeros((1, 1), ">i2")),
        changed(meta={"a": 1}, note=""),
    ],
)
def test_a_sample_like_the_first_is_accepted(sample: dict[str, object]) -> None:
    check_sample(sample, SCHEMA)


def test_the_first_sample_always_fits_what_was_inferred_from_it() -> None:
    for value in (np.zeros(3, ">f4"), np.zeros(0), True, 2.5, np.float16(1), np.zeros((), ">u2")):
        check_sample({"x": value}, infer_schema({"x": value}))


@pytest.mark.parametrize("shape", [(4, 5, 3), (3, 4, 5), (4,)])
def test_pictures_of_another_size_name_the_cure(shape: tuple[int, ...]) -> None:
    schema = infer_schema({"x": np.zeros(shape, np.uint8)})
    with pytest.raises(SchemaError, match='collate="pad"') as caught:
        check_sample({"x": np.zeros(tuple(n + 1 for n in shape), np.uint8)}, schema)
    cure = r"shardio.transforms.Resize((height, width)) or torchvision's v2.Resize((height, width))"
    assert (cure in str(caught.value)) == (len(shape) == 3)
