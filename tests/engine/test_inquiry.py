"""Which fields batches have, asked of workers that die at the worst moment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardio._engine.inquiry import Inquiry
from shardio._engine.recipe import Recipe
from shardio._engine.staff import Answer, Local, Loss
from shardio._engine.wire import Done, Status, Task
from shardio.dataset import ShardDataset
from shardio.errors import WorkerDied
from shardio.format.fields import Array
from shardio.format.schema import Schema
from tests.loading import TWO_FIELDS, two_fields, write_dataset

MADE = Schema({"made": Array("int64")})
ANSWER = Answer(0, Done(Status.SCHEMA, 0, 0, 0, 0, 0, 0), schema=MADE)
DEATHS = [Loss(worker, f"worker {worker} was killed by signal 9", 9) for worker in range(2)]


class Scripted(Local):
    """Workers that say what a test has written down, one list per wait."""

    def __init__(self, recipe: Recipe, script: list[list[Answer | Loss]]) -> None:
        super().__init__(recipe)
        self.script, self.given = script, list[Task]()

    def give(self, worker: int, task: Task, block: object) -> None:
        self.given.append(task)

    def wait(self, timeout_s: float | None = None) -> list[Answer | Loss]:
        return self.script.pop(0)


@pytest.fixture
def dataset(tmp_path: Path) -> Iterator[ShardDataset]:
    with ShardDataset(write_dataset(tmp_path / "set", 4, 1, TWO_FIELDS, two_fields(4))) as opened:
        yield opened


def inquiry(dataset: ShardDataset, script: list[list[Answer | Loss]]) -> tuple[Inquiry, Scripted]:
    recipe = Recipe(
        path=dataset.path,
        fields=tuple(TWO_FIELDS),
        block_rows=2,
        n_samples=4,
        shuffle=False,
        seed=0,
        verify="first",
        access="mmap",
        transform=dict,
        takes_rng=False,
    )
    staff = Scripted(recipe, script)
    return Inquiry(recipe, dataset, staff), staff


def test_a_worker_that_dies_after_its_answer_is_not_asked_again(dataset: ShardDataset) -> None:
    asked, staff = inquiry(dataset, [[ANSWER, DEATHS[0]]])
    assert asked.schema() == MADE
    assert len(staff.given) == 1, "nobody would wait for the second answer"


def test_only_the_death_of_the_worker_that_was_asked_has_it_asked_again(
    dataset: ShardDataset,
) -> None:
    asked, staff = inquiry(dataset, [[DEATHS[1]], [DEATHS[0]], [DEATHS[1]], [ANSWER]])
    assert asked.schema() == MADE
    assert len(staff.given) == 2


def test_a_first_sample_that_two_workers_died_of_says_so(dataset: ShardDataset) -> None:
    asked, _ = inquiry(dataset, [[DEATHS[0]], [DEATHS[0]]])
    with pytest.raises(WorkerDied, match=r"sample 0 of .*, which 2 workers have died of$"):
        asked.schema()
