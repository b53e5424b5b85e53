"""The engine under a loader: blocks that move between passes, and what shares them."""

from __future__ import annotations

import contextlib
import gc
import itertools
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio import InvalidArgument, ShardDataset, ShardLoader
from shardio._engine.dispatch import iterations, worker
from shardio._engine.dispatch.engine import Engine
from shardio._engine.dispatch.iterations import EpochIteration
from shardio._engine.dispatch.worker import (
    BatchWorker,
    ReplyBuffer,
    RequestKind,
    Status,
    WorkerLost,
    pack,
    replies_file,
    unpack,
    unpack_all,
)
from shardio._engine.filling.batch_spec import BatchSpec, EpochPlan
from shardio._workers.tasks.schedule import QUICK_NS
from shardio.batch.layout import CLAIMED, EMPTY, FILLED
from shardio.errors import DatasetCorrupt, InsufficientMemory
from shardio.order.ranks import RankPartition
from shardio.samples.shard_dataset import DatasetSource
from shardio.samples.view import RowView
from tests.loading import TWO_FIELDS, two_fields, write_dataset

N, BATCH = 100, 10
Engines = Callable[..., Engine]
WORKERS = pytest.mark.parametrize("n_workers", [0, 2])


@pytest.fixture
def engines(folder: str) -> Iterator[Engines]:
    """Make engines with a budget of some blocks, and close them."""
    source, fields = DatasetSource(folder), tuple(TWO_FIELDS)
    batch_spec = BatchSpec(
        source, fields, block_rows=BATCH, n_samples=N, is_full_shuffle=False, seed=0
    )
    with contextlib.ExitStack() as made:

        def make(n_workers: int, *, blocks: int = 100) -> Engine:
            n_bytes = blocks * 65_536
            engine = Engine(batch_spec, n_workers=n_workers, prefetch=2, memory_bytes=n_bytes)
            made.callback(engine.close)
            engine.open(RowView(ShardDataset(folder)))
            return engine

        yield make


