from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shardio import Array, Schema
from shardio.errors import ChecksumMismatch, ShardNotFound
from shardio.samples.shard_dataset import ShardDataset
from shardio.shard.verification import Verify
from tests.loading import write_dataset
from tests.shards import flip

pytestmark = pytest.mark.usefixtures("quick_disk")

# Rows of 2 KiB and more have a hash each; smaller ones share a hash per run of up to 64 KiB.
COLUMNS = Schema(
    {
        "tiny": Array("bool", (3,)),
        "label": Array("int64"),
        "bits": Array("bfloat16", (3,)),
        "vector": Array("float32", (25,)),  # 100 bytes, 128 with its padding: runs of 512 rows
        "line": Array("uint8", (8, 8)),
        "long": Array("uint8", (2047,)),  # runs of 32 rows
        "row": Array("uint8", (2048,)),
        "odd": Array("uint8", (2100,)),  # a hash per row, and padding
        "image": Array("uint16", (20, 64)),
    }
)
NAMES = list(COLUMNS)
HASHED_BY_ROW = ["row", "odd", "image"]
IN_RUNS = ["label", "vector", "long"]
N_SAMPLES = 1300


def make_columns(n: int) -> dict[str, npt.NDArray[Any]]:
    rng = np.random.default_rng(n)
    found = {}
    for name, field in COLUMNS.columns.items():
        raw = rng.integers(0, 256, (n, field.row_bytes or 0), np.uint8)
        raw = raw & 1 if field.dtype == "bool" else raw & 0x3F  # no NaN, which equals nothing
        found[name] = raw.view(field.numpy).reshape(n, *(d or 0 for d in field.shape))
    return found


VALUES = make_columns(N_SAMPLES)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    root = tmp_path_factory.mktemp("columns")
    found = {}
    for n_shards in (1, 3, 400):
        samples = ({name: VALUES[name][i] for name in NAMES} for i in range(N_SAMPLES))
        path = root / str(n_shards)
        found[n_shards] = write_dataset(path, N_SAMPLES, n_shards, COLUMNS, samples)
    return found


@pytest.fixture(scope="module")
def datasets(folders: dict[int, str]) -> Iterator[dict[int, ShardDataset]]:
    opened = {n_shards: ShardDataset(folder) for n_shards, folder in folders.items()}
    yield opened
    for dataset in opened.values():
        dataset.close()


@pytest.fixture
def three(folders: dict[int, str], tmp_path: Path) -> str:
    """Copy a dataset to be damaged: the second of three shards holds rows 433 to 865."""
    return str(shutil.copytree(folders[3], tmp_path / "three"))


def gathered(dataset: ShardDataset, name: str, rows: Any) -> npt.NDArray[Any]:
    """Return rows of a column as a gather delivers them, shaped like a batch."""
    field = COLUMNS.columns[name]
    places = np.asarray(rows, np.int64)
    out = np.full((len(places), field.row_bytes or 0), 0xEE, np.uint8)
    gather, shards = dataset.gather(name), dataset.locate(places)
    gather.gather(places, shards, out)
    return out.view(field.numpy).reshape(len(places), *(d or 0 for d in field.shape))


def rows_at_random(n: int = 300) -> npt.NDArray[np.int64]:
    return np.random.default_rng(n).integers(0, N_SAMPLES, n)


# Values.


@pytest.mark.parametrize("n_shards", [1, 3, 400])
@pytest.mark.parametrize("name", NAMES)
def test_gather_returns_rows(datasets: dict[int, ShardDataset], name: str, n_shards: int) -> None:
    for rows in (rows_at_random(), np.arange(N_SAMPLES), rows_at_random(20_000)):
        assert np.array_equal(gathered(datasets[n_shards], name, rows), VALUES[name][rows])


@pytest.mark.parametrize("name", HASHED_BY_ROW)
def test_batches_may_shrink_and_grow(folders: dict[int, str], name: str) -> None:
    with ShardDataset(folders[3], verify="always") as dataset:
        for n in (5, 200, 7, 200, 201, 1, 0, 300):
            rows = rows_at_random(n)
            assert np.array_equal(gathered(dataset, name, rows), VALUES[name][rows])


