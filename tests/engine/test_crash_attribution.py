"""The sample that a worker's crash is attributed to, with crashes that a test causes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shardio import ShardLoader, WorkerDied
from shardio._engine.dispatch import engine
from shardio._engine.dispatch.backends import InlineWorker
from shardio._engine.dispatch.crashes import read_claims
from shardio._engine.dispatch.worker import TaskResult, WorkerLost
from shardio.batch.batch import Skipped
from shardio.batch.layout import CLAIMED, EMPTY, FILLED, NO_FIELD, layout_for_samples
from shardio.samples.field_sources import BatchRows
from tests.loading import TWO_FIELDS

N, BATCH = 40, 8
END = "was killed by signal 11"
Kills = Callable[[list[int]], bool]


class Death(BaseException):
    """The signal or exit that a test kills with."""


class Mortal(InlineWorker):
    """One worker that dies when `kills` says so of the samples that it begins to read."""

    n_crashes = 0

    @staticmethod
    def kills(numbers: list[int]) -> bool:
        return False

    def send_hello(self, *given: Any) -> None:
        super().send_hello(*given)
        filler = self._runner.filler
        assert filler is not None
        fill_rows = filler.fill_rows

        def fill(batch: BatchRows) -> int:
            if self.kills(batch.chunk.origins[batch.part, 0].tolist()):
                self._left = self._claims().copy()
                raise Death
            return fill_rows(batch)

        filler.fill_rows = fill  # type: ignore[method-assign]

    def _claims(self) -> Any:
        block = self._tasks[0][1]
        assert self._runner.layout is not None and block is not None
        return self._runner.layout.origins(block.bytes)

    def wait(self, timeout_s: float | None = None) -> list[TaskResult | WorkerLost]:
        try:
            return super().wait(timeout_s)
        except Death:
            self._claims()[:] = self._left
            self._tasks.clear()
            self.n_crashes += 1
            return [WorkerLost(0, f"worker 0 {END}", 11, END)]


@pytest.fixture
def die_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Kills], None]:
    """Has workers die when a function of the samples that they begin to read says so."""
    monkeypatch.setattr(engine, "InlineWorker", Mortal)
    return lambda kills: monkeypatch.setattr(Mortal, "kills", staticmethod(kills))


def epoch(folder: str) -> tuple[list[Skipped], int]:
    with ShardLoader(
        folder, BATCH, output="numpy", num_workers=0, on_error="skip", max_skips=N
    ) as loader:
        found = [each for batch in loader for each in batch.skipped]
        backend = loader._engine._backend
        assert isinstance(backend, Mortal)
        return found, backend.n_crashes


def test_sample_found_without_transform(folder: str, die_of: Callable[[Kills], None]) -> None:
    die_of(lambda numbers: bool({13, 14, 35} & set(numbers)))
    found, n_crashes = epoch(folder)
    assert [(each.index, each.row, each.error) for each in found] == [
        (13, 5, "WorkerDied"),
        (14, 6, "WorkerDied"),
        (35, 3, "WorkerDied"),
    ]
    assert {each.text for each in found} == {f"2 workers crashed on it alone; the last {END}"}
    # Of each batch one that names all its samples, then two for each sample, of substitutes too.
    assert n_crashes >= 2 + 3 * 2


def test_one_crash_at_a_sample_skips_nothing(folder: str, die_of: Callable[[Kills], None]) -> None:
    moments = iter([True] * 3 + [False] * 1000)  # a whole batch, and twice its first row
    seen: list[list[int]] = []

    def kills(numbers: list[int]) -> bool:
        is_new = not (len(seen) and seen[-1] == numbers)
        seen.append(numbers)
        return is_new and next(moments)

    die_of(kills)
    found, n_crashes = epoch(folder)
    assert (found, n_crashes) == ([], 3)


def test_crashes_at_every_sample_are_an_error(folder: str, die_of: Callable[[Kills], None]) -> None:
    victims = iter(range(N))
    victim = next(victims)

    def kills(numbers: list[int]) -> bool:
        nonlocal victim
        if victim not in numbers:
            return False
        victim = next(victims) if len(numbers) == 1 else victim
        return True

    die_of(kills)
    with pytest.raises(WorkerDied, match="batch 0 of epoch 0 .*, at which 6 workers have crashed"):
        epoch(folder)


def claimed(*places: tuple[int, int], field: int = NO_FIELD) -> list[tuple[int, ...]]:
    return [(*place, field, CLAIMED) for place in places]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([(0, 0, NO_FIELD, FILLED)], "before it began with"),
        (
            [(0, 0, NO_FIELD, FILLED), *claimed((1, 1)), (2, 0, NO_FIELD, EMPTY)],
            "while it worked on sample 1 of shard b for",
        ),
        # By the order in which fields are read, not that of the dataset.
        (claimed((0, 0), (0, 1), field=0), "while it worked on field 'y' of samples 0, 1 of shard"),
        ([*claimed((0, 0), field=0), *claimed((0, 1), field=1)], "worked on samples 0, 1 of shard"),
        (claimed((2, 5), (2, 6), (2, 7), (2, 8)), "worked on samples 5, 6, 7, … of shard c for"),
        (
            claimed((4, 0), (1, 5), (1, 6), (1, 7), (0, 0)),
            "sample 0 of shard a; samples 5, 6, 7 of shard b; sample 0 of shard e for",
        ),
        (
            claimed((4, 0), (1, 0), (0, 0), (2, 0)),
            "sample 0 of shard a; sample 0 of shard b; sample 0 of shard c and others for",
        ),
    ],
)
def test_crash_names_three_samples_of_three_shards(rows: list[tuple[int, ...]], said: str) -> None:
    layout = layout_for_samples(TWO_FIELDS, 6)
    block: Any = SimpleNamespace(bytes=np.zeros(layout.heap, np.uint8))
    dataset: Any = SimpleNamespace(shards=[SimpleNamespace(name=name) for name in "abcde"])
    origins = layout.origins(block.bytes)
    for i, values in enumerate(rows):
        for name, value in zip(("shard", "row", "field", "status"), values, strict=True):
            origins[i][name] = value
    assert said in read_claims(layout, block, dataset, ("y", "x")).text
