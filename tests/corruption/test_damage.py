"""Damage of every kind to a small shard: the audit finds it, a reader never returns wrong data.

`tools/dev/flip_every_bit.py` does the same with every bit.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardio.errors import ShardioError
from shardio.format.layout import Kind
from shardio.surgery import shard_audit
from shardio.surgery.finding import Findings
from shardio.surgery.shard_audit import examine_bytes
from tests.corruption.forge import (
    SMALL,
    Forgery,
    content_of,
    read_everything,
    small_samples,
)
from tests.shards import same_sample


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytearray:
    return content_of(tmp_path_factory.mktemp("small") / "s.shard", SMALL, small_samples())


def findings_in(content: bytes | bytearray | memoryview) -> list[str]:
    return [finding.code for finding in examine_bytes(memoryview(content), "s.shard").findings]


def is_intact(found: list[dict[str, object]]) -> bool:
    wanted = small_samples()
    return len(found) == len(wanted) and all(map(same_sample, found, wanted))


def meaningful_bytes(content: bytearray) -> list[int]:
    """The offsets of all bytes that are not padding of a page, and of some that are."""
    forgery = Forgery.of(content)
    header, size = forgery.header, len(content)
    parts = [(0, 104), (size - 4096, 104), (header.table_offset, header.table_size)]
    parts += [(section.offset, section.size) for section in forgery.sections.values()]
    inside = {at for start, n in parts for at in range(start, start + n)}
    return sorted(inside | set(range(0, size, 509)))


def test_the_small_shard_has_every_kind_of_section(small: bytearray) -> None:
    built = {kind for kind in Kind if kind < Kind.DICTIONARY}
    assert {section.kind for section in Forgery.of(small).sections.values()} == built


def test_an_intact_shard_has_no_findings_and_is_read_whole(
    small: bytearray, tmp_path: Path
) -> None:
    assert findings_in(small) == []
    path = tmp_path / "s.shard"
    path.write_bytes(small)
    found = read_everything(path)
    assert not isinstance(found, ShardioError)
    assert is_intact(found)


class FoundError(Exception):
    """Ends an audit at its first finding."""


class FirstOnly(Findings):
    """Findings for tests that need to know only whether there is one."""

    def add(self, code: str, message: str, **where: object) -> None:
        raise FoundError(code)


def is_found(content: bytearray) -> bool:
    """Whether the audit finds anything."""
    try:
        examine_bytes(memoryview(content), "s.shard")
    except FoundError:
        return True
    return False


def test_the_audit_finds_a_flipped_bit_in_every_byte(
    small: bytearray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_audit, "Findings", FirstOnly)
    damaged, missed = bytearray(small), []
    assert not is_found(damaged)
    for at in range(len(damaged)):
        damaged[at] ^= 1 << at % 8
        if not is_found(damaged):
            missed.append(at)
        damaged[at] ^= 1 << at % 8
    assert missed == []


@pytest.mark.parametrize("verify", ["first", "always"])
def test_a_reader_never_returns_other_data_after_a_flipped_bit(
    small: bytearray, tmp_path: Path, verify: str
) -> None:
    path = tmp_path / "s.shard"
    path.write_bytes(small)
    wrong, n_refused = [], 0
    with open(path, "r+b", buffering=0) as file:
        for at in meaningful_bytes(small):
            os.pwrite(file.fileno(), bytes([small[at] ^ 1 << at % 8]), at)
            found = read_everything(path, verify)
            if isinstance(found, ShardioError):
                n_refused += 1
            elif not is_intact(found):
                wrong.append(at)
            os.pwrite(file.fileno(), small[at : at + 1], at)
    assert wrong == []
    assert n_refused > 1000


def test_without_verification_a_flipped_bit_still_raises_nothing_but_errors_of_shardio(
    small: bytearray, tmp_path: Path
) -> None:
    path = tmp_path / "s.shard"
    path.write_bytes(small)
    n_refused = 0
    with open(path, "r+b", buffering=0) as file:
        for at in meaningful_bytes(small):
            os.pwrite(file.fileno(), bytes([small[at] ^ 1 << at % 8]), at)
            n_refused += isinstance(read_everything(path, "off"), ShardioError)
            os.pwrite(file.fileno(), small[at : at + 1], at)
    assert n_refused > 500


def test_a_shard_cut_short_is_refused_at_every_length(small: bytearray, tmp_path: Path) -> None:
    path = tmp_path / "s.shard"
    path.write_bytes(small)
    near_pages = {at + d for at in range(0, len(small), 4096) for d in (-1, 0, 1)}
    lengths = sorted((set(range(0, len(small), 97)) | near_pages) - {-1}, reverse=True)
    for length in (n for n in lengths if n < len(small)):
        os.truncate(path, length)
        assert isinstance(read_everything(path), ShardioError), length
        assert length == 0 or findings_in(memoryview(small)[:length]), length


@pytest.mark.parametrize("n_bytes", [1, 100, 4095, 4096, 8192])
@pytest.mark.parametrize("byte", [0, 7])
def test_bytes_after_the_end_are_refused(
    small: bytearray, tmp_path: Path, n_bytes: int, byte: int
) -> None:
    path = tmp_path / "s.shard"
    path.write_bytes(bytes(small) + bytes([byte]) * n_bytes)
    assert "bytes after its end" in str(read_everything(path))
    assert findings_in(path.read_bytes()) == ["file_size"]


def test_a_shard_behind_itself_is_refused(small: bytearray, tmp_path: Path) -> None:
    path = tmp_path / "s.shard"
    path.write_bytes(small + small)
    assert isinstance(read_everything(path), ShardioError)
    assert findings_in(small + small) == ["file_size"]


@pytest.mark.parametrize("size", [1, 100, 4095, 4096, 10_000])
@pytest.mark.parametrize("byte", [0, 1, 0x89, 0xFF])
def test_a_file_of_one_byte_over_and_over_is_refused(tmp_path: Path, size: int, byte: int) -> None:
    path = tmp_path / "s.shard"
    path.write_bytes(bytes([byte]) * size)
    assert isinstance(read_everything(path), ShardioError)
    assert findings_in(path.read_bytes())


def test_all_data_is_still_checked_where_one_header_page_is_lost(small: bytearray) -> None:
    damaged = bytearray(small)
    damaged[:4096] = bytes(4096)
    damaged[4096 + 130] ^= 1  # in the second row of the column
    assert set(findings_in(damaged)) >= {"incomplete", "checksum"}


def test_the_audit_goes_on_after_a_finding(small: bytearray) -> None:
    damaged, sections = bytearray(small), Forgery.of(small).sections
    payload = sections[Kind.PAYLOAD, 0xFFFF, 0]
    for at in (4096 + 5, 4096 + 4000, payload.offset + 10, len(small) - 9):
        damaged[at] ^= 0x10
    found = examine_bytes(memoryview(damaged), "s.shard").findings
    assert {(f.code, f.section) for f in found} == {
        ("padding", "trailer"),
        ("padding", "column"),
        ("checksum", "column"),
        ("checksum", "payload"),
    }
