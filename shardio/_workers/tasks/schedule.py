"""The schedule of steps: assigned, done, delivered, free. A pure state machine driven by events.

A Schedule belongs to one iteration of an epoch. It knows steps, workers and blocks only by number;
`dispatcher` and `task_pool` carry out its decisions. Steps are assigned in order, and
delivered in order or, by `deliver_any`, as they become ready. Each block is in one state: free, in
flight (with its step and worker), lost (with its step, which must be done again), ready, or
delivered.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Final

DEPTH = 2
"""The number of tasks per worker: the current one and the next, so that it never has to wait."""
QUICK_DEPTH = 8
"""The number of tasks of a worker whose time is dominated by messages.

With DEPTH for every worker, the main process takes 20 us of CPU time for a batch of 32 KiB, not 11.
"""
QUICK_NS = 500_000
"""A task that takes less is quick; a worker holds back quick answers for this long."""
ENDLESS: Final = sys.maxsize
"""The last step of a pass whose end is not known yet; `end_at` sets it later."""


Assignment = tuple[int, int, int]
"""A worker, the step assigned to it, and the block for the step."""


class Schedule:
    """The bookkeeping of one pass over the steps `first` to `last` - 1.

    Args:
        first, last: the steps to deliver; `last` is ENDLESS if it is unknown.
        n_workers: the number of workers, which are numbered from 0.
        depth: the number of tasks that a worker may have at a time, unless it is quick.

    The load of a worker is its number of tasks, plus `_full` minus the number that it may have.
    Thus a worker is full at `_full`, and all workers are comparable.
    """

    def __init__(self, first: int, last: int, n_workers: int, depth: int = DEPTH) -> None:
        self.next_step = first
        """The step that is delivered next; with `deliver_any`, the number of delivered steps."""
        self._next_assigned, self._last = first, last
        self._base_depth, self._full = depth, max(depth, QUICK_DEPTH)
        self._is_quick = [False] * n_workers
        self._tasks: list[dict[int, int]] = [{} for _ in range(n_workers)]  # worker: step -> block
        self._loads = [self._full - depth] * n_workers
        self._lows, self._leads = [self._full - 1] * n_workers, [0] * n_workers
        self._n_low = n_workers
        self._ready: dict[int, int] = {}
        self._failed: dict[int, BaseException] = {}
        self._lost: dict[int, int] = {}
        self._free: deque[int] = deque()
        self.n_in_flight = 0
        """The number of assigned tasks without an answer."""
        self.n_circulating = 0
        """The number of blocks that are free, in flight, lost or ready."""

    @property
    def is_over(self) -> bool:
        """True if every step has been delivered."""
        return self.next_step >= self._last

    @property
    def is_given_out(self) -> bool:
        """True if no step is left to assign and none has failed or was lost."""
        return self._next_assigned >= self._last and not (self._lost or self._failed)

    @property
    def n_wanted(self) -> int:
        """The number of steps that can be assigned to workers with room."""
        # After a failure, later steps are not delivered.
        n_new = 0 if self._failed else max(0, self._last - self._next_assigned)
        n_left = len(self._lost) + n_new
        full = self._full
        return min(n_left, sum([full - n for n in self._loads if n < full])) if n_left else 0

    @property
    def is_low(self) -> bool:
        """True if a worker may soon be idle. Otherwise, tasks should be sent later.

        Several tasks then share a message, which suits quick workers.
        """
        return self._n_low > 0

    @property
    def wants_block(self) -> bool:
        """True if an assignable step lacks a block."""
        return not (self._free or self._lost)

    def renewed(self) -> Schedule:
        """Return a schedule of the undelivered steps, with nothing assigned."""
        return Schedule(self.next_step, self._last, len(self._tasks), self._base_depth)

    def free(self, block: int) -> None:
        """Record that a block may be filled again."""
        # Last in, first out, as the block used last is still in the CPU cache.
        self._free.append(block)
        self.n_circulating += 1

    def assign(self) -> Assignment:
        """Assign the next step to a worker with few tasks; there must be a step to assign.

        Step `s` goes to worker `s % n_workers`, unless that worker has fallen behind.
        """
        loads = self._loads
        least = min(loads)
        if least >= self._full or not (self._free or self._lost):
            raise AssertionError("nothing can be assigned")
        if self._lost:  # lost steps first: the loop may be waiting for one
            step = min(self._lost)
            block = self._lost.pop(step)
        else:
            step, block = self._next_assigned, self._free.pop()
            self._next_assigned = step + 1
        worker = step % len(loads)
        load = loads[worker]
        if load > least + self._leads[worker] or load >= self._full:
            worker, load = loads.index(least), least
        self._tasks[worker][step] = block
        loads[worker] = load + 1
        self._n_low -= load == self._lows[worker]
        self.n_in_flight += 1
        return worker, step, block

    def done(self, worker: int, step: int, *, is_quick: bool = False) -> None:
        """Record that a worker has filled the block of a step, and whether it was quick."""
        self._ready[step] = self._tasks[worker].pop(step)  # `_answered`, inlined
        self.n_in_flight -= 1
        self._loads[worker] = load = self._loads[worker] - 1
        self._n_low += load == self._lows[worker]
        if is_quick is not self._is_quick[worker]:
            self._change_depth(worker, is_quick=is_quick)

    def _change_depth(self, worker: int, *, is_quick: bool) -> None:
        """Record that a worker has become quick or slow.

        A slow worker with as many tasks as a quick one would delay all steps after its own.
        """
        # With a depth of 1, a worker takes one task at a time even if it is quick.
        if self._base_depth == 1:
            return
        self._is_quick[worker] = is_quick
        full, depth = self._full, QUICK_DEPTH if is_quick else self._base_depth
        self._update_load(worker, depth)
        self._lows[worker] = full - depth // 2 if is_quick else full - 1
        self._leads[worker] = depth // 4 if is_quick else 0
        self._count_low()

    def _update_load(self, worker: int, depth: int) -> None:
        self._loads[worker] = self._full - depth + len(self._tasks[worker])

    def _count_low(self) -> None:
        self._n_low = sum(n <= low for n, low in zip(self._loads, self._lows, strict=True))

    def failed(self, worker: int, step: int, error: BaseException) -> None:
        """Record that a worker could not do a step; `deliver` raises the error in its place."""
        self._free.append(self._answered(worker, step))
        self._failed[step] = error

    def lost(self, worker: int) -> None:
        """Put the tasks of an exited worker back to be assigned again, each with its block."""
        for step in self.tasks_of(worker):
            self._lost[step] = self._answered(worker, step)

    def cancelled(self, worker: int, step: int) -> None:
        """Record that a worker has dropped a step of this cancelled pass."""
        self._free.append(self._answered(worker, step))

    def _answered(self, worker: int, step: int) -> int:
        block = self._tasks[worker].pop(step)
        self.n_in_flight -= 1
        self._loads[worker] = load = self._loads[worker] - 1
        self._n_low += load == self._lows[worker]
        return block

    def tasks_of(self, worker: int) -> dict[int, int]:
        """Return the unanswered tasks of a worker, step to block, the current task first."""
        return dict(self._tasks[worker])

    def deliver(self) -> int | None:
        """Return the block of the next step if it is ready; the caller has it until `free`.

        Raises:
            BaseException: the error recorded by `failed` for this step, once; the pass is then
                over.
        """
        block = self._ready.pop(self.next_step, None)
        if block is not None:
            self.next_step += 1
            self.n_circulating -= 1
        elif self.next_step in self._failed:
            self._last = self.next_step
            # Not bound to a name: the traceback refers to the loop, and thus would keep the loader
            # alive.
            raise self._failed.pop(self.next_step)
        return block

    def deliver_any(self) -> tuple[int, int] | None:
        """Return the step that was done first, and its block, if any is ready.

        Must not be used together with `deliver`. Returns None once the pass is over, even if
        further steps are done.

        Raises:
            BaseException: the error recorded by `failed` for a step, once nothing is ready; the
                pass is then over.
        """
        if self.is_over:
            return None
        for step in self._ready:
            block = self._ready.pop(step)
            self.next_step += 1
            self.n_circulating -= 1
            return step, block
        for step in self._failed:
            self._last = self.next_step
            raise self._failed.pop(step)  # not bound to a name, as in `deliver`
        return None

    def end_at(self, last: int) -> None:
        """Set the end of the pass, once known; no step from `last` on may have been assigned."""
        if last < self._next_assigned:
            raise AssertionError(f"step {self._next_assigned - 1} has been assigned already")
        self._last = last

    def release_idle_blocks(self) -> list[int]:
        """Release and return every block that no worker has, for a cancelled pass."""
        blocks = [*self._free, *self._lost.values(), *self._ready.values()]
        self._free.clear()
        self._lost.clear()
        self._ready.clear()
        self.n_circulating -= len(blocks)
        return blocks
