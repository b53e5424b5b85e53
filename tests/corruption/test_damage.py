"""Damage of every kind to a small shard: verification finds it, a reader never returns wrong data.

`tools/stress flips` does the same with every bit.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest

from shardio.errors import ShardioError
from shardio.format.layout import HEADER, HEADER_HASH, PAGE, Kind
from shardio.format.types import CODECS, FIELD_TYPES
from shardio.maintenance.verify.shard import verify_bytes
from shardio.shard.verification import Verify
from tests.corruption import forge
from tests.corruption.damage import Victim, code_found
from tests.corruption.forge import Forgery, codes_of, content_of, read_everything, small_samples
from tests.shards import same_sample

N_HEADER = HEADER.size + HEADER_HASH.size
"""Bytes of a header page that mean something."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytearray:
    return content_of(tmp_path_factory.mktemp("small") / "s.shard", forge.SMALL, small_samples())


def parts_of(content: bytearray) -> list[tuple[int, int, int]]:
    """Of each page-aligned part: where it begins, where its padding begins, and where it ends."""
    forgery = Forgery.of(content)
    header, size = forgery.header, len(content)
    table_end = header.table_offset + header.table_size
    parts = [(0, N_HEADER, PAGE), (size - PAGE, size - PAGE + N_HEADER, size)]
    parts += [(s.offset, s.offset + s.size, s.end) for s in forgery.sections.values()]
    return [*parts, (header.table_offset, table_end, size - PAGE)]


def meaningful_bits(content: bytearray) -> list[int]:
    """Every bit of both headers and the table; of other bytes that mean something, one in turn."""
    header, trailer, *sections, table = parts_of(content)
    whole = [range(8 * start, 8 * padding) for start, padding, _ in (header, trailer, table)]
    bits = [bit for part in whole for bit in part]
    return bits + [8 * at + at % 8 for start, end, _ in sections for at in range(start, end)]


def padding_bytes(content: bytearray, *, of_headers: bool) -> list[list[int]]:
    """Offsets of padding, part by part: of the two header pages, or of the others."""
    parts = parts_of(content)
    chosen = parts[:2] if of_headers else parts[2:]
    return [list(range(padding, end)) for _, padding, end in chosen]


def check_flips(
    path: Path, content: bytearray, samples: list[Any], bits: list[int], verify: Verify = "first"
) -> int:
    """Check that each flipped bit is noticed; return how many flips made a reader refuse."""
    victim = Victim(path, content, samples)
    complaints = {bit: victim.complaint_about_flip(bit, verify) for bit in bits}
    victim.close()
    assert {bit: text for bit, text in complaints.items() if text} == {}
    return victim.n_refused


def test_the_small_shards_have_every_kind_of_section_field_and_codec(tmp_path: Path) -> None:
    kinds, types, codecs = set[int](), set[int](), set[str]()
    for schema, made in forge.VICTIMS.values():
        content = content_of(tmp_path / "s.shard", schema, made())
        assert len(content) <= 64 << 10
        kinds |= {section.kind for section in Forgery.of(content).sections.values()}
        types |= {field.code for field in schema.values()}
        codecs |= {field.codec for field in schema.values()}
    assert (kinds, types, codecs) == (set(Kind), set(FIELD_TYPES), set(CODECS))


