"""Header page and section table: what is packed is unpacked, and nothing else is."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardio.errors import ShardCorrupt, ShardIncomplete, ShardUnsupported
from shardio.format.checksum import content_id, hash_bytes
from shardio.format.layout import (
    MAX_SECTIONS,
    NO_FIELD,
    PAGE,
    SECTION,
    Header,
    Kind,
    Required,
    Section,
    check_header_fits,
    check_required,
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


SOUND = Header(3, 6 * PAGE, 4 * PAGE, 2 * SECTION.size, 0, bytes(16))
"""A header of a shard of six pages: its own, three of sections, the table, and the last one."""


def test_a_header_names_the_first_and_the_last_byte_that_it_accounts_for() -> None:
    check_header_fits(SOUND, 6 * PAGE, "a.shard")
    for actual, text in ((6 * PAGE - 1, "truncated"), (6 * PAGE + 1, "bytes after its end")):
        with pytest.raises(ShardCorrupt, match=text) as caught:
            check_header_fits(SOUND, actual, "a.shard")
        error = caught.value
        assert (error.code, error.path, error.section) == ("file_size", "a.shard", "header")
        assert (error.expected, error.found) == (6 * PAGE, actual)


@pytest.mark.parametrize(
    ("changes", "ends_at"),
    [
        ({"table_offset": 4 * PAGE + 64}, 6 * PAGE + 64),
        ({"table_offset": PAGE}, 3 * PAGE),
        ({"table_size": 0}, 5 * PAGE),
        ({"table_size": SECTION.size + 1}, 6 * PAGE),
        ({"table_size": 86 * SECTION.size}, 7 * PAGE),
        ({"table_offset": 3 * PAGE}, 5 * PAGE),
        ({"table_offset": 4 * PAGE + 64, "file_size": 6 * PAGE + 64}, 6 * PAGE + 64),
    ],
)
def test_a_table_must_end_where_the_last_page_begins(changes: dict[str, Any], ends_at: int) -> None:
    header = dataclasses.replace(SOUND, **changes)
    with pytest.raises(ShardCorrupt, match="section table does not end") as caught:
        check_header_fits(header, header.file_size, "a.shard")
    error = caught.value
    assert (error.code, error.path, error.section) == ("table_place", "a.shard", "header")
    assert (error.expected, error.found) == (header.file_size, ends_at)


def test_the_smallest_and_the_largest_table_fit() -> None:
    check_header_fits(Header(0, 4 * PAGE, 2 * PAGE, SECTION.size, 0, bytes(16)), 4 * PAGE, "")
    size = MAX_SECTIONS * SECTION.size
    file_size = 3 * PAGE + size
    largest = Header(0, file_size, 2 * PAGE, size, 0, bytes(16))
    check_header_fits(largest, file_size, "a.shard")
    size, file_size = size + 3 * PAGE, file_size + 3 * PAGE  # a multiple of an entry's size
    larger = dataclasses.replace(largest, table_size=size, file_size=file_size)
    with pytest.raises(ShardCorrupt) as caught:
        check_header_fits(larger, file_size, "a.shard")
    assert caught.value.code == "table_place"


def test_a_page_that_is_no_header_says_which_rule_it_breaks_and_where() -> None:
    page = SOUND.pack()
    with pytest.raises(ShardIncomplete) as unfinished:
        unpack_header(bytes(PAGE), "a.shard")
    assert str(unfinished.value).startswith("a.shard: the header was never written")
    assert "write the shard again" in str(unfinished.value)
    with pytest.raises(ShardCorrupt) as caught:
        unpack_header(b"GIF89a--" + page[8:], "a.shard", offset=PAGE)
    assert (caught.value.code, caught.value.offset) == ("magic", PAGE)
    assert (caught.value.expected, caught.value.found) == (page[:8], b"GIF89a--")
    with pytest.raises(ShardUnsupported, match=r"^a\.shard: format version 2\.0, .* version 1; "):
        unpack_header(page[:8] + b"\2\0" + page[10:], "a.shard")
    with pytest.raises(ShardCorrupt) as caught:
        unpack_header(page[:40] + b"?" + page[41:], "a.shard", offset=PAGE)
    assert (caught.value.code, caught.value.section) == ("header_hash", "header")
    assert caught.value.offset == PAGE + 88  # where the hash is
    assert caught.value.expected != caught.value.found


def test_features_that_a_reader_lacks_are_named_each() -> None:
    check_required(int(Required.ZSTD | Required.AUDIO), "a.shard")
    with pytest.raises(ShardUnsupported) as caught:
        check_required(int(Required.ZSTD | Required.FLOAT8) | 1 << 40, "a.shard")
    message = str(caught.value)
    assert message.startswith("a.shard: needs float8, bit 40, which this version of shardio cannot")
    assert message.endswith("read it with a newer shardio")


def test_a_section_is_named_by_its_kind_and_by_what_it_covers() -> None:
    def name(kind: int, of_kind: int = 0) -> str:
        return Section(kind, NO_FIELD, of_kind, 0, 0, 0, 0, 0).name

    assert name(Kind.PAYLOAD) == "payload"
    assert name(Kind.BLOCK_HASHES, Kind.INDEX) == "block_hashes of index"
    assert name(0x8001) == "kind 32769"
    assert name(Kind.BLOCK_HASHES, 99) == "block_hashes of 99"


def refused_table(sections: list[Section], pages: int) -> ShardCorrupt:
    """Return the error for a table of a shard of so many pages, whose hashes are right."""
    table = pack_table(sections)
    header = Header(0, pages * PAGE, (pages - 2) * PAGE, len(table), hash_bytes(table), b"")
    header = dataclasses.replace(header, id=content_id(table))
    with pytest.raises(ShardCorrupt) as caught:
        unpack_table(table, header, "a.shard")
    assert (caught.value.path, caught.value.section) == ("a.shard", "section table")
    return caught.value


def test_each_entry_of_a_table_that_breaks_a_rule_is_located() -> None:
    first = Section(Kind.COLUMN, 0, 0, PAGE, 100, 1, 100, 0)
    entry = 3 * PAGE + SECTION.size  # the second entry, in a shard of five pages
    hole = refused_table([first, Section(Kind.SCHEMA, 1, 0, 3 * PAGE, 9, 1, 0, 0)], 5)
    assert (hole.code, hole.offset) == ("hole", entry)
    assert (hole.expected, hole.found) == (2 * PAGE, 3 * PAGE)
    overlap = refused_table([first, Section(Kind.SCHEMA, 1, 0, PAGE, 9, 1, 0, 0)], 5)
    assert (overlap.code, overlap.expected, overlap.found) == ("overlap", 2 * PAGE, PAGE)
    assert "section schema does not begin where" in str(overlap)
    twice = refused_table([first, dataclasses.replace(first, offset=2 * PAGE)], 5)
    assert (twice.code, twice.offset, twice.found) == ("duplicate", entry, "column")
    long = refused_table([first, Section(Kind.SCHEMA, 1, 0, 2 * PAGE, PAGE + 1, 1, 0, 0)], 5)
    assert (long.code, long.offset) == ("size", entry)
    assert (long.expected, long.found) == (3 * PAGE, 4 * PAGE)
    table = bytearray(pack_table([first, dataclasses.replace(first, field=1, offset=2 * PAGE)]))
    table[SECTION.size + 6] = 1
    size, id_ = len(table), content_id(bytes(table))
    header = Header(0, 5 * PAGE, 3 * PAGE, size, hash_bytes(bytes(table)), id_)
    with pytest.raises(ShardCorrupt, match="a reserved number is not zero") as caught:
        unpack_table(bytes(table), header, "a.shard")
    assert (caught.value.code, caught.value.offset) == ("reserved", entry)
    assert (caught.value.expected, caught.value.found) == (0, 1)
    rest = refused_table([first], 5)
    assert (rest.code, rest.offset) == ("hole", 3 * PAGE)
    assert (rest.expected, rest.found) == (3 * PAGE, 2 * PAGE)


def test_a_table_of_another_shard_is_refused_with_both_hashes() -> None:
    table = pack_table([Section(Kind.SCHEMA, 1, 0, PAGE, 9, 1, 0, 0)])
    right = Header(0, 4 * PAGE, 2 * PAGE, len(table), hash_bytes(table), content_id(table))
    with pytest.raises(ShardCorrupt) as caught:
        unpack_table(table, dataclasses.replace(right, table_hash=7), "a.shard")
    assert (caught.value.code, caught.value.offset) == ("table_hash", 2 * PAGE)
    assert caught.value.expected == f"{7:016x}"
    assert caught.value.found == f"{hash_bytes(table):016x}"
    with pytest.raises(ShardCorrupt) as caught:
        unpack_table(table, dataclasses.replace(right, id=bytes(16)), "a.shard")
    assert (caught.value.code, caught.value.offset) == ("id", 2 * PAGE)
    assert (caught.value.expected, caught.value.found) == ("00" * 16, right.id.hex())
