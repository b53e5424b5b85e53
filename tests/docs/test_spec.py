"""The tables of the specification hold the structs, codes and limits of the code."""

from __future__ import annotations

import json
import re
import struct
import sys
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest

from shardio import ShardWriter
from shardio.dataset import external_lists, generation, manifest
from shardio.dataset.generation import ColumnGroup, Generation, describe_generation
from shardio.dataset.manifest import publish
from shardio.dataset.selection import RowRuns
from shardio.errors import DatasetCorrupt
from shardio.format import checksum, codecs, layout, schema, sections
from shardio.format import types as fields
from shardio.format.layout import (
    HEADER,
    HEADER_HASH,
    MAGIC,
    PAGE,
    SECTION,
    Kind,
    Required,
    unpack_header,
    unpack_table,
)
from shardio.format.types import DType, FieldType, arrays, images, streams, text
from shardio.format.types.arrays import numpy_dtype
from shardio.format.types.text import canonical_json, read_json
from shardio.storage.fs import read_checksummed_json, to_checksummed_json
from tests.golden.second_reader import SecondReader

PAGE_TEXT = (Path(__file__).parents[2] / "docs" / "reference" / "format.md").read_text()


def table(first_header: str, nth: int = 0) -> list[list[str]]:
    """Return the cells of the nth table whose header row begins with a text, without backquotes."""
    blocks = re.findall(r"(?m)(?:^\|.*\n)+", PAGE_TEXT)
    found = [block for block in blocks if block.startswith(first_header)]
    lines = found[nth].splitlines()[2:]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


