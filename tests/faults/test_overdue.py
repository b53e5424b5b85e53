"""A batch that does not arrive in time is an error that reports what every worker was doing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardio import ShardLoader
from shardio._engine.dispatch import backends
from shardio._workers.processes import stack_dumps
from shardio.errors import BatchTimeout
from tests.loading import PATIENCE_S, TWO_FIELDS, two_fields, write_dataset

pytestmark = pytest.mark.usefixtures("warm_zygote", "quick_disk")

N, BATCH, STUCK = 40, 4, 20
Transform = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give workers time to report what they do, however busy the machine is."""
    monkeypatch.setattr(stack_dumps, "_ANSWER_TIMEOUT_S", PATIENCE_S)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return write_dataset(tmp_path / "set", N, 2, TWO_FIELDS, two_fields(N))


def hanging(marker: Path, label: int, *, in_c: bool) -> Transform:
    """Return a transform that hangs at one sample, and a file that appears when it does."""

    def hang(sample: dict[str, Any]) -> dict[str, Any]:
        import collections
        import itertools

        if sample["label"] == label:
            marker.touch()
            while not in_c:
                time.sleep(0.1)
            collections.deque(itertools.repeat(0), maxlen=0)
        return sample

    return hang


def await_file(path: Path) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert time.monotonic() < end_s, f"{path.name} never came"
        time.sleep(0.001)


def seen_before_it_is_overdue(loader: ShardLoader, marker: Path) -> tuple[list[int], str]:
    """Return the samples and the error of an epoch that times out when the transform hangs."""
    seen: list[int] = []
    loader._engine._timeout_s = None
    with pytest.raises(BatchTimeout) as caught:
        for batch in loader:
            seen += batch["label"].tolist()
            if len(seen) == STUCK:
                await_file(marker)
                loader._engine._timeout_s = 0.05
    return seen, str(caught.value)


@pytest.mark.parametrize("in_c", [False, True])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_transform_that_hangs_is_named_with_its_sample_and_its_stack(
    folder: str, tmp_path: Path, num_workers: int, *, in_c: bool
) -> None:
    marker = tmp_path / "hangs"
    transform = hanging(marker, STUCK, in_c=in_c)
    with ShardLoader(
        folder, BATCH, output="numpy", num_workers=num_workers, transform=transform
    ) as loader:
        for epoch in range(2):  # the workers that hang are replaced
            marker.unlink(missing_ok=True)
            seen, text = seen_before_it_is_overdue(loader, marker)
            assert seen == list(range(STUCK))
            assert text.startswith(
                f"batch 5 of epoch {epoch} of {folder} did not arrive within 0.05"
            )
            place = f"sample 0 of shard 000001-000.shard for batch 5 of epoch {epoch}:"
            assert f"while it worked on {place}" in text
            assert f'{Path(__file__).name}", line' in text and "in hang" in text
            assert "fill.py" not in text, "frames that are not the user's are left out"
            assert text.count("\nworker ") == num_workers


def test_a_first_sample_that_hangs_is_named(folder: str, tmp_path: Path) -> None:
    marker = tmp_path / "hangs"
    transform = hanging(marker, 0, in_c=False)
    with ShardLoader(folder, BATCH, output="numpy", num_workers=2, transform=transform) as loader:
        await_file(marker)
        loader._engine._timeout_s = 0.05
        with pytest.raises(BatchTimeout) as caught:
            iter(loader)
    assert "the first sample, which determines the layout of batches" in str(caught.value)
    assert "worker 0" in str(caught.value) and "in hang" in str(caught.value)
    assert ", without a task:" in str(caught.value)


def test_batches_that_come_in_time_are_as_without_a_limit(folder: str) -> None:
    with ShardLoader(folder, BATCH, output="numpy", num_workers=2, timeout_s=PATIENCE_S) as loader:
        assert [int(i) for batch in loader for i in batch["label"]] == list(range(N))


def test_without_workers_no_batch_is_overdue(folder: str) -> None:
    def slow(sample: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.002)
        return sample

    with ShardLoader(
        folder, BATCH, output="numpy", num_workers=0, transform=slow, timeout_s=0.001
    ) as loader:
        for _ in zip(range(2), loader, strict=False):  # each has begun another batch, done first
            assert [int(i) for batch in loader for i in batch["label"]] == list(range(N))


def workers_of(loader: ShardLoader) -> backends.WorkerBackend:
    found = loader._engine._backend
    assert isinstance(found, backends.WorkerBackend)
    return found


def test_each_worker_gets_its_own_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_dumps, "_ANSWER_TIMEOUT_S", 0.05)
    files = [(tmp_path / str(worker)).open("wb+", buffering=0) for worker in range(4)]

    texts = ["  a longer stack", "  stack"]

    def send(worker: int, _: int) -> bool:
        if worker % 2:  # the first does not answer, and the third is not there yet
            files[worker].write(f"{texts[0]} {worker}\n".encode())
        return worker != 2

    while texts:  # what they have said before is not said again
        found = stack_dumps.ask_for_stacks([file.fileno() for file in files], send)
        silent = "it did not report within 0.05 s what it is doing"
        assert found == [silent, f"{texts[0]} 1", "it is being started", f"{texts[0]} 3"]
        del texts[0]
    for file in files:
        file.close()


def test_a_worker_starts_until_it_opens(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with ShardLoader(folder, BATCH, output="numpy", num_workers=1) as loader:
        workers = workers_of(loader)
        assert workers.is_starting
        monkeypatch.setattr(workers, "_start_end_s", 0.0)
        assert not workers.is_starting, "nor longer than STARTING_S"
        monkeypatch.undo()
        for batch in loader:
            assert not workers.is_starting
            assert len(batch["label"]) == BATCH
        (pid,) = workers._pool.pids()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        while not workers.is_starting:
            workers.wait()  # for its death, after which another is started
        while workers.is_starting:
            assert workers.wait() == []


def test_starting_workers_are_waited_for(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with ShardLoader(folder, BATCH, output="numpy", num_workers=1) as loader:
        next(iter(loader))
        dispatching = loader._engine.dispatcher
        is_starting = True
        monkeypatch.setattr(backends.WorkerBackend, "is_starting", property(lambda _: is_starting))
        now_s = time.monotonic()
        assert dispatching.extend_deadline(now_s - 1, 0.5, "a batch") >= now_s + 0.5
        is_starting = False
        with pytest.raises(BatchTimeout, match="a batch of .* did not arrive within 0.5 s"):
            dispatching.extend_deadline(now_s - 1, 0.5, "a batch")
        assert dispatching.extend_deadline(now_s + 999, 0.5, "a batch") >= now_s + 0.5, (
            "a worker is ready"
        )
