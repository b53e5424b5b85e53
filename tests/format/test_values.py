"""Values of samples: stored exactly as given, or refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardio.errors import SchemaError
from shardio.format.types import DTYPES, Array, Bytes, Field, Json, Text
from shardio.format.types.array_values import encode_array
from tests.format.strategies import JSON


@given(JSON)
def test_the_order_of_keys_in_json_does_not_show(value: Any) -> None:
    def reversed_keys(found: Any) -> Any:
        if isinstance(found, dict):
            return {key: reversed_keys(found[key]) for key in reversed(found)}
        return [reversed_keys(item) for item in found] if isinstance(found, list) else found

    assert Json().encode_record("a", value) == Json().encode_record("a", reversed_keys(value))


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_may_come_as_any_bytes_like_object(kind: Any) -> None:
    record, _ = Bytes().encode_record("a", kind(b"abc"))
    assert Bytes().decode(record, ()) == b"abc"


@given(
    dtype=st.sampled_from(sorted(name for name in DTYPES if "int" in name)),
    number=st.integers(-(1 << 70), 1 << 70),
)
def test_a_python_integer_is_stored_exactly_or_refused(dtype: str, number: int) -> None:
    limits = np.iinfo(dtype)
    if limits.min <= number <= limits.max:
        assert int(encode_array("a", Array(dtype), number)) == number
    else:
        with pytest.raises(SchemaError, match=f"field 'a': expected {dtype}"):
            encode_array("a", Array(dtype), number)


@pytest.mark.parametrize("value", [[300], [np.int64(300)], [-1], [1.0], ["1"], [None], [b"1"]])
def test_a_list_of_what_uint8_cannot_hold_is_refused(value: Any) -> None:
    with pytest.raises(SchemaError, match="field 'a': expected uint8"):
        encode_array("a", Array("uint8", (1,)), value)


@pytest.mark.parametrize("value", [1e300, -1e39, [1e300], np.float64(1)])
def test_a_number_beyond_float32_is_refused(value: Any) -> None:
    shape = (1,) if isinstance(value, list) else ()
    with pytest.raises(SchemaError, match="float32"):
        encode_array("a", Array("float32", shape), value)


def test_infinities_and_nan_are_numbers_of_a_float_field() -> None:
    found = encode_array("a", Array("float32", (3,)), [float("inf"), float("-inf"), float("nan")])
    assert np.isposinf(found[0]) and np.isneginf(found[1]) and np.isnan(found[2])


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [("int64", "uint64"), ("uint8", "int16"), ("bool", "uint8"), ("float32", "float64")],
)
def test_an_array_of_a_dtype_that_does_not_fit_is_refused(dtype: str, stored: str) -> None:
    with pytest.raises(SchemaError, match=f"expected dtype {dtype}, found {stored}"):
        encode_array("a", Array(dtype, (1,)), np.zeros(1, stored))


@pytest.mark.parametrize(
    "value", [np.zeros(3, "uint8"), np.zeros(3, "float32"), np.zeros(3, bool), [1, 2, 3]]
)
def test_bfloat16_is_given_as_its_bits_and_never_as_numbers(value: Any) -> None:
    with pytest.raises(SchemaError, match="bfloat16"):
        encode_array("a", Array("bfloat16", (3,)), value)


def test_bfloat16_bits_may_have_either_byte_order() -> None:
    bits = np.array([0x3F80, 1, 0xFFFF], np.uint16)
    for given_ in (bits, bits.astype(">u2")):
        found = encode_array("a", Array("bfloat16", (3,)), given_)
        assert found.dtype == np.dtype("<u2")
        assert found.tolist() == bits.tolist()


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_big_endian_and_strided_arrays_are_stored_in_order(dtype: str) -> None:
    field = Array(dtype, (3, 2))
    plain = np.arange(6).reshape(3, 2).astype(field.numpy)
    other = np.asfortranarray(plain.astype(field.numpy.newbyteorder(">")))
    assert encode_array("a", field, other).tobytes() == plain.tobytes()


@pytest.mark.parametrize(
    ("shape", "value", "text"),
    [
        ((2,), np.zeros(3, "u1"), r"expected shape \(2\), found \(3\)"),
        ((2,), np.zeros((), "u1"), r"expected shape \(2\), found \(\)"),
        ((None, 2), np.zeros((1, 3), "u1"), r"expected shape \(any, 2\), found \(1, 3\)"),
        ((), [1], r"expected shape \(\), found \(1\)"),
        ((2, 2), [[1, 2], [3]], "inhomogeneous"),
        ((None,), np.empty((0, 1), "u1"), r"found \(0, 1\)"),
    ],
)
def test_an_array_of_another_shape_is_refused(shape: Any, value: Any, text: str) -> None:
    with pytest.raises(SchemaError, match=text):
        encode_array("a", Array("uint8", shape), value)


def test_an_empty_array_that_numpy_could_not_address_again_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"not below 2\^48 bytes"):
        Array("uint8", (None, None)).encode_record("a", np.empty((0, 1 << 50), "u1"))


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        (Text(), b"abc", "expected str, found bytes"),
        (Text(), None, "expected str, found NoneType"),
        (Text(), "\ud800", "not valid Unicode"),
        (Bytes(), "abc", "expected bytes, found str"),
        (Bytes(), [1], "expected bytes, found list"),
        (Json(), float("nan"), "cannot be written as JSON"),
        (Json(), {1: "a"}, "keys must be str, found 1"),
        (Json(), [{"a": {None: 1}}], "keys must be str, found None"),
        (Json(), "\ud800", "cannot be written as JSON"),
        (Json(), np.int64(1), "cannot be written as JSON"),
    ],
)
def test_a_value_of_another_kind_is_refused(field: Field, value: Any, text: str) -> None:
    with pytest.raises(SchemaError, match=text):
        field.encode_record("a", value)


def nested(depth: int, inside: list[Any]) -> Any:
    for _ in range(depth - 1):
        inside = [inside]
    return inside


@pytest.mark.parametrize("inside", [[7], [{}], [[]]], ids=repr)
def test_no_value_of_json_lies_inside_of_more_than_256_lists(inside: list[Any]) -> None:
    deepest = nested(256, inside)
    record, _ = Json().encode_record("a", deepest)
    assert Json().decode(record, ()) == deepest
    with pytest.raises(SchemaError, match="nested more than 256 deep"):
        Json().encode_record("a", [deepest])


def test_json_that_refers_to_itself_is_refused() -> None:
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(SchemaError, match="cannot be written as JSON"):
        Json().encode_record("a", circle)


def test_a_tuple_in_json_becomes_a_list() -> None:
    record, _ = Json().encode_record("a", {"a": (1, 2)})
    assert bytes(record) == b'{"a":[1,2]}'
