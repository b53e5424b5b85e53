"""Encoders made once for a field give the bytes and the errors that `values` gives of any value."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardio.errors import SchemaError
from shardio.format.types import DTYPES, Array, Bytes, Field, Text
from shardio.format.types.array_values import encode_array
from tests.format.strategies import FIELDS, TEXTS, TYPES

NUMBERS = st.one_of(
    st.booleans(),
    st.integers(-(1 << 65), 1 << 65),
    st.sampled_from(
        [n for bits in (7, 8, 15, 16, 31, 32, 63, 64) for n in (-(1 << bits), 1 << bits)]
    ),
    st.floats(),
    st.sampled_from([3.4028235677973366e38, -3.5e38, 1e-46, 65520.0]),
)
SHAPES = st.sampled_from([(), (1,), (3,), (2, 3), (0,), (2111,)])


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    """Draw an array of any dtype and shape, also of other byte orders, strides and kinds."""
    dtype = np.dtype(draw(st.sampled_from([*sorted(set(DTYPES) - {"bfloat16"}), ">i4", "S1", "O"])))
    shape = draw(SHAPES)
    raw = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 3, math.prod(shape), np.uint8)
    found: Any = raw.reshape(shape).astype(dtype)
    if dtype.kind == "b" and draw(st.booleans()):
        found = raw.reshape(shape).view(np.bool_)  # there may be a 2 in it
    kinds = [found, found[()], found.T, np.ma.masked_array(found), found.tolist()]
    return draw(st.sampled_from(kinds))


VALUES = st.one_of(st.none(), NUMBERS, st.lists(NUMBERS, max_size=3), arrays(), TEXTS)


def result(call: Any, *given_: Any) -> Any:
    """Return the result of a call: bytes and a shape, or the text of an error."""
    try:
        found = call(*given_)
    except SchemaError as error:
        return str(error)
    if found is None:
        return None
    return (bytes(found[0]), found[1]) if isinstance(found, tuple) else found.tobytes()


@given(st.builds(Array, TYPES, SHAPES.filter(lambda shape: 0 not in shape)), VALUES)
def test_a_row_is_what_the_array_of_the_value_is(field: Array, value: Any) -> None:
    encode = field.row_encoder("a")
    expected = result(encode_array, "a", field, value)
    assert result(lambda: memoryview(encode(value) or b"")) == expected


@given(FIELDS.filter(lambda field: not field.is_streamed), VALUES)
def test_a_record_is_what_the_value_is_stored_as(field: Field, value: Any) -> None:
    assert result(field.record_encoder("a"), value) == result(field.encode_record, "a", value)


@pytest.mark.parametrize("value", ["a", "\ud800", b"b", bytearray(b"c"), memoryview(b"ab")[::2], 1])
@pytest.mark.parametrize("field", [Text(), Bytes(), Text(optional=True)])
def test_text_and_bytes_are_told_apart(field: Field, value: Any) -> None:
    assert result(field.record_encoder("a"), value) == result(field.encode_record, "a", value)


@pytest.mark.parametrize("shape", [(3,), (3000,)])
def test_a_row_that_is_not_there_is_none(shape: tuple[int, ...]) -> None:
    assert Array("uint8", shape, optional=True).row_encoder("a")(None) is None
