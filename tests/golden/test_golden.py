"""Golden files: every released version of the format is read, for good, by both readers.

They were written once (provenance.json says with what) and are never written by a test.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from shardio import Array, Schema, ShardReader, Text
from shardio import open as open_dataset
from shardio.format.checksum import hash_bytes
from shardio.format.layout import PAGE
from shardio.format.sections import DIMENSION, plan_sections
from shardio.format.types import DType
from shardio.maintenance import verify_dataset, verify_shard
from shardio.media import ClipDecoder
from shardio.shard.section_writers import PayloadWriter, SectionTable
from tests.golden.golden_media import planes_picture
from tests.golden.make_golden import plain
from tests.golden.second_reader import (
    Picture,
    RefusedError,
    SecondReader,
    Stored,
    Stream,
    listed_inputs,
    listed_shards,
)

HERE = Path(__file__).parent
NAMES = {
    "v1.0": [
        "dictionary",
        "dictionary_no_sample",
        "dictionary_one_sample",
        "dtypes",
        "dtypes_no_sample",
        "dtypes_one_sample",
        "dtypes_zstd",
        "lists",
        "many_units",
        "nested",
        "no_dictionary",
        "optional",
        "optional_no_sample",
        "optional_one_sample",
        "records",
        "records_zstd",
        "varying",
        "varying_zstd",
        "wide",
    ],
    "media-v1.0": ["long_video", "missing_media", "missing_media_no_sample", "pictures", "videos"],
    "planes-v1.0": ["planes"],
}
GOLDEN = [HERE / version / name for version, names in NAMES.items() for name in names]
golden = pytest.mark.parametrize("path", GOLDEN, ids=lambda path: f"{path.parent.name}-{path.name}")


def expected(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.with_suffix(".json").read_text())
    return found


def as_told(value: Any) -> Any:
    if isinstance(value, Picture):
        return {"picture": value.content.hex(), "shape": list(value.shape)}
    if isinstance(value, Stream):
        return {
            "stream": value.parameters,
            "extradata": value.extradata.hex(),
            "packets": [[data.hex(), *facts] for data, *facts in value.packets],
            "numbers": list(value.numbers),
        }
    if isinstance(value, tuple):
        code, shape, content = value
        dtype = DType(code).name.lower().replace("bfloat16", "uint16")
        return {"array": dtype, "shape": list(shape), "hex": content.hex()}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, list) and value and isinstance(value[0], tuple):
        return {"list": [as_told(each) for each in value]}
    return {"value": value}


@golden
def test_a_golden_file_is_read_as_it_was_written_and_is_sound(path: Path) -> None:
    provenance = json.loads((path.parent / "provenance.json").read_text())["files"][path.name]
    with ShardReader(path.with_suffix(".shard"), verify="always") as reader:
        assert reader.id == provenance["id"]
        found = [{n: plain(v) for n, v in sample.items()} for sample in reader]
    assert found == expected(path)
    assert verify_shard(path.with_suffix(".shard")) == []


@golden
def test_a_reader_written_from_the_specification_reads_the_same(path: Path) -> None:
    shard = path.with_suffix(".shard")
    second, content = SecondReader(shard), shard.read_bytes()
    samples = expected(path)
    assert second.n == len(samples)
    with ShardReader(shard) as reader:
        for row, sample in enumerate(samples):
            for name, value in second[row].items():
                if not isinstance(value, Stored):
                    assert as_told(value) == sample[name], (row, name)
                    continue
                (entry,) = reader.records.entries(name, np.array([row]))
                place = reader.records.offset + int(entry["offset"])
                stored = int(entry["stored"])
                assert value.codec == stored >> 48
                assert value.content == content[place : place + (stored & (1 << 48) - 1)]
                assert value.n_bytes == entry["n_bytes"]


def decoded_by_the_specification(stream: Stream) -> list[bytes]:
    """Return the pictures of a stream of planes, by the rules of the specification alone."""
    _, _, _, width, height, _ = stream.numbers
    found, picture = [], bytes(width * height * 3 // 2)
    for packet, flags, _, _ in stream.packets:
        content = packet
        if len(packet) < len(picture):
            content = zstandard.ZstdDecompressor().decompress(packet)
        before = bytes(len(picture)) if flags & 1 else picture
        picture = bytes((a + b) % 256 for a, b in zip(content, before, strict=True))
        found.append(picture)
    return found


def test_golden_planes_are_the_pictures_that_were_stored() -> None:
    path, sizes = HERE / "planes-v1.0" / "planes.shard", set()
    second = SecondReader(path)
    with ShardReader(path) as reader, ClipDecoder() as decoder:
        for i in range(3):
            stream = reader[i]["video"]
            found = np.empty((5, stream.height * 3 // 2, stream.width), np.uint8)
            decoder.decode(stream, range(5), found, pixels="yuv420")
            wanted = [planes_picture(i, k).tobytes() for k in range(5)]
            assert [each.tobytes() for each in found] == wanted
            assert decoded_by_the_specification(second[i]["video"]) == wanted
            sizes |= {len(packet) < len(wanted[0]) for packet, *_ in second[i]["video"].packets}
    assert sizes == {True, False}


def generation_of(folder: Path) -> dict[str, Any]:
    number = json.loads((folder / "dataset.json").read_text())["generation"]
    found: dict[str, Any] = json.loads((folder / f"generations/{number:06d}.json").read_text())
    return found


def told_by_the_specification(folder: Path) -> list[dict[str, Any]]:
    """Return the samples of a dataset, by the second reader and the rules of column groups."""
    generation = generation_of(folder)
    shards = listed_shards(folder, generation["shards"])
    beside = [listed_shards(folder, side["shards"]) for side in generation["column_groups"]]
    found = []
    for k, shard in enumerate(shards):
        listed = [shard, *(side[k] for side in beside)]
        readers = [SecondReader(folder / entry["name"]) for entry in listed]
        for reader, side in zip(readers[1:], generation["column_groups"], strict=True):
            assert reader.fields == side["schema"]["fields"]
        for row in range(shard["samples"]):
            sample = {n: v for reader in readers for n, v in reader[row].items()}
            found.append({name: as_told(value) for name, value in sample.items()})
    return found


def test_a_golden_dataset_with_columns_beside_its_shards_is_read_and_sound() -> None:
    folder = HERE / "datasets-v1.0" / "column_groups"
    provenance = json.loads((folder.parent / "provenance.json").read_text())["files"][
        "column_groups"
    ]
    samples = expected(folder)
    with open_dataset(folder, verify="always") as dataset:
        known = {"lineage": dataset.lineage, "generation": dataset.generation}
        assert known == provenance
        assert list(dataset.column_groups) == ["vector", "camera.id", "boxes"]
        assert len(dataset.shards) > 1
        found = [{n: plain(v) for n, v in sample.items()} for sample in dataset]
    assert found == samples
    assert generation_of(folder)["required"] == ["column_groups"]
    assert told_by_the_specification(folder) == samples
    with open_dataset(folder, generation=2) as dataset:
        assert list(dataset.schema) == ["label", "note", "vector"]
    report = verify_dataset(folder, workers=0)
    assert (report.findings, report.unknown) == ((), ())


def test_a_golden_dataset_whose_lists_lie_in_parts_is_read_and_sound() -> None:
    folder = HERE / "lists-v1.0" / "external_lists"
    provenance = json.loads((folder.parent / "provenance.json").read_text())["files"][
        "external_lists"
    ]
    samples, said = expected(folder), generation_of(folder)
    assert said["required"] == ["external_lists", "column_groups"]
    inputs = [{"outcome": "converted", "path": f"größe/{i}.txt", "samples": i} for i in range(5)]
    with open_dataset(folder, verify="always") as dataset:
        known = {"lineage": dataset.lineage, "generation": dataset.generation}
        assert known == provenance
        found = [{n: plain(v) for n, v in sample.items()} for sample in dataset]
        assert list(dataset.inputs) == inputs
    assert found == samples
    assert told_by_the_specification(folder) == samples
    assert listed_inputs(folder, said["inputs"]) == inputs
    report = verify_dataset(folder, workers=0)
    assert (report.findings, report.unknown) == ((), ())


@pytest.mark.parametrize("name", ["column_groups", "external_lists"])
def test_no_golden_dataset_is_missing_and_none_is_forgotten(name: str) -> None:
    version = {"column_groups": "datasets-v1.0", "external_lists": "lists-v1.0"}[name]
    found = {path.name for path in (HERE / version).iterdir()}
    assert found == {name, f"{name}.json", "provenance.json"}


@pytest.mark.parametrize("version", list(NAMES))
def test_no_golden_file_is_missing_and_none_is_forgotten(version: str) -> None:
    wanted = {f"{name}.{kind}" for name in NAMES[version] for kind in ("shard", "json")}
    assert {path.name for path in (HERE / version).iterdir()} == {*wanted, "provenance.json"}
    provenance = json.loads((HERE / version / "provenance.json").read_text())
    assert version.endswith(f"v{provenance['format']}")
    assert sorted(provenance["files"]) == NAMES[version]


def test_the_second_reader_refuses_what_breaks_a_rule(tmp_path: Path) -> None:
    whole = (HERE / "v1.0" / "optional.shard").read_bytes()
    for place, text in ((0, "no shard"), (16, "size or last page"), (8191, "padding")):
        changed = bytearray(whole)
        changed[place] ^= 0x40
        (tmp_path / "a.shard").write_bytes(changed)
        with pytest.raises(RefusedError, match=text):
            SecondReader(tmp_path / "a.shard")


def test_offsets_beyond_4_gib_are_read(tmp_path: Path) -> None:
    schema = Schema({"frames": Array("uint8", (64 << 20,)), "note": Text()})
    n_rows, row_bytes = 70, 64 << 20
    payload = PayloadWriter(schema)
    for i in range(n_rows):
        payload.append([(memoryview(f"note {i}".encode()), ())])
    zero_hash = hash_bytes(bytes(row_bytes))
    hashes = DIMENSION.pack(zero_hash) * n_rows
    path = tmp_path / "large.shard"
    with open(path, "xb") as file:
        file.seek(PAGE + n_rows * row_bytes)  # a hole: 4.4 GB of zeros that take no space
        table = SectionTable(file)
        whole = hash_bytes(hashes)
        column, records, column_hashes, _, index, _, last = plan_sections(schema, n_rows)
        table.add_entry(column, n_rows * row_bytes, whole)
        table.add(records, payload.data.pieces(), payload.hash.intdigest())
        table.add_with_block_hashes(column_hashes, [memoryview(hashes)])
        table.add_with_block_hashes(index, payload.index.pieces())
        text = schema.to_json()
        table.add(last, [memoryview(text)], hash_bytes(text))
        table.close(n_rows, 0)
    assert path.stat().st_blocks * 512 < 1 << 20
    with ShardReader(path) as reader:
        assert reader.records.offset > 1 << 32
        assert reader[69]["note"] == "note 69"
        assert not reader.column("frames", [69])[0, :: 1 << 12].any()