@pytest.mark.parametrize("name", ["videos", "planes", "sound"])
def test_some_bits_of_media_and_of_all_that_says_where_they_are(name: str, tmp_path: Path) -> None:
    schema, made = forge.VICTIMS[name]
    content = content_of(tmp_path / "s.shard", schema, made())
    parts = parts_of(content)[2:]
    places = [at for start, end, _ in parts for at in range(start, end, 1 + (end - start) // 40)]
    bits = [8 * at + at % 8 for at in places]
    assert check_flips(tmp_path / "s.shard", content, made(), bits) == len(bits)


def test_an_intact_shard_has_no_findings(small: bytearray, tmp_path: Path) -> None:
    assert codes_of(small) == []
    path = tmp_path / "s.shard"
    path.write_bytes(small)
    found = read_everything(path)
    assert not isinstance(found, ShardioError)
    assert all(map(same_sample, found, small_samples())) and len(found) == len(small_samples())


def test_every_bit_of_headers_and_one_of_every_byte(small: bytearray, tmp_path: Path) -> None:
    bits = meaningful_bits(small)
    n_refused = check_flips(tmp_path / "s.shard", small, small_samples(), bits)
    assert n_refused > 0.9 * len(bits)  # the rest: zeros between rows and records


def test_a_bit_in_every_byte_of_the_header_padding(small: bytearray, tmp_path: Path) -> None:
    bits = [8 * at + at % 8 for part in padding_bytes(small, of_headers=True) for at in part]
    n_refused = check_flips(tmp_path / "s.shard", small, small_samples(), bits)
    assert n_refused == len(bits) == 2 * (PAGE - N_HEADER)


def test_the_audit_places_a_bit_in_every_byte_of_other_padding(small: bytearray) -> None:
    # One byte of each part at a time: verification finds the first one in each part.
    parts, damaged = padding_bytes(small, of_headers=False), bytearray(small)
    for flipped in itertools.zip_longest(*parts):
        places = {at for at in flipped if at is not None}
        for at in places:
            damaged[at] ^= 1 << at % 8
        found = verify_bytes(memoryview(damaged), "s.shard").findings
        assert {(f.code, f.offset) for f in found} == {("padding", at) for at in places}
        for at in places:
            damaged[at] ^= 1 << at % 8
    assert damaged == small


@pytest.mark.parametrize("verify", ["first", "always", "off"])
def test_padding_changes_nothing_read(small: bytearray, tmp_path: Path, verify: Verify) -> None:
    for turn in range(8):
        damaged = bytearray(small)
        for at in itertools.chain(*padding_bytes(small, of_headers=False)):
            damaged[at] ^= 1 << (at + turn) % 8
        victim = Victim(tmp_path / "s.shard", damaged, small_samples())
        assert victim.read_complaint(verify) is None and victim.n_same == 1
        victim.close()


def test_a_flipped_bit_with_verification_always(small: bytearray, tmp_path: Path) -> None:
    sections = [bit for bit in meaningful_bits(small) if PAGE * 8 <= bit]
    check_flips(tmp_path / "s.shard", small, small_samples(), sections[::5], "always")


def test_a_flipped_bit_without_verification(small: bytearray, tmp_path: Path) -> None:
    victim, n_refused = Victim(tmp_path / "s.shard", small, small_samples()), 0
    for bit in meaningful_bits(small)[::3]:
        victim.flip(bit)
        n_refused += isinstance(read_everything(victim.path, "off"), ShardioError)
        victim.flip(bit)
    victim.close()
    assert n_refused > 500


def test_damage_that_is_missed_is_told(small: bytearray, tmp_path: Path) -> None:
    victim = Victim(tmp_path / "s.shard", small, small_samples()[::-1])
    assert victim.read_complaint() == "a reader returned other data"
    victim.close()
    assert code_found(small) is None


def test_a_shard_cut_short_is_refused_at_every_length(small: bytearray, tmp_path: Path) -> None:
    path = tmp_path / "s.shard"
    path.write_bytes(small)
    near_pages = {at + d for at in range(0, len(small), 4096) for d in (-1, 0, 1)}
    lengths = sorted((set(range(0, len(small), 97)) | near_pages) - {-1}, reverse=True)
    for length in (n for n in lengths if n < len(small)):
        os.truncate(path, length)
        assert isinstance(read_everything(path), ShardioError), length
        assert length == 0 or codes_of(memoryview(small)[:length]), length


@pytest.mark.parametrize("n_bytes", [1, 100, 4095, 4096, 8192])
@pytest.mark.parametrize("byte", [0, 7])
def test_bytes_after_the_end(small: bytearray, tmp_path: Path, n_bytes: int, byte: int) -> None:
    path = tmp_path / "s.shard"
    path.write_bytes(bytes(small) + bytes([byte]) * n_bytes)
    assert "bytes after its end" in str(read_everything(path))
    assert codes_of(path.read_bytes()) == ["file_size"]


def test_a_shard_behind_itself_is_refused(small: bytearray, tmp_path: Path) -> None:
    path = tmp_path / "s.shard"
    path.write_bytes(small + small)
    assert isinstance(read_everything(path), ShardioError)
    assert codes_of(small + small) == ["file_size"]


@pytest.mark.parametrize("size", [1, 100, 4095, 4096, 10_000])
@pytest.mark.parametrize("byte", [0, 1, 0x89, 0xFF])
def test_a_file_of_one_byte_over_and_over_is_refused(tmp_path: Path, size: int, byte: int) -> None:
    path = tmp_path / "s.shard"
    path.write_bytes(bytes([byte]) * size)
    assert isinstance(read_everything(path), ShardioError)
    assert codes_of(path.read_bytes())


def test_all_data_is_still_checked_where_one_header_page_is_lost(small: bytearray) -> None:
    damaged = bytearray(small)
    damaged[:4096] = bytes(4096)
    damaged[4096 + 130] ^= 1  # in the second row of the column
    assert set(codes_of(damaged)) >= {"incomplete", "checksum"}


def test_the_audit_goes_on_after_a_finding(small: bytearray) -> None:
    damaged, sections = bytearray(small), Forgery.of(small).sections
    payload, column = sections[Kind.PAYLOAD, 0xFFFF, 0], sections[Kind.COLUMN, 0, 0]
    for at in (column.offset + 5, column.offset + 4000, payload.offset + 10, len(small) - 9):
        damaged[at] ^= 0x10
    found = verify_bytes(memoryview(damaged), "s.shard").findings
    assert {(f.code, f.section) for f in found} == {
        ("padding", "trailer"),
        ("padding", "column"),
        ("checksum", "column"),
        ("checksum", "payload"),
    }
