"""Values through memory: equal to what went in, their arrays in place."""

from __future__ import annotations

import copyreg
import pickle
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as np_st

from shardio._workers.processes.serialization import ValuePickler
from shardio._workers.tasks.values import pack_value, read_value, write_value

Ndarray = npt.NDArray[Any]


def through_memory(value: Any) -> tuple[Any, Ndarray]:
    """Return a value after a trip through memory, and the memory."""
    packed = pack_value(value)
    memory = np.full(packed.n_bytes + 8, 0xEE, np.uint8)
    write_value(packed, memory[:-8].data)
    assert (memory[-8:] == 0xEE).all(), "nothing is written behind it"
    return read_value(memory[:-8]), memory


def assert_same(found: Ndarray, expected: Ndarray) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.dtype.byteorder == expected.dtype.byteorder
    np.testing.assert_array_equal(found, expected)


FROZEN = np.arange(5)
FROZEN.flags.writeable = False

IN_PLACE = {
    "plain": np.arange(10, dtype=np.float32),
    "of no dimension": np.array(3.5),
    "empty": np.zeros((0, 3)),
    "in Fortran's order": np.arange(12).reshape(3, 4).T,
    "with gaps": np.arange(100)[::3],
    "backwards": np.arange(24.0).reshape(2, 3, 4)[:, ::-1],
    "broadcast": np.broadcast_to(np.arange(3), (4, 3)),
    "of the other byte order": np.arange(5, dtype=">i4"),
    "structured": np.array([(1, 2.5), (3, 4.5)], [("a", "<i4"), ("b", "<f8")]),
    "of text": np.array(["ab", "c"]),
    "of truth values": np.array([True, False]),
    "read-only": FROZEN,
}

OTHERS = {
    "of objects": np.array([1, "a", None], object),
    "of dates": np.array(["2020-01-01"], "M8[D]"),
    "of records": np.rec.array([(1, 2.0)], dtype=[("a", int), ("b", float)]),
}


@pytest.mark.parametrize("kind", sorted(IN_PLACE))
def test_an_array_comes_out_as_it_went_in_and_is_a_view_of_the_memory(kind: str) -> None:
    array = IN_PLACE[kind]
    found, memory = through_memory(array)
    assert_same(found, array)
    assert not array.size or np.shares_memory(found, memory)
    assert not array.size or found.ctypes.data % 64 == memory.ctypes.data % 64


@pytest.mark.parametrize("kind", sorted(OTHERS))
def test_an_array_that_is_more_than_its_memory_comes_out_as_it_went_in(kind: str) -> None:
    found, _ = through_memory(OTHERS[kind])
    assert type(found) is type(OTHERS[kind])
    assert_same(found, OTHERS[kind])


def test_a_masked_array_keeps_its_mask() -> None:
    found, _ = through_memory(np.ma.masked_array([1, 2], [False, True]))
    assert found.tolist() == [1, None]


def test_of_a_mapped_file_the_values_come_out(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "x", np.int32, "w+", shape=(4, 6))
    mapped[:] = np.arange(24).reshape(4, 6)
    for part in (mapped, mapped[:, 1:3]):
        found, memory = through_memory(part)
        assert type(found) is np.ndarray
        assert_same(found, np.array(part))
        assert np.shares_memory(found, memory)


def test_only_what_was_read_only_comes_out_read_only() -> None:
    (frozen, other), _ = through_memory((FROZEN, np.arange(3)))
    assert not frozen.flags.writeable
    other += 1
    assert other.tolist() == [1, 2, 3]


def test_an_array_that_is_there_twice_comes_out_as_one() -> None:
    array = np.arange(3)
    (first, second), _ = through_memory((array, array))
    assert first is second


def test_a_value_may_have_anything_in_it() -> None:
    value = {"a": [np.arange(3), {"b": (np.zeros((2, 2)), "text", None)}], 7: b"bytes", "s": {1, 2}}
    found, memory = through_memory(value)
    np.testing.assert_equal(found, value)
    assert np.shares_memory(found["a"][1]["b"][0], memory)


def test_what_cannot_be_pickled_raises_what_pickle_raises() -> None:
    with pytest.raises((TypeError, pickle.PicklingError), match="generator"):
        pack_value(each for each in "abc")


SOME_SHAPES = np_st.array_shapes(min_dims=0, min_side=0)


@settings(max_examples=30)
@given(st.lists(np_st.arrays(np_st.array_dtypes(), SOME_SHAPES), max_size=3))
def test_any_arrays_come_out_as_they_went_in(arrays: list[Ndarray]) -> None:
    found, _ = through_memory(arrays)
    for one, other in zip(found, arrays, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()


def _returning(result: Any, _: object) -> Any:
    return result


def test_a_replaced_reducer_is_used_next(monkeypatch: pytest.MonkeyPatch) -> None:
    pickler, value = ValuePickler(1024), object()
    for found in ("one", "two"):
        reduced = (str, (found,))
        monkeypatch.setitem(copyreg.dispatch_table, object, partial(_returning, reduced))
        assert pickle.loads(pickler.dumps(value)[0]) == found


def test_a_value_of_many_objects_leaves_no_large_table_in_the_pickler() -> None:
    pickler = ValuePickler(1024)
    pickler.dumps("small")
    tracemalloc.start()
    try:
        pickler.dumps([str(i) for i in range(100_000)])
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
    finally:
        tracemalloc.stop()