def sizes_of(layout_: struct.Struct) -> list[int]:
    """Return the size of every item of a struct."""
    items = re.findall(r"(\d*)([a-zA-Z])", layout_.format.lstrip("<"))
    sizes = []
    for count, code in items:
        size = struct.calcsize("<" + count + code)
        sizes += [size] if code == "s" else [size // int(count or 1)] * int(count or 1)
    return sizes


STRUCTS = [
    (0, sizes_of(HEADER) + sizes_of(HEADER_HASH), PAGE),
    (1, sizes_of(SECTION), SECTION.size),
    (2, sizes_of(sections.ENTRY), sections.ENTRY.size),
    (3, sizes_of(streams.STREAM), streams.STREAM.size),
    (4, sizes_of(streams.PACKET), streams.PACKET.size),
]


@pytest.mark.parametrize(
    ("nth", "sizes", "total"), STRUCTS, ids=["header", "section", "entry", "stream", "packet"]
)
def test_offsets_and_sizes_are_those_of_the_structs(nth: int, sizes: list[int], total: int) -> None:
    rows = table("| offset | size |", nth)
    if sum(sizes) < total:
        sizes = [*sizes, total - sum(sizes)]
    assert [int(row[1]) for row in rows] == sizes
    assert [int(row[0]) for row in rows] == [sum(sizes[:i]) for i in range(len(sizes))]
    types = {"u16": 2, "u32": 4, "u64": 8, "i64": 8}
    assert all(types.get(row[2], int(row[1])) == int(row[1]) for row in rows)


def test_names_of_entries_are_those_of_the_code() -> None:
    names = [row[3] for row in table("| offset | size |", 1)]
    fields = list(layout.Section.__dataclass_fields__)
    assert [name for name in names if name != "zero"] == fields
    header = [row[3] for row in table("| offset | size |", 0)]
    assert set(layout.Header.__dataclass_fields__) <= set(header)
    entry = [row[3] for row in table("| offset | size |", 2)]
    assert entry == list(sections.ENTRY_DTYPE.names or ())
    for nth, dtype in ((3, streams.STREAM_DTYPE), (4, streams.PACKET_DTYPE)):
        assert [row[3] for row in table("| offset | size |", nth)] == list(dtype.names or ())
        sizes = [dtype[name].itemsize for name in dtype.names or ()]
        assert [int(row[1]) for row in table("| offset | size |", nth)] == sizes


def test_flags_of_packets_are_those_of_the_code() -> None:
    assert {row[1]: int(row[0]) for row in table("| flag |")} == {
        flag.name: int(flag) for flag in streams.PacketFlag
    }


@pytest.mark.parametrize(
    ("header", "enum"),
    [
        ("| code | name |", Kind),
        ("| code | field type |", FieldType),
        ("| code | dtype |", DType),
        ("| code | codec |", codecs.Codec),
    ],
)
def test_codes_are_those_of_the_code(header: str, enum: type[IntEnum]) -> None:
    assert {row[1]: int(row[0]) for row in table(header)} == {e.name: int(e) for e in enum}


def test_feature_bits_are_those_of_the_code_and_the_built_ones_are_not_reserved() -> None:
    rows = table("| bit |")
    assert {row[1]: 1 << int(row[0]) for row in rows} == {r.name: int(r) for r in Required}
    built = sum(1 << int(row[0]) for row in rows if row[2] != "reserved")
    assert built == int(layout.SUPPORTED)


def test_reserved_codes_are_exactly_those_that_are_not_built() -> None:
    def free(header: str, column: int) -> set[str]:
        return {row[1] for row in table(header) if row[column] != "reserved"}

    assert free("| code | field type |", 2) == {FieldType(code).name for code in fields.FIELD_TYPES}
    assert free("| code | dtype |", 3) == {name.upper() for name in fields.DTYPES}
    assert free("| code | codec |", 2) == {c.upper() for c in codecs.SPECS}
    built = {Kind(spec.key[0]) for spec in sections.plan_sections(_every_kind(), 3)}
    assert free("| code | name |", 5) == {kind.name for kind in built}


def _every_kind() -> schema.Schema:
    kinds: dict[str, fields.Field] = {
        "a": fields.Array("uint8"),
        "b": fields.Array("uint8", (None,), optional=True),
        "c": fields.Text("zstd_dictionary"),
        "d": fields.Video(),
    }
    return schema.Schema(kinds)


def test_item_sizes_are_those_of_numpy() -> None:
    for _, name, n_bytes, note in table("| code | dtype |"):
        if note != "reserved":
            assert numpy_dtype(name.lower()).itemsize == int(n_bytes)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (f"`{MAGIC.hex(' ').upper()}`", MAGIC),
        (f"A *page* is {PAGE} bytes", PAGE),
        ("from 48 to 16384 × 48", layout.MAX_SECTIONS),
        ("`n_samples` | at most 2^48", layout.MAX_SAMPLES),
        ("at most 4 MiB", layout.MAX_SCHEMA_BYTES),
        ("Kinds from 32768 up are optional", layout.FIRST_OPTIONAL_KIND),
        ("65535 if to none", layout.NO_FIELD),
        ("1 to 1024 fields", schema.MAX_FIELDS),
        ("at most 255 bytes of UTF-8", schema.MAX_NAME_BYTES),
        ("depth of JSON | 256", text.MAX_JSON_DEPTH),
        ("Integers have at most 4300 digits", sys.int_info.default_max_str_digits),
        ("at most 16 dimensions", arrays.MAX_DIMS),
        ("bytes of the record before compression, below 2^48", fields.MAX_RECORD_BYTES + 1),
        ("times the dimensions that do not vary is below 2^48", fields.MAX_RECORD_BYTES + 1),
        ("all dimensions that are not 0 is below 2^48", fields.MAX_RECORD_BYTES + 1),
        ("bytes of a record or packet, of a column's row | 2^48 − 1", fields.MAX_RECORD_BYTES),
        ("dimensions of an array that are not 0 | 2^48 − 1", fields.MAX_RECORD_BYTES),
        ("stride is b for b < 64", arrays.COLUMN_ALIGNMENT),
        ("rounded up to a multiple of 64 if", arrays.RECORD_ALIGNMENT),
        ("≤ 32768 × stored bytes", codecs.ZSTD_MAX_RATIO),
        ("if b ≥ 2048", checksum.ROW_HASH_MIN),
        ("⌊65536 ∕ stride⌋", checksum.RUN_BYTES),
        ("a *block* is 4096 bytes", checksum.BLOCK_BYTES),
        ("⌈x ∕ 4096⌉ blocks", checksum.BLOCK_BYTES),
        ("bytes of a dictionary, of a stream's parameters | 1 MiB", codecs.MAX_DICTIONARY_BYTES),
        ("`parameter_bytes` | 1 to 1 MiB", streams.MAX_PARAMETER_BYTES),
        ("as its EXIF orientation says), each from 1 to 2147483647", images.MAX_PICTURE_SIDE),
        ("height and width of an image | 2147483647", images.MAX_PICTURE_SIDE),
        ("channels of the encoded picture, 1 to 4", images.MAX_CHANNELS),
        ("a *chunk* 65536 bytes", checksum.CHUNK_BYTES),
        ("⌈`n_bytes` ∕ 65536⌉ chunks", checksum.CHUNK_BYTES),
        ("bytes of a shard | 2^62", layout.MAX_FILE_BYTES),
        ("sections of a shard | 16384", layout.MAX_SECTIONS),
        ("fields, those of column groups included | 1024", schema.MAX_FIELDS),
        ("dimensions of an array | 16", arrays.MAX_DIMS),
        ("bytes of a field's name, of a shard's name | 255", schema.MAX_NAME_BYTES),
        ("of a shard's name | 255", external_lists.MAX_NAME_BYTES),
        ("channels of an image | 4", images.MAX_CHANNELS),
        ("bytes of the schema | 4 MiB", layout.MAX_SCHEMA_BYTES),
        ("samples of a shard, and of a dataset | 2^48", layout.MAX_SAMPLES),
        ("an integer (1 to 999999)", manifest._MAX_NUMBER),
        ("height and width to 16384", generation._MAX_SIDE),
        ("that has more than 4096 entries", external_lists.MAX_INLINE_ENTRIES),
        ("inside of more than 256", text.MAX_JSON_DEPTH),
    ],
)
def test_limits_are_those_of_the_code(text: str, value: int | bytes) -> None:
    assert text in PAGE_TEXT
    if isinstance(value, int):
        units = {4 << 20: "4 MiB", 1 << 20: "1 MiB", 1 << 48: "2^48", 1 << 62: "2^62"}
        unit = {**units, (1 << 48) - 1: "2^48 − 1"}.get(value, str(value))
        assert re.search(rf"(?<!\d){re.escape(unit)}(?!\d)", text)


