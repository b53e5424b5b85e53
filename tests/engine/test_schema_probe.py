"""The schema of batches, requested from workers that crash at the worst moment."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardio import Array, Schema, ShardDataset
from shardio._engine.dispatch.backends import InlineWorker
from shardio._engine.dispatch.engine import SchemaProbe
from shardio._engine.dispatch.worker import Status, Task, TaskResult, WorkerLost
from shardio._engine.filling.batch_spec import BatchSpec, Schemas
from shardio.errors import InsufficientMemory, ShardChanged
from shardio.samples.shard_dataset import DatasetSource
from shardio.samples.view import RowView
from tests.loading import TWO_FIELDS, two_fields, write_dataset

MADE = Schemas(Schema({"made": Array("int64")}))
ANSWER = TaskResult(Status.SCHEMA, 0, 0, 0, 0, 0, 0, schemas=MADE)
DEATHS = [WorkerLost(worker, f"worker {worker} was killed by signal 9", 9) for worker in range(2)]


class Scripted(InlineWorker):
    """Workers that say what a test has written down, one list per wait."""

    def __init__(self, batch_spec: BatchSpec, script: list[list[TaskResult | WorkerLost]]) -> None:
        super().__init__(batch_spec)
        self.script, self.given = script, list[Task]()
        self.n_at_work, self.now_s = len(script), 0.0

    def queue_task(self, worker: int, task: Task, block: object) -> None:
        self.given.append(task)

    def wait(self, timeout_s: float | None = None) -> list[TaskResult | WorkerLost]:
        said = self.script.pop(0)
        self.now_s += 1
        self.is_starting = len(self.script) > self.n_at_work
        return said


@pytest.fixture
def dataset(tmp_path: Path) -> Iterator[ShardDataset]:
    with ShardDataset(write_dataset(tmp_path / "set", 4, 1, TWO_FIELDS, two_fields(4))) as opened:
        yield opened


def inquiry(
    dataset: ShardDataset, script: list[list[TaskResult | WorkerLost]], *, skips: bool = False
) -> tuple[SchemaProbe, Scripted]:
    batch_spec = BatchSpec(
        source=DatasetSource(dataset.path),
        fields=tuple(TWO_FIELDS),
        block_rows=2,
        n_samples=4,
        is_full_shuffle=False,
        seed=0,
        transform=dict,
        skips=skips,
    )
    backend = Scripted(batch_spec, script)
    return SchemaProbe(batch_spec, RowView(dataset), backend), backend


def test_a_worker_that_dies_after_its_answer_is_not_asked_again(dataset: ShardDataset) -> None:
    asked, backend = inquiry(dataset, [[ANSWER, DEATHS[0]]])
    assert asked.schemas() == MADE
    assert len(backend.given) == 1, "nobody would wait for the second answer"


def test_only_the_asked_workers_death_repeats_the_request(dataset: ShardDataset) -> None:
    asked, backend = inquiry(dataset, [[DEATHS[1]], [DEATHS[0]], [DEATHS[1]], [ANSWER]])
    assert asked.schemas() == MADE
    assert len(backend.given) == 2


def test_startup_time_is_excluded(dataset: ShardDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    for n_at_work, expected in ((1, MADE), (4, None)):  # they begin with the third wait, or at once
        asked, backend = inquiry(dataset, [[], [], [], [ANSWER]])
        backend.is_starting, backend.n_at_work = n_at_work == 1, n_at_work
        monkeypatch.setattr(time, "monotonic", lambda backend=backend: backend.now_s)
        assert asked.schemas(1.0) == expected


def failed(error: BaseException) -> TaskResult:
    return TaskResult(Status.FAILED, 0, 0, 0, 0, 0, 0, error=error)


@pytest.mark.parametrize(
    "error", [InsufficientMemory("none left"), ShardChanged("cut", code="file_size")]
)
def test_other_errors_are_raised_at_once(dataset: ShardDataset, error: Exception) -> None:
    asked, _ = inquiry(dataset, [[failed(error)]], skips=True)
    with pytest.raises(type(error)):
        asked.schemas()
