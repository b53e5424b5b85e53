"""The table of a loader's running iterations; a slot is an index of this table.

An iteration is *begun ahead* if idle workers fill its first batches before a loop requests it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from shardio._base.statistics import LoadingStats
from shardio._engine.dispatch.counters import CounterTable, IterationTimer
from shardio._engine.dispatch.crashes import SuspectSamples
from shardio._engine.filling.batch_spec import EpochPlan
from shardio._workers.tasks.schedule import Schedule
from shardio.batch.batch import Skipped
from shardio.batch.layout import BlockLayout
from shardio.errors import InvalidArgument, TooManySkipped

_NAMED_SKIPS: Final = 3

DeliveredBlock = tuple[int, int, int, int]
"""The index of a filled block, its step, its number of rows, and the bytes used in its heap."""


@dataclass(slots=True, eq=False)
class EpochIteration:
    slot: int
    plan: EpochPlan
    schedule: Schedule
    layout: BlockLayout
    sizes: dict[int, tuple[int, int]] = field(default_factory=dict)
    """For each ready step, the number of rows and the bytes used in the heap."""
    crashes: dict[int, int] = field(default_factory=dict)
    """The number of workers that have crashed at each step; steps without a crash have no entry."""
    suspects: dict[int, SuspectSamples] = field(default_factory=dict)
    """If samples may be skipped, a record for each step at which a worker has crashed."""
    skips: dict[int, tuple[Skipped, ...]] = field(default_factory=dict)
    """The skipped samples of each step that is ready; a step without skips has no entry."""
    n_skipped: int = 0
    sent_to: set[int] = field(default_factory=set)
    """The indices of the workers that have received the plan."""
    timer: IterationTimer = field(default_factory=IterationTimer)
    next_loop_step: int = 0
    """The step of the next batch to hand over to the loop."""
    is_exhausted: bool = False
    """True once the iterator has raised StopIteration at the end of the epoch."""
    delivered_block: int | None = None
    """The index of the block delivered last; None once that block is leased or freed."""
    is_cancelled: bool = False
    is_watched: bool = False
    """True if there is an iterator; the iterator will cancel the iteration."""
    is_ahead: bool = False
    """True if workers have begun the iteration, and no loop has requested it yet."""
    successor: EpochPlan | None = None
    """The plan of the next iteration; None if the next one must not be begun ahead."""

    def take_skips(self, step: int, most: int) -> tuple[Skipped, ...]:
        """Return the skipped samples of a step; raise TooManySkipped if `most` is exceeded."""
        found = self.skips.pop(step, ())
        self.n_skipped += len(found)
        if self.n_skipped <= most:
            return found
        named = [f"sample {s.index}: {s.error}: {s.text}" for s in found[-_NAMED_SKIPS:]]
        raise TooManySkipped(
            f"{self.n_skipped} samples of epoch {self.plan.epoch} have failed by batch {step}, and "
            f"max_skips allows {most}: repair them, or raise max_skips; the last:\n"
            + "\n".join(named)
        )


N_SLOTS: Final = 4096


class IterationTable:
    """The running iterations, by their slots.

    A cancelled iteration stays in the table until the last of its tasks has ended. Callers hold
    the engine's lock, except for calls of `cancel`.
    """

    def __init__(self) -> None:
        self._by_slot: dict[int, EpochIteration] = {}
        self._free_slots = list(range(N_SLOTS))
        self.newly_cancelled: deque[EpochIteration] = deque()
        """Cancelled iterations that `take_cancelled` has not yielded yet."""
        self.ahead: EpochIteration | None = None
        """The iteration that was begun ahead; None once a loop takes it over or it is cancelled."""
        self._latest: EpochIteration | None = None
        """The iteration that a loop began or took over last; None once the table has dropped it."""
        self._expected_plan: EpochPlan | None = None
        """The plan that the next iteration is expected to have; None if unknown."""
        self.counters: CounterTable
        """The shared memory of iterations; the engine creates and closes it."""
        self._removed_stats = LoadingStats()
        self.n_restarts = 0
        """The number of replaced workers, whether busy or idle."""
        self.may_be_inconsistent = False
        """True if an exception may have left the state of the engine inconsistent."""

    def __len__(self) -> int:
        return len(self._by_slot)

    def __iter__(self) -> Iterator[EpochIteration]:
        return iter(list(self._by_slot.values()))

    def __getitem__(self, slot: int) -> EpochIteration:
        return self._by_slot[slot]

    @property
    def n_live(self) -> int:
        return sum(not each.is_cancelled for each in self._by_slot.values())

    @property
    def n_returning_blocks(self) -> int:
        """The number of blocks that workers are still using for cancelled iterations."""
        each_cancelled = (each for each in self._by_slot.values() if each.is_cancelled)
        return sum(each.schedule.n_in_flight for each in each_cancelled)

    def begin(self, plan: EpochPlan, schedule: Schedule, layout: BlockLayout) -> EpochIteration:
        if not self._free_slots:
            raise InvalidArgument(
                f"{N_SLOTS} iterations over one loader are running, the maximum number; release "
                "iterators that are no longer needed"
            )
        slot = self._free_slots.pop()
        iteration = self._by_slot[slot] = EpochIteration(slot, plan, schedule, layout)
        iteration.next_loop_step = plan.partition.first_step
        self.counters.begin(slot, iteration.timer.began_ns)
        return iteration

    def begin_ahead(self, before: EpochIteration) -> EpochIteration | None:
        """Begin the successor of an iteration; return None if it cannot be begun now."""
        plan, is_busy = before.successor, not before.schedule.is_fully_assigned
        if plan is None or is_busy or not self._free_slots or self.n_live > 1:
            return None
        partition = plan.partition
        schedule = before.schedule.next_iteration(partition.first_step, partition.stop_step)
        self.ahead = iteration = self.begin(plan, schedule, before.layout)
        iteration.is_ahead = True
        return iteration

    def take_over(self, plan: EpochPlan) -> EpochIteration | None:
        """Return the iteration begun ahead if its plan equals `plan`; otherwise, cancel it."""
        iteration, self.ahead = self.ahead, None
        if iteration is None:
            return None
        if iteration.plan != plan:
            self.cancel(iteration, has_workers=True)
            return None
        iteration.timer = iteration.timer.restarted(self.counters.sums(iteration.slot))
        iteration.is_ahead = False
        iteration.schedule.set_backlog([0] * self.counters.n_workers)
        return iteration

    def set_successor(self, iteration: EpochIteration, successor: EpochPlan | None) -> None:
        """Record `iteration` as the latest one, and `successor` as the plan that will follow it.

        If the plan of `iteration` was not expected, no successor is begun ahead.
        """
        if self._latest is not None:
            self._latest.successor = None  # only one iteration is begun ahead
        is_expected = self._expected_plan is None or self._expected_plan == iteration.plan
        self._latest, self._expected_plan = iteration, successor
        iteration.successor = successor if is_expected else None

    def cancel(self, iteration: EpochIteration, *, has_workers: bool) -> None:
        """Record that an iteration is cancelled; a finalizer may call this in any thread.

        `has_workers` is False after `close`, and in a fork of the process that owns the workers.
        """
        if has_workers and not iteration.is_cancelled:
            self.counters.cancel(iteration.slot)  # `take_cancelled` may be called much later
        iteration.timer.end()
        self.newly_cancelled.append(iteration)

    def take_cancelled(self) -> Iterator[EpochIteration]:
        """Set `is_cancelled` of the iterations that `cancel` has recorded; yield each once."""
        while self.newly_cancelled:
            iteration = self.newly_cancelled.popleft()
            if not iteration.is_cancelled:
                iteration.is_cancelled = True
                self.counters.cancel(iteration.slot)
                yield iteration

    def remove(self, iteration: EpochIteration) -> None:
        if not iteration.is_ahead:
            self._removed_stats += self.stats_of(iteration)
        del self._by_slot[iteration.slot]
        if self._latest is iteration:
            self._latest = None
        self._free_slots.append(iteration.slot)

    def restart_iterations(self) -> None:
        """Remove all tasks, because workers and blocks are replaced.

        Iterations that have an iterator will resume at their next step; the others are dropped.
        """
        while self.newly_cancelled:
            self.newly_cancelled.popleft().is_cancelled = True
        for iteration in self:
            iteration.is_cancelled |= not iteration.is_watched
            iteration.schedule = iteration.schedule.restarted()
            iteration.sizes, iteration.skips, iteration.delivered_block = {}, {}, None
            iteration.sent_to.clear()
            if iteration.is_cancelled:
                self.remove(iteration)
        self.ahead = None  # it had no iterator, so it was dropped
        # An exception may have interrupted `begin` after it took a slot.
        self._free_slots = [slot for slot in range(N_SLOTS) if slot not in self._by_slot]

    def stats_of(self, iteration: EpochIteration) -> LoadingStats:
        """Return the figures of an iteration so far; its slot must not have been used again."""
        plan, timer = iteration.plan, iteration.timer
        row_bytes = sum(slot.row_bytes for slot in iteration.layout.fixed)
        words = self.counters.sums(iteration.slot)
        found = timer.stats(plan.partition, iteration.next_loop_step, row_bytes, words)
        return replace(found, n_skipped=iteration.n_skipped)

    def total(self) -> LoadingStats:
        counted = (self.stats_of(each) for each in self if not each.is_ahead)
        found = sum(counted, self._removed_stats)
        return replace(found, n_restarts=self.n_restarts)
