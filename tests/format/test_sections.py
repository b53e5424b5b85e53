"""Index entries, codecs and hashes: arithmetic that readers and writers share."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardio.errors import ShardCorrupt
from shardio.format.checksum import (
    BLOCK_BYTES,
    CHUNK_BYTES,
    block_hashes,
    blocks_touched,
    chunk_hashes,
    distinct,
    format_hashes,
    hash_bytes,
    n_blocks,
    n_chunks,
    n_units,
    pack_hashes,
    rows_per_unit,
)
from shardio.format.codecs import (
    Codec,
    Dictionary,
    check_dictionary,
    decode,
    encode,
    train_dictionary,
)
from shardio.format.layout import NO_FIELD, Kind
from shardio.format.schema import Schema
from shardio.format.sections import (
    ENTRY_DTYPE,
    Entries,
    codecs,
    first_invalid,
    invalid_entries,
    max_units,
    pack_entry,
    plan_sections,
    stored_bytes,
)
from shardio.format.types import Array, Bytes, Field, Image, Text, Video
from shardio.format.types.arrays import unpack_list

U64 = st.integers(0, (1 << 64) - 1)


def entries_of(*rows: tuple[int, int, Codec, int]) -> Entries:
    packed = b"".join(pack_entry(*row, 7) for row in rows)
    return np.frombuffer(packed, ENTRY_DTYPE)


@given(offset=U64, n_stored=st.integers(0, (1 << 48) - 1), codec=st.sampled_from(Codec), n=U64)
def test_a_packed_entry_round_trips(offset: int, n_stored: int, codec: Codec, n: int) -> None:
    found = entries_of((offset, n_stored, codec, n))
    assert int(stored_bytes(found)[0]) == n_stored
    assert int(codecs(found)[0]) == codec
    assert found[0].tolist() == (offset, n_stored | codec << 48, n, 7)


@given(payload=st.integers(0, 1 << 62), offset=U64, n_stored=st.integers(0, (1 << 48) - 1))
def test_a_record_must_lie_inside_the_payload(payload: int, offset: int, n_stored: int) -> None:
    found = first_invalid(entries_of((offset, n_stored, Codec.RAW, n_stored)), Bytes(), payload)
    assert (found is None) == (offset + n_stored <= payload)


SMALL = st.integers(0, 9)
ANY_SIZE = SMALL | st.integers((1 << 48) - 2, (1 << 48) - 1)
ANY_PLACE = SMALL | ANY_SIZE | st.integers((1 << 64) - 3, (1 << 64) - 1)


@given(
    rows=st.lists(
        st.tuples(ANY_PLACE, ANY_SIZE, st.sampled_from(Codec), ANY_PLACE)
        | st.builds(lambda at, n: (at, n, Codec.RAW, n), ANY_PLACE, ANY_SIZE),
        max_size=4,
    ),
    payload=ANY_SIZE | st.integers(1 << 48, 1 << 62),
    field=st.sampled_from([Bytes(), Array("int8", (None,)), Bytes(codec="zstd")]),
)
def test_whether_any_entry_is_broken_is_told_as_each_is(
    rows: list[tuple[int, int, Codec, int]], payload: int, field: Field
) -> None:
    entries = entries_of(*rows)
    bad = np.flatnonzero(invalid_entries(entries, field, payload)).tolist()
    assert first_invalid(entries, field, payload) == (bad[0] if bad else None)


def test_a_record_has_fewer_than_2_to_48_bytes() -> None:
    packed = entries_of(*((0, 1 << 40, Codec.ZSTD, n) for n in ((1 << 48) - 1, 1 << 48)))
    assert invalid_entries(packed, Bytes(codec="zstd"), 1 << 60).tolist() == [False, True]


def test_an_empty_array_takes_fewer_than_2_to_48_bytes_where_a_0_counts_as_1() -> None:
    field = Array("uint8", (None, None))
    assert field.shape_of(np.array([0, (1 << 48) - 1], "<u8"), 0) == (0, (1 << 48) - 1)
    with pytest.raises(ShardCorrupt, match="does not fit the record"):
        field.shape_of(np.array([0, 1 << 48], "<u8"), 0)


def test_the_same_holds_for_an_empty_array_in_a_list() -> None:
    element = Array("uint8", (None, None))
    for size, is_refused in (((1 << 48) - 1, False), (1 << 48, True)):
        record = struct.pack("<3Q", 1, 0, size).ljust(64, b"\0")
        if is_refused:
            with pytest.raises(ShardCorrupt, match="does not fit the record"):
                unpack_list(element, record)
        else:
            assert unpack_list(element, record)[0].shape == (0, size)


@given(st.lists(st.integers(0, (1 << 64) - 1), min_size=2, max_size=2), U64)
def test_a_shape_is_accepted_only_if_it_accounts_for_the_bytes(dims: list[int], n: int) -> None:
    field = Array("int32", (None, 3, None))
    needed = 12 * dims[0] * dims[1]
    for n_bytes in {n, needed}:
        reasonable = 12 * max(dims[0], 1) * max(dims[1], 1) <= 1 << 48
        if n_bytes == needed and reasonable:
            assert field.shape_of(np.array(dims, "<u8"), n_bytes) == (dims[0], 3, dims[1])
        else:
            with pytest.raises(ShardCorrupt, match="does not fit the record"):
                field.shape_of(np.array(dims, "<u8"), n_bytes)


def windowed(exponent: int, eighths: int, content: bytes) -> memoryview:
    """Make a zstd frame of one raw block that declares a window and its content's size."""
    descriptor = struct.pack("<BBQ", 0b11000000, exponent << 3 | eighths, len(content))
    block = struct.pack("<I", len(content) << 3 | 1)[:3]
    return memoryview(b"\x28\xb5\x2f\xfd" + descriptor + block + content)


