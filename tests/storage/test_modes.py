"""A shard that is read by offset and one that is mapped are the same to whoever reads them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardio
from shardio import ShardDataset, ShardLoader, ShardReader
from shardio.errors import ChecksumMismatch, ClosedError
from shardio.shard.verification import Verify
from shardio.storage.file_access import Access
from tests.loading import bits, write_dataset
from tests.shards import EVERY_FIELD, flip, same_sample

pytestmark = pytest.mark.usefixtures("warm_zygote", "quick_disk")

N = 60
COLUMNS = list(EVERY_FIELD.columns)
Pair = tuple[ShardDataset, ShardDataset]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_dataset(tmp_path_factory.mktemp("modes") / "set", N, 3)


@pytest.fixture(scope="module", params=["off", "first", "always"])
def pair(folder: str, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Open the same dataset, mapped and read."""
    verify: Verify = request.param
    with (
        ShardDataset(folder, verify=verify, access="mmap") as mapped,
        ShardDataset(folder, verify=verify, access="pread") as read,
    ):
        yield mapped, read


@given(row=st.integers(0, N - 1))
@settings(max_examples=30)
def test_samples_are_the_same(pair: Pair, row: int) -> None:
    mapped, read = (dataset[row] for dataset in pair)
    assert same_sample(mapped, read)
    writable = [name for name, v in read.items() if isinstance(v, np.ndarray) and v.flags.writeable]
    assert writable == []


@given(rows=st.lists(st.integers(-20, 19), max_size=30), name=st.sampled_from(COLUMNS))
@settings(max_examples=50)
def test_columns_are_the_same(pair: Pair, rows: list[int], name: str) -> None:
    mapped, read = (dataset.reader(1) for dataset in pair)
    expected, found = mapped.column(name, rows), read.column(name, rows)
    assert (expected.dtype, expected.shape) == (found.dtype, found.shape)
    assert expected.tobytes() == found.tobytes()
    whole = read.column(name)
    assert whole.tobytes() == mapped.column(name).tobytes()
    assert not whole.flags.writeable


@given(rows=st.lists(st.integers(0, N - 1), max_size=60), name=st.sampled_from(COLUMNS))
@settings(max_examples=50)
def test_gathers_are_the_same(pair: Pair, rows: list[int], name: str) -> None:
    found = []
    for dataset in pair:
        places = np.array(rows, np.int64)
        out = np.full((len(rows), EVERY_FIELD.columns[name].row_bytes or 0), 0xEE, np.uint8)
        gather, shards = dataset.gather(name), dataset.locate(places)
        gather.gather(places, shards, out)
        found.append(out.tobytes())
    assert found[0] == found[1]


def transformed(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"frames": sample["frames"] ^ rng.integers(0, 255, dtype=np.uint8), "note": "x"}


def batches(folder: str, access: Access, **options: Any) -> list[Any]:
    with ShardLoader(shardio.open(folder, access=access), 7, output="numpy", **options) as loader:
        return [bits(batch) for batch in loader]


@pytest.mark.parametrize(("num_workers", "transform"), [(0, None), (2, None), (1, transformed)])
def test_batches_are_the_same(folder: str, num_workers: int, transform: Any) -> None:
    options = {"num_workers": num_workers, "transform": transform, "shuffle": True}
    assert batches(folder, "pread", **options) == batches(folder, "mmap", **options)


@pytest.mark.parametrize("access", ["mmap", "pread"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_pread_maps_nothing(tmp_path: Path, access: Access, num_workers: int) -> None:
    folder = write_dataset(tmp_path / "set", N, 3)  # its own: nobody else has it mapped

    def look(sample: dict[str, Any]) -> dict[str, Any]:
        return {"n": Path("/proc/self/maps").read_text().count(folder)}

    options: Any = {"output": "numpy", "num_workers": num_workers, "transform": look}
    with ShardLoader(shardio.open(folder, access=access), 20, **options) as loader:
        in_worker = max(int(batch["n"].max()) for batch in loader)
        here = Path("/proc/self/maps").read_text().count(folder)
    assert (in_worker > 0, here > 0) == (access == "mmap",) * 2


def test_samples_that_were_read_outlive_the_reader_and_records_are_read_on(folder: str) -> None:
    path = os.path.join(folder, "000000-000.shard")
    reader = ShardReader(path, access="pread")
    rows = np.arange(4)
    records = reader.records.read("blob", rows, reader.records.entries("blob", rows))
    sample = reader[3]
    next(records)
    reader.close()
    assert [bytes(record) for record in records] == [b"abc" * i for i in (1, 2, 3)]
    with ShardReader(path) as again:
        assert same_sample(sample, again[3])
    with pytest.raises(ClosedError, match="the reader is closed") as caught:
        reader[0]
    assert path in str(caught.value)


@pytest.mark.parametrize(
    ("name", "through"),
    [
        *((name, "column") for name in ("odd", "vector", "label")),
        *((name, "sample") for name in ("odd", "vector", "note", "packed")),
        *((name, "batch") for name in ("odd", "vector", "note", "packed")),
    ],
)
def test_a_flipped_bit_is_named_alike(tmp_path: Path, name: str, through: str) -> None:
    folder = write_dataset(tmp_path / "d", 20, 1)
    with ShardReader(os.path.join(folder, "000000-000.shard")) as reader:
        if name in COLUMNS:
            offset = reader.column_section(name).offset + 10 * reader.column_section(name).stride
        else:
            entries = reader.records.entries(name, np.array([10]))
            offset = reader.records.offset + int(entries["offset"][0])
        flip(reader.path, offset)
    modes: tuple[Access, ...] = ("mmap", "pread")
    found = []
    for access in modes:
        with pytest.raises(ChecksumMismatch) as caught:
            if through == "batch":
                batches(folder, access, num_workers=0)
            with ShardReader(reader.path, access=access) as again:
                _ = again[10] if through == "sample" else again.column(name, [10])
        error = caught.value
        found.append((error.path, error.field, error.sample, error.offset, error.found))
    assert found[0] == found[1]
