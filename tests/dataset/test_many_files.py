"""Datasets of more files than may be open at a time: read as others are, a few files at once."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio import Array, Schema, ShardLoader, Video, mix
from shardio._engine.dispatch.crashes import InFlightRows, crash_error
from shardio._workers.processes.shared_memory import create_marks_file
from shardio.dataset import files, gather, open_files
from shardio.dataset.dataset import Dataset
from shardio.dataset.open_files import LocalStorage
from shardio.errors import (
    ChecksumMismatch,
    InsufficientMemory,
    ShardChanged,
    ShardCorrupt,
    ShardNotFound,
    UnsupportedEnvironment,
)
from shardio.format.sections import max_units
from shardio.maintenance import add_column
from shardio.samples import shard_dataset
from shardio.samples.clips import Clip
from shardio.samples.packing import Pack
from shardio.samples.shard_dataset import ShardDataset
from shardio.shard.verification import Rows
from shardio.shard.writer import ShardSummary
from shardio.storage import file_access
from tests.limits import n_open
from tests.loading import bits, make_loader, write_dataset
from tests.media_made import scene, write_video
from tests.shards import EVERY_FIELD, MEDIA_FIELDS, media_sample, same_sample

pytestmark = pytest.mark.usefixtures("quick_disk")

N_SAMPLES, N_SHARDS, MAX = 48, 24, 6
Epochs = dict[Any, list[Any]]
COLUMNS = ["frames", "odd", "vector", "label"]
"""Two with a hash of each row, and two of runs."""
NAMES = [*COLUMNS, "packed", "points", "blob", "note", "maybe", "parts"]
SCHEMA = Schema({name: EVERY_FIELD[name] for name in NAMES})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_dataset(tmp_path_factory.mktemp("many") / "set", N_SAMPLES, N_SHARDS, SCHEMA)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six files may be open at a time."""
    monkeypatch.setattr(open_files, "ALL_OPEN_LIMIT", MAX)
    monkeypatch.setattr(open_files, "MAX_OPEN_FILES", MAX)
    monkeypatch.setattr(open_files, "_MIN_OPEN_FILES", 1)


