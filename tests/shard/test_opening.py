"""Opening a shard costs the same whatever the number of samples, and accepts one layout only.

`tests/corruption/test_forged_structure.py` breaks every rule that opening checks.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shardio import Array, Schema, Text
from shardio.errors import ShardCorrupt, ShardIncomplete, ShardUnsupported
from shardio.format.layout import PAGE, Header, Kind, Required, Section
from shardio.format.sections import plan_sections
from shardio.shard.opening import check_sections, open_sections
from shardio.shard.writer import ShardWriter
from tests.shards import write_shard


def count_lines(path: Path) -> int:
    """Return how many lines of Python opening a shard runs."""
    content, n_lines = memoryview(path.read_bytes()), 0

    def trace(frame: object, event: str, argument: object) -> object:
        nonlocal n_lines
        n_lines += event == "line"
        return trace

    open_sections(content, str(path))  # the schema is parsed once per process
    before = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        open_sections(content, str(path))
    finally:
        sys.settrace(before)
    return n_lines


def test_opening_does_not_depend_on_the_number_of_samples(tmp_path: Path) -> None:
    schema = Schema({"label": Array("int64"), "text": Text()})
    counts = []
    for n in (10, 1000):
        with ShardWriter(tmp_path / f"{n}.shard", schema) as writer:
            for i in range(n):
                writer.append({"label": i, "text": str(i)})
        counts.append(count_lines(tmp_path / f"{n}.shard"))
    assert counts[0] == counts[1] > 10


def test_equal_schemas_are_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = write_shard(tmp_path / "a.shard", 1).read_bytes()
    _, first, _ = open_sections(memoryview(content), "a.shard")
    monkeypatch.delattr("shardio.format.schema.Schema.from_json")
    _, second, _ = open_sections(memoryview(content), "b.shard")
    assert second is first


@pytest.mark.parametrize("n_bytes", [1, 100, PAGE - 1, PAGE, 10 * PAGE])
def test_a_file_of_zeros_was_never_finished(n_bytes: int) -> None:
    with pytest.raises(ShardIncomplete, match=r"^a\.shard: ") as caught:
        open_sections(memoryview(bytes(n_bytes)), "a.shard")
    expected = "header was never written" if n_bytes >= PAGE else f"{n_bytes} bytes and no header"
    assert expected in str(caught.value)


@pytest.mark.parametrize("content", [b"x", b"\x89SHD\r\n\x1a\n", b"y" * PAGE, b"z" * 5 * PAGE])
def test_another_file_is_no_shard(content: bytes) -> None:
    is_short = len(content) < PAGE
    text = "too short to be a shard" if is_short else "not a shard: wrong magic"
    with pytest.raises(ShardCorrupt, match=text) as caught:
        open_sections(memoryview(content), "a.shard")
    error = caught.value
    assert (error.path, error.code) == ("a.shard", "file_size" if is_short else "magic")
    assert error.found == (len(content) if is_short else content[:8])
    assert str(error).endswith(f"expected {error.expected}, found {error.found!s}")


def test_the_last_page_must_repeat_the_first(tmp_path: Path) -> None:
    content = bytearray(write_shard(tmp_path / "a.shard", 1).read_bytes())
    last = len(content) - PAGE
    content[last + 70] ^= 1
    with pytest.raises(ShardCorrupt, match="the first and the last page differ") as caught:
        open_sections(memoryview(content), "a.shard")
    error = caught.value
    assert (error.code, error.path, error.section) == ("trailer", "a.shard", "trailer")
    assert error.offset == last + 70
    assert (error.expected, error.found) == (content[70], content[70] ^ 1)


def test_a_schema_that_was_changed_is_refused_with_both_hashes(tmp_path: Path) -> None:
    content = bytearray(write_shard(tmp_path / "a.shard", 1).read_bytes())
    at = content.index(b'{"fields"')
    content[at + 20] ^= 1
    with pytest.raises(ShardCorrupt, match="the schema does not match its hash") as caught:
        open_sections(memoryview(content), "a.shard")
    error = caught.value
    assert (error.code, error.path, error.section) == ("schema_hash", "a.shard", "schema")
    assert error.offset == at
    assert error.expected != error.found
    assert len(str(error.found)) == 16


def checked(required: Required, sections: list[Section], n_samples: int = 3) -> Exception:
    """Return the error for a shard of one text field, 3 samples and these sections."""
    header = Header(n_samples, 0, 0, 0, 0, bytes(16), int(required))
    with pytest.raises((ShardCorrupt, ShardUnsupported)) as caught:
        check_sections(header, Schema({"t": Text()}), {s.key: s for s in sections}, "a.shard")
    return caught.value


def test_sections_that_do_not_match_the_schema_are_named_with_both_sizes() -> None:
    sound = [
        Section(*spec.key, PAGE, spec.n_items * spec.stride, spec.n_items, spec.stride, 0)
        for spec in plan_sections(Schema({"t": Text()}), 3)
    ]
    check_sections(
        Header(3, 0, 0, 0, 0, bytes(16)), Schema({"t": Text()}), {s.key: s for s in sound}, ""
    )
    index = next(each for each in sound if each.name == "index")
    rest = [each for each in sound if each is not index]
    missing = checked(Required(0), rest)
    assert str(missing) == "a.shard: section index is missing"
    short = checked(Required(0), [replace(index, count=2), *rest])
    assert isinstance(short, ShardCorrupt)
    assert (short.code, short.path, short.section) == ("section", "a.shard", "index")
    assert (short.expected, short.found) == ((3, 32), (2, 32))
    cut = checked(Required(0), [replace(index, size=95), *rest])
    assert isinstance(cut, ShardCorrupt)
    assert (cut.what, cut.expected, cut.found) == ("wrong size", 96, 95)
    needy = checked(Required.LISTS, sound)
    assert isinstance(needy, ShardCorrupt)
    assert (needy.code, needy.path, needy.section) == ("feature", "a.shard", "header")
    assert (needy.expected, needy.found) == (str(Required(0)), str(Required.LISTS))
    many = checked(Required(0), sound, (1 << 48) + 1)
    assert isinstance(many, ShardCorrupt)
    assert (many.code, many.expected, many.found) == ("count", 1 << 48, (1 << 48) + 1)
    foreign = checked(Required(0), [*sound, Section(Kind.COLUMN, 9, 0, PAGE, 0, 0, 0, 0)])
    assert isinstance(foreign, ShardCorrupt)
    assert (foreign.section, foreign.found) == ("column", (Kind.COLUMN, 9, 0))
    later = checked(Required(0), [*sound, Section(77, 0, 0, 5 * PAGE, 0, 0, 0, 0)])
    assert isinstance(later, ShardUnsupported)
    assert f"a.shard: has a section of kind 77 at byte {5 * PAGE}" in str(later)
