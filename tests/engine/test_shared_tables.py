from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from shardio import ShardLoader
from shardio._engine.filling.batch_spec import EpochPlan
from shardio._workers.processes.shared_memory import SharedArray, pack_shared, unpack_shared
from shardio.order import RankPartition
from shardio.order.sampling import Listed, Weighted
from tests.loading import TWO_FIELDS, two_fields, write_dataset


def n_open_files(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


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
