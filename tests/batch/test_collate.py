from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shardio import Array, Bytes, Json, Schema, Text
from shardio.batch.collation import parse_collate
from shardio.batch.layout import EXTENT, ORIGIN, BlockLayout, layout_for_samples
from shardio.format.types import DTYPES, Field

DIMS = st.one_of(st.none(), st.integers(1, 9))
FIELDS: st.SearchStrategy[Field] = st.one_of(
    st.builds(
        Array,
        st.sampled_from(sorted(DTYPES)),
        st.lists(DIMS, max_size=3).map(tuple),
        st.sampled_from(["raw", "zstd"]),
        optional=st.booleans(),
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
    parts += [(slot.offset, n) for slot in layout.presence]
    parts += [(slot.offset, 8 + 8 * slot.n_dims) for slot in layout.whole]
    return sorted(part for part in parts if part[1])


def test_the_tables_of_a_block_have_the_sizes_they_always_had() -> None:
    assert {ORIGIN.fields[name][1] for name in ORIGIN.names or ()} == {0, 8, 16, 20, 22}  # type: ignore[index]
    assert (ORIGIN.itemsize, EXTENT.itemsize) == (24, 16)


@given(
    schema=SCHEMAS,
    n_rows=st.integers(1, 3000),
    collate=st.sampled_from(["stack", "pad", "ragged", "list"]),
)
@settings(max_examples=200, deadline=None)
def test_parts_are_aligned_disjoint_and_compact(schema: Schema, n_rows: int, collate: str) -> None:
    layout = layout_for_samples(schema, n_rows, parse_collate(collate))
    parts = parts_of(layout)
    assert all(offset % 64 == 0 for offset, _ in parts)
    ends = [offset + size for offset, size in parts]
    assert all(end <= start for end, (start, _) in zip(ends, parts[1:], strict=False))
    assert ends[-1] <= layout.heap < sum(size for _, size in parts) + 64 * len(parts) + 4096
    assert layout.heap % 4096 == 0
    names = [slot.name for slot in layout.fixed + layout.whole]
    names += [slot.name for slot in layout.varying]
    assert sorted(names) == sorted(layout.schema)
