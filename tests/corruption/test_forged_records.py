"""Forged records: one rule of index, payload or values broken each, with every hash right.

A forgery that readers must refuse is refused by verification too; those that only verification
refuses cannot make a reader return anything but what the writer of the file put there.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import zstandard

from shardio.errors import ShardCorrupt, ShardioError
from shardio.format.checksum import hash_bytes
from shardio.format.codecs import Codec
from shardio.format.layout import Kind
from shardio.format.schema import Schema
from shardio.format.types import Array, List
from shardio.maintenance.verify.shard import verify_bytes
from tests.corruption import forge
from tests.corruption.damage import assert_refused, table
from tests.corruption.forge import INDEX, PAYLOAD, Change, Forgery, codes_of, read_bytes

COLUMN = (Kind.COLUMN, 0, 0)


def entry(name: str, **changes: int) -> Change:
    return lambda forgery: forgery.change_entry(name, 2, **changes)


def record(name: str, new: bytes) -> Change:
    return lambda forgery: forgery.change_record(name, 2, new)


def shape(*dims: int) -> Change:
    def change(forgery: Forgery) -> None:
        forgery.change(forgery.column("cloud", Kind.SHAPES), 2 * 16, struct.pack("<QQ", *dims))

    return change


def empty_cloud(*dims: int) -> Change:
    """Give the record of row 0, which has no bytes, other dimensions."""

    def change(forgery: Forgery) -> None:
        forgery.change(forgery.column("cloud", Kind.SHAPES), 0, struct.pack("<QQ", *dims))

    return change


def deep(forgery: Forgery) -> None:
    """Nest the last JSON record too deep to be parsed."""
    _insert(forgery, "meta", 3, b"[" * 200_000)


def _insert(forgery: Forgery, name: str, row: int, new: bytes, codec: int = 0, n: int = -1) -> None:
    """Replace a record of the last row by one of any size; the records behind it move."""
    names = list(forgery.schema.records)
    _, old = forgery.entry(name, row)
    start = int(old["offset"])
    stored = int(old["stored"]) & (1 << 48) - 1
    payload = forgery.contents[PAYLOAD]
    forgery.contents[PAYLOAD] = payload[:start] + new + payload[start + stored :]
    n_bytes = len(new) if n < 0 else n
    forgery.change_entry(
        name, row, n_stored=len(new), n_bytes=n_bytes, hash_=hash_bytes(new), codec=codec
    )
    for behind in names[names.index(name) + 1 :]:
        _, entry_ = forgery.entry(behind, row)
        forgery.change_entry(behind, row, offset=int(entry_["offset"]) + len(new) - stored)


def zstd_record(content: bytes, extra: bytes = b"", n: int | None = None) -> Change:
    def change(forgery: Forgery) -> None:
        packed = zstandard.ZstdCompressor().compress(content) + extra
        _insert(forgery, "blob", 3, packed, Codec.ZSTD, len(content) if n is None else n)

    return change


def unsized_frame(forgery: Forgery) -> None:
    packed = zstandard.ZstdCompressor(write_content_size=False).compress(b"b" * 500)
    _insert(forgery, "blob", 3, packed, Codec.ZSTD, 500)


BROKEN_VALUES: list[tuple[str, Change, str]] = [
    ("an unknown codec", entry("blob", codec=5), "index_entry"),
    ("a dictionary codec", entry("blob", codec=2), "index_entry"),
    ("zstd where the schema says raw", entry("note", codec=1), "index_entry"),
    ("an offset beyond the payload", entry("note", offset=1 << 40), "index_entry"),
    ("an offset that wraps", entry("note", offset=(1 << 64) - 1), "index_entry"),
    ("a size beyond the payload", entry("note", n_stored=(1 << 48) - 1), "index_entry"),
    ("a raw record of two sizes", entry("note", n_bytes=3), "index_entry"),
    ("a compressed record that grew", entry("blob", n_bytes=1), "index_entry"),
    ("a record of 2^48 bytes", entry("blob", n_bytes=1 << 48), "index_entry"),
    ("more than zstd can hold", entry("blob", n_bytes=1 << 40), "index_entry"),
    ("a raw array off its alignment", entry("cloud", offset=8), "index_entry"),
    ("a fixed array of another size", entry("grid", n_bytes=128), "index_entry"),
    ("another content size", entry("blob", n_bytes=199), "zstd_size"),
    ("no zstd frame", lambda f: _insert(f, "blob", 3, b"not zstd!", 1, 200), "zstd_frame"),
    ("a frame of unknown size", unsized_frame, "zstd_size"),
    ("a frame and more", zstd_record(b"b" * 500, b"more"), "zstd_frame"),
    ("two frames", zstd_record(b"b" * 500, zstandard.compress(b"c" * 9)), "zstd_frame"),
    ("a shape too large for its bytes", shape(3, 3), "shape"),
    ("a shape that overflows", shape(1 << 63, 1 << 63), "shape"),
    ("an empty shape beyond any memory", empty_cloud(0, (1 << 64) - 1), "shape"),
    ("an empty shape of 2^49 bytes", empty_cloud(0, 1 << 46), "shape"),
    ("text that is no UTF-8", record("note", b"\xff" * 10), "value"),
    ("JSON that is none", record("meta", b'{"i":2,"of":[1,2]]'), "value"),
    ("JSON that is no UTF-8", record("meta", b'"' + b"\xff" * 16 + b'"'), "value"),
    ("JSON that says NaN", record("meta", b"[NaN,1,2,3,4,5,67]"), "value"),
    ("JSON nested too deep", deep, "value"),
]


@pytest.mark.parametrize(("change", "code"), **table(BROKEN_VALUES))
@pytest.mark.parametrize("verify", ["first", "off"])
def test_refusals(sound: bytearray, tmp_path: Path, change: Change, code: str, verify: str) -> None:
    forgery = Forgery.of(sound)
    change(forgery)
    error = assert_refused(tmp_path / "r.shard", forgery.seal(), code, verify)
    assert error.field and error.sample is not None and error.offset


def test_a_refused_record_is_named_with_its_place(sound: bytearray, tmp_path: Path) -> None:
    forgery = Forgery.of(sound)
    forgery.change_record("note", 2, b"\xff" * 10)
    content = forgery.seal()
    offset = content.index(b"\xff" * 10)
    error = read_bytes(tmp_path, content)
    assert isinstance(error, ShardCorrupt)
    place = (error.path, error.field, error.sample, error.offset)
    assert place == (str(tmp_path / "r.shard"), "note", 2, offset)
    found = verify_bytes(memoryview(content), "r.shard").findings
    assert [(f.field, f.sample, f.offset) for f in found] == [("note", 2, offset)]


# --- what only verification sees ---------------------------------------------------------------


def stride_padding(forgery: Forgery) -> None:
    forgery.change(forgery.column("long"), 2100, b"\x01")


def flag_of_two(forgery: Forgery) -> None:
    key = forgery.column("flag")
    forgery.change(key, 4, b"\x02")
    hashes = struct.pack("<Q", hash_bytes(forgery.contents[key]))
    forgery.contents[forgery.column("flag", Kind.COLUMN_HASHES)] = hashes


def hidden_gap(forgery: Forgery) -> None:
    _, before = forgery.entry("grid", 2)
    end = int(before["offset"]) + (int(before["stored"]) & (1 << 48) - 1)
    assert end % 64
    forgery.change(PAYLOAD, end, b"!")


def hidden_end(forgery: Forgery) -> None:
    forgery.contents[PAYLOAD] += b"hidden"


def shared_record(forgery: Forgery) -> None:
    _, first = forgery.entry("note", 0)
    stored = int(first["stored"]) & (1 << 48) - 1
    forgery.change_entry("note", 1, offset=int(first["offset"]), hash_=int(first["hash"]))
    assert stored


def wrong_section_hash(key: tuple[int, int, int]) -> Change:
    return lambda forgery: forgery.table_changes.update({key: {"hash": 1}})


def without_zstd(forgery: Forgery) -> None:
    forgery.header_changes["required"] = 0


VERIFIED: list[tuple[str, Change, list[str]]] = [
    ("bytes between rows", stride_padding, ["padding"]),
    ("a bool of 2 in a column", flag_of_two, ["value"]),
    ("a bool of 2 in a record", record("mask", b"\x01\x02"), ["value"]),
    ("bytes between records", hidden_gap, ["padding"]),
    ("bytes behind the last record", hidden_end, ["tiling"]),
    ("one record for two samples", shared_record, ["tiling", "tiling"]),
    ("JSON with keys in another order", record("meta", b'{"of":[1,2],"i":2}'), ["value"]),
    ("a wrong hash of a column", wrong_section_hash(COLUMN), ["section_hash"]),
    ("a wrong hash of the payload", wrong_section_hash(PAYLOAD), ["section_hash"]),
    ("a wrong hash of the index", wrong_section_hash(INDEX), ["section_hash"]),
    ("no feature bit for zstd", without_zstd, ["feature"]),
]


@pytest.mark.parametrize(("change", "codes"), **table(VERIFIED))
def test_a_verify_finds(sound: bytearray, tmp_path: Path, change: Change, codes: list[str]) -> None:
    forgery = Forgery.of(sound)
    change(forgery)
    content = forgery.seal()
    assert codes_of(content) == codes
    assert len(read_bytes(tmp_path, content)) == len(forge.rules_samples())


@pytest.mark.parametrize("shape", [(), (2,), (None,)], ids=repr)
def test_a_verify_finds_a_2_in_bools(tmp_path: Path, shape: tuple[int | None, ...]) -> None:
    flags = np.ones([d or 3 for d in shape], np.bool_)
    schema = Schema({"flags": List(Array("bool", shape))})
    content = forge.content_of(tmp_path / "f.shard", schema, [{"flags": [flags, flags]}])
    forgery = Forgery.of(content)
    assert codes_of(forgery.seal()) == []
    forgery.change_record("flags", 0, forgery.contents[PAYLOAD][:-1] + b"\x02")
    assert codes_of(forgery.seal()) == ["value"]


@pytest.mark.parametrize(
    "text",
    [
        *(b'{"a":1,"a":1}', b'{"b":1,"a":1}', b'{"a": 1}', b'"\\u00e4"'),
        *(b"[NaN]", b"[Infinity]", b"1.50", b" 1", b"1e2"),
    ],
)
def test_a_verify_finds_json_in_another_form(sound: bytearray, text: bytes) -> None:
    forgery = Forgery.of(sound)
    _insert(forgery, "meta", 3, text)
    assert codes_of(forgery.seal()) == ["value"]


def test_a_column_with_another_hash_is_refused_when_read(sound: bytearray, tmp_path: Path) -> None:
    forgery = Forgery.of(sound)
    forgery.change(forgery.column("long", Kind.COLUMN_HASHES), 8, bytes(8))
    error = read_bytes(tmp_path, forgery.seal())
    assert isinstance(error, ShardCorrupt)
    assert (error.code, error.field, error.sample) == ("checksum", "long", 1)
    assert codes_of(forgery.seal()) == ["checksum"]


def test_random_forgeries_end_in_errors_of_shardio_only(sound: bytearray, tmp_path: Path) -> None:
    rng, n_refused = np.random.default_rng(0), 0
    for _ in range(200):
        forgery = Forgery.of(sound)
        keys = [INDEX, PAYLOAD, forgery.column("cloud", Kind.SHAPES)]
        key = keys[int(rng.integers(len(keys)))]
        size = len(forgery.contents[key])
        n = int(rng.integers(1, 17))
        at = int(rng.integers(0, size - n))
        forgery.change(key, at, rng.bytes(n) if rng.random() < 0.7 else bytes([255]) * n)
        content = forgery.seal()
        n_refused += isinstance(read_bytes(tmp_path, content, "off"), ShardioError)
        codes_of(content)
    assert n_refused > 50
