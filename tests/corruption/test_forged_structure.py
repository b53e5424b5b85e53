"""Forged structure: one rule of header, table or schema broken each, with every hash right."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from shardio.errors import ShardCorrupt, ShardIncomplete, ShardioError, ShardUnsupported
from shardio.format.checksum import content_id, hash_bytes
from shardio.format.layout import HEADER, HEADER_HASH, NO_FIELD, PAGE, Kind
from tests.corruption import forge
from tests.corruption.damage import assert_refused, table
from tests.corruption.forge import SCHEMA, Change, Forgery, codes_of, read_bytes, rules_samples


def test_a_forgery_that_changes_nothing_is_the_same_shard(sound: bytearray) -> None:
    assert Forgery.of(sound).seal() == sound


# --- header and table -----------------------------------------------------------------------


def header_with(content: bytes | bytearray, offset: int, new: bytes) -> bytes:
    """Both header pages with other bytes and the right hash."""
    fields = bytearray(content[: HEADER.size])
    fields[offset : offset + len(new)] = new
    page = (bytes(fields) + HEADER_HASH.pack(hash_bytes(bytes(fields)))).ljust(PAGE, b"\0")
    return page + bytes(content[PAGE:-PAGE]) + page


@pytest.mark.parametrize(
    ("offset", "new", "text"),
    [
        (0, b"\x89SHD\n\r\x1a\n", "wrong magic bytes"),
        (8, struct.pack("<H", 2), "format version 2.0, this shardio reads version 1"),
        (12, struct.pack("<I", 8192), "unknown page size"),
        (16, struct.pack("<Q", 1 << 8 | 1 << 9), "needs float8, complex, which"),
        (16, struct.pack("<Q", 1 << 1 | 1 << 63), "needs bit 63"),
        (32, struct.pack("<Q", 3), "wrong count or stride"),
        (32, struct.pack("<Q", 1 << 63), "too many samples"),
        (40, struct.pack("<Q", PAGE), "bytes after its end"),
        (40, struct.pack("<Q", 1 << 63), "truncated"),
        (48, struct.pack("<Q", PAGE + 1), "section table does not end"),
        (48, struct.pack("<Q", (1 << 64) - PAGE), "section table does not end"),
        (56, struct.pack("<Q", 0), "section table does not end"),
        (56, struct.pack("<Q", 47), "section table does not end"),
        (56, struct.pack("<Q", (1 << 64) - 1), "section table does not end"),
        (64, struct.pack("<Q", 1), "section table does not match its hash"),
        (72, bytes(16), "the id of the shard is not the hash of its section table"),
    ],
)
def test_header_rules(sound: bytearray, tmp_path: Path, offset: int, new: bytes, text: str) -> None:
    content = header_with(sound, offset, new)
    error = read_bytes(tmp_path, content)
    assert isinstance(error, ShardioError)
    assert text in str(error)
    assert str(tmp_path) in str(error)
    assert codes_of(content)


def test_optional_features_and_minor_versions_are_ignored(sound: bytearray, tmp_path: Path) -> None:
    content = header_with(sound, 10, struct.pack("<H", 7))
    content = header_with(content, 24, struct.pack("<Q", (1 << 64) - 1))
    assert len(read_bytes(tmp_path, content)) == len(rules_samples())
    assert codes_of(content) == []


def test_two_sound_header_pages_that_differ_are_refused(sound: bytearray, tmp_path: Path) -> None:
    other = header_with(sound, 24, b"\x01")
    content = bytes(sound[:-PAGE]) + other[-PAGE:]
    error = read_bytes(tmp_path, content)
    assert isinstance(error, ShardCorrupt) and error.code == "trailer"
    assert codes_of(content) == ["trailer"]


COLUMN = (Kind.COLUMN, 0, 0)


def move(key: tuple[int, int, int], **changes: int) -> Change:
    def change(forgery: Forgery) -> None:
        forgery.table_changes[key] = changes

    return change


def add_section(forgery: Forgery, key: tuple[int, int, int], content: bytes = b"?") -> None:
    section = forgery.sections[SCHEMA]
    kind, field, of_kind = key
    values = {"kind": kind, "field": field, "of_kind": of_kind}
    forgery.sections[key] = type(section)(
        **values, offset=0, size=0, count=1, stride=0, hash=hash_bytes(content)
    )
    forgery.contents[key] = content
    forgery.sections[SCHEMA] = forgery.sections.pop(SCHEMA)  # the last one


def optional_of_another_size(forgery: Forgery) -> None:
    add_section(forgery, (0x8001, NO_FIELD, 0), b"0123456789")
    forgery.table_changes[0x8001, NO_FIELD, 0] = {"count": 3, "stride": 3}


def behind_the_schema(forgery: Forgery) -> None:
    forgery.sections[COLUMN] = forgery.sections.pop(COLUMN)


def drop(key: tuple[int, int, int]) -> Change:
    def change(forgery: Forgery) -> None:
        del forgery.sections[key], forgery.contents[key]
        forgery.rehash_chunks = False

    return change


def set_schema(content: object) -> Change:
    def change(forgery: Forgery) -> None:
        raw = content if isinstance(content, bytes) else compact(content)
        forgery.contents[SCHEMA] = raw
        forgery.rehash_chunks = False

    return change


def compact(content: object) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def fields_of(*entries: dict[str, Any]) -> object:
    return {"fields": list(entries)}


TEXT_FIELD = {"codec": 0, "id": 0, "name": "a", "type": 3}
ARRAY_FIELD = {"codec": 0, "dtype": 6, "id": 0, "name": "a", "shape": [2], "type": 1}

STRUCTURE: list[tuple[str, Change, str]] = [
    ("a hole", move(COLUMN, offset=2 * PAGE), "hole"),
    ("an overlap", move((Kind.COLUMN_HASHES, 0, 0), offset=PAGE), "overlap"),
    ("an offset that wraps", move(COLUMN, offset=(1 << 64) - PAGE), "hole"),
    ("a size beyond the file", move(COLUMN, size=(1 << 64) - 1), "size"),
    ("a size into the table", move(SCHEMA, size=3 * PAGE), "size"),
    ("a count that is wrong", move(forge.INDEX, count=3), "section"),
    ("a stride that is wrong", move(COLUMN, stride=2112 + 64), "section"),
    ("a stride of nothing", move(COLUMN, stride=0), "section"),
    ("no schema", drop(SCHEMA), "section"),
    ("a section behind the schema", behind_the_schema, "section"),
    ("no payload", drop(forge.PAYLOAD), "section"),
    ("no block hashes", drop((Kind.BLOCK_HASHES, NO_FIELD, Kind.INDEX)), "section"),
    ("an optional section of another", lambda f: add_section(f, (0x8001, 1, 5)), "section"),
    ("an optional section of another size", optional_of_another_size, "section"),
    ("a column of no field", lambda f: add_section(f, (2, 99, 0)), "section"),
    ("block hashes of nothing", lambda f: add_section(f, (7, 9, 0x8001)), "section"),
    ("a schema that is no JSON", set_schema(b"{"), "schema"),
    ("a schema that is no UTF-8", set_schema(b'"\xff"'), "schema"),
    ("a schema nested too deep", set_schema(b"[" * 100_000), "schema"),
    ("a schema that is a list", set_schema([]), "schema"),
    ("a schema without fields", set_schema({"fields": []}), "schema"),
    ("fields that are no list", set_schema({"fields": {}}), "schema"),
    ("a field that is no object", set_schema({"fields": [1]}), "schema"),
    ("an unknown key", set_schema({"fields": [TEXT_FIELD], "x": 1}), "schema"),
    ("an unknown key of a field", set_schema(fields_of({**TEXT_FIELD, "x": 1})), "schema"),
    ("a key twice", set_schema(compact(fields_of(TEXT_FIELD))[:-2] + b',"id":0}]}'), "schema"),
    ("blanks", set_schema(json.dumps(fields_of(TEXT_FIELD)).encode()), "schema"),
    ("a wrong id", set_schema(fields_of({**TEXT_FIELD, "id": 1})), "schema"),
    ("a name that is empty", set_schema(fields_of({**TEXT_FIELD, "name": ""})), "schema"),
    ("a name that is a number", set_schema(fields_of({**TEXT_FIELD, "name": 1})), "schema"),
    ("a name that ends with a dot", set_schema(fields_of({**TEXT_FIELD, "name": "a."})), "schema"),
    ("control characters in a name", set_schema(fields_of({**TEXT_FIELD, "name": "\n"})), "schema"),
    ("a name twice", set_schema(fields_of(TEXT_FIELD, {**TEXT_FIELD, "id": 1})), "schema"),
    ("a code that is a list", set_schema(fields_of({**TEXT_FIELD, "type": [3]})), "schema"),
    ("a dtype that is a list", set_schema(fields_of({**ARRAY_FIELD, "dtype": [6]})), "schema"),
    ("a dtype that is true", set_schema(fields_of({**ARRAY_FIELD, "dtype": True})), "schema"),
    ("a shape that is a number", set_schema(fields_of({**ARRAY_FIELD, "shape": 2})), "schema"),
    ("a dimension of 0", set_schema(fields_of({**ARRAY_FIELD, "shape": [0]})), "schema"),
    ("a dimension of -2", set_schema(fields_of({**ARRAY_FIELD, "shape": [-2]})), "schema"),
    ("17 dimensions", set_schema(fields_of({**ARRAY_FIELD, "shape": [1] * 17})), "schema"),
    ("a huge row", set_schema(fields_of({**ARRAY_FIELD, "shape": [10**30]})), "schema"),
    ("a huge varying row", set_schema(fields_of({**ARRAY_FIELD, "shape": [-1, 10**30]})), "schema"),
    ("another schema", set_schema(fields_of(TEXT_FIELD)), "section"),
]


@pytest.mark.parametrize(("change", "code"), **table(STRUCTURE))
def test_structures_refused(sound: bytearray, tmp_path: Path, change: Change, code: str) -> None:
    forgery = Forgery.of(sound)
    change(forgery)
    assert_refused(tmp_path / "r.shard", forgery.seal(), code)


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ({**TEXT_FIELD, "type": 9}, "field type 9"),
        ({**TEXT_FIELD, "type": 99}, "field type 99"),
        ({**TEXT_FIELD, "codec": 3}, "codec 3"),
        ({**ARRAY_FIELD, "dtype": 14}, "dtype 14"),
    ],
)
def test_codes_to_come(sound: bytearray, tmp_path: Path, entry: dict[str, Any], text: str) -> None:
    forgery = Forgery.of(sound)
    set_schema(fields_of(entry))(forgery)
    error = read_bytes(tmp_path, forgery.seal())
    assert isinstance(error, ShardUnsupported)
    assert text in str(error) and str(tmp_path) in str(error)
    assert codes_of(forgery.seal()) == ["unsupported"]


@pytest.mark.parametrize("kind", [0, 13, 0x7FFF])
def test_a_section_of_an_unknown_kind(sound: bytearray, tmp_path: Path, kind: int) -> None:
    forgery = Forgery.of(sound)
    add_section(forgery, (kind, NO_FIELD, 0))
    error = read_bytes(tmp_path, forgery.seal(), "off")
    assert isinstance(error, ShardUnsupported)
    assert f"a section of kind {kind} at byte" in str(error) and str(tmp_path) in str(error)
    assert codes_of(forgery.seal()) == ["unsupported"]


@pytest.mark.parametrize("more", [b"", b"something", b"something".ljust(2 * PAGE)], ids=len)
def test_a_first_page_of_zeros_is_incomplete_whatever_follows(tmp_path: Path, more: bytes) -> None:
    assert isinstance(read_bytes(tmp_path, bytes(PAGE) + more), ShardIncomplete)
    assert codes_of(bytes(PAGE) + more)[0] == "incomplete"


def test_the_first_broken_rule_of_a_header_is_named(sound: bytearray, tmp_path: Path) -> None:
    later = header_with(sound, 8, struct.pack("<H", 2))  # and its hash may lie elsewhere
    needy = header_with(header_with(sound, 32, struct.pack("<Q", 3)), 16, struct.pack("<Q", 1 << 9))
    for content in (later, needy, later[: PAGE + 7], needy[: PAGE + 7]):
        assert isinstance(read_bytes(tmp_path, content), ShardUnsupported)
        assert set(codes_of(content)) == {"unsupported"}
    for content in (bytes(sound[: PAGE + 7]), bytes(sound[: PAGE - 1])):
        assert_refused(tmp_path / "r.shard", content, "file_size", "first")
        assert codes_of(content) == ["file_size"]


def test_a_schema_over_the_limit_is_refused_unparsed(sound: bytearray, tmp_path: Path) -> None:
    forgery = Forgery.of(sound)
    set_schema(b"[" * ((4 << 20) + 1))(forgery)
    assert "the schema is too large" in str(read_bytes(tmp_path, forgery.seal()))


def test_a_section_twice_is_refused(sound: bytearray, tmp_path: Path) -> None:
    forgery = Forgery.of(sound)
    add_section(forgery, (0x8001, 1, 0))
    add_section(forgery, (0x8002, 1, 0))
    forgery.table_changes[0x8002, 1, 0] = {"kind": 0x8001}
    assert_refused(tmp_path / "r.shard", forgery.seal(), "duplicate", "first")
    assert codes_of(forgery.seal()) == ["duplicate"]


def test_a_reserved_number_in_the_table_must_be_zero(sound: bytearray, tmp_path: Path) -> None:
    table_offset, table_size = struct.unpack_from("<QQ", sound, 48)
    content = bytearray(sound)
    content[table_offset + 6] = 1
    table = bytes(content[table_offset : table_offset + table_size])
    forged = header_with(bytes(content), 64, struct.pack("<Q", hash_bytes(table)))
    forged = header_with(forged, 72, content_id(table))
    assert_refused(tmp_path / "r.shard", forged, "reserved", "first")
    assert codes_of(forged) == ["reserved"]


def test_an_optional_section_is_skipped_and_audited(sound: bytearray, tmp_path: Path) -> None:
    forgery = Forgery.of(sound)
    add_section(forgery, (0x8001, NO_FIELD, 0), b"something of the future")
    content = forgery.seal()
    assert len(read_bytes(tmp_path, content)) == len(rules_samples())
    assert codes_of(content) == []
    at = content.index(b"something")
    damaged = content[:at] + b"S" + content[at + 1 :]
    assert len(read_bytes(tmp_path, damaged)) == len(rules_samples())
    assert codes_of(damaged) == ["checksum"]