def _plan(epoch: int, first: int = 0, last: int = N // BATCH) -> EpochPlan:
    return EpochPlan(epoch, RankPartition(last * BATCH, first * BATCH, BATCH))


def _steps(engine: Engine, iteration: EpochIteration) -> list[int]:
    found = []
    while (delivered := engine.next(iteration)) is not None:
        found.append(delivered[1])
    return found


@WORKERS
def test_ended_leases_return_blocks_after_settling(engines: Engines, n_workers: int) -> None:
    engine = engines(n_workers)
    n_settled = 0

    def settle() -> None:
        nonlocal n_settled
        n_settled += 1

    engine.set_synchronize(settle)
    iteration = engine.iterate(_plan(0))
    engine.next(iteration)
    lease = engine.lease(iteration)
    engine.next(iteration)
    engine.lease(iteration)  # and dropped at once
    assert n_settled == 0
    engine.next(iteration)
    assert n_settled == 1
    del lease
    engine.next(iteration)
    assert n_settled == 3  # one block that was not leased, one whose lease has ended


@WORKERS
def test_a_pass_without_blocks_gets_one_beyond_the_budget(engines: Engines, n_workers: int) -> None:
    engine = engines(n_workers, blocks=2)
    outer = engine.iterate(_plan(0))
    assert engine.next(outer) is not None
    assert _steps(engine, engine.iterate(_plan(1))) == list(range(10))
    assert _steps(engine, outer) == list(range(1, 10))
    assert len(engine.pool) == 3


def test_simultaneous_passes_are_limited(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iterations, "N_SLOTS", 3)
    engine = engines(0)
    passes = [engine.iterate(_plan(epoch)) for epoch in range(3)]
    with pytest.raises(InvalidArgument, match="3 iterations over one loader are running"):
        engine.iterate(_plan(3))
    engine.cancel(passes[0])
    assert _steps(engine, passes[1]) == list(range(10))  # and the cancelled tasks before its own
    assert _steps(engine, engine.iterate(_plan(3))) == list(range(10))


@WORKERS
def test_a_pass_that_cannot_begin_leaves_nothing(
    engines: Engines, n_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(n_workers)
    with monkeypatch.context() as patch:
        patch.setattr(engine.pool, "make_extra", _no_memory)
        for epoch in range(3):
            with pytest.raises(InsufficientMemory):
                engine.iterate(_plan(epoch))
    assert _steps(engine, engine.iterate(_plan(3))) == list(range(10))
    assert len(engine._iterations) <= 1


def _no_memory() -> int:
    raise InsufficientMemory("none left")


def _printed(program: str, *arguments: str) -> list[str]:
    command = [sys.executable, "-c", program, *arguments]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    assert done.stderr == ""
    return done.stdout.splitlines()


FEW_FILES = """
import resource, sys, warnings
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from shardio import ShardLoader
warnings.simplefilter("ignore", RuntimeWarning)
with ShardLoader(sys.argv[1], 1, output="numpy", num_workers=2) as loader:
    kept = list(loader) + list(loader)
print([int(batch["label"][0]) for batch in kept] == 2 * list(range(100)))
"""


def test_batches_can_be_kept_beyond_the_limit_of_open_files(folder: str) -> None:
    assert _printed(FEW_FILES, folder) == ["True"]


TOO_FEW_FILES = """
import resource, sys, warnings
from shardio import ShardLoader
from shardio.errors import UnsupportedEnvironment
n_workers, start_method = int(sys.argv[2]), sys.argv[3]
most = resource.getrlimit(resource.RLIMIT_NOFILE)
warnings.simplefilter("ignore", RuntimeWarning)
for n in (12, 17, 22, 28):
    resource.setrlimit(resource.RLIMIT_NOFILE, (n, most[1]))
    try:
        with ShardLoader(
            sys.argv[1], 8, output="numpy", num_workers=n_workers, start_method=start_method
        ) as loader:
            print(n, sum(batch.n_rows for batch in loader))
    except UnsupportedEnvironment as error:
        print(n, "open files" in str(error) or str(error))
"""


@pytest.mark.parametrize("how", [(0, "zygote"), (2, "zygote"), (2, "thread")])
def test_too_few_open_files_are_an_error_that_says_so(folder: str, how: tuple[int, str]) -> None:
    lines = _printed(TOO_FEW_FILES, folder, *map(str, how))
    assert len(lines) == 4
    assert lines[0] == "12 True"
    assert all(line.split()[1] in ("True", "100") for line in lines), lines


def test_another_dataset_in_the_place_of_the_opened_one_is_never_read(tmp_path: Path) -> None:
    write_dataset(tmp_path / "one", N, 2, TWO_FIELDS, two_fields(N))
    black = [{"image": np.zeros((64, 96), np.uint8), "label": -1}] * N
    write_dataset(tmp_path / "other", N, 2, TWO_FIELDS, black)
    path = tmp_path / "set"
    path.symlink_to(tmp_path / "one")
    with ShardLoader(path, BATCH, output="numpy", num_workers=1) as loader:
        assert len(list(loader)) == 10
        path.unlink()
        path.symlink_to(tmp_path / "other")
        (pid,) = loader._engine._backend._pool.pids()  # type: ignore[union-attr]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        for _ in range(3):
            with pytest.raises(DatasetCorrupt, match="another dataset has replaced"):
                list(loader)


def test_claims_of_a_cancelled_pass_are_cleared(engines: Engines) -> None:
    engine = engines(0)
    iteration = engine.iterate(_plan(0))
    (number,) = iteration.schedule.tasks_of(0).values()
    origins = iteration.layout.origins(engine.pool[number].bytes)
    origins["status"] = CLAIMED
    engine.cancel(iteration)
    engine.dispatcher.apply_finalizers()
    engine.dispatcher._handle_result(WorkerLost(0, "worker 0 was killed by signal 9", 9))
    assert not (origins["status"] == CLAIMED).any()
    assert len(engine._iterations) == 0 and engine.pool.n_idle


def n_open_files(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_tables_of_epochs_that_are_over_are_not_kept(folder: str) -> None:

    def worker_of(sample: dict[str, int]) -> dict[str, int]:
        return {"pid": os.getpid(), "label": sample["label"]}

    options: dict[str, Any] = {"num_workers": 1, "transform": worker_of, "output": "numpy"}
    with ShardLoader(folder, 4, sampler=lambda epoch: [epoch] * 8, **options) as loader:
        counts = []
        for _ in range(12):
            pids = {int(batch["pid"][0]) for batch in loader}
            gc.collect()
            counts.append([n_open_files(), *map(n_open_files, pids)])
    assert max(counts[6:]) <= max(counts[:6])


def test_the_last_batch_leaves_the_rest_of_its_block_empty(engines: Engines) -> None:
    engine = engines(0)
    iteration = engine.iterate(EpochPlan(0, RankPartition(94, 80, BATCH)))
    for n_rows in (10, 4):
        delivered = engine.next(iteration)
        assert delivered is not None and delivered[2] == n_rows
        states = iteration.layout.origins(engine.pool[delivered[0]].bytes)["status"]
        assert states.tolist() == [FILLED] * n_rows + [EMPTY] * (BATCH - n_rows)


def test_what_a_worker_held_back_is_found_once() -> None:
    fd = replies_file(3)
    theirs, memory = ReplyBuffer(mmap.mmap(fd, 0), 1), mmap.mmap(fd, 0)
    ours, other = ReplyBuffer(memory, 1), ReplyBuffer(memory, 2)
    os.close(fd)
    assert ours.take() == b""
    theirs.add(b"a" * 32)
    theirs.add(b"b" * 32)
    assert other.take() == b""
    assert ours.take() == b"a" * 32 + b"b" * 32
    assert theirs.take() == ours.take() == b""


class Scripted(BatchWorker):
    """A worker whose tasks end as a test says."""

    def __init__(self, ends: list[Status], **options: Any) -> None:
        self.sent: list[bytes] = []
        self._send, self._ends = self.sent.append, ends
        source = DatasetSource("set")
        self._batch_spec = BatchSpec(source, ("x",), 1, 9, is_full_shuffle=False, seed=0, **options)
        self._replies = ReplyBuffer(mmap.mmap(-1, mmap.PAGESIZE), 0)

    def _run_task(self, *task: int) -> tuple[int, bytes]:
        status, step = self._ends[task[4]], task[4]
        rest = b"x" * 32 if status == Status.FAILED else b""
        return status, pack(status, 0, 0, step, 0, 0, 0) + rest


@pytest.mark.parametrize(
    ("ends", "options", "tick_ns", "expected"),
    [
        ([Status.QUICK] * 3, {}, 0, [[0, 1, 2]]),
        ([Status.FILLED, Status.QUICK, Status.CANCELLED, Status.QUICK], {}, 0, [[0], [1, 2], [3]]),
        ([Status.QUICK, Status.FAILED, Status.QUICK], {}, 0, [[0], [1], [2]]),
        ([Status.QUICK] * 2, {"batch_transform": dict}, 0, [[0], [1]]),  # the next task may hang
        ([Status.QUICK] * 5, {}, QUICK_NS // 2 + 1, [[0, 1], [2, 3], [4]]),
        ([Status.QUICK] * 300, {}, 0, [[*range(128)], [*range(128, 256)], [*range(256, 300)]]),
    ],
    ids=["quick", "slow", "failed", "user code", "for a short time", "as far as there is room"],
)
def test_quick_answers_are_held_back_until_another_is_due(
    monkeypatch: pytest.MonkeyPatch,
    ends: list[Status],
    options: dict[str, Any],
    tick_ns: int,
    expected: list[list[int]],
) -> None:
    monkeypatch.setattr(worker, "now_ns", itertools.count(0, tick_ns).__next__)
    scripted = Scripted(ends, **options)
    tasks = [pack(RequestKind.FILL, 0, 0, 0, step, 0, 0) for step in range(len(ends))]
    scripted.handle_message(b"".join(tasks), ())
    found = []
    for message in scripted.sent:
        is_failure = unpack(message)[0] == Status.FAILED
        found.append(
            [words[3] for words in ([unpack(message)] if is_failure else unpack_all(message))]
        )
    assert found == expected
