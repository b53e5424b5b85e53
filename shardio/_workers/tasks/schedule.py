"""What is assigned, done, delivered and free: a pure state machine, driven by events.

One Schedule belongs to one pass over an epoch. It knows steps, workers and blocks by number only;
`engine.py` does what it decides. Steps are assigned in order, and delivered in order or, by
`deliver_any`, as they get ready; a block belongs to exactly one of: free, in flight (with its step
and worker), lost (with its step, which is to be done again), ready, delivered.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Final

DEPTH = 2
"""Tasks a worker may have: the one it works on, and the next, so that it never waits for main."""
QUICK_DEPTH = 8
"""Tasks a worker may have that does them so quickly that messages are what takes time."""
QUICK_NS = 500_000
"""A task that takes less is quick; a worker holds quick answers back until this has passed."""
ENDLESS: Final = sys.maxsize
"""The last step of a pass whose end is not known yet: `end_at` tells."""


Assignment = tuple[int, int, int]
"""A worker, the step it is to do, and the block for it."""


class Schedule:
    """The bookkeeping of one pass from step `first` to `last` - 1.

    Args:
        first, last: the steps to deliver; ENDLESS where it is not known how many.
        n_workers: numbers 0..n_workers-1.
        depth: how many tasks a worker may have at a time, unless it is quick.

    The load of a worker is how many tasks it has, and as many more as it may have less than
    `_full`: for one that is not quick. So all of them are compared by one number.
    """

    def __init__(self, first: int, last: int, n_workers: int, depth: int = DEPTH) -> None:
        self.next_step = first
        """The step that is delivered next; as many have been where any may come first."""
        self._next_assigned, self._last = first, last
        self._base_depth, self._full = depth, max(depth, QUICK_DEPTH)
        self._is_quick = [False] * n_workers
        self._before = [0] * n_workers  # tasks of the pass before this one
        self._tasks: list[dict[int, int]] = [{} for _ in range(n_workers)]  # worker: step -> block
        self._loads = [self._full - depth] * n_workers
        self._lows, self._leads = [self._full - 1] * n_workers, [0] * n_workers
        self._n_low = n_workers
        self._ready: dict[int, int] = {}
        self._failed: dict[int, BaseException] = {}
        self._lost: dict[int, int] = {}
        self._free: deque[int] = deque()
        self.n_in_flight = 0
        """How many tasks have been assigned and not answered."""
        self.n_circulating = 0
        """How many blocks are free, in flight, lost or ready."""

    @property
    def is_over(self) -> bool:
        """Whether every step has been delivered."""
        return self.next_step >= self._last

    @property
    def is_given_out(self) -> bool:
        """Whether no step is left to assign, and none has failed or been lost."""
        return self._next_assigned >= self._last and not (self._lost or self._failed)

    @property
    def n_tasks(self) -> list[int]:
        """How many tasks each worker has."""
        return [len(tasks) for tasks in self._tasks]

    @property
    def n_wanted(self) -> int:
        """How many steps there are to assign to workers with room for them."""
        # After a failure nothing new behind it will be delivered.
        n_new = 0 if self._failed else max(0, self._last - self._next_assigned)
        n_left = len(self._lost) + n_new
        full = self._full
        return min(n_left, sum([full - n for n in self._loads if n < full])) if n_left else 0

    @property
    def is_low(self) -> bool:
        """Whether a worker may soon have nothing to do; else tasks are better given out later.

        Then several of them go in one message, as those of quick workers should.
        """
        return self._n_low > 0

    @property
    def wants_block(self) -> bool:
        """Whether a task that is wanted has no block yet."""
        return not (self._free or self._lost)

    def renewed(self) -> Schedule:
        """A schedule of what is still to be delivered, of which nothing has been assigned."""
        return Schedule(self.next_step, self._last, len(self._tasks), self._base_depth)

    def followed(self, first: int, last: int) -> Schedule:
        """A schedule of the pass behind this one, with workers as quick as they are now."""
        found = Schedule(first, last, len(self._tasks), self._base_depth)
        for worker, is_quick in enumerate(self._is_quick):
            if is_quick:
                found._change_depth(worker, is_quick=True)
        return found

    def stand_behind(self, n_tasks: list[int]) -> None:
        """Leave the workers the tasks that they have of the pass before: so many less of this."""
        self._before = n_tasks
        for worker, is_quick in enumerate(self._is_quick):
            self._weigh(worker, QUICK_DEPTH if is_quick else self._base_depth)
        self._count_low()

    def free(self, block: int) -> None:
        """A block may be filled again."""
        # Last in, first out: the block that was used last is the one still in the cache.
        self._free.append(block)
        self.n_circulating += 1

    def assign(self) -> Assignment:
        """Give the next step to a worker with few tasks; there must be a task to give.

        Each worker has steps of its own, one of as many as there are workers, unless it is behind.
        """
        loads = self._loads
        least = min(loads)
        if least >= self._full or not (self._free or self._lost):
            raise AssertionError("nothing can be assigned")
        if self._lost:  # first: the loop may be waiting for it
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
        """A worker has filled the block of a step, and was quick or not."""
        self._ready[step] = self._tasks[worker].pop(step)  # `_answered`, without the call
        self.n_in_flight -= 1
        self._loads[worker] = load = self._loads[worker] - 1
        self._n_low += load == self._lows[worker]
        if is_quick is not self._is_quick[worker]:
            self._change_depth(worker, is_quick=is_quick)

    def _change_depth(self, worker: int, *, is_quick: bool) -> None:
        """A worker has become quick, or slow; the others are what they were.

        A slow one with as many tasks as a quick one would hold up all that come behind them.
        """
        if self._base_depth == 1:  # who takes one task at a time takes no more for being quick
            return
        self._is_quick[worker] = is_quick
        full, depth = self._full, QUICK_DEPTH if is_quick else self._base_depth
        self._weigh(worker, depth)
        self._lows[worker] = full - depth // 2 if is_quick else full - 1
        self._leads[worker] = depth // 4 if is_quick else 0
        self._count_low()

    def _weigh(self, worker: int, depth: int) -> None:
        n_tasks = len(self._tasks[worker]) + self._before[worker]
        self._loads[worker] = self._full - depth + n_tasks

    def _count_low(self) -> None:
        self._n_low = sum(n <= low for n, low in zip(self._loads, self._lows, strict=True))

    def failed(self, worker: int, step: int, error: BaseException) -> None:
        """A worker could not fill the block of a step; the error is raised when its turn comes."""
        self._free.append(self._answered(worker, step))
        self._failed[step] = error

    def lost(self, worker: int) -> None:
        """A worker has died: its tasks will be assigned again, each with the block that it had."""
        for step in self.tasks_of(worker):
            self._lost[step] = self._answered(worker, step)

    def cancelled(self, worker: int, step: int) -> None:
        """A worker has dropped a step of this pass, which has been cancelled."""
        self._free.append(self._answered(worker, step))

    def _answered(self, worker: int, step: int) -> int:
        block = self._tasks[worker].pop(step)
        self.n_in_flight -= 1
        self._loads[worker] = load = self._loads[worker] - 1
        self._n_low += load == self._lows[worker]
        return block

    def tasks_of(self, worker: int) -> dict[int, int]:
        """The unanswered tasks of a worker: step to block, the one that it works on first."""
        return dict(self._tasks[worker])

    def deliver(self) -> int | None:
        """The block of the next step, if it is ready; the caller has it until it is freed.

        Raises:
            BaseException: what `failed` was given for this step, once; the pass is then over.
        """
        block = self._ready.pop(self.next_step, None)
        if block is not None:
            self.next_step += 1
            self.n_circulating -= 1
        elif self.next_step in self._failed:
            self._last = self.next_step
            # ReplyBuffer nowhere, not even under a name: its traceback leads to the loop, and so to the
            # loader, which would live on with it.
            raise self._failed.pop(self.next_step)
        return block

    def deliver_any(self) -> tuple[int, int] | None:
        """A step that is ready, and its block: the one that was done first; not beside `deliver`.

        There is none any more once the pass is over, whatever else is answered then.

        Raises:
            BaseException: what `failed` was given for a step, once nothing is ready; the pass is
                then over.
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
            raise self._failed.pop(step)  # kept nowhere, as in `deliver`
        return None

    def end_at(self, last: int) -> None:
        """The end of the pass has become known; no step from `last` on may have been assigned."""
        if last < self._next_assigned:
            raise AssertionError(f"step {self._next_assigned - 1} has been assigned already")
        self._last = last

    def surrender(self) -> list[int]:
        """Give up every block that no worker has: for when the pass is cancelled."""
        blocks = [*self._free, *self._lost.values(), *self._ready.values()]
        self._free.clear()
        self._lost.clear()
        self._ready.clear()
        self.n_circulating -= len(blocks)
        return blocks
