"""Crafted files that other tests of this folder do not make: padding, swaps, bombs, links.

Where hashes are made right again, it is said what refuses the file; where nothing in the file can
tell, it is another sound shard, with another id, which the generation of its dataset does not know.
"""

from __future__ import annotations

import functools
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from shardio import DatasetWriter, ShardDataset
from shardio.dataset.manifest import GENERATIONS, POINTER, publish
from shardio.errors import ChecksumMismatch, DatasetCorrupt, ShardCorrupt
from shardio.format.checksum import content_id
from shardio.format.codecs import Codec
from shardio.format.layout import NO_FIELD, PAGE, Kind, Required
from shardio.format.schema import Schema
from shardio.format.types import Array, Bytes, Text
from shardio.maintenance import verify_dataset
from shardio.maintenance.verify.shard import verify_bytes
from shardio.shard.reader import ShardReader
from shardio.shard.writer import ShardSummary
from shardio.storage.file_access import Access
from shardio.storage.fs import to_checksummed_json
from tests.corruption.forge import SMALL, codes_of, read_bytes, read_everything, small_samples
from tests.fuzz.mutate import records_of, set_records
from tests.fuzz.parts import Parts
from tests.fuzz.seeds import shard_of
from tests.loading import make_loader
from tests.shards import same_sample

pytestmark = pytest.mark.usefixtures("quick_disk")