def dumped() -> bytes:
    """Return the file whose bytes the page lists."""
    (block,) = re.findall(r"```text\n(00000 .*?)```", PAGE_TEXT, re.DOTALL)
    *listed, last = [line for line in block.splitlines() if line]
    content = bytearray()
    for line in listed:
        place, listing = int(line[:5], 16), bytes.fromhex(line[7:54])
        assert len(content) <= place, line
        content += bytes(place - len(content)) + listing
    assert last.endswith("the first page again")
    return bytes(content.ljust(int(last[:5], 16), b"\0") + content[:PAGE])


def test_the_hex_dump_is_the_file_that_it_says_it_is(tmp_path: Path) -> None:
    schema_ = schema.Schema({"label": fields.Array("uint8"), "note": fields.Text(optional=True)})
    with ShardWriter(tmp_path / "written.shard", schema_) as writer:
        writer.append({"label": 7, "note": "hi"})
        writer.append({"label": 9, "note": None})
    assert dumped() == (tmp_path / "written.shard").read_bytes()
    (tmp_path / "dumped.shard").write_bytes(dumped())
    second = SecondReader(tmp_path / "dumped.shard")
    assert second[0] == {"label": (DType.UINT8, (), b"\x07"), "note": "hi"}
    assert second[1] == {"label": (DType.UINT8, (), b"\x09"), "note": None}


def test_what_the_hex_dump_says_of_its_sections_is_so() -> None:
    content = dumped()
    header = unpack_header(content[:PAGE], "dump")
    end = header.table_offset + header.table_size
    sections = unpack_table(content[header.table_offset : end], header, "dump")
    listed = re.findall(
        r"  ([A-Z_]+)(?: of ([A-Z_]+))?: kind.*\n.*  offset (\d+), size (\d+)\n"
        r".*  count (\d+), stride (\d+)\n.*  hash\n",
        PAGE_TEXT,
    )
    assert listed == [
        (
            Kind(section.kind).name,
            Kind(section.of_kind).name if section.of_kind else "",
            *map(str, (section.offset, section.size, section.count, section.stride)),
        )
        for section in sections
    ]


def test_the_version_is_that_of_the_code() -> None:
    assert PAGE_TEXT.startswith(f"# The shard format, version {layout.MAJOR}.{layout.MINOR}\n")


