from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from shardio import ShardLoader
from shardio._engine.filling.batch_spec import EpochPlan
from shardio._workers.processes.shared_memory import SharedArray, pack_shared, unpack_shared
from shardio.order import Order, RankPartition, Sequential
from shardio.order.sampling import Listed, Weighted
from shardio.order.shuffle import BlockShuffle, ShardShuffle
from tests.loading import TWO_FIELDS, two_fields, write_dataset


def n_open_files(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.parametrize("numbers", [np.arange(5000), np.array([0.5, 2.0]), np.zeros(0, np.int64)])
def test_what_another_process_gets_is_the_same(numbers: np.ndarray) -> None:
    made = SharedArray.of(numbers, "a test")
    got = SharedArray.received(os.dup(made.fd), numbers.dtype.str, len(numbers))
    for each in (made.array, got.array):
        assert each.dtype == numbers.dtype
        assert each.tolist() == numbers.tolist()
        assert not each.flags.writeable


def test_its_descriptors_go_with_it_and_its_numbers_stay_while_they_are_held() -> None:
    gc.collect()  # what earlier tests left
    before = n_open_files()
    made = SharedArray.of(np.arange(10), "a test")
    assert n_open_files() > before
    array = made.array
    del made
    gc.collect()
    assert array.tolist() == list(range(10))
    del array
    gc.collect()
    assert n_open_files() == before


def test_a_plan_travels_with_its_table_beside_it() -> None:
    numbers = np.arange(100_000)
    table = SharedArray.of(numbers, "a test")
    for order in (Listed(table, 10, {"sampler": "a"}), Weighted(table, 10, {"weights": "b"})):
        plan = EpochPlan(3, RankPartition(10, 2, 4), order)
        message, fds = pack_shared(plan)
        assert len(message) < 1000
        back = unpack_shared(message, [os.dup(fd) for fd in fds])
        assert (back.epoch, back.partition, type(back.order)) == (3, plan.partition, type(order))
        assert (back.order.n, back.order.origin) == (10, order.origin)
        assert np.array_equal(back.order.table.array, numbers)


@pytest.mark.parametrize("order", [Sequential(), BlockShuffle(2, 8), ShardShuffle(2, 8, "0f")])
def test_a_plan_without_a_table_is_small(order: Order) -> None:
    plan = EpochPlan(1, RankPartition(10, 0, 4), order)
    message, fds = pack_shared(plan)
    assert fds == []
    assert len(message) < 350
    assert unpack_shared(message, fds) == plan


@pytest.mark.usefixtures("warm_zygote", "quick_disk")
def test_tables_of_epochs_that_are_over_are_not_kept(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "set", 20, 1, TWO_FIELDS, two_fields(20))

    def worker_of(sample: dict[str, int]) -> dict[str, int]:
        return {"pid": os.getpid(), "label": sample["label"]}

    options = {"num_workers": 1, "output": "numpy", "transform": worker_of}
    with ShardLoader(folder, 4, sampler=lambda epoch: [epoch] * 8, **options) as loader:  # type: ignore[arg-type]
        counts = []
        for _ in range(12):
            pids = {int(batch["pid"][0]) for batch in loader}
            gc.collect()
            counts.append([n_open_files(), *map(n_open_files, pids)])
    assert max(counts[6:]) <= max(counts[:6])