@contextmanager
def all_open() -> Iterator[None]:
    """Let all files of a dataset be open."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(open_files, "ALL_OPEN_LIMIT", 1024)
        yield


def loader(folder: str | Dataset, **options: Any) -> ShardLoader:
    options = {"batch_size": 12, "num_workers": 0, "output": "numpy", "seed": 3, **options}
    return make_loader(folder, **options)


def epoch(folder: str, **options: Any) -> list[Any]:
    with loader(folder, **options) as batches:
        return [bits(batch) for batch in batches]


def files_mapped(folder: str) -> Counter[str]:
    """Return the number of maps this process has of each file in a folder."""
    with open("/proc/self/maps") as maps:
        return Counter(os.path.basename(line.split()[-1]) for line in maps if folder in line)


def path_of(folder: str, shard: int) -> str:
    return os.path.join(folder, f"{shard:06d}-000.shard")


@pytest.fixture(scope="module")
def expected(folder: str) -> Epochs:
    """Epochs of a loader that has all files open."""
    return {shuffle: epoch(folder, shuffle=shuffle) for shuffle in (False, True)}


# Batches.


@pytest.mark.parametrize("access", ["mmap", "pread"])
@pytest.mark.parametrize("verify", ["first", "always", "off"])
def test_batches_are_the_same(folder: str, expected: Epochs, verify: str, access: str) -> None:
    for shuffle in (False, True):
        assert epoch(folder, shuffle=shuffle, verify=verify, access=access) == expected[shuffle]


def test_shards_of_whole_pages_take_turns_in_the_room_for_their_maps(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 256, (4 * MAX, 4096), np.uint8)
    made = ({"x": value} for value in values)
    schema = Schema({"x": Array("uint8", (4096,))})
    folder = write_dataset(tmp_path / "set", 4 * MAX, 4 * MAX, schema, made)
    rows, out = np.arange(4 * MAX)[::-1].copy(), np.empty_like(values)
    with ShardDataset(folder) as dataset:
        dataset.gather("x").gather(rows, dataset.locate(rows), out)
    assert np.array_equal(out, values[rows])


@pytest.mark.usefixtures("warm_zygote")
def test_workers_have_few_files_open_as_well(folder: str, expected: Epochs) -> None:
    assert epoch(folder, shuffle=True, num_workers=2, start_method="thread") == expected[True]


def identity(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: sample[name] for name in ("frames", "label", "vector")}


def test_samples_for_a_transform_are_the_same(folder: str) -> None:
    fields = {"fields": ["frames", "label", "vector"], "shuffle": True}
    assert epoch(folder, transform=identity, **fields) == epoch(folder, **fields)


def added(path: Path, folder: str) -> str:
    copy = str(shutil.copytree(folder, path))
    add_column(copy, "score", Array("float64"), np.arange(N_SAMPLES) * 0.5)
    return copy


def tokens(path: Path, _: str) -> str:
    rng = np.random.default_rng(1)
    samples = [{"tokens": rng.integers(0, 99, n).astype(np.uint16)} for n in range(60)]
    return write_dataset(path, 60, 20, Schema({"tokens": Array("uint16", (None,))}), samples)


def videos(path: Path, _: str) -> str:
    file = write_video(path.with_name("a.mp4"), scene(12, 48, 32)).read_bytes()
    samples = ({"video": file, "label": i} for i in range(12))
    return write_dataset(path, 12, 12, Schema({"video": Video(), "label": Array("int64")}), samples)


SCORES = {"fields": ["score", "frames", "label"]}


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (added, {"access": "mmap", **SCORES}),
        (added, {"access": "pread", **SCORES}),
        (tokens, {"pack": Pack(32), "batch_size": 4}),
        (videos, {"clip": Clip(frames=4), "batch_size": 5}),
    ],
)
def test_views_are_the_same(folder: str, tmp_path: Path, make: Any, options: Any) -> None:
    made = make(tmp_path / "set", folder)
    with all_open():
        found = epoch(made, shuffle=True, **options)
    assert epoch(made, shuffle=True, **options) == found


def test_a_mixture_is_the_same(folder: str) -> None:
    def mixed() -> list[Any]:
        sources = [folder, folder]
        with mix(sources, weights=[2, 1]) as both, loader(both, shuffle=True) as batches:
            return [bits(batch) for batch in itertools.islice(batches, 3)]

    with all_open():
        found = mixed()
    assert mixed() == found


def test_single_samples_outlive_the_file_that_made_room(folder: str) -> None:
    with ShardDataset(folder) as dataset, ShardDataset(folder, access="pread") as read:
        samples = [dataset[i] for i in range(N_SAMPLES)]
        assert all(same_sample(samples[i], read[i]) for i in range(N_SAMPLES))


# What is open.


def test_no_file_is_opened_before_it_is_needed(folder: str) -> None:
    with ShardDataset(folder) as dataset:
        dataset.files.share_marks(np.zeros(dataset.files.n_marks, np.uint8))
        for name in COLUMNS:
            dataset.gather(name)
        assert not files_mapped(folder)
        assert dataset.files.reader_if_open(7) is None
        dataset.reader(7)
        assert dataset.files.reader_if_open(7) is not None
        assert files_mapped(folder) == {"000007-000.shard": 1}


@pytest.mark.parametrize("batch_size", [3, 12])
def test_mapped_files_are_bounded_and_unmapped_on_close(folder: str, batch_size: int) -> None:
    with loader(folder, fields=COLUMNS, shuffle=True, batch_size=batch_size) as batches:
        for _ in batches:
            mapped = files_mapped(folder)
            assert len(mapped) <= MAX
            assert max(mapped.values()) <= 1 + 4 + 2, "the file, four columns, the hashes of two"
    gc.collect()
    assert not files_mapped(folder)


def test_descriptors_are_of_as_many_files_as_may_be_open(folder: str) -> None:
    with loader(folder, access="pread", shuffle=True) as batches:
        for _ in batches:
            assert n_open(folder) <= MAX
    gc.collect()
    assert n_open(folder) == 0


def test_files_used_longest_ago_make_room(folder: str) -> None:
    with ShardDataset(folder) as dataset:
        for shard in range(MAX):
            dataset.reader(shard)
        dataset.reader(0)
        rows = dataset.shard_starts[1:2]
        out = np.empty((1, 8), np.uint8)
        dataset.gather("label").gather(rows, np.array([1]), out)
        dataset.reader(20)
        known = [dataset.files.reader_if_open(k) is not None for k in (0, 1, 2, 20)]
        assert known == [True, True, False, True]


def test_reopening_keeps_marks(folder: str, tmp_path: Path) -> None:
    copy = str(shutil.copytree(folder, tmp_path / "set"))
    with ShardDataset(copy) as first, ShardDataset(copy, verify="always") as always:
        offset = first.reader(0).column_section("label").offset
        for dataset in (first, always):
            assert dataset[0]["label"] == 0
            for shard in range(1, 20):
                dataset.reader(shard)
            assert dataset.files.reader_if_open(0) is None
        with open(path_of(copy, 0), "r+b") as file:
            file.seek(offset)
            file.write(b"\x07")
        assert first[0]["label"] == 7
        with pytest.raises(ChecksumMismatch, match="field 'label'") as caught:
            always[0]
        assert caught.value.path == path_of(copy, 0)


def test_every_sample_of_an_epoch_is_marked_as_checked(folder: str) -> None:
    with ShardDataset(folder) as dataset:
        marks = np.zeros(dataset.files.n_marks, np.uint8)
        dataset.files.share_marks(marks)
        for sample in dataset:
            assert sample
        assert marks.all()


# What is wrong with a file is said when it is needed.


@pytest.mark.parametrize("fields", [["label"], ["note"]])
def test_missing_shard_named_on_first_use(folder: str, tmp_path: Path, fields: list[str]) -> None:
    copy = str(shutil.copytree(folder, tmp_path / "set"))
    os.unlink(path_of(copy, 15))
    with loader(copy, fields=fields, batch_size=4) as batches:
        delivered: list[list[int]] = []
        with pytest.raises(ShardNotFound, match=r"000015-000\.shard: there is no such shard"):
            delivered.extend(batch.indices.tolist() for batch in batches)
    assert len(delivered) == 30 // 4


def test_a_damaged_shard_is_named_when_it_is_first_needed(folder: str, tmp_path: Path) -> None:
    copy = str(shutil.copytree(folder, tmp_path / "set"))
    os.truncate(path_of(copy, 15), 8192)
    with loader(copy, batch_size=4) as batches, pytest.raises(ShardCorrupt) as caught:
        list(batches)
    assert (caught.value.path, caught.value.code) == (path_of(copy, 15), "file_size")


def test_crash_error_names_a_shard_never_opened_before(folder: str, tmp_path: Path) -> None:
    copy = str(shutil.copytree(folder, tmp_path / "set"))
    os.truncate(path_of(copy, 15), 8192)
    with ShardDataset(copy) as dataset:
        claims = InFlightRows("at", {15: [1]}, "label")
        error = crash_error("a worker died", signal.SIGBUS, claims, "", dataset)
    assert isinstance(error, ShardChanged)
    assert (error.path, error.field, error.sample) == (path_of(copy, 15), "label", 1)


def test_marks_stay_within_their_shard(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "max_units", lambda *given: max_units(*given) - 1)
    with ShardDataset(folder) as dataset:
        with pytest.raises(ShardCorrupt, match="more hashes than its size permits"):
            dataset.reader(0)


# Where the system gives less.


def test_addresses_run_out(folder: str, expected: Epochs, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def reserve(n_bytes: int) -> int:
        asked.append(n_bytes)
        if n_bytes > 5 * 27 * 4096:  # of `frames` less than six shards have
            raise InsufficientMemory("no addresses")
        return given(n_bytes)

    given = file_access.reserve
    monkeypatch.setattr(gather, "reserve", reserve)
    assert epoch(folder, shuffle=True) == expected[True]
    assert max(asked) > 5 * 27 * 4096


def test_maps_run_out(folder: str, expected: Epochs, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = []

    def map_part(address: int, n_bytes: int, fd: int, offset: int, path: str) -> None:
        if len(files_mapped(folder)) > MAX // 2:
            refused.append(path)
            raise UnsupportedEnvironment("no more maps")
        given(address, n_bytes, fd, offset, path)

    given = file_access.map_fixed
    monkeypatch.setattr(gather, "map_fixed", map_part)
    assert epoch(folder, shuffle=True) == expected[True]
    assert refused


def test_columns_count_towards_the_map_limit(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files, "max_maps", lambda: 28)
    with loader(folder, fields=COLUMNS, shuffle=True) as batches:
        for _ in batches:
            assert sum(files_mapped(folder).values()) <= 21


def test_datasets_share_the_map_limit(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files, "max_maps", lambda: 8)
    with ShardDataset(folder) as one, ShardDataset(folder) as other:
        for shard in range(20):
            one.reader(shard)
        assert sum(files_mapped(folder).values()) == 6
        for shard in range(20):
            other.reader(shard)
            one.reader(20 - shard)
        assert sum(files_mapped(folder).values()) <= 6
    with ShardDataset(folder) as alone:
        for shard in range(20):
            alone.reader(shard)
        assert sum(files_mapped(folder).values()) == 6


def test_column_evicts_before_mapping(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files, "max_maps", lambda: 12)
    with ShardDataset(folder) as dataset:
        for shard in range(MAX):
            dataset.reader(shard)
        assert sum(files_mapped(folder).values()) == MAX
        dataset.gather("label")  # each file will have two maps, and nine are allowed
        assert sum(files_mapped(folder).values()) == 4


def test_mapping_error_reaches_the_caller(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise UnsupportedEnvironment("no more maps")

    monkeypatch.setattr(gather, "map_fixed", refuse)
    with loader(folder) as batches, pytest.raises(UnsupportedEnvironment, match="no more maps"):
        list(batches)


# Marks.


def test_samples_with_streams_are_the_same(tmp_path: Path) -> None:
    made = (media_sample(i) for i in range(24))
    folder = write_dataset(tmp_path / "set", 24, 24, MEDIA_FIELDS, made)
    with all_open():
        every = ShardDataset(folder)
    with every, ShardDataset(folder) as dataset:
        assert all(map(same_sample, dataset, every))


def test_a_long_table_of_marks_takes_memory_as_it_is_used() -> None:
    for n_marks, is_reserved in ((1000, True), (1 << 30, False)):
        fd = create_marks_file(n_marks)
        try:
            assert os.fstat(fd).st_size == n_marks
            assert bool(os.fstat(fd).st_blocks) is is_reserved
        finally:
            os.close(fd)


# Places.


class _Counting(LocalStorage):
    """A storage that pins at most three files, and counts the pins."""

    def __init__(self, root: str) -> None:
        super().__init__(root, root)
        self.held: Counter[str] = Counter()
        self.most = 0
        self.is_closed = False

    def max_pinned(self, sizes: Rows) -> int:
        return 3

    def pin(self, summary: ShardSummary) -> str:
        self.held[summary.name] += 1
        self.most = max(self.most, self.held.total())
        return super().pin(summary)

    def unpin(self, summary: ShardSummary) -> None:
        self.held[summary.name] -= 1

    def close(self) -> None:
        self.is_closed = True


Storages = list[_Counting]


@pytest.fixture
def storages(few: None, monkeypatch: pytest.MonkeyPatch) -> Storages:
    """Return the storages of new datasets; only they limit the number of open files."""
    monkeypatch.undo()
    made: Storages = []

    def storage_of(path: str, *_: object) -> _Counting:
        made.append(_Counting(os.path.abspath(path)))
        return made[-1]

    monkeypatch.setattr(shard_dataset, "_storage_of", storage_of)
    return made


@pytest.mark.parametrize("access", ["mmap", "pread"])
def test_each_file_pinned(folder: str, expected: Epochs, storages: Storages, access: str) -> None:
    assert epoch(folder, shuffle=True, access=access) == expected[True]
    gc.collect()
    asked, used = storages  # of the dataset that was opened, and of its loader
    assert not asked.held
    assert used.most <= 3 + 1, "the one that is opened comes before another goes"
    assert sorted(used.held) == [f"{k:06d}-000.shard" for k in range(N_SHARDS)]
    assert used.held.total() == 0


def test_closing_closes_every_storage(folder: str, storages: Storages) -> None:
    with ShardDataset(folder):
        assert [each.is_closed for each in storages] == [False]
    with mix([folder, folder], weights=[1, 1]):
        assert [each.is_closed for each in storages] == [True, False, False]
    assert [each.is_closed for each in storages] == [True, True, True]


@pytest.mark.usefixtures("storages")
def test_smallest_pin_limit_bounds_a_mixture(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = iter([5, 2, 5, 2])  # of the sources, then of the mixture
    monkeypatch.setattr(_Counting, "max_pinned", lambda *_: next(limits))
    with mix([folder, folder], weights=[1, 1]) as made:
        assert made.files.open_files.max_open == 2


@pytest.mark.usefixtures("storages")
def test_mixture_has_marks_for_the_files_of_all_sources(folder: str, tmp_path: Path) -> None:
    other = write_dataset(tmp_path / "other", 900, 2, Schema({"label": Array("int64")}))
    with mix([folder, other], weights=[1, 1]) as made, ShardDataset(folder) as first:
        assert made.files.is_partial
        assert made.files.n_marks > first.files.n_marks
        assert [made[i]["label"] for i in (0, N_SAMPLES, -1)] == [0, 0, 899]


def test_file_is_pinned_while_a_reader_lives(folder: str, storages: Storages) -> None:
    with ShardDataset(folder, access="pread") as dataset:
        reader = dataset.reader(0)
        for shard in range(1, 9):
            dataset.reader(shard)
        assert dataset.files.reader_if_open(0) is None
        assert storages[0].held["000000-000.shard"] == 1
        assert reader[0]["label"] == 0
        del reader
        assert storages[0].held["000000-000.shard"] == 0


def test_missing_file_is_unpinned(folder: str, tmp_path: Path, storages: Storages) -> None:
    copy = str(shutil.copytree(folder, tmp_path / "set"))
    os.unlink(path_of(copy, 2))
    with ShardDataset(copy) as dataset:
        with pytest.raises(ShardNotFound, match=r"000002-000\.shard: there is no such shard"):
            dataset.reader(2)
        assert storages[0].held.total() == 0
        assert len(dataset.reader(3)) == dataset.shards[3].n_samples
