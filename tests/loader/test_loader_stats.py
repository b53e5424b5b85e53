"""The figures of `loader.stats()` follow from the work done, with and without workers."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from shardio import Array, Schema, ShardLoader, Text
from shardio._base.statistics import CHECK, PHASE_TIMES, LoadingStats
from shardio._engine.dispatch.counters import CounterTable, IterationCounters
from shardio.order.ranks import RankPartition, Tail
from tests.loading import PATIENCE_S, make_loader, write_dataset

N, BATCH = 100, 8
ROW_BYTES = 64 * 96 + 8
NOTES = Schema({"note": Text(codec="zstd"), "label": Array("int64")})


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("stats")
    samples = ({"note": f"{i} " * 500, "label": i} for i in range(N))
    return write_dataset(root / "notes", N, 2, NOTES, samples)


def loader_of(folder: str, n_workers: int, **options: Any) -> ShardLoader:
    return make_loader(folder, BATCH, output="numpy", num_workers=n_workers, **options)


def epoch(loader: ShardLoader) -> LoadingStats:
    for _ in loader:
        pass
    return loader.stats().latest


def slowly(sample: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.001)
    return sample


@pytest.mark.parametrize("n_workers", [0, 2])
def test_an_epoch_is_counted_in_batches_samples_and_bytes(folder: str, n_workers: int) -> None:
    with loader_of(folder, n_workers) as loader:
        epoch(loader)
        stats = loader.stats()
    assert (stats.epoch, stats.n_workers) == (0, n_workers)
    latest = stats.latest
    assert (latest.n_batches, latest.n_samples) == (13, N)
    assert latest.n_bytes == N * ROW_BYTES


@pytest.mark.parametrize("n_workers", [0, 2])
def test_the_loops_time_is_waiting_handing_over_and_its_body(folder: str, n_workers: int) -> None:
    with loader_of(folder, n_workers) as loader:
        start_s, in_body_s = time.perf_counter(), 0.0
        for _ in loader:
            begin_s = time.perf_counter()
            time.sleep(0.001)
            in_body_s += time.perf_counter() - begin_s
        whole_s = time.perf_counter() - start_s
        found = loader.stats().latest
    assert found.body_s >= in_body_s
    assert found.elapsed_s <= whole_s
    parts_s = found.waiting_s + found.hand_over_s + found.body_s
    assert parts_s == pytest.approx(found.elapsed_s)
    assert found.hand_over_s > 0


@pytest.mark.parametrize("n_workers", [0, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"transform": slowly},
        {"batch_transform": slowly},
        {"collate": lambda samples: slowly({"n": len(samples)})},
    ],
)
def test_user_function_time_is_apart(folder: str, n_workers: int, options: dict[str, Any]) -> None:
    with loader_of(folder, n_workers, **options) as loader:
        latest = epoch(loader)
    n_calls = latest.n_samples if "transform" in options else latest.n_batches
    assert 0.001 * n_calls <= latest.transforming_s <= latest.filling_s
    assert latest.reading_s > 0


@pytest.mark.parametrize("n_workers", [0, 2])
def test_hashing_is_counted_where_it_is_done(folder: str, n_workers: int) -> None:
    """By default in the first epoch, and not again."""
    with loader_of(folder, n_workers) as loader:
        checking_s = []
        for _ in range(2):
            checking_s.append(epoch(loader).checking_s)
    assert checking_s[0] > 0
    assert checking_s[1] == 0
    with loader_of(folder, n_workers, verify="off") as loader:
        assert epoch(loader).checking_s == 0


@pytest.mark.parametrize("n_workers", [0, 2])
def test_decompression_is_counted_apart(folder: str, notes: str, n_workers: int) -> None:
    with loader_of(notes, n_workers) as loader:
        for batch in loader:
            assert batch["note"][0]
        found = loader.stats().latest
    assert found.decoding_s > 0
    heap_bytes = sum(len(f"{i} " * 500) for i in range(N))
    assert found.n_bytes == N * 8 + heap_bytes
    with loader_of(folder, n_workers) as loader:
        assert epoch(loader).decoding_s == 0


def test_what_the_program_reads_beside_the_loader_does_not_count(folder: str) -> None:
    with loader_of(folder, 0) as loader:
        epoch(loader)
        PHASE_TIMES.sums_ns[CHECK] += 10**12
        assert epoch(loader).checking_s < 1


def test_ready_batches_are_counted_while_the_loop_does_something_else(folder: str) -> None:
    with loader_of(folder, 1, prefetch=3) as loader:
        next(iterator := iter(loader))
        end_s = time.monotonic() + PATIENCE_S
        while loader.stats().latest.queue_depth <= 1 and time.monotonic() < end_s:
            time.sleep(0.01)  # meanwhile several lie ready
        found = loader.stats().latest
        del iterator
    assert found.n_batches == 1
    assert found.queue_depth > 1


def test_without_workers_nothing_lies_ready(folder: str) -> None:
    with loader_of(folder, 0) as loader:
        for _ in loader:
            time.sleep(0.002)
        latest = loader.stats().latest
    assert latest.ready_s <= latest.waiting_s + latest.hand_over_s, "nor while the loop does more"


def test_epochs_add_up(folder: str) -> None:
    with loader_of(folder, 2) as loader:
        each = []
        for _ in range(3):
            each.append(epoch(loader))
        total = loader.stats().total
    assert total.n_samples == 3 * N
    assert total.n_batches == sum(one.n_batches for one in each)
    assert total.filling_s == pytest.approx(sum(one.filling_s for one in each))


@pytest.mark.parametrize("n_workers", [0, 2])
def test_a_loop_that_was_left_counts_what_it_got(folder: str, n_workers: int) -> None:
    with loader_of(folder, n_workers) as loader:
        for batch in loader:
            if batch.step == 2:
                break
        del batch
        gc.collect()
        ended = loader.stats().latest
        assert (ended.n_batches, ended.n_samples) == (3, 3 * BATCH)
        assert loader.stats().latest.elapsed_s == ended.elapsed_s  # its clock has stopped


def test_iterators_beside_each_other_are_counted_apart(folder: str) -> None:
    with loader_of(folder, 2) as loader:
        first, second = iter(loader), iter(loader)
        for _ in range(3):
            next(first)
        next(second)
        stats = loader.stats()
        assert stats.latest.n_batches == 1
        assert stats.total.n_batches == 4


def test_the_start_of_a_pass_is_handing_over_and_no_time_of_the_loops_body(folder: str) -> None:
    with loader_of(folder, 0) as loader:
        batches = iter(loader)
        assert loader.stats().latest.hand_over_s > 0  # blocks were made, tasks given out
        started_s = loader.stats().latest.hand_over_s
        list(batches)
        latest = loader.stats().latest
    assert latest.hand_over_s > started_s
    assert latest.waiting_s + latest.hand_over_s + latest.body_s == pytest.approx(latest.elapsed_s)


def test_a_closed_loader_still_tells(folder: str) -> None:
    with loader_of(folder, 1) as loader:
        expected = epoch(loader)
    assert loader.stats().latest == expected


def test_stats_are_json(folder: str) -> None:
    with loader_of(folder, 0) as loader:
        epoch(loader)
        stats = loader.stats()
    said = json.loads(json.dumps(stats.as_json()))
    assert said["latest"]["n_samples"] == N
    assert said["latest"]["body_s"] == stats.latest.body_s
    assert said["latest"]["reading_s"] == stats.latest.reading_s
    assert said["total"]["queue_depth"] == stats.total.queue_depth
    assert (said["epoch"], said["n_workers"]) == (0, 0)


@pytest.mark.parametrize("n_workers", [0, 2])
def test_samples_that_were_skipped_are_counted(folder: str, n_workers: int) -> None:
    def refuses_two(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["label"] in (3, 50):
            raise ValueError("no")
        return sample

    skipping: dict[str, Any] = {"on_error": "skip", "max_skips": 5}
    with loader_of(folder, n_workers, transform=refuses_two, **skipping) as loader:
        epoch(loader)
        stats = loader.stats()
    assert stats.latest.n_skipped == stats.total.n_skipped == 2
    assert stats.latest.n_samples == N


def test_copies_are_counted(folder: str) -> None:
    with loader_of(folder, 1, memory_bytes=4 * BATCH * ROW_BYTES) as loader:
        with pytest.warns(RuntimeWarning, match="batches are copied"):
            held = list(loader)
        assert len(held) == 13
        assert 1 <= loader.stats().latest.n_copies < 13


def test_workers_that_were_replaced_are_counted(folder: str, tmp_path: Path) -> None:
    flag = tmp_path / "died"

    def dies_once(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["label"] == 40 and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return sample

    with loader_of(folder, 2, transform=dies_once) as loader:
        epoch(loader)
        stats = loader.stats()
        assert epoch(loader).n_restarts == 0
    assert stats.latest.n_restarts == stats.total.n_restarts == 1
    assert stats.latest.n_samples == N


def test_another_thread_may_ask_while_the_loop_waits(folder: str) -> None:
    is_free = threading.Event()

    def waits(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["label"] != 20:
            return sample
        assert is_free.wait(PATIENCE_S)
        return sample

    with loader_of(folder, 0, transform=waits) as loader:
        steps: list[int] = []
        loop = threading.Thread(target=lambda: steps.extend(batch.step for batch in loader))
        loop.start()
        end_s = time.monotonic() + PATIENCE_S
        while loader.stats().latest.n_batches < 2 and time.monotonic() < end_s:
            time.sleep(0.001)
        found = loader.stats().latest
        is_free.set()
        loop.join()
    assert len(steps) == 13
    assert found.n_batches == 2
    assert found.hand_over_s + found.waiting_s > 0


@pytest.mark.parametrize(
    ("rank", "world_size", "tail"),
    [(0, 1, "short"), (1, 3, "short"), (2, 3, "pad"), (0, 3, "drop")],
)
def test_a_division_counts_the_samples_of_its_steps(rank: int, world_size: int, tail: Tail) -> None:
    partition = RankPartition(100, 7, 8, rank, world_size, tail)
    counted = 0
    for step in range(partition.first_step, partition.stop_step):
        assert partition.n_samples(step) == counted
        start, stop = partition.own_range(step)
        counted += stop - start
    assert partition.n_samples(partition.stop_step) == counted


def test_a_ring_keeps_the_latest_batches_of_a_worker() -> None:
    table = CounterTable(n_slots=1, n_workers=2, n_records=3)
    try:
        table.begin(0, 17)
        counters = IterationCounters(table.fd, 1)
        for step, is_recording in enumerate([False, True, True, True, True, False]):
            table.set_recording(is_recording=is_recording)
            counters.add(0, step, counters.start())
        for _ in range(2):  # also after `close`
            first, second = table.fill_records()
            assert (first, [each.step for each in second]) == ([], [2, 3, 4])
            assert {each.iteration_ns for each in second} == {17}
            table.close()
    finally:
        os.close(table.fd)
