"""The next epoch is begun while the loop has the last batches of this one, and nobody notices."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio import ShardLoader, WeightedSampler
from shardio._engine.dispatch.iterations import EpochIteration
from shardio.errors import TransformError
from tests.loading import PATIENCE_S, bits

N, BATCH, N_STEPS = 100, 10, 10


def _loader(folder: str, n_workers: int = 2, **options: Any) -> ShardLoader:
    return ShardLoader(folder, BATCH, output="numpy", num_workers=n_workers, **options)


def _ahead(loader: ShardLoader) -> EpochIteration | None:
    return loader._engine._iterations.ahead


def _filled_ahead(loader: ShardLoader) -> EpochIteration:
    """Return the pass begun ahead once workers have filled all that they were given of it."""
    ahead = _ahead(loader)
    assert ahead is not None
    end_s = time.monotonic() + PATIENCE_S
    while not 0 < ahead.schedule._next_assigned <= _n_filled(loader, ahead):
        assert time.monotonic() < end_s
        time.sleep(0.001)
    return ahead


def _n_filled(loader: ShardLoader, iteration: EpochIteration) -> int:
    return int(loader._engine._iterations.counters.sums(iteration.slot)[0])


def _steps(loader: ShardLoader) -> list[int]:
    return [batch.step for batch in loader]


def test_the_next_epoch_goes_on_with_what_was_begun_before_it_was_asked_for(folder: str) -> None:
    with _loader(folder) as loader:
        _steps(loader)
        ahead = _filled_ahead(loader)
        assert (ahead.plan.epoch, ahead.schedule._next_assigned > 0) == (1, True)
        batches: Any = iter(loader)
        assert batches.iteration is ahead
        assert _ahead(loader) is None
        assert [batch.step for batch in batches] == list(range(N_STEPS))
        assert loader.epoch == 1


def test_it_takes_no_more_blocks_than_one_epoch_has(folder: str) -> None:
    with _loader(folder, prefetch=1) as loader:
        for _ in range(5):
            assert _steps(loader) == list(range(N_STEPS))
        assert len(loader._engine.pool) <= 4  # two workers, one ahead, one in the loop's hands


def test_after_a_break_in_the_last_batches_there_is_one_and_in_the_middle_none(folder: str) -> None:
    with _loader(folder, prefetch=1) as loader:
        for batch in loader:
            if batch.step == 4:
                break
        assert _ahead(loader) is None
        for batch in loader:
            if batch.step == N_STEPS - 1:
                break
        del batch
        ahead = _ahead(loader)
        assert ahead is not None
        batches: Any = iter(loader)
        assert batches.iteration is ahead
        assert [batch.step for batch in batches] == list(range(N_STEPS))
        assert loader.epoch == 2


def test_another_place_to_begin_is_begun_there(folder: str) -> None:
    with _loader(folder, shuffle=True) as loader:
        start = loader.state_dict()
        first = [bits(batch) for batch in loader]
        assert _ahead(loader) is not None
        for _ in range(2):
            loader.load_state_dict(start)
            assert [bits(batch) for batch in loader] == first
            assert loader.stats().latest.n_batches == N_STEPS
            assert _ahead(loader) is None, "what comes next is not what seemed to"
        _steps(loader)
        assert _ahead(loader) is not None, "and now it is again"
        assert loader.stats().total.n_batches == 4 * N_STEPS


def test_two_loops_at_the_same_time_get_all_their_batches_from_few_blocks(folder: str) -> None:
    with _loader(folder, prefetch=0, memory_bytes=6 * 65_536 + 65_535) as loader:
        for _ in range(3):
            first = iter(loader)
            steps = [next(first).step for _ in range(N_STEPS - 1)]
            second = iter(loader)
            steps += [next(second).step for _ in range(N_STEPS - 1)]
            steps += [batch.step for batch in first] + [batch.step for batch in second]
            assert sorted(steps) == sorted(2 * list(range(N_STEPS)))
        assert loader.stats().total.n_copies == 0


def test_a_loop_beside_another_begins_nothing_ahead(folder: str) -> None:
    with _loader(folder) as loader:
        first = iter(loader)
        next(first)
        assert _steps(loader) == list(range(N_STEPS))
        assert _ahead(loader) is None
        assert [batch.step for batch in first] == list(range(1, N_STEPS))
        assert _ahead(loader) is None, "the epoch behind this one is over already"


def test_what_costs_the_user_something_is_not_begun_before_it_is_asked_for(folder: str) -> None:
    asked = []

    def sampler(epoch: int) -> range:
        asked.append(epoch)
        return range(N)

    with _loader(folder, sampler=sampler) as loader:
        _steps(loader)
        assert (set(asked), _ahead(loader)) == ({0}, None)
    choices: list[tuple[dict[str, Any], bool]] = [
        ({"sampler": range(N)}, True),
        ({"sampler": WeightedSampler(np.ones(N))}, True),
        ({"sampler": WeightedSampler(np.ones(N), replacement=False)}, False),
    ]
    for options, is_begun in choices:
        with _loader(folder, **options) as loader:
            _steps(loader)
            assert (_ahead(loader) is not None) is is_begun


def test_functions_of_the_user_do_not_run_in_his_threads_between_epochs(folder: str) -> None:
    for transform, is_begun in [(None, True), (lambda sample: sample, False)]:
        options: dict[str, Any] = {"start_method": "thread", "transform": transform}
        with _loader(folder, **options) as loader:
            for _ in range(2):
                assert _steps(loader) == list(range(N_STEPS))
            assert (_ahead(loader) is not None) is is_begun


def _refusing(flag: Path) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Make a transform that refuses sample 3 as soon as there is a file."""

    def refuse(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["label"] == 3 and flag.exists():
            raise ValueError("no")
        return sample

    return refuse


def test_a_failure_waits_for_its_batch_in_the_next_epoch(folder: str, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    # So few blocks that nothing of the next epoch can be filled before the flag is there.
    with _loader(folder, transform=_refusing(flag), prefetch=0) as loader:
        for batch in loader:
            if batch.step == 4:
                flag.touch()
        batches = iter(loader)
        with pytest.raises(TransformError, match="sample 3"):
            next(batches)
        flag.unlink()
        assert _steps(loader) == list(range(N_STEPS))


def test_what_failed_of_an_epoch_that_never_comes_is_not_said(folder: str, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    skips: dict[str, Any] = {"on_error": "skip", "max_skips": 1, "prefetch": 0}
    with _loader(folder, transform=_refusing(flag), **skips) as loader:
        middle: dict[str, Any] = {}
        for batch in loader:
            if batch.step == 4:
                middle = loader.state_dict()
                flag.touch()
        _filled_ahead(loader)
        assert loader.stats().latest.n_skipped == loader.stats().total.n_skipped == 0
        loader.load_state_dict(middle)
        assert _steps(loader) == list(range(5, N_STEPS))
        stats = loader.stats()
        assert (stats.latest.n_skipped, stats.total.n_skipped) == (0, 0)
        assert _steps(loader) == list(range(N_STEPS))
        assert loader.stats().latest.n_skipped == 1


def test_what_is_filled_ahead_counts_for_the_epoch_that_gets_it(folder: str) -> None:
    with _loader(folder) as loader:
        _steps(loader)
        _filled_ahead(loader)
        stats = loader.stats()
        assert stats.epoch == 0
        assert stats.total == stats.latest
        assert loader.state_dict()["epoch"] == 1
        begin_s = time.perf_counter()  # until now they lay ready, and nobody was there to want them
        batches = iter(loader)
        latest = loader.stats().latest
        assert 0 < latest.elapsed_s <= time.perf_counter() - begin_s
        assert latest.ready_s <= N_STEPS * latest.elapsed_s * 1.01
        assert [batch.step for batch in batches] == list(range(N_STEPS))
        latest, total = loader.stats().latest, loader.stats().total
    assert total.n_batches == 2 * N_STEPS
    assert total.filling_s == pytest.approx(stats.latest.filling_s + latest.filling_s)


def test_a_worker_that_dies_between_epochs_costs_no_batch(folder: str, tmp_path: Path) -> None:
    seen, dead = tmp_path / "seen", tmp_path / "dead"

    def die_once(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["label"] == 3 and not seen.exists():
            seen.touch()
        elif sample["label"] == 3 and not dead.exists():  # of the second epoch
            dead.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return sample

    with _loader(folder, transform=die_once, timeout_s=PATIENCE_S) as loader:
        _steps(loader)
        end_s = time.monotonic() + PATIENCE_S
        while _ahead(loader) is not None and not dead.exists():
            assert time.monotonic() < end_s
            time.sleep(0.001)
        found = [label for batch in loader for label in batch["label"].tolist()]
        assert found == list(range(N))
        assert loader.stats().total.n_restarts == 1


def test_the_last_batch_of_the_fast_lane_stays_until_the_next(folder: str) -> None:
    with _loader(folder, reuse=True, prefetch=0) as loader:
        for _ in range(3):
            labels = np.zeros(0, np.int64)
            for batch in loader:
                labels = batch["label"]
            _filled_ahead(loader)
            assert labels.tolist() == list(range(N - BATCH, N))


def test_the_last_batch_is_no_copy_because_the_next_epoch_has_blocks(folder: str) -> None:
    with _loader(folder, prefetch=0, memory_bytes=3 * 65_536 + 65_535) as loader:
        for _ in range(4):
            assert _steps(loader) == list(range(N_STEPS))
        assert loader.stats().total.n_copies == 0