def test_the_keys_of_a_generation_are_those_that_are_written() -> None:
    none = external_lists.ShardList.of(())
    extras: dict[str, Any] = {
        "subsets": {"train": RowRuns([], [])},
        "stats": {"whole": {}},
        "operation": {"name": "split"},
        "column_groups": (ColumnGroup(schema.Schema({"x": fields.Text()}), none),),
    }
    generation = Generation(1, "", _every_kind(), none, **extras)
    keys = {row[0] for row in table("| key of a generation |")}
    assert keys == {*describe_generation(generation, {}), "digest"}
    left_out = {row[0] for row in table("| key of a generation |") if "left out if none" in row[1]}
    plain = Generation(1, "", _every_kind(), none)
    assert keys - left_out == {*describe_generation(plain, {}), "digest"}
    (group,) = describe_generation(generation, {})["column_groups"]
    assert {row[0] for row in table("| key of an external list |")} == {
        *external_lists.add_external_list({}, "x", b"", 1)
    }
    assert {row[0] for row in table("| key of a column group |")} == set(group)
    assert f"`{describe_generation(generation, {})['required']}`".replace("'", '"') in PAGE_TEXT


@pytest.mark.parametrize(
    "lines",
    [["{", ' "digest": "$",', ' "view": 1', "}"], ["{", ' "a": [],', ' "digest": "$"', "}"]],
)
def test_a_digest_is_that_of_the_text_without_its_line(lines: list[str], tmp_path: Path) -> None:
    rest = [line for line in lines if "digest" not in line]
    rest[-2] = rest[-2].removesuffix(",")
    whole = "".join(line + "\n" for line in rest)
    digest = f"{checksum.hash_bytes(whole.encode()):016x}"
    text = ("\n".join(lines) + "\n").replace("$", digest)
    path = tmp_path / "000001.json"
    path.write_text(text)
    assert "digest" not in read_checksummed_json(path)
    path.write_text(text.replace("{", "{ "))
    with pytest.raises(DatasetCorrupt):
        read_checksummed_json(path)


def test_the_keys_of_the_pointer_are_those_that_are_written(tmp_path: Path) -> None:
    publish(tmp_path, schema=_every_kind(), shards=[])
    written = json.loads((tmp_path / "dataset.json").read_text())
    assert {row[0] for row in table("| key of `dataset.json` |")} == set(written)


def test_the_lines_in_the_form_of_a_generation_are_a_file_that_is_read(tmp_path: Path) -> None:
    (block,) = re.findall(r"```text\n(\{\n.*?)```", PAGE_TEXT, re.DOTALL)
    (tmp_path / "x.json").write_text(block)
    content = read_checksummed_json(tmp_path / "x.json")
    assert content == {"classes": ["ant", "bee"], "inputs": []}
    assert to_checksummed_json(content).decode() == block


def test_the_hashes_that_the_page_gives_are_those_of_the_code() -> None:
    hundred, thousand = bytes(range(100)), bytes(i % 251 for i in range(1000))
    found = re.findall(
        r"hash\s+is `(\w+)`; of the 100 bytes 0 to 99 `(\w+)`, and the id `(\w+)`; of 1000 bytes\s+"
        r"each of which is its number mod 251, the hash is `(\w+)`",
        PAGE_TEXT,
    )
    hashes = [f"{checksum.hash_bytes(x):016x}" for x in (b"", hundred, thousand)]
    assert found == [(*hashes[:2], checksum.content_id(hundred).hex(), hashes[2])]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (1125899906842624.25, "1125899906842624.2"),
        (1125899906842624.75, "1125899906842624.8"),
        (0.0001, "0.0001"),
        (0.000015, "1.5e-05"),
        (1.0, "1.0"),
        (-0.0, "-0.0"),
        (1e15, "1000000000000000.0"),
        (1e16, "1e+16"),
        (10**16, "10000000000000000"),
    ],
)
def test_numbers_of_json_have_the_form_that_the_page_says(number: float, text: str) -> None:
    assert canonical_json(number) == text.encode()
    found = read_json(text)
    assert (found, type(found)) == (number, type(number))


def test_the_specification_fits_on_its_page() -> None:
    assert len(PAGE_TEXT.splitlines()) <= 560