def test_empty_shards_are_passed_over(tmp_path: Path) -> None:
    samples = ({name: VALUES[name][i] for name in NAMES} for i in range(3))
    folder = write_dataset(tmp_path / "d", 3, 10, COLUMNS, samples)
    with ShardDataset(folder) as dataset:
        for name in NAMES:
            assert np.array_equal(gathered(dataset, name, [2, 0, 1, 0]), VALUES[name][[2, 0, 1, 0]])
        for i in range(3):
            assert np.array_equal(dataset[i]["label"], VALUES["label"][i])


def maps_of(folder: str) -> int:
    with open("/proc/self/maps") as maps:
        return sum(folder in line for line in maps)


@pytest.mark.parametrize("name", ["row", "odd"])
def test_gather_maps_column_and_hashes_until_close(three: str, name: str) -> None:
    with ShardDataset(three) as dataset:
        gather = dataset.gather(name)
        assert maps_of(three) == 3 * 3  # of each shard: the file, the column, its hashes
        assert dataset.gather(name) is gather
        assert maps_of(three) == 3 * 3
    assert maps_of(three) == 0
    dataset.close()


def test_what_was_mapped_before_a_file_was_found_missing_goes_with_the_dataset(three: str) -> None:
    dataset = ShardDataset(three)
    path = Path(dataset.reader(2).path)
    path.unlink()
    with pytest.raises(ShardNotFound, match=f"{path.name}: there is no such shard"):
        dataset.gather("row")
    del dataset
    gc.collect()
    assert maps_of(three) == 0


@pytest.mark.parametrize(("name", "verify"), [("row", "off"), ("vector", "first")])
def test_hashes_are_mapped_only_to_be_compared(three: str, name: str, verify: Verify) -> None:
    with ShardDataset(three, verify=verify) as dataset:
        dataset.gather(name)
        assert maps_of(three) == 3 * 2


# Damage: one flipped bit of row 700, which is row 267 of the second shard.

ROW, LOCAL = 700, 267


def flip_row(dataset: ShardDataset, name: str, *, at: int = 0) -> tuple[str, int]:
    """Flip a bit in byte `at` of row 700; returns file and offset of the row."""
    reader = dataset.reader(1)
    section = reader.column_section(name)
    offset = section.offset + LOCAL * section.stride
    flip(Path(reader.path), offset + at)
    return reader.path, offset


def differing(found: npt.NDArray[Any], expected: npt.NDArray[Any]) -> int:
    """In how many bytes two arrays differ."""
    return int((found.view(np.uint8) != np.ascontiguousarray(expected).view(np.uint8)).sum())


@pytest.mark.parametrize("name", HASHED_BY_ROW + IN_RUNS)
def test_off_delivers_a_flipped_bit(three: str, name: str) -> None:
    with ShardDataset(three, verify="off") as dataset:
        flip_row(dataset, name)
        assert differing(gathered(dataset, name, [ROW]), VALUES[name][[ROW]]) == 1


@pytest.mark.parametrize("verify", ["first", "always"])
@pytest.mark.parametrize("name", HASHED_BY_ROW)
def test_flipped_bit_in_a_large_row_is_located(three: str, name: str, verify: Verify) -> None:
    with ShardDataset(three, verify=verify) as dataset:
        path, offset = flip_row(dataset, name, at=2047)
        rows = [5, ROW + 1, ROW, 1200, ROW - 1]
        for _ in range(2):  # what is damaged is never marked as checked
            with pytest.raises(ChecksumMismatch) as caught:
                gathered(dataset, name, rows)
            error = caught.value
            assert (error.path, error.field, error.sample) == (path, name, LOCAL)
            assert error.offset == offset
            assert error.expected != error.found
        rows.remove(ROW)
        assert np.array_equal(gathered(dataset, name, rows), VALUES[name][rows])


@pytest.mark.parametrize("verify", ["first", "always"])
@pytest.mark.parametrize(("name", "first_of_run"), [("label", 0), ("vector", 0), ("long", 256)])
def test_damaged_run_is_located(three: str, name: str, first_of_run: int, verify: Verify) -> None:
    with ShardDataset(three, verify=verify) as dataset:
        path, offset = flip_row(dataset, name)
        stride = COLUMNS.columns[name].stride
        for row in (ROW, ROW + 1):  # also a neighbour, which shares the hash
            with pytest.raises(ChecksumMismatch) as caught:
                gathered(dataset, name, [5, row, 1200])
            error = caught.value
            assert (error.path, error.field, error.sample) == (path, name, first_of_run)
            assert error.offset == offset - (LOCAL - first_of_run) * stride
        rows = [5, 1200]
        assert np.array_equal(gathered(dataset, name, rows), VALUES[name][rows])


