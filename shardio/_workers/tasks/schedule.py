"""The schedule of the steps of one iteration: a state machine without side effects.

A step is one batch or item; a worker writes the result to a block. Steps, workers and blocks are
represented by their indices. The schedule assigns steps, in order, to workers and blocks; the owner
of the schedule sends each worker its tasks, the steps assigned to it. `deliver` delivers steps in
order, `deliver_any` as they become ready.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Final

DEPTH = 2
"""The number of tasks per worker: the current and the next, so that workers need not wait."""
QUICK_DEPTH = 8
"""The number of tasks of a quick worker, so that several tasks share a message.

For a batch of 32 KiB, the main process then takes 11 µs of CPU time instead of 20 µs.
"""
QUICK_NS = 500_000
"""The duration below which a task is quick; its answer may wait this long to share a message."""
ENDLESS: Final = sys.maxsize
"""The value of `last` for an iteration whose end is not known yet; `end_at` sets the end."""


Assignment = tuple[int, int, int]
"""A worker, the step assigned to it, and the block for the step."""


class Schedule:
    """The bookkeeping of one iteration over the steps in `range(first, last)`.

    A worker is quick if its last task was (see QUICK_NS), and then has up to QUICK_DEPTH tasks;
    other workers have up to `depth`. The load of a worker is `_full` minus the number of tasks for
    which it has room. Thus every worker is full at the same load.
    """

    def __init__(self, first: int, last: int, n_workers: int, depth: int = DEPTH) -> None:
        # The step to deliver next; with `deliver_any`, the number of delivered steps.
        self.next_step = first
        self._next_assigned, self._last = first, last
        self._base_depth, self._full = depth, max(depth, QUICK_DEPTH)
        self._is_quick = [False] * n_workers
        self._n_previous_tasks = [0] * n_workers  # each worker's tasks of the previous iteration
        self._tasks: list[dict[int, int]] = [{} for _ in range(n_workers)]  # worker: step -> block
        self._loads = [self._full - depth] * n_workers
        # Worker i is nearly idle at a load of up to `_nearly_idle_loads[i]`. A step of worker i
        # goes to another worker if the load of worker i exceeds the least load by more than
        # `_max_leads[i]`.
        self._nearly_idle_loads, self._max_leads = [self._full - 1] * n_workers, [0] * n_workers
        self._n_nearly_idle = n_workers
        self._ready: dict[int, int] = {}
        self._failed: dict[int, BaseException] = {}
        self._lost: dict[int, int] = {}  # the steps of workers that have exited: step -> block
        self._free: deque[int] = deque()
        self.n_in_flight = 0  # assigned tasks without an answer
        self.n_circulating = 0  # blocks that are free, in flight, lost or ready

    @property
    def is_over(self) -> bool:
        """True if every step was delivered, or the error of a step was raised."""
        return self.next_step >= self._last

    @property
    def is_fully_assigned(self) -> bool:
        """True if every step is assigned, and none has failed or is lost."""
        return self._next_assigned >= self._last and not (self._lost or self._failed)

    @property
    def n_tasks(self) -> list[int]:
        return [len(tasks) for tasks in self._tasks]

    @property
    def n_wanted(self) -> int:
        """The number of steps that can be assigned to workers with room."""
        # Assign no new steps after a failure, because later steps are not delivered.
        n_new = 0 if self._failed else max(0, self._last - self._next_assigned)
        n_left = len(self._lost) + n_new
        full = self._full
        return min(n_left, sum([full - n for n in self._loads if n < full])) if n_left else 0

    @property
    def has_nearly_idle_worker(self) -> bool:
        """True if a worker may soon be idle; if not, tasks may wait and share a message."""
        return self._n_nearly_idle > 0

    @property
    def wants_block(self) -> bool:
        """True if a step can be assigned only after `free` has added a block."""
        return not (self._free or self._lost)

    def restarted(self) -> Schedule:
        """Return a schedule of the steps that are not delivered yet; none of them is assigned."""
        return Schedule(self.next_step, self._last, len(self._tasks), self._base_depth)

    def next_iteration(self, first: int, last: int) -> Schedule:
        """Return a schedule for the next iteration, in which the same workers count as quick."""
        found = Schedule(first, last, len(self._tasks), self._base_depth)
        for worker, is_quick in enumerate(self._is_quick):
            if is_quick:
                found._change_depth(worker, is_quick=True)
        return found

    def set_backlog(self, n_tasks: list[int]) -> None:
        """Add to the load of each worker its unfinished tasks of the previous iteration."""
        self._n_previous_tasks = n_tasks
        for worker, is_quick in enumerate(self._is_quick):
            self._update_load(worker, QUICK_DEPTH if is_quick else self._base_depth)
        self._count_nearly_idle()

    def free(self, block: int) -> None:
        # Last in, first out, because the block used last is still in the CPU cache.
        self._free.append(block)
        self.n_circulating += 1

    def assign(self) -> Assignment:
        """Assign the next step to a worker; there must be a step, a block and a worker with room.

        Step `s` goes to worker `s % n_workers`, unless that worker has fallen behind.
        """
        loads = self._loads
        least = min(loads)
        if least >= self._full or not (self._free or self._lost):
            raise AssertionError("nothing can be assigned")
        if self._lost:  # lost steps come first, because the loop may be waiting for one of them
            step = min(self._lost)
            block = self._lost.pop(step)
        else:
            step, block = self._next_assigned, self._free.pop()
            self._next_assigned = step + 1
        worker = step % len(loads)
        load = loads[worker]
        if load > least + self._max_leads[worker] or load >= self._full:
            worker, load = loads.index(least), least
        self._tasks[worker][step] = block
        loads[worker] = load + 1
        self._n_nearly_idle -= load == self._nearly_idle_loads[worker]
        self.n_in_flight += 1
        return worker, step, block

    def complete(self, worker: int, step: int, *, is_quick: bool = False) -> None:
        """Record that a worker has filled the block of a step, and whether the task was quick."""
        self._ready[step] = self._tasks[worker].pop(step)  # `_answered`, inlined for speed
        self.n_in_flight -= 1
        self._loads[worker] = load = self._loads[worker] - 1
        self._n_nearly_idle += load == self._nearly_idle_loads[worker]
        if is_quick is not self._is_quick[worker]:
            self._change_depth(worker, is_quick=is_quick)

    def _change_depth(self, worker: int, *, is_quick: bool) -> None:
        if self._base_depth == 1:  # one task at a time, even for a quick worker
            return
        self._is_quick[worker] = is_quick
        full, depth = self._full, QUICK_DEPTH if is_quick else self._base_depth
        self._update_load(worker, depth)
        self._nearly_idle_loads[worker] = full - depth // 2 if is_quick else full - 1
        self._max_leads[worker] = depth // 4 if is_quick else 0
        self._count_nearly_idle()

    def _update_load(self, worker: int, depth: int) -> None:
        n_tasks = len(self._tasks[worker]) + self._n_previous_tasks[worker]
        self._loads[worker] = self._full - depth + n_tasks

    def _count_nearly_idle(self) -> None:
        self._n_nearly_idle = sum(
            n <= low for n, low in zip(self._loads, self._nearly_idle_loads, strict=True)
        )

    def fail(self, worker: int, step: int, error: BaseException) -> None:
        """Record that a step failed; `deliver` raises the error in place of the step's block."""
        self._free.append(self._answered(worker, step))
        self._failed[step] = error

    def reassign(self, worker: int) -> None:
        """Record that a worker has exited: assign its steps again, with the same blocks."""
        for step in self.tasks_of(worker):
            self._lost[step] = self._answered(worker, step)

    def cancel(self, worker: int, step: int) -> None:
        """Record that a worker has dropped a step, because the iteration was cancelled."""
        self._free.append(self._answered(worker, step))

    def _answered(self, worker: int, step: int) -> int:
        block = self._tasks[worker].pop(step)
        self.n_in_flight -= 1
        self._loads[worker] = load = self._loads[worker] - 1
        self._n_nearly_idle += load == self._nearly_idle_loads[worker]
        return block

    def tasks_of(self, worker: int) -> dict[int, int]:
        """Return the unanswered tasks of a worker as {step: block}, the current task first."""
        return dict(self._tasks[worker])

    def deliver(self) -> int | None:
        """Return the block of the next step, or None; the caller passes the block to `free` later.

        If the step has failed, raise its error once; the iteration is then over.
        """
        block = self._ready.pop(self.next_step, None)
        if block is not None:
            self.next_step += 1
            self.n_circulating -= 1
        elif self.next_step in self._failed:
            self._last = self.next_step
            # Do not bind the error to a name. The traceback of the error refers to this frame, and
            # thus to the loop: a cycle of references would keep the loader alive.
            raise self._failed.pop(self.next_step)
        return block

    def deliver_any(self) -> tuple[int, int] | None:
        """Return the first step to become ready, and its block, or None.

        One iteration must not use both this method and `deliver`.

        If no step is ready and one has failed, raise its error; the iteration is then over.
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
        """Set the end of an endless iteration; only steps before `last` may have been assigned."""
        if last < self._next_assigned:
            raise AssertionError(f"step {self._next_assigned - 1} has been assigned already")
        self._last = last

    def release_idle_blocks(self) -> list[int]:
        """Remove and return all blocks that no worker has, after the iteration was cancelled."""
        blocks = [*self._free, *self._lost.values(), *self._ready.values()]
        self._free.clear()
        self._lost.clear()
        self._ready.clear()
        self.n_circulating -= len(blocks)
        return blocks
