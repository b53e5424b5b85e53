"""Windows of many records or rows are checked together, and what is wrong is placed one by one."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from shardio import Array, Bytes, Schema, ShardReader, Text
from shardio.format.layout import PAGE
from shardio.format.sections import ENTRY
from shardio.maintenance import verify_shard
from shardio.maintenance.verify import payload
from shardio.maintenance.verify.shard import verify_bytes
from shardio.maintenance.verify.window import WINDOW_BYTES, ShardWindows
from shardio.storage.content import PreadFile
from tests.corruption.forge import PAYLOAD, Forgery, content_of
from tests.shards import write_samples, write_shard

N_ROWS = 100
RECORDS = Schema({"text": Text(), "blob": Bytes()})


@pytest.fixture(params=[True, False])
def segments(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check records with the segments of zstandard, and without them."""
    if not request.param:
        monkeypatch.setattr("shardio.maintenance.verify.window._SEGMENTS", None)


def forgery_of_texts(folder: Path) -> Forgery:
    """Texts of ten bytes between records of bytes that are none."""
    samples = ({"text": f"text {i:05d}", "blob": b"\xff" * i} for i in range(N_ROWS))
    return Forgery.of(content_of(folder / "texts.shard", RECORDS, samples))


@pytest.mark.usefixtures("segments")
@pytest.mark.parametrize("n", [8, 4096])
def test_no_texts_are_placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    monkeypatch.setattr(payload, "CHUNK_ENTRIES", n)
    forgery = forgery_of_texts(tmp_path)
    for row in (3, 40, N_ROWS - 1):
        forgery.change_record("text", row, b"\xff" * 10)
    forgery.change_record("text", 60, b"\xfe" * 10)
    forgery.change_entry("text", 60, hash_=1)
    content = forgery.seal()
    found = verify_bytes(memoryview(content), "texts").findings
    expected = [(3, "value"), (40, "value"), (N_ROWS - 1, "value")]
    assert sorted((f.sample or 0, f.code) for f in found) == sorted([*expected, (60, "checksum")])
    for finding in found:
        assert finding.field == "text" and finding.offset is not None
        assert content[finding.offset : finding.offset + 10] in (b"\xff" * 10, b"\xfe" * 10)


def test_a_character_in_two_records_is_in_neither(tmp_path: Path) -> None:
    forgery = forgery_of_texts(tmp_path)
    forgery.change_record("text", 10, b"text 0001\xc3")
    forgery.change_record("text", 11, b"\xa9text 0001")
    findings = verify_bytes(memoryview(forgery.seal()), "texts").findings
    assert [(f.sample, f.code) for f in findings] == [(10, "value"), (11, "value")]


@pytest.mark.usefixtures("segments")
def test_flipped_bit_is_placed_among_records_of_all_sizes(tmp_path: Path) -> None:
    sizes = [0, 1, 0, WINDOW_BYTES, 0, 3, WINDOW_BYTES - 1, 5, WINDOW_BYTES + 1, 0, 0, 7, 64, 2]
    made = ({"text": "e" * (size % 100), "blob": bytes(size)} for size in sizes)
    path = write_samples(tmp_path / "sizes.shard", RECORDS, made)
    forgery = Forgery.of(path.read_bytes())
    start = forgery.sections[PAYLOAD].offset
    for row in (1, 3, 6, 8, len(sizes) - 1):
        place = start + int(forgery.entry("blob", row)[1]["offset"])
        for at in (place, place + sizes[row] - 1):
            content = bytearray(forgery.seal())
            content[at] ^= 1
            path.write_bytes(content)
            (finding,) = verify_shard(path)
            found = (finding.code, finding.field, finding.sample, finding.offset)
            assert found == ("checksum", "blob", row, place)


def test_a_damaged_index_entry_hides_no_other_record(tmp_path: Path) -> None:
    forgery = forgery_of_texts(tmp_path)
    at, entry = forgery.entry("text", 20)
    forgery.change_entry("text", 20, offset=1 << 40)
    forgery.change_record("text", 50, b"\xff" * 10)
    findings = verify_bytes(memoryview(forgery.seal()), "texts").findings
    assert [(f.sample, f.code) for f in findings] == [(20, "index_entry"), (50, "value")]
    assert at % ENTRY.size == 0 and int(entry["n_bytes"]) == 10


def test_damage_to_any_part_is_found_alike_in_a_file_and_in_memory(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "a.shard", 30)
    content = path.read_bytes()
    for at in range(0, len(content), 4099):
        damaged = bytearray(content)
        for near in range(at, min(at + 600, len(content)), 97):
            damaged[near] ^= 1 << near % 8
        path.write_bytes(damaged)
        found = verify_bytes(PreadFile(str(path)), "a.shard")
        assert found == verify_bytes(memoryview(damaged), "a.shard")
        assert found.findings, at


def test_file_cut_while_read_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_shard(tmp_path / "a.shard", 400)
    n_bytes, real = path.stat().st_size, ShardWindows.window

    def cut_first(content: ShardWindows, start: int, end: int) -> memoryview:
        os.truncate(path, start + 1)
        return real(content, start, end)

    monkeypatch.setattr(ShardWindows, "window", cut_first)
    cut, _ = findings = verify_shard(path)
    assert [finding.code for finding in findings] == ["file_size", "changed"]
    assert cut.offset is not None
    assert cut.offset <= path.stat().st_size < n_bytes


def test_a_window_holds_its_part_of_the_file_whatever_was_asked_for_before(tmp_path: Path) -> None:
    whole = np.random.default_rng(0).bytes(5 * WINDOW_BYTES)
    path = tmp_path / "file"
    path.write_bytes(whole)
    content = ShardWindows(PreadFile(str(path)))
    places = [(0, 0), (5, 5), (0, 100), (PAGE, PAGE + 100), (7, 107), (PAGE + 7, PAGE + 107)]
    places += [(100, 5 * WINDOW_BYTES), (0, 0), (7, 107), (0, 107), (3 * PAGE - 1, 3 * PAGE)]
    for start, end in places:
        window = content.window(start, end)
        assert window.readonly and bytes(window) == whole[start:end]


@pytest.mark.parametrize(
    ("n_bytes", "rows"),
    [
        (2100, (0, 487, 499, 520, 1000, 1099)),
        (3072, (0, 340, 341, 1000, 1099)),
        *((4 * n_floats, (0, 2, 4)) for n_floats in (120_000, 150_528, 700_001)),
    ],
)
def test_rows_of_any_size_are_checked(tmp_path: Path, n_bytes: int, rows: tuple[int, ...]) -> None:
    schema = Schema({"row": Array("uint8", (n_bytes,))})
    made = ({"row": np.full(n_bytes, i % 255, "u1")} for i in range(rows[-1] + 1))
    path = write_samples(tmp_path / "rows.shard", schema, made)
    assert verify_shard(path) == []
    content = bytearray(path.read_bytes())
    with ShardReader(path) as reader:
        section = reader.column_section("row")
    places = {row: section.offset + row * section.stride for row in rows}
    for place in places.values():
        content[place + n_bytes - 1] ^= 1
    path.write_bytes(content)
    findings = verify_shard(path)
    assert {f.sample: f.offset for f in findings} == places
    assert {f.code for f in findings} == {"checksum"}
