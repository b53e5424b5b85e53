"""Extents of values: reading them touches nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardio import Array, Bytes, Schema, ShardDataset, Text, mix
from shardio.format.layout import Kind
from shardio.samples.extents import Extents, Ranges, blocks_of, concatenate_ranges, merge_ranges
from tests.loading import write_dataset
from tests.shards import EVERY_FIELD, same_value

pytestmark = pytest.mark.usefixtures("quick_disk")

N, N_SHARDS = 30, 3
ROWS = np.array([29, 3, 4, 17, 3])
BULK = (Kind.COLUMN, Kind.PAYLOAD, Kind.INDEX, Kind.SHAPES)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return write_dataset(tmp_path / "set", N, N_SHARDS)


def wipe_all_but(dataset: ShardDataset, extents: Extents, kept: Ranges) -> None:
    """Overwrite what lies in the large sections of all shards outside of some ranges."""
    parts = merge_ranges(kept, 1)
    for shard in range(len(dataset.shards)):
        reader, first = dataset.reader(shard), int(extents.files.starts[shard])
        content = bytearray(Path(reader.path).read_bytes())
        is_kept = np.zeros(len(content), np.bool_)
        starts, ends = parts.starts - first, parts.ends - first
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            is_kept[max(0, start) : max(0, end)] = True
        for section in reader.sections:
            if section.kind in BULK:
                part = slice(section.offset, section.offset + section.size)
                np.frombuffer(content, np.uint8)[part][~is_kept[part]] = 0xA5
        Path(reader.path).write_bytes(content)


def test_nothing_outside_of_the_ranges_is_needed_to_read_the_rows(folder: str) -> None:
    with ShardDataset(folder, verify="off") as dataset:
        expected = [dataset[row] for row in ROWS.tolist()]
        extents = Extents(dataset, list(EVERY_FIELD), "off")
        shards = dataset.locate(ROWS)
        found = concatenate_ranges([extents.fixed(ROWS, shards), extents.records(ROWS, shards)])
        assert 0 < merge_ranges(found, 1).n_bytes < extents.files.n_bytes / 5
        expected = [
            {
                name: value.copy() if isinstance(value, np.ndarray) else value
                for name, value in each.items()
            }
            for each in expected
        ]
        wipe_all_but(dataset, extents, found)
    with ShardDataset(folder, verify="off") as dataset:
        for row, sample in zip(ROWS.tolist(), expected, strict=True):
            for name, value in sample.items():
                assert same_value(dataset[row][name], value), (row, name)


def test_hashes_and_whole_runs_are_read_until_they_are_checked(tmp_path: Path) -> None:
    schema = Schema({"large": Array("uint8", (4096,)), "small": Array("int64")})
    samples = [{"large": np.full(4096, i, np.uint8), "small": i} for i in range(N)]
    path = write_dataset(tmp_path / "set", N, N_SHARDS, schema, samples)
    rows = np.array([2, 25])
    with ShardDataset(path) as dataset:
        shards = dataset.locate(rows)
        extents = {verify: Extents(dataset, list(schema), verify) for verify in ("off", "first")}
        sizes = [extents["off"].fixed(rows, shards).n_bytes]
        assert sizes == [2 * (4096 + 8)]
        before = extents["first"].fixed(rows, shards).n_bytes
        # A hash of 8 bytes for each, and for the small rows their run: 64 KiB of them.
        assert before == sizes[0] + 2 * (8 + 8 + 65536)
        for row in rows.tolist():
            dataset[row]
            reader = dataset.reader(int(dataset.locate(np.array([row]))[0]))
            reader.column("large", rows=[row % 10])
        assert extents["first"].fixed(rows, shards).n_bytes == sizes[0]
        always = Extents(dataset, list(schema), "always").fixed(rows, shards).n_bytes
        assert always == before


def test_an_index_that_points_out_of_its_file_is_no_place(tmp_path: Path) -> None:
    samples = [{"x": bytes([i]) * 100} for i in range(N)]
    path = write_dataset(tmp_path / "set", N, 1, Schema({"x": Bytes()}), samples)
    with ShardDataset(path) as dataset:
        index = next(s for s in dataset.reader(0).sections if s.kind == Kind.INDEX)
        with open(dataset.reader(0).path, "r+b") as file:
            file.seek(index.offset + 32 * 3)
            file.write(b"\xff" * 16)
        extents = Extents(dataset, ["x"], "first")
        rows = np.arange(2, 5)
        found = extents.records(rows, dataset.locate(rows))
        assert (found.ends - found.starts).tolist() == [100, 100]


def test_shards_of_a_mixture_may_have_other_fields_besides(tmp_path: Path) -> None:
    one, other = Schema({"x": Bytes()}), Schema({"first": Text(), "x": Bytes()})
    made = [{"first": f"{i}", "x": bytes([i]) * (100 + i)} for i in range(4)]
    folders = [
        write_dataset(tmp_path / "one", 4, 1, one, [{"x": each["x"]} for each in made]),
        write_dataset(tmp_path / "other", 4, 1, other, made),
    ]
    with mix(folders, weights=[1, 1]) as mixture:
        extents, rows = Extents(mixture, ["x"], "off"), np.array([1, 3, 4, 6])
        found = extents.records(rows, mixture.locate(rows))
        read = [
            Path(extents.files.path(number)).read_bytes()[offset : offset + n_bytes]
            for number, places in extents.files.pieces(found)
            for offset, n_bytes in places
        ]
    assert read == [made[i % 4]["x"] for i in rows.tolist()]


def test_a_file_that_a_mixture_has_several_times_is_one(folder: str) -> None:
    with ShardDataset(folder) as one, mix([folder, folder], weights=[1, 1]) as twice:
        names = list(one.schema)
        expected, found = (Extents(each, names, "off") for each in (one, twice))
        paths = [[f.path(k) for k in range(len(f.sizes))] for f in (found.files, expected.files)]
        assert paths[0] == paths[1]
        rows = np.array([N - 1, 0, 2])
        for behind in (0, N):
            there, shards = rows + behind, twice.locate(rows + behind)
            for of, due in ((found.fixed, expected.fixed), (found.records, expected.records)):
                assert list(found.files.pieces(merge_ranges(of(there, shards), 1))) == list(
                    expected.files.pieces(merge_ranges(due(rows, one.locate(rows)), 1))
                )


def test_files_are_told_apart_however_ranges_are_rounded(folder: str) -> None:
    with ShardDataset(folder) as dataset:
        extents = Extents(dataset, ["frames"], "off")
        rows = np.arange(N)
        ranges = merge_ranges(extents.fixed(rows, dataset.locate(rows)), 1 << 20)
        found = dict(extents.files.pieces(ranges))
        assert sorted(found) == [0, 1, 2]
        assert [os.path.basename(extents.files.path(k)) for k in sorted(found)] == [
            shard.name for shard in dataset.shards
        ]
        assert set(map(tuple, found.values())) == {((0, 1 << 20),)}


# Ranges of bytes, rounded and merged: against the same worked out byte by byte.

PAIRS = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 40)), max_size=12)
SIZES = st.sampled_from([1, 4, 16, 64])


def ranges_of(pairs: list[tuple[int, int]]) -> Ranges:
    starts = np.array([start for start, _ in pairs], np.int64)
    return Ranges(starts, starts + np.array([n for _, n in pairs], np.int64))


@given(PAIRS, SIZES)
def test_merged_ranges_hold_each_block_once(pairs: list[tuple[int, int]], size: int) -> None:
    expected = sorted({at // size for start, n in pairs for at in range(start, start + n)})
    found = ranges_of(pairs)
    assert blocks_of(found, size).tolist() == expected
    parts = merge_ranges(found, size)
    covered = [
        block
        for start, end in zip(parts.starts.tolist(), parts.ends.tolist(), strict=True)
        for block in range(start // size, end // size)
    ]
    assert covered == expected
    assert (parts.starts[1:] > parts.ends[:-1]).all()  # what touches is one