def test_the_window_of_a_frame_is_below_4_gib_and_takes_no_memory() -> None:
    content = b"more than a window of 1 KiB can say" * 40
    for exponent, eighths in ((0, 0), (20, 7), (21, 7)):
        frame = windowed(exponent, eighths, content)
        assert decode(frame, Codec.ZSTD, len(content)) == content
    with pytest.raises(ShardCorrupt) as caught:
        decode(windowed(22, 0, content), Codec.ZSTD, len(content))
    assert caught.value.code == "zstd_frame"


def test_a_zstd_frame_cut_short_is_refused_at_every_length() -> None:
    content = np.random.default_rng(0).integers(0, 4, 5000, np.uint8).tobytes()
    _, stored = encode(memoryview(content), Codec.ZSTD)
    for length in range(len(stored)):
        with pytest.raises(ShardCorrupt) as caught:
            decode(stored[:length], Codec.ZSTD, len(content))
        assert caught.value.code == "zstd_frame"


def test_a_flipped_bit_in_a_zstd_frame_never_raises_a_foreign_error() -> None:
    content = np.random.default_rng(0).integers(0, 4, 500, np.uint8).tobytes()
    _, stored = encode(memoryview(content), Codec.ZSTD)
    damaged, n_refused = bytearray(stored), 0
    for at in range(len(damaged)):
        for bit in range(8):
            damaged[at] ^= 1 << bit
            try:
                found = decode(memoryview(damaged), Codec.ZSTD, len(content))
                assert len(found) == len(content)
            except ShardCorrupt:
                n_refused += 1
            damaged[at] ^= 1 << bit
    assert n_refused > 0


@pytest.mark.parametrize(
    ("row_bytes", "stride", "n_rows"),
    [(1, 1, 65536), (63, 63, 1040), (100, 128, 512), (2047, 2048, 32), (2048, 2048, 1)],
)
def test_small_rows_share_a_hash_of_up_to_64_kib(row_bytes: int, stride: int, n_rows: int) -> None:
    assert rows_per_unit(row_bytes, stride) == n_rows
    assert [n_units(n, row_bytes, stride) for n in (0, 1, n_rows, n_rows + 1)] == [0, 1, 1, 2]


