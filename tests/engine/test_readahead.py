"""Read-ahead before a batch is read: little is requested if all is in memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import shardio
from shardio import Array, Schema, ShardDataset, ShardLoader
from shardio._engine.filling import readahead
from shardio._engine.filling.batch_spec import BatchSpec, EpochPlan, IndexPlanner
from shardio._engine.filling.readahead import ReadAhead
from shardio.dataset.files import DatasetFiles
from shardio.dataset.gather import ColumnGather
from shardio.order import FullShuffle
from shardio.order.ranks import RankPartition
from shardio.order.shuffle import BlockShuffle
from shardio.samples.shard_dataset import DatasetSource
from shardio.samples.view import RowView
from shardio.storage import file_access
from tests.loading import bits, write_dataset

N, BATCH, ROW = 512, 8, 4096
SCHEMA = Schema({"x": Array("uint8", (ROW,))})
STEPS = N // BATCH
FULL = EpochPlan(0, RankPartition(N, 0, BATCH), FullShuffle())
WINDOWED = EpochPlan(0, RankPartition(N, 0, BATCH), BlockShuffle(16, 128))


class Kernel:
    """Says what is cached, and notes what it was asked; `answer` None stands for no answer."""

    def __init__(self) -> None:
        self.answer: bool | None = False
        self.has_what_was_asked = False
        self.n_probes = 0
        self.asked: list[tuple[int, int]] = []

    def is_cached(self, fd: int, offset: int) -> bool | None:
        self.n_probes += 1
        if self.has_what_was_asked:
            return any(start <= offset < start + n for start, n in self.asked)
        return self.answer

    def will_need(self, fd: int, offset: int, n_bytes: int) -> None:
        self.asked.append((offset, n_bytes))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel()
    monkeypatch.setattr(readahead, "is_cached", made.is_cached)
    monkeypatch.setattr(readahead, "prefetch_range", made.will_need)
    monkeypatch.setattr(readahead, "available_bytes", lambda: 0)
    return made


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShardDataset]:
    samples = ({"x": np.full(ROW, i % 251, np.uint8)} for i in range(N))
    folder = write_dataset(tmp_path_factory.mktemp("advice") / "set", N, 1, SCHEMA, samples)
    with ShardDataset(folder, verify="off") as opened:
        yield opened


class Run:
    """Steps of a plan, one after another, as a filler looks ahead of them."""

    def __init__(self, dataset: ShardDataset) -> None:
        source = DatasetSource(dataset.path)
        batch_spec = BatchSpec(source, ("x",), BATCH, N, is_full_shuffle=False, seed=0)
        self.advice = ReadAhead(batch_spec, RowView(dataset))
        self._index_planner = IndexPlanner(RowView(dataset), seed=0)
        self._first = dataset.reader(0).column_section("x").offset

    def step(self, plan: EpochPlan, step: int) -> set[int]:
        """Look ahead of one; returns where its rows lie in their file."""
        index_chunk, part = self._index_planner.index_chunk(plan, step)
        self.advice.prefetch(plan, step, index_chunk, part)
        return {self._first + row * ROW for row in index_chunk.rows[part].tolist()}


def covered(asked: list[tuple[int, int]]) -> set[int]:
    return {page for start, n in asked for page in range(start, start + n, ROW)}


def test_what_is_missing_is_asked_for_to_the_page(dataset: ShardDataset, kernel: Kernel) -> None:
    run = Run(dataset)
    with mock.patch.object(ColumnGather, "disable_readahead") as disable:
        places = run.step(FULL, 0)
    assert disable.called  # the kernel's own read-ahead would push out what was asked for
    assert kernel.n_probes == 1  # one that is missing suffices
    assert covered(kernel.asked) == places
    places |= set().union(*(run.step(FULL, step) for step in range(1, STEPS)))
    assert covered(kernel.asked) == places
    assert len(kernel.asked) < len(places)  # neighbours are asked for at once


def test_where_all_is_cached_nothing_is_asked_and_probes_become_rare(
    dataset: ShardDataset, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readahead, "MAX_SKIPPED", 7)
    kernel.answer = True
    run = Run(dataset)
    probed = []
    for step in range(STEPS):
        before = kernel.n_probes
        run.step(FULL, step)
        probed.append(kernel.n_probes > before)
    assert not kernel.asked
    assert kernel.n_probes == readahead.N_PROBED * sum(probed)
    assert probed[: readahead.HITS_UNTIL_WARM] == [True] * readahead.HITS_UNTIL_WARM
    places = [i for i, each in enumerate(probed) if each][readahead.HITS_UNTIL_WARM - 1 :]
    assert np.diff(places).tolist() == [2, 4, 8, 8, 8, 8, 8]


def test_a_system_that_does_not_tell_is_asked_once(dataset: ShardDataset, kernel: Kernel) -> None:
    kernel.answer = None
    run = Run(dataset)
    for plan in (FULL, WINDOWED):
        for step in range(STEPS):
            run.step(plan, step)
    assert (kernel.n_probes, kernel.asked) == (1, [])


def test_an_order_that_is_kept_is_left_to_the_kernel(dataset: ShardDataset, kernel: Kernel) -> None:
    run = Run(dataset)
    for step in range(STEPS):
        run.step(EpochPlan(0, RankPartition(N, 0, BATCH)), step)
    assert (kernel.n_probes, kernel.asked) == (0, [])


def test_windows_request_neighbouring_pages_once(dataset: ShardDataset, kernel: Kernel) -> None:
    kernel.has_what_was_asked = True
    run = Run(dataset)
    for first in range(0, STEPS, 128 // BATCH):
        del kernel.asked[:]
        places = set().union(*(run.step(WINDOWED, first + step) for step in range(128 // BATCH)))
        assert places <= covered(kernel.asked)
        assert all(start % readahead.NEAR_BYTES == 0 for start, _ in kernel.asked)
        starts = [start for start, _ in kernel.asked]
        assert len({*starts}) == len(starts)


def test_windows_request_evicted_pages_again(dataset: ShardDataset, kernel: Kernel) -> None:
    run, whole = Run(dataset), EpochPlan(0, RankPartition(N, 0, BATCH), BlockShuffle(16, N))
    kernel.has_what_was_asked = True
    for step in range(40):
        run.step(whole, step)
    del kernel.asked[:]
    places = set().union(*(run.step(whole, step) for step in range(40, STEPS)))
    assert len(places & covered(kernel.asked)) > 0.9 * len(places)


def test_every_new_window_is_probed(dataset: ShardDataset, kernel: Kernel) -> None:
    kernel.answer = True
    run = Run(dataset)
    for step in range(3 * 128 // BATCH):
        if step == 128 // BATCH:
            kernel.n_probes = 0
        run.step(WINDOWED, step)
    assert kernel.n_probes == 2 * 6 * readahead.N_PROBED  # 4 in a row, and then fewer
    kernel.answer = False
    places = run.step(WINDOWED, 3 * 128 // BATCH)
    assert places <= covered(kernel.asked)


def test_what_was_pushed_out_while_all_was_there_is_asked_for_again(
    dataset: ShardDataset, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readahead, "available_bytes", lambda: 1 << 40)
    monkeypatch.setattr(readahead, "WIDE_BYTES", 2 * ROW)
    run = Run(dataset)
    for step in range(STEPS // 2 + readahead.HITS_UNTIL_WARM):
        kernel.answer = step >= STEPS // 2
        run.step(FULL, step)
    del kernel.asked[:]
    kernel.answer = False
    first = STEPS // 2 + readahead.HITS_UNTIL_WARM
    run.step(FULL, first)  # without a probe
    places = set().union(*(run.step(FULL, step) for step in range(first + 1, STEPS)))
    assert places <= covered(kernel.asked)


def test_where_all_files_fit_into_memory_much_is_asked_for_at_once(
    dataset: ShardDataset, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readahead, "available_bytes", lambda: 1 << 40)
    run = Run(dataset)
    places = run.step(FULL, 0)
    n_asked = sum(n for _, n in kernel.asked)
    assert n_asked > len(places) * file_access.PAGE_BYTES
    assert n_asked % readahead.WIDE_BYTES == 0


def test_a_file_that_is_gone_is_no_error_of_the_advice(tmp_path: Path, kernel: Kernel) -> None:
    samples = ({"x": np.full(ROW, i, np.uint8)} for i in range(BATCH))
    folder = write_dataset(tmp_path / "set", BATCH, 1, SCHEMA, samples)
    with ShardDataset(folder) as dataset:
        run = Run(dataset)
        os.unlink(dataset.reader(0).path)
        run.step(EpochPlan(0, RankPartition(BATCH, 0, BATCH), FullShuffle()), 0)
    assert kernel.asked == []


@pytest.mark.parametrize(
    ("failure", "expected"),
    [(BlockingIOError(), False), (OSError(errno.EOPNOTSUPP, "not supported"), None), (None, True)],
)
def test_a_probe_tells_missing_from_unknown(
    monkeypatch: pytest.MonkeyPatch, failure: OSError | None, expected: object
) -> None:
    monkeypatch.setattr(os, "preadv", mock.Mock(side_effect=failure, return_value=1))
    assert file_access.is_cached(0, 0) is expected


def test_long_ranges_are_requested_in_kernel_sized_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, start, n, how: asked.append((start, n)))
    file_access.prefetch_range(0, 4096, 300_000)
    assert asked == [(4096, 131072), (135168, 131072), (266240, 37856)]


@pytest.mark.parametrize("transform", [None, lambda sample: sample])
def test_requests_precede_reads(dataset: ShardDataset, kernel: Kernel, transform: Any) -> None:
    asked_before = []
    gather = DatasetFiles.sample if transform else ColumnGather.gather
    owner: Any = DatasetFiles if transform else ColumnGather

    def noting(*args: Any, **named: Any) -> Any:
        asked_before.append(bool(kernel.asked))
        return gather(*args, **named)

    options: dict[str, Any] = {"num_workers": 0, "output": "numpy", "transform": transform}
    with (
        ShardLoader(dataset.path, BATCH, shuffle=True, **options) as loader,
        mock.patch.object(owner, gather.__name__, noting),
    ):
        next(iter(loader))
    assert asked_before and asked_before[-1]


def dropped(folder: str) -> None:
    for path in Path(folder).glob("*.shard"):
        with open(path, "rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("access", ["mmap", "pread"])
@pytest.mark.parametrize(
    "shuffled", [{"shuffle": True}, {"shuffle": "blocks"}, {"transform": dict, "shuffle": True}]
)
def test_batches_from_storage_are_those_from_memory(
    tmp_path: Path, access: Any, shuffled: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_dataset(tmp_path / "set", 24, 2)
    epochs = []
    if access == "mmap" and shuffled == {"shuffle": True}:  # whatever the file system tells
        monkeypatch.setattr(readahead, "is_cached", lambda fd, offset: False)
    for is_cold in (False, True):
        if is_cold:
            dropped(folder)
        with ShardLoader(
            shardio.open(folder, access=access), 8, num_workers=0, output="numpy", **shuffled
        ) as loader:
            epochs.append([bits(batch) for batch in loader])
    assert epochs[0] == epochs[1]
