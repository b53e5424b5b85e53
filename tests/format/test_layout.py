"""Header page and section table: what is packed is unpacked, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardio.errors import ShardCorrupt
from shardio.format.checksum import content_id, hash_bytes
from shardio.format.layout import (
    PAGE,
    Header,
    Required,
    Section,
    pack_table,
    padded,
    unpack_header,
    unpack_table,
)

U64 = st.integers(0, (1 << 64) - 1)
U16 = st.integers(0, (1 << 16) - 1)
HEADERS = st.builds(
    Header,
    n_samples=U64,
    file_size=U64,
    table_offset=U64,
    table_size=U64,
    table_hash=U64,
    id=st.binary(min_size=16, max_size=16),
    required=st.sampled_from([0, int(Required.ZSTD)]),
    optional=U64,
    minor=U16,
)


@given(header=HEADERS)
def test_a_header_that_is_packed_is_unpacked_again(header: Header) -> None:
    page = header.pack()
    assert len(page) == PAGE
    assert unpack_header(page, "a.shard") == header


def test_the_place_of_a_damaged_byte_is_counted_from_the_start_of_the_file() -> None:
    page = bytearray(Header(0, 0, 0, 0, 0, bytes(16)).pack())
    page[1000] = 7
    with pytest.raises(ShardCorrupt) as caught:
        unpack_header(bytes(page), "a.shard", offset=40960)
    assert (caught.value.offset, caught.value.expected, caught.value.found) == (41960, 0, 7)


@given(st.lists(st.tuples(U16, st.integers(0, 3 * PAGE), U64, U64, U64), max_size=20))
def test_a_tiling_table_round_trips(rows: list[tuple[int, int, int, int, int]]) -> None:
    place, sections = PAGE, []
    for number, (kind, size, count, stride, hash_) in enumerate(rows):
        sections.append(Section(kind, number, 0, place, size, count, stride, hash_))
        place += padded(size)
    table = pack_table(sections)
    header = Header(
        0,
        place + padded(len(table)) + PAGE,
        place,
        len(table),
        hash_bytes(table),
        content_id(table),
    )
    assert list(unpack_table(table, header, "a.shard")) == sections