GRID = Array("int16", (None, None))
SCHEMA = Schema({"grid": GRID, "name": Text(), "tag": Text(), "blob": Bytes(codec="zstd")})
SAMPLES: list[dict[str, Any]] = [
    {
        "grid": np.arange(6, dtype=np.int16).reshape(2, 3) + i,
        "name": f"name {i}",
        "tag": f"tags {i}",
        "blob": bytes(1000) + bytes([i]),
    }
    for i in range(3)
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return shard_of(tmp_path_factory.mktemp("sound"), SCHEMA, SAMPLES)


def contents_of(parts: Parts, kind: Kind, field: int = NO_FIELD) -> tuple[int, bytes]:
    place = parts.find(kind, field)
    assert place is not None
    return place, parts.contents[place]


# --- padding ----------------------------------------------------------------------------------


def test_padding_of_a_section_or_of_the_table_that_is_not_zero_is_found(sound: bytes) -> None:
    (table_offset,) = struct.unpack_from("<Q", sound, 48)
    for end in [*(section.end for section in Parts.of(sound).sections), table_offset + PAGE]:
        content = bytearray(sound)
        content[end - 1] = 1
        (finding,) = verify_bytes(memoryview(content), "c.shard").findings
        assert (finding.code, finding.offset, finding.found) == ("padding", end - 1, 1)


def test_a_header_page_not_zero_behind_its_hash_is_refused(sound: bytes, tmp_path: Path) -> None:
    content = bytearray(sound)
    content[PAGE - 1] = content[-1] = 1
    error = read_bytes(tmp_path, bytes(content))
    assert isinstance(error, ShardCorrupt)
    assert (error.code, error.section, error.offset) == ("padding", "header", PAGE - 1)


# --- what lies where something else should be ---------------------------------------------------


def swap_dimensions(parts: Parts) -> None:
    place, shapes = contents_of(parts, Kind.SHAPES, 0)
    parts.contents[place] = shapes[8:16] + shapes[:8] + shapes[16:]


def swap_entries(parts: Parts) -> None:
    place, index = contents_of(parts, Kind.INDEX)
    a, b = 1 * 32, 5 * 32  # `name` of the first and of the second sample
    first, second = index[a : a + 32], index[b : b + 32]
    parts.contents[place] = index[:a] + second + index[a + 32 : b] + first + index[b + 32 :]


def swap_bytes(i: int, j: int) -> Callable[[Parts], None]:
    def change(parts: Parts) -> None:
        place, payload = contents_of(parts, Kind.PAYLOAD)
        (a, n, *_), (b, m, *_) = (
            struct.unpack_from("<QI", contents_of(parts, Kind.INDEX)[1], 32 * k) for k in (i, j)
        )
        assert a < b and n == m
        between = payload[a + n : b]
        swapped = payload[b : b + n] + between + payload[a : a + n]
        parts.contents[place] = payload[:a] + swapped + payload[b + n :]

    return change


SWAPS: dict[str, tuple[Callable[[Parts], None], str]] = {
    "the dimensions of a shape": (swap_dimensions, "shapes"),
    "two index entries": (swap_entries, "index"),
    "two records of a field": (swap_bytes(1, 5), "payload"),
    "two records of a sample": (swap_bytes(1, 2), "payload"),
}


@pytest.mark.parametrize("what", SWAPS)
def test_what_was_swapped_fails_its_hash(sound: bytes, tmp_path: Path, what: str) -> None:
    parts = Parts.of(sound)
    change, section = SWAPS[what]
    change(parts)
    parts.hashes = parts.blocks = False
    error = read_bytes(tmp_path, parts.seal())
    assert isinstance(error, ChecksumMismatch)
    found = verify_bytes(memoryview(parts.seal()), "c.shard").findings
    assert {(f.code, f.section) for f in found} >= {("checksum", section)}


def test_index_entries_that_were_swapped_with_all_hashes_right_do_not_tile(sound: bytes) -> None:
    parts = Parts.of(sound)
    swap_entries(parts)
    assert set(codes_of(parts.seal())) == {"tiling"}


def test_a_shape_right_in_product_only_is_told_in_its_dataset(tmp_path: Path) -> None:
    root = tmp_path / "out"
    with DatasetWriter(root, SCHEMA) as writer:
        for sample in SAMPLES:
            writer.append(sample)
    path = root / "000000-000.shard"
    parts = Parts.of(path.read_bytes())
    swap_dimensions(parts)
    path.unlink()
    path.write_bytes(parts.seal())
    found = read_everything(path)
    assert isinstance(found, list) and found[0]["grid"].shape == (3, 2)
    with ShardDataset(root) as dataset, pytest.raises(DatasetCorrupt, match="not the shard that"):
        dataset[0]
    assert [f.code for f in verify_dataset(root, workers=0).findings] == ["generation"]


def test_records_swapped_with_hashes_are_another_shard(sound: bytes, tmp_path: Path) -> None:
    parts = Parts.of(sound)
    records = records_of(parts)
    records[1], records[5] = records[5], records[1]
    set_records(parts, SCHEMA, records)
    content = parts.seal()
    assert codes_of(content) == [] and content_id(content) != content_id(sound)
    found = read_bytes(tmp_path, content)
    assert [sample["name"] for sample in found] == ["name 1", "name 0", "name 2"]
    assert same_sample(found[2], SAMPLES[2])


# --- bombs --------------------------------------------------------------------------------------

_READ = """
import os, sys
from shardio.errors import ShardCorrupt
from shardio.shard.reader import ShardReader
from shardio.maintenance.verify.shard import verify_file

def peak_bytes():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM:"))

sound, bomb = sys.argv[1:]
for path in (sound, bomb):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before, code = peak_bytes(), None
    try:
        with ShardReader(path, verify="off") as reader:
            list(reader)
    except ShardCorrupt as error:
        code = error.code
    found = [finding.code for finding in verify_file(path).findings]
print(code, ",".join(found), peak_bytes() - before)
"""


MIB = 1 << 20


@functools.cache
def bomb(n_bytes: int, declared: int | None) -> bytes:
    """Make a frame, mostly of zeros, that declares another size.

    It is so long that its size justifies 64 MiB.
    """
    content = np.random.default_rng(0).bytes(2048) + bytes(n_bytes - 2048)
    packed = bytearray(zstandard.ZstdCompressor(level=1).compress(content))
    if declared is not None:
        at = packed.index(struct.pack("<I", n_bytes), 4)
        packed[at : at + 4] = struct.pack("<I", declared)
        assert zstandard.frame_content_size(bytes(packed)) == declared
    return bytes(packed)


BOMBS: dict[str, tuple[int, int | None, int, str]] = {
    "a frame that declares more than the index": (64 * MIB, None, MIB, "zstd_size"),
    "a frame that holds more than it declares": (64 * MIB, MIB, MIB, "zstd_frame"),
    "an index that declares more than the frame": (MIB, None, 60 * MIB, "zstd_size"),
    "both declare more than it holds": (MIB, 60 * MIB, 60 * MIB, "zstd_frame"),
    "more than zstd can hold": (MIB, None, 1 << 40, "index_entry"),
}
"""The bytes that a frame holds and declares, the bytes in the index, and the code of the error."""


def bombs(folder: Path) -> Iterator[tuple[str, bytes]]:
    sound = shard_of(folder, SCHEMA, SAMPLES)
    for what, (n_bytes, declared, n_index, _) in BOMBS.items():
        parts = Parts.of(sound)
        records = records_of(parts)
        records[3] = (bomb(n_bytes, declared), Codec.ZSTD, n_index)
        set_records(parts, SCHEMA, records)
        yield what, parts.seal()


@pytest.mark.parametrize("what", BOMBS)
def test_a_zstd_bomb_is_refused_within_16_mib(sound: bytes, tmp_path: Path, what: str) -> None:
    code = BOMBS[what][-1]
    (tmp_path / "bomb.shard").write_bytes(dict(bombs(tmp_path))[what])
    (tmp_path / "sound.shard").write_bytes(sound)
    paths = [str(tmp_path / f"{name}.shard") for name in ("sound", "bomb")]
    said = subprocess.check_output([sys.executable, "-c", _READ, *paths], text=True)
    found, verified, grown = said.split()
    assert (found, verified) == (code, code)
    assert int(grown) < 16 * MIB


# --- optional fields, dictionaries ----------------------------------------------------------------


New = Callable[[bytes], bytes]


def _section(kind: Kind, name: str, new: New | None) -> Callable[[Parts], None]:
    """Give a section other content; with `new` None, remove it."""

    def change(parts: Parts) -> None:
        place, content = contents_of(parts, kind, SMALL.field_id(name))
        if new is None:
            del parts.sections[place], parts.contents[place]
        else:
            parts.contents[place] = new(content)

    return change


def _bits(new: New | None) -> Callable[[Parts], None]:
    return _section(Kind.VALIDITY, "vector", new)


def _dictionary(new: New | None) -> Callable[[Parts], None]:
    return _section(Kind.DICTIONARY, "camera.id", new)


def _without_feature(feature: Required) -> Callable[[Parts], None]:
    def change(parts: Parts) -> None:
        parts.required &= ~int(feature)

    return change


def _undeclared_dictionary(parts: Parts) -> None:
    """Compress the first record with the dictionary, without declaring it."""
    _, learned = contents_of(parts, Kind.DICTIONARY, SMALL.field_id("camera.id"))
    known = zstandard.ZstdCompressionDict(learned, dict_type=zstandard.DICT_TYPE_FULLDICT)
    records, place = records_of(parts), list(SMALL.records).index("camera.id")
    value = small_samples()[0]["camera.id"]
    frame = zstandard.ZstdCompressor(dict_data=known, write_dict_id=False).compress(value)
    assert records[place][1:] == (Codec.ZSTD_DICTIONARY, len(value))
    records[place] = (frame, Codec.ZSTD_DICTIONARY, len(value))
    set_records(parts, SMALL, records)


OPTIONAL: dict[str, tuple[Callable[[Parts], None], str, str]] = {
    "a value where there is none": (_bits(lambda b: bytes([b[0] & 0b110])), "", "validity"),
    "a sample beyond the last one": (_bits(lambda b: bytes([b[0] | 0b1000])), "", "validity"),
    "a bitmap that is too long": (_bits(lambda b: b + bytes(1)), "section", "section"),
    "no bitmap": (_bits(None), "section", "section"),
    "no dictionary": (_dictionary(None), "section", "section"),
    "an empty dictionary": (_dictionary(lambda d: b""), "dictionary", "dictionary"),
    "not a dictionary": (_dictionary(lambda d: b"no dictionary" * 9), "dictionary", "dictionary"),
    "too large a dictionary": (_dictionary(lambda d: bytes((1 << 20) + 1)), "section", "section"),
    "no id": (_dictionary(lambda d: d[:4] + bytes(4) + d[8:]), "dictionary", "dictionary"),
    "a frame that declares no dictionary": (_undeclared_dictionary, "", "dictionary"),
    "another dictionary": (_dictionary(lambda d: d[:4] + b"!" + d[5:]), "zstd_frame", "zstd_frame"),
    "no OPTIONAL_FIELDS bit": (_without_feature(Required.OPTIONAL_FIELDS), "feature", "feature"),
    "no LISTS bit": (_without_feature(Required.LISTS), "feature", "feature"),
    "no NESTED_NAMES bit": (_without_feature(Required.NESTED_NAMES), "feature", "feature"),
}


def optional_cases(folder: Path) -> dict[str, tuple[bytes, str, str]]:
    """Shards that break a rule each; the codes that a reader and a verification give."""
    sound, cases = shard_of(folder, SMALL, small_samples()), {}
    for what, (change, reader_code, code) in OPTIONAL.items():
        parts = Parts.of(sound)
        change(parts)
        cases[what] = parts.seal(), reader_code, code
    return cases


@pytest.mark.parametrize("what", OPTIONAL)
def test_a_bitmap_or_dictionary_that_breaks_a_rule(tmp_path: Path, what: str) -> None:
    content, reader_code, code = optional_cases(tmp_path)[what]
    assert code in codes_of(content)
    found = read_bytes(tmp_path, content)
    assert getattr(found, "code", "") == reader_code
    assert isinstance(found, ShardCorrupt) is bool(reader_code)


@pytest.mark.parametrize("access", ["mmap", "pread"])
def test_what_lies_where_no_value_is_is_not_delivered(tmp_path: Path, access: Access) -> None:
    content, _, _ = optional_cases(tmp_path)["a value where there is none"]
    root = tmp_path / "out"
    root.mkdir()
    path = root / "a.shard"
    path.write_bytes(content)
    with ShardReader(path, access=access) as reader:
        present, raw = reader.present("vector"), reader.column("vector")
        rows = np.flatnonzero(~present)
        assert raw[rows].any()  # unverified, and said to be
        assert not reader.column("vector", rows).any()
        found = reader.column("vector", np.arange(len(reader)))
        assert (found[present] == raw[present]).all() and not found[~present].any()
        shard = ShardSummary("a.shard", len(reader), len(content), reader.id)
        publish(root, schema=reader.schema, shards=[shard])
    with ShardReader(path, access=access, verify="always") as reader:
        with pytest.raises(ShardCorrupt, match="its row is not zero") as caught:
            reader.column("vector")
        assert (caught.value.code, caught.value.sample) == ("validity", int(rows[0]))
    options: Any = {"shuffle": False, "num_workers": 0, "access": access, "output": "numpy"}
    with make_loader(root, batch_size=2, fields=["vector"], **options) as loader:
        batches = [batch["vector"].copy() for batch in loader]
    assert (np.concatenate(batches) == found).all()


# --- generations that point outside ---------------------------------------------------------------


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    root = tmp_path / "out"
    with DatasetWriter(root, SCHEMA) as writer:
        writer.append(SAMPLES[0])
    return root


def rename_in_generation(root: Path, name: str) -> None:
    """Let the generation name another file; both digests are right."""
    place = root / GENERATIONS / "000001.json"
    content = json.loads(place.read_bytes())
    del content["digest"]
    content["shards"][0]["name"] = name
    place.write_bytes(to_checksummed_json(content))


@pytest.mark.parametrize("name", ["../other.shard", "{0}/other.shard", "sub/other.shard"])
def test_a_generation_naming_a_file_outside(dataset: Path, tmp_path: Path, name: str) -> None:
    (dataset / "000000-000.shard").rename(tmp_path / "other.shard")
    rename_in_generation(dataset, name.format(tmp_path))
    with pytest.raises(DatasetCorrupt, match="not a shard name in the dataset's folder"):
        ShardDataset(dataset)
    assert [f.code for f in verify_dataset(dataset, workers=0).findings] == ["dataset"]


@pytest.mark.parametrize("how", ["absolute", "relative", "by two links"])
def test_a_shard_linked_to_outside_is_refused(dataset: Path, tmp_path: Path, how: str) -> None:
    shard, outside = dataset / "000000-000.shard", tmp_path / "other.shard"
    shard.rename(outside)
    if how == "by two links":
        (dataset / "between").symlink_to(outside)
    targets = {"absolute": str(outside), "relative": "../other.shard", "by two links": "between"}
    shard.symlink_to(targets[how])
    with ShardDataset(dataset) as opened, pytest.raises(DatasetCorrupt) as caught:
        opened[0]
    assert str(caught.value) == f"{shard}: a link that leads out of the dataset, to {outside}"
    assert [f.code for f in verify_dataset(dataset, workers=0).findings] == ["outside"]


@pytest.mark.parametrize("name", [POINTER, GENERATIONS, f"{GENERATIONS}/000001.json"])
def test_a_manifest_linked_outside_is_refused(dataset: Path, tmp_path: Path, name: str) -> None:
    (dataset / name).rename(tmp_path / "moved")
    (dataset / name).symlink_to(tmp_path / "moved")
    with pytest.raises(DatasetCorrupt, match="a link that leads out of the dataset"):
        ShardDataset(dataset)
    assert [f.code for f in verify_dataset(dataset, workers=0).findings] == ["dataset"]


def test_links_within_and_to_a_dataset_are_followed(dataset: Path, tmp_path: Path) -> None:
    shard = dataset / "000000-000.shard"
    shard.rename(dataset / "data")
    shard.symlink_to("data")
    (tmp_path / "link").symlink_to(dataset)
    with ShardDataset(tmp_path / "link") as opened:
        assert same_sample(opened[0], SAMPLES[0])
    assert verify_dataset(tmp_path / "link", workers=0).findings == ()


def test_a_shard_linked_in_a_circle_is_an_error_of_the_system(dataset: Path) -> None:
    shard = dataset / "000000-000.shard"
    shard.unlink()
    shard.symlink_to(shard.name)
    with ShardDataset(dataset) as opened, pytest.raises(OSError, match="leads to itself"):
        opened[0]
    assert [f.code for f in verify_dataset(dataset, workers=0).findings] == ["unreadable"]
    assert os.path.islink(shard)
