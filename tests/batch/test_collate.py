from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardio import Array, Bytes, Json, Schema, Text
from shardio.batch.layout import EXTENT, NO_FIELD, ORIGIN, BlockLayout, is_fixed, layout_for_samples
from shardio.format.types import DTYPES, Field
from tests.shards import EVERY_FIELD

DIMS = st.one_of(st.none(), st.integers(1, 9))
FIELDS: st.SearchStrategy[Field] = st.one_of(
    st.builds(
        Array,
        st.sampled_from(sorted(DTYPES)),
        st.lists(DIMS, max_size=3).map(tuple),
        st.sampled_from(["raw", "zstd"]),
    ),
    st.builds(Bytes),
    st.builds(Text),
    st.builds(Json),
)
SCHEMAS = st.lists(FIELDS, min_size=1, max_size=8).map(
    lambda fields: Schema({f"field {i}": field for i, field in enumerate(fields)})
)


def parts_of(layout: BlockLayout) -> list[tuple[int, int]]:
    """Offset and size of everything before the heap, in bytes; empty parts left out."""
    n = layout.n_rows
    parts = [(0, n * ORIGIN.itemsize)]
    for slot in layout.fixed:
        parts.append((slot.offset, n * slot.row_bytes))
    for varying in layout.varying:
        parts.append((varying.offset, n * EXTENT.itemsize))
        parts.append((varying.shapes, n * varying.n_dims * 8))
    return sorted(part for part in parts if part[1])


def test_the_tables_of_a_block_have_the_sizes_they_always_had() -> None:
    assert {ORIGIN.fields[name][1] for name in ORIGIN.names or ()} == {0, 8, 16, 20, 22}  # type: ignore[index]
    assert (ORIGIN.itemsize, EXTENT.itemsize) == (24, 16)


@given(schema=SCHEMAS, n_rows=st.integers(1, 3000))
@settings(max_examples=200, deadline=None)
def test_parts_of_a_block_are_aligned_never_overlap_and_waste_less_than_a_cache_line_each(
    schema: Schema, n_rows: int
) -> None:
    layout = layout_for_samples(schema, n_rows)
    parts = parts_of(layout)
    assert all(offset % 64 == 0 for offset, _ in parts)
    ends = [offset + size for offset, size in parts]
    assert all(end <= start for end, (start, _) in zip(ends, parts[1:], strict=False))
    assert ends[-1] <= layout.heap < sum(size for _, size in parts) + 64 * len(parts) + 4096
    assert layout.heap % 4096 == 0


@given(schema=SCHEMAS)
@settings(max_examples=100, deadline=None)
def test_every_field_has_one_place(schema: Schema) -> None:
    layout = layout_for_samples(schema, 10)
    fixed, varying = ([slot.name for slot in slots] for slots in (layout.fixed, layout.varying))
    assert sorted(fixed + varying) == sorted(schema)
    assert fixed == [name for name in schema if is_fixed(schema, name)]
    assert [slot.n_dims for slot in layout.varying] == [
        len(field.shape) if isinstance(field, Array) else 0
        for name, field in schema.items()
        if name in varying
    ]


def test_compressed_arrays_of_one_shape_are_dense_in_a_batch_too() -> None:
    assert is_fixed(EVERY_FIELD, "packed")
    assert not is_fixed(EVERY_FIELD, "points")
    assert not is_fixed(EVERY_FIELD, "note")


def test_views_of_a_block_lie_where_the_layout_says() -> None:
    layout = layout_for_samples(EVERY_FIELD, 5)
    block = np.zeros(layout.heap, np.uint8)
    start = block.__array_interface__["data"][0]
    for slot in layout.fixed:
        rows = layout.fixed_rows(block, slot, 3)
        field = EVERY_FIELD[slot.name]
        assert isinstance(field, Array)
        assert rows.__array_interface__["data"][0] - start == slot.offset
        assert (rows.dtype, rows.shape) == (field.numpy, (3, *field.shape))
        assert rows.flags.c_contiguous
    for varying in layout.varying:
        assert layout.extents(block, varying).shape == (5,)
        assert layout.shapes(block, varying).shape == (5, varying.n_dims)


def test_what_is_written_through_one_view_shows_in_no_other() -> None:
    layout = layout_for_samples(EVERY_FIELD, 4)
    block = np.zeros(layout.heap, np.uint8)
    layout.origins(block)["position"] = -1
    for slot in layout.varying:
        layout.extents(block, slot)["place"] = 7
        layout.shapes(block, slot)[:] = 9
    for fixed in layout.fixed:
        assert not layout.fixed_rows(block, fixed, 4).any()
        layout.fixed_rows(block, fixed, 4)[...] = 1
    assert set(layout.origins(block)["position"].tolist()) == {-1}
    assert set(layout.origins(block)["row"].tolist()) == {0}
    for slot in layout.varying:
        assert set(layout.extents(block, slot)["place"].tolist()) == {7}
        assert set(layout.shapes(block, slot).reshape(-1).tolist()) <= {9}


def test_only_bfloat16_is_a_dtype_that_numpy_lacks() -> None:
    layout = layout_for_samples(EVERY_FIELD, 1)
    assert {slot.name: slot.logical_dtype for slot in layout.fixed if slot.logical_dtype} == {
        "bits": "bfloat16"
    }


@pytest.mark.parametrize("number", [NO_FIELD, 0, 1023])
def test_an_origin_holds_every_field_number(number: int) -> None:
    origins = np.zeros(1, ORIGIN)
    origins["field"] = number
    assert origins["field"].tolist() == [number]