@pytest.mark.parametrize("name", HASHED_BY_ROW + IN_RUNS)
def test_first_checks_a_unit_once_and_always_every_time(three: str, name: str) -> None:
    with ShardDataset(three) as first, ShardDataset(three, verify="always") as always:
        for dataset in (first, always):
            gathered(dataset, name, [ROW])
        flip_row(first, name)
        assert differing(gathered(first, name, [ROW]), VALUES[name][[ROW]]) == 1
        with pytest.raises(ChecksumMismatch) as caught:
            gathered(always, name, [ROW])
        assert (caught.value.field, caught.value.path) == (name, always.reader(1).path)


@pytest.mark.parametrize("name", [*HASHED_BY_ROW, "vector", "long"])
def test_checking_marks_only_the_runs_that_were_read(three: str, name: str) -> None:
    shared = [ROW] if name in HASHED_BY_ROW else np.arange(433, 866)
    with ShardDataset(three) as dataset:
        gathered(dataset, name, np.delete(np.arange(N_SAMPLES), shared))
        path, _ = flip_row(dataset, name)
        with pytest.raises(ChecksumMismatch) as caught:
            gathered(dataset, name, [ROW])
        assert (caught.value.field, caught.value.path) == (name, path)


@pytest.mark.parametrize("name", HASHED_BY_ROW + IN_RUNS)
def test_readers_and_gathers_share_their_marks(three: str, name: str) -> None:
    with ShardDataset(three) as dataset:
        dataset.files.share_marks(np.zeros(dataset.files.n_marks, np.uint8))
        dataset.reader(1).sample(LOCAL, [name])
        flip_row(dataset, name)
        assert differing(gathered(dataset, name, [ROW]), VALUES[name][[ROW]]) == 1


@pytest.mark.parametrize("name", HASHED_BY_ROW + IN_RUNS)
def test_datasets_that_share_marks_check_once_between_them(three: str, name: str) -> None:
    with ShardDataset(three) as one, ShardDataset(three) as other, ShardDataset(three) as alone:
        marks = np.zeros(one.files.n_marks, np.uint8)
        one.files.share_marks(marks)
        other.files.share_marks(marks)
        gathered(one, name, [ROW])
        flip_row(one, name)
        assert differing(gathered(other, name, [ROW]), VALUES[name][[ROW]]) == 1
        with pytest.raises(ChecksumMismatch) as caught:
            gathered(alone, name, [ROW])
        assert caught.value.field == name


@pytest.mark.parametrize("verify", ["first", "always"])
@pytest.mark.parametrize("name", ["row", "long"])
def test_damaged_hash_is_reported_as_index_damage(three: str, name: str, verify: Verify) -> None:
    with ShardDataset(three, verify=verify) as dataset:
        section = dataset.reader(1).hashes_section(name)
        flip(Path(dataset.reader(1).path), section.offset)
        with pytest.raises(ChecksumMismatch, match="bytes of an index") as caught:
            gathered(dataset, name, [433])
        assert caught.value.path == dataset.reader(1).path
        assert (caught.value.field, caught.value.offset) == (name, section.offset)


@pytest.mark.parametrize("name", ["row", "long"])
def test_off_reads_no_hash(three: str, name: str) -> None:
    with ShardDataset(three, verify="off") as dataset:
        flip(Path(dataset.reader(1).path), dataset.reader(1).hashes_section(name).offset)
        assert np.array_equal(gathered(dataset, name, [433]), VALUES[name][[433]])


def test_a_damaged_hash_is_noticed_though_other_rows_of_its_block_are_marked(three: str) -> None:
    with ShardDataset(three) as dataset:
        gathered(dataset, "row", [434])  # marks the block of hashes as checked
        flip(Path(dataset.reader(1).path), dataset.reader(1).hashes_section("row").offset)
        with pytest.raises(ChecksumMismatch) as caught:
            gathered(dataset, "row", [433])
        assert (caught.value.field, caught.value.sample) == ("row", 0)
        assert np.array_equal(gathered(dataset, "row", [5]), VALUES["row"][[5]])
