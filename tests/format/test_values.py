"""Values of samples: stored exactly as given, or refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardio.errors import SchemaError, ShardCorrupt
from shardio.format.types import (
    DTYPES,
    Array,
    Bytes,
    EncodedImage,
    Field,
    Image,
    Json,
    List,
    Text,
)
from shardio.format.types.array_values import encode_array
from shardio.format.types.arrays import unpack_list
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
    assert found.dtype == np.dtype("<f4")


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [("int64", "uint64"), ("uint8", "int16"), ("bool", "uint8"), ("float32", "float64")],
)
def test_an_array_of_a_dtype_that_does_not_fit_is_refused(dtype: str, stored: str) -> None:
    with pytest.raises(SchemaError) as caught:
        encode_array("size", Array(dtype, (1,)), np.zeros(1, stored))
    assert str(caught.value) == f"field 'size': expected dtype {dtype}, found {stored}"


def test_an_array_of_64_bits_is_rounded_to_no_number_of_a_float_field() -> None:
    exact = np.array([1 << 53, -(1 << 60)], np.int64)
    assert encode_array("a", Array("float64", (2,)), exact).tolist() == exact.tolist()
    assert encode_array("a", Array("uint64"), np.uint64((1 << 64) - 1)) == (1 << 64) - 1
    with pytest.raises(SchemaError) as caught:
        encode_array("a", Array("float64", (2,)), np.array([5, (1 << 53) + 1]))
    expected = f"field 'a': float64 cannot hold {(1 << 53) + 1} exactly"
    assert str(caught.value) == expected


def test_a_number_that_is_refused_is_reported_with_the_limits_of_the_field() -> None:
    for field, value, reason in (
        (Array("uint8"), 256, "found int: a value lies outside 0..255"),
        (Array("int8", (2,)), [-129, 0], "found list: a value lies outside -128..127"),
        (Array("uint64"), 1 << 64, "found int: an integer has more than 64 bits"),
        (Array("float16"), 1e6, "found float: a value is too large for float16"),
        (Array("int64"), "7", "found str: its values are <U1"),
        (Array("int64", (1,)), [0.5], "found list: its values are float64"),
    ):
        with pytest.raises(SchemaError) as caught:
            encode_array("a.b", field, value)
        assert str(caught.value) == f"field 'a.b': expected {field.dtype}, {reason}"


def test_bool_numbers_fit_numbers_and_an_empty_list_fits_any_dtype() -> None:
    assert encode_array("a", Array("uint8", (2,)), [True, False]).tolist() == [1, 0]
    assert encode_array("a", Array("float32"), True) == 1
    for dtype in ("bool", "int8", "bfloat16"):
        found = encode_array("a", Array(dtype, (None,)), [])
        assert (found.shape, found.dtype) == ((0,), Array(dtype).numpy)


def test_a_bool_array_with_other_bytes_than_0_and_1_is_refused() -> None:
    bits = np.array([1, 2, 0], np.uint8).view(np.bool_)
    for store in (lambda: encode_array("a", Array("bool", (3,)), bits), lambda: row(bits)):
        with pytest.raises(SchemaError) as caught:
            store()
        assert str(caught.value) == "field 'a': a bool in it is neither 0 nor 1"
    assert row(np.array([True, False, True])) == b"\1\0\1"


def row(value: Any) -> bytes:
    return bytes(Array("bool", (3,)).row_encoder("a")(value) or b"")


def test_only_masked_arrays_and_tensors_of_torch_are_special() -> None:
    class Tensor(np.ndarray[Any, Any]):
        pass

    plain = np.arange(3, dtype=np.uint8)
    own = plain.view(Tensor)
    assert encode_array("a", Array("uint8", (3,)), own).tolist() == [0, 1, 2]
    for value, shape in ((np.ma.masked_array(plain), (3,)), ([np.ma.masked_array(plain)], (1, 3))):
        with pytest.raises(SchemaError) as caught:
            encode_array("a", Array("uint8", shape), value)
        message = str(caught.value)
        assert message.startswith("field 'a': a masked array would lose its mask; fill it")
        assert message.endswith("np.ma.getmaskarray(x)")


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
    with pytest.raises(SchemaError) as caught:
        Array("uint8", (None, None)).encode_record("a", np.empty((0, 1 << 50), "u1"))
    assert str(caught.value) == f"field 'a': shape (0, {1 << 50}) is not below 2^48 bytes"


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        (Text(), b"abc", "expected str, found bytes"),
        (Text(), None, "expected str, found None, which only a field with optional=True takes$"),
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
    with pytest.raises(SchemaError, match=text) as caught:
        field.encode_record("some", value)
    assert str(caught.value).startswith("field 'some': ")


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


def test_a_missing_value_has_an_empty_record_and_dimensions_of_zero() -> None:
    for field, shape in (
        (Array("uint8", (None, 3, None), optional=True), (0, 0, 0)),
        (Image(optional=True), (0, 0, 0)),
        (Text(optional=True), ()),
        (List(Array("uint8", (2,)), optional=True), ()),
    ):
        record, found = field.encode_record("a", None)
        assert (bytes(record), found) == (b"", shape)
    null, _ = Json().encode_record("a", None)
    assert bytes(null) == b"null"


def test_a_list_of_arrays_refuses_what_its_element_refuses_by_position() -> None:
    field = List(Array("uint8", (2,)))
    with pytest.raises(SchemaError) as caught:
        field.encode_record("boxes", [[1, 2], [3]])
    assert str(caught.value) == "field 'boxes[1]': expected shape (2), found (1)"
    with pytest.raises(SchemaError) as caught:
        field.encode_record("boxes", np.zeros((1, 2), np.uint8))
    assert str(caught.value) == "field 'boxes': expected a list of arrays, found ndarray"
    for element in (Array("uint8", codec="zstd"), Array("uint8", optional=True)):
        with pytest.raises(SchemaError, match="give codec and optional to the List itself"):
            List(element)
    with pytest.raises(SchemaError, match="must be an Array; found Text()"):
        List(Text())  # type: ignore[arg-type]


def test_a_record_of_a_list_that_is_cut_or_padded_is_refused() -> None:
    element = Array("uint8", (None,))
    record, _ = List(element).encode_record("a", [[1, 2, 3], [], [4]])
    assert [each.tolist() for each in unpack_list(element, record)] == [[1, 2, 3], [], [4]]
    for damaged, text, expected, found in (
        (record[:63], "has no head", 64, 63),
        (record[:-1], r"of shape \(1,\) in a list is cut off", 1, 0),
        (bytes(record) + b"x", "do not fill its record", 68, 69),
        (b"\xff" + bytes(record[1:]), "has too many arrays for its size", 8, 255),
        (bytes(record[:33]) + b"\1" + bytes(record[34:]), "padding is not zero", 64, 32),
    ):
        with pytest.raises(ShardCorrupt, match=text) as caught:
            unpack_list(element, damaged)
        assert caught.value.code == "list"
        assert (caught.value.expected, caught.value.found) == (expected, found)


def test_the_options_of_a_field_are_named_if_they_are_unknown() -> None:
    for make in (
        Text,
        lambda codec: Array("uint8", codec=codec),
        lambda c: List(Array("uint8"), c),
    ):
        with pytest.raises(SchemaError) as caught:
            make("gzip")
        expected = "unknown codec 'gzip'; known: 'raw', 'zstd', 'zstd_dictionary'"
        assert str(caught.value) == expected
    with pytest.raises(SchemaError, match="^optional must be True or False; found 1$"):
        Text(optional=1)  # type: ignore[arg-type]


def test_a_picture_of_impossible_size_is_refused_when_written_and_when_read() -> None:
    field = Image()
    for shape in ((0, 1, 1), (1, 1 << 31, 1), (1, 1, 5)):
        with pytest.raises(SchemaError) as refused:
            field.encode_record("a", EncodedImage(b"x", *shape))
        height, width, channels = shape
        said = f"1 bytes, height {height}, width {width} and {channels} channels"
        assert str(refused.value) == f"field 'a': invalid picture: {said}"
        dims = np.array(shape, np.uint64)
        with pytest.raises(ShardCorrupt) as caught:
            field.shape_of(dims, 1)
        assert (caught.value.code, caught.value.found) == ("picture", shape)
        assert field.are_valid(dims[None]).tolist() == [False]
    largest = np.array([[(1 << 31) - 1, (1 << 31) - 1, 4], [1, 1, 1]], np.uint64)
    assert field.are_valid(largest).tolist() == [True, True]
    assert field.shape_of(largest[0], 1) == ((1 << 31) - 1, (1 << 31) - 1, 4)
    with pytest.raises(ShardCorrupt) as empty:
        field.check_record(b"", largest[1])
    assert empty.value.code == "validity"
    with pytest.raises(ShardCorrupt) as wide:
        field.check_record(b"x", np.array([1, 1, 5], np.uint64))
    assert (wide.value.code, wide.value.found) == ("picture", (1, 1, 5))
    with pytest.raises(SchemaError, match="optional must be True or False; found None"):
        Image(optional=None)  # type: ignore[arg-type]