@given(st.lists(st.integers(-(1 << 60), 1 << 60)), st.integers(1, 3))
def test_distinct_numbers_come_each_once_and_ascending(numbers: list[int], n_times: int) -> None:
    found = distinct(np.array(numbers * n_times, np.int64))
    assert found.tolist() == sorted(set(numbers))


@given(
    st.lists(st.integers(0, 100_000), min_size=1, max_size=30), st.sampled_from([8, 24, 32, 128])
)
def test_the_blocks_touched_are_those_that_hold_a_byte(starts: list[int], n_bytes: int) -> None:
    expected = {at // BLOCK_BYTES for start in starts for at in range(start, start + n_bytes)}
    assert blocks_touched(np.array(starts), n_bytes).tolist() == sorted(expected)


def test_hashes_are_shown_whole_and_packed_as_little_endian_numbers() -> None:
    assert format_hashes(7, 1 << 63) == {"expected": f"{7:016x}", "found": f"8{0:015x}"}
    assert pack_hashes([1, 1 << 63]) == struct.pack("<QQ", 1, 1 << 63)


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_block_or_chunk_that_is_cut_short_has_a_hash_of_its_own(more: int) -> None:
    content = memoryview(bytes(range(251)) * 600)
    blocks, chunks = content[: 2 * BLOCK_BYTES + more], content[: 2 * CHUNK_BYTES + more]
    expected = [blocks[i : i + BLOCK_BYTES] for i in range(0, len(blocks), BLOCK_BYTES)]
    assert list(block_hashes(blocks)) == [hash_bytes(each) for each in expected]
    assert n_blocks(len(blocks)) == len(expected) == (3 if more > 0 else 2)
    assert len(chunk_hashes(chunks)) == n_chunks(len(chunks)) == (3 if more > 0 else 2)
    assert chunk_hashes(chunks)[1] == hash_bytes(chunks[CHUNK_BYTES : 2 * CHUNK_BYTES])


def trained() -> Dictionary:
    rng = np.random.default_rng(0)
    words = [rng.bytes(12) for _ in range(50)]
    return Dictionary(train_dictionary([b"".join(rng.permutation(words)[:20]) for _ in range(99)]))


def test_a_record_that_names_no_dictionary_or_another_is_refused() -> None:
    dictionary = trained()
    record = memoryview(dictionary.content[-120:] * 2)
    code, stored = encode(record, Codec.ZSTD_DICTIONARY, dictionary)
    assert code == Codec.ZSTD_DICTIONARY
    assert decode(stored, code, len(record), dictionary) == record
    check_dictionary(stored, dictionary)
    code, plain = encode(memoryview(bytes(record) * 9), Codec.ZSTD_DICTIONARY, None)
    assert code == Codec.ZSTD
    with pytest.raises(ShardCorrupt, match="does not declare its field's dictionary") as caught:
        check_dictionary(plain, dictionary)
    assert caught.value.code == "dictionary"
    assert (caught.value.expected, caught.value.found) == (dictionary.id, 0)
    with pytest.raises(ShardCorrupt, match="its field has none") as missing:
        decode(stored, Codec.ZSTD_DICTIONARY, len(record))
    assert missing.value.code == "dictionary"


def test_no_dictionary_is_trained_on_too_little_and_none_is_made_of_other_bytes() -> None:
    assert train_dictionary([b"a camera on the left of the hall" * 9] * 15) == b""
    assert train_dictionary([b"x"] * 99) == b""
    with pytest.raises(ShardCorrupt, match=r"not a zstd dictionary \(.+\)") as caught:
        Dictionary(b"\x37\xa4\x30\xec" + bytes(60))
    assert caught.value.code == "dictionary"


def test_a_frame_of_another_size_is_refused_with_both_sizes() -> None:
    _, stored = encode(memoryview(bytes(1000)), Codec.ZSTD)
    with pytest.raises(ShardCorrupt, match="disagree about the record's size") as caught:
        decode(stored, Codec.ZSTD, 999)
    assert caught.value.code == "zstd_size"
    assert (caught.value.expected, caught.value.found) == (999, 1000)
    with pytest.raises(ShardCorrupt, match=r"^the zstd frame is damaged \(.+\)$") as longer:
        decode(memoryview(bytes(stored) + b"more"), Codec.ZSTD, 1000)
    assert longer.value.code == "zstd_frame"


def test_the_sections_of_a_shard_are_planned_with_their_sizes() -> None:
    schema = Schema(
        {
            "x": Array("uint8", (2100,)),  # a hash per row, and rows of 2,112 bytes
            "note": Text("zstd_dictionary", optional=True),
            "image": Image(),
            "video": Video(),
        }
    )
    counts = (((Kind.PACKETS, 3, 0), 70), ((Kind.CHUNK_HASHES, 3, 0), 600))
    found = {key: (n_items, stride) for key, n_items, stride in plan_sections(schema, 9, counts)}
    assert list(found) == [
        (Kind.COLUMN, 0, 0),
        (Kind.PAYLOAD, NO_FIELD, 0),
        *((kind, 0, of) for kind, of in ((Kind.COLUMN_HASHES, 0), (Kind.BLOCK_HASHES, 3))),
        *((kind, NO_FIELD, of) for kind, of in ((Kind.INDEX, 0), (Kind.BLOCK_HASHES, 5))),
        *((kind, 2, of) for kind, of in ((Kind.SHAPES, 0), (Kind.BLOCK_HASHES, 6))),
        *((kind, 3, of) for kind, of in ((Kind.STREAMS, 0), (Kind.BLOCK_HASHES, 12))),
        *((kind, 3, of) for kind, of in ((Kind.PACKETS, 0), (Kind.BLOCK_HASHES, 11))),
        *((kind, 3, of) for kind, of in ((Kind.CHUNK_HASHES, 0), (Kind.BLOCK_HASHES, 10))),
        *((kind, 1, of) for kind, of in ((Kind.VALIDITY, 0), (Kind.BLOCK_HASHES, 9))),
        (Kind.DICTIONARY, 1, 0),
        (Kind.SCHEMA, NO_FIELD, 0),
    ]
    assert found[Kind.COLUMN, 0, 0] == (9, 2112)
    assert found[Kind.PAYLOAD, NO_FIELD, 0] == (27, 0)
    assert found[Kind.COLUMN_HASHES, 0, 0] == (9, 8)
    assert found[Kind.INDEX, NO_FIELD, 0] == (27, 32)
    assert found[Kind.SHAPES, 2, 0] == (9, 24)
    assert found[Kind.CHUNK_HASHES, 3, 0] == (600, 8)
    assert found[Kind.BLOCK_HASHES, 3, Kind.CHUNK_HASHES] == (2, 8)  # 4,800 bytes
    assert found[Kind.VALIDITY, 1, 0] == (2, 1)
    assert found[Kind.BLOCK_HASHES, 1, Kind.VALIDITY] == (1, 8)
    assert found[Kind.DICTIONARY, 1, 0] == found[Kind.SCHEMA, NO_FIELD, 0] == (1, 0)


def test_no_shard_has_more_units_than_expected_of_its_samples_and_bytes() -> None:
    schema = Schema({"x": Array("uint8", (2100,)), "note": Text()})
    found = max_units(schema, np.array([9, 0, 9]), np.array([40_000, 4096, 1 << 30]))
    # A hash per row and per record, the block hashes of both, and one unit for each hash section.
    assert found.tolist() == [9 + 9 + 1 + 1 + 2, 2, 22]
