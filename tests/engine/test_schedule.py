"""Every sequence of events that workers, loops and pools can bring about, against a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from shardio._workers.tasks.schedule import DEPTH, ENDLESS, QUICK_DEPTH, Assignment, Schedule


def assign_all(schedule: Schedule) -> Iterator[Assignment]:
    while schedule.n_wanted and not schedule.wants_block:
        yield schedule.assign()


class Passes(RuleBasedStateMachine):
    """One pass, driven at random; the model says where every block is."""

    @initialize(
        first=st.integers(0, 3),
        n_steps=st.integers(0, 12),
        n_workers=st.integers(1, 4),
        depth=st.integers(1, 3),
        n_blocks=st.integers(1, 20),
        is_endless=st.booleans(),
        is_in_order=st.booleans(),
    )
    def start(
        self,
        first: int,
        n_steps: int,
        n_workers: int,
        depth: int,
        n_blocks: int,
        *,
        is_endless: bool,
        is_in_order: bool,
    ) -> None:
        self.next_step, self.last = first, ENDLESS if is_endless else first + n_steps
        self.schedule = Schedule(first, self.last, n_workers, depth)
        self.is_in_order = is_in_order
        self.n_workers, self.base_depth = n_workers, depth
        self.depths, self.lows = [depth] * n_workers, [depth - 1] * n_workers
        self.leads = [0] * n_workers
        self.before = [0] * n_workers  # tasks of the pass before this one
        self.blocks = set(range(100, 100 + n_blocks))
        self.outside = set(self.blocks)  # the pool's, or a batch's that the loop holds
        self.working: dict[int, tuple[int, int]] = {}  # step -> worker, block
        self.ready: dict[int, int] = {}
        self.free: set[int] = set()
        self.lost: dict[int, int] = {}
        self.errors: dict[int, Exception] = {}
        self.assigned_to = first
        self.is_cancelled = False

    @precondition(lambda self: self.outside and not self.is_cancelled)
    @rule(data=st.data())
    def a_block_becomes_free(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.outside)))
        self.outside.remove(block)
        self.free.add(block)
        self.schedule.free(block)

    @rule()
    def a_block_is_made(self) -> None:
        """Add a block, as when a batch outgrows the others or all blocks are held."""
        block = 100 + len(self.blocks)
        self.blocks.add(block)
        self.outside.add(block)

    @precondition(lambda self: not self.is_cancelled)
    @rule()
    def tasks_are_given_out(self) -> None:
        for worker, step, block in assign_all(self.schedule):
            rooms, home = self.rooms(), step % self.n_workers
            if rooms[home] > 0 and rooms[home] >= max(rooms) - self.leads[home]:
                assert worker == home, "each has steps of its own"
            else:
                assert rooms[worker] == max(rooms) > 0
            if self.lost:
                assert step == min(self.lost), "what was lost comes first, in order"
                assert block == self.lost.pop(step)
            else:
                assert step == self.assigned_to, "steps are assigned in order, each once"
                assert step < self.last
                assert block in self.free
                self.assigned_to += 1
                self.free.remove(block)
            self.working[step] = worker, block
        if self.lost or self.free and self.assigned_to < self.last and not self.errors:
            assert max(self.rooms()) <= 0, "what can be given out is given out"

    @rule(data=st.data())
    def the_pass_before_has_tasks(self, data: st.DataObject) -> None:
        """Update the tasks of the pass before, as whenever workers may get more of this one."""
        n_each = st.lists(st.integers(0, 3), min_size=self.n_workers, max_size=self.n_workers)
        self.before = data.draw(n_each)
        self.schedule.set_backlog(self.before)

    def counts(self) -> list[int]:
        workers = [worker for worker, _ in self.working.values()]
        return [workers.count(worker) + self.before[worker] for worker in range(self.n_workers)]

    def rooms(self) -> list[int]:
        return [depth - n for depth, n in zip(self.depths, self.counts(), strict=True)]

    def tasks_of(self, worker: int) -> dict[int, int]:
        """Step to block, in the order in which they were given out: what was lost may be late."""
        return {step: block for step, (who, block) in self.working.items() if who == worker}

    @precondition(lambda self: self.working)
    @rule(data=st.data(), is_done=st.sampled_from([True, True, True, False]))
    def a_worker_answers(self, data: st.DataObject, *, is_done: bool) -> None:
        # A worker answers its own tasks in order; which worker comes first is open.
        workers = sorted({worker for worker, _ in self.working.values()})
        worker = data.draw(st.sampled_from(workers))
        step = next(iter(self.tasks_of(worker)))
        _, block = self.working.pop(step)
        if self.is_cancelled and data.draw(st.booleans()):
            self.schedule.cancel(worker, step)
            self.free.add(block)
        elif is_done:
            is_quick = data.draw(st.booleans())
            self.schedule.complete(worker, step, is_quick=is_quick)
            self.pace(worker, is_quick=is_quick)
            self.ready[step] = block
        else:
            self.errors[step] = ValueError(step)
            self.schedule.fail(worker, step, self.errors[step])
            self.free.add(block)

    def pace(self, worker: int, *, is_quick: bool) -> None:
        is_quick = is_quick and self.base_depth > 1
        self.depths[worker] = QUICK_DEPTH if is_quick else self.base_depth
        self.lows[worker] = QUICK_DEPTH // 2 if is_quick else self.base_depth - 1
        self.leads[worker] = QUICK_DEPTH // 4 if is_quick else 0

    @precondition(lambda self: self.working)
    @rule(data=st.data(), is_final=st.booleans())
    def a_worker_dies(self, data: st.DataObject, *, is_final: bool) -> None:
        """Give up the step that it was at, or have that done again as well."""
        worker = data.draw(st.sampled_from(sorted({who for who, _ in self.working.values()})))
        tasks = self.schedule.tasks_of(worker)
        assert list(tasks.items()) == list(self.tasks_of(worker).items()), "what it works on first"
        first = next(iter(tasks))
        for step, block in tasks.items():
            del self.working[step]
            if self.is_cancelled:
                self.schedule.cancel(worker, step)
                self.free.add(block)
            elif is_final and step == first:
                self.errors[step] = ValueError(step)
                self.schedule.fail(worker, step, self.errors[step])
                self.free.add(block)
            else:
                self.lost[step] = block
        self.schedule.reassign(worker)
        assert self.schedule.tasks_of(worker) == {}

    @precondition(lambda self: self.last == ENDLESS)
    @rule(n_more=st.integers(0, 5))
    def the_end_becomes_known(self, n_more: int) -> None:
        if self.assigned_to:
            with pytest.raises(AssertionError, match="assigned already"):
                self.schedule.end_at(self.assigned_to - 1)
        self.last = self.assigned_to + n_more
        self.schedule.end_at(self.last)

    @precondition(lambda self: not self.is_cancelled)
    @rule()
    def the_loop_asks_for_a_batch(self) -> None:
        assert self.schedule.next_step == self.next_step
        if not self.is_in_order:
            self.the_loop_asks_for_any_batch()
            return
        if self.next_step in self.errors and self.next_step < self.last:
            with pytest.raises(ValueError, match=str(self.next_step)) as caught:
                self.schedule.deliver()
            assert caught.value is self.errors[self.next_step]
            self.last = self.next_step  # raised once; the pass is over
            return
        block = self.schedule.deliver()
        assert block == self.ready.pop(self.next_step, None), "in order, or not at all"
        if block is not None:
            self.outside.add(block)
            self.next_step += 1

    def the_loop_asks_for_any_batch(self) -> None:
        if self.next_step == self.last:
            assert self.schedule.deliver_any() is None, "nothing comes once the pass is over"
            return
        if self.errors and not self.ready:
            with pytest.raises(ValueError) as caught:
                self.schedule.deliver_any()
            assert caught.value in self.errors.values()
            self.last = self.next_step  # raised once; the pass is over
            return
        found = self.schedule.deliver_any()
        if found is None:
            assert not self.ready
            return
        assert found == next(iter(self.ready.items())), "the one that was done first"
        step, block = found
        del self.ready[step]
        self.outside.add(block)
        self.next_step += 1

    @precondition(lambda self: not self.is_cancelled)
    @rule(chance=st.integers(0, 15))
    def the_loop_is_left(self, chance: int) -> None:
        if chance == 15:  # seldom: most of what can happen, happens before
            self.is_cancelled = True
            self.blocks_come_back()

    @precondition(lambda self: self.is_cancelled)
    @rule()
    def blocks_come_back(self) -> None:
        found = self.schedule.release_idle_blocks()
        assert sorted(found) == sorted([*self.free, *self.lost.values(), *self.ready.values()])
        assert self.schedule.release_idle_blocks() == [], "none is given up twice"
        self.outside |= set(found)
        self.free.clear()
        self.lost.clear()
        self.ready.clear()

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        if not hasattr(self, "schedule"):
            return
        places = [*self.outside, *self.free, *self.lost.values(), *self.ready.values()]
        places += [block for _, block in self.working.values()]
        assert sorted(places) == sorted(self.blocks)

    @invariant()
    def the_figures_agree_with_the_model(self) -> None:
        if not hasattr(self, "schedule"):
            return
        schedule = self.schedule
        assert schedule.n_in_flight == len(self.working)
        here = (self.free, self.lost, self.working, self.ready)
        assert schedule.n_circulating == sum(map(len, here))
        assert schedule.is_over == (self.next_step == self.last)
        n_left = len(self.lost) + (0 if self.errors else self.last - self.assigned_to)
        room = sum(max(0, room) for room in self.rooms())
        assert schedule.n_wanted == min(n_left, room)
        lows = zip(self.counts(), self.lows, strict=True)
        assert schedule.has_nearly_idle_worker == any(n <= low for n, low in lows)
        assert schedule.wants_block == (not self.free and not self.lost)
        tasks = [sorted(schedule.tasks_of(worker)) for worker in range(self.n_workers)]
        assert tasks == [
            sorted(step for step, (worker, _) in self.working.items() if worker == n)
            for n in range(self.n_workers)
        ]
        is_fully_assigned = self.assigned_to >= self.last and not (self.lost or self.errors)
        assert schedule.is_over or schedule.is_fully_assigned == is_fully_assigned

    def teardown(self) -> None:
        if not hasattr(self, "schedule"):
            return
        if self.is_cancelled:
            self.end_cancelled()
        else:
            self.end_pass()

    def end_cancelled(self) -> None:
        """Once every task is answered, every block is back."""
        for step, (worker, block) in list(self.working.items()):
            del self.working[step]
            self.schedule.cancel(worker, step)
            self.free.add(block)
        self.blocks_come_back()
        assert self.outside == self.blocks
        assert self.schedule.n_circulating == 0

    def end_pass(self) -> None:
        """From any state a pass comes to its end, or to its first failure: nothing is stuck."""
        if self.last == ENDLESS:
            self.the_end_becomes_known(0)
        while not self.schedule.is_over and not self.has_failed():
            for block in sorted(self.outside):
                self.schedule.free(block)
            self.free |= self.outside
            self.outside.clear()
            self.before = [0] * self.n_workers  # it has come to its end
            self.schedule.set_backlog(self.before)
            self.tasks_are_given_out()
            before = self.next_step
            for step, (worker, block) in sorted(self.working.items()):
                del self.working[step]
                self.schedule.complete(worker, step)
                self.pace(worker, is_quick=False)
                self.ready[step] = block
            self.the_loop_asks_for_a_batch()
            assert self.next_step == before + 1, "every round brings a batch"

    def has_failed(self) -> bool:
        if self.is_in_order:
            return self.next_step in self.errors
        return bool(self.errors) and not self.ready


def test_whatever_happens_every_step_comes_once_in_order_and_no_block_is_lost() -> None:
    run_state_machine_as_test(
        Passes, settings=settings(max_examples=100, stateful_step_count=40, deadline=None)
    )


def schedule_of(n_blocks: int, *arguments: Any, **options: Any) -> Schedule:
    schedule = Schedule(*arguments, **options)
    for block in range(n_blocks):
        schedule.free(block)
    return schedule


def test_the_block_used_last_is_used_next() -> None:
    schedule = schedule_of(3, 0, 9, n_workers=1, depth=1)
    assert list(assign_all(schedule)) == [(0, 0, 2)]
    with pytest.raises(AssertionError, match="nothing can be assigned"):
        schedule.assign()


def test_the_pass_behind_another_finds_workers_as_quick_as_they_are() -> None:
    before = schedule_of(2, 0, 100, n_workers=2)
    assert [worker for worker, _, _ in assign_all(before)] == [0, 1]
    before.complete(0, 0, is_quick=True)
    schedule = before.next_iteration(0, 100)
    for block in range(2, 30):
        schedule.free(block)
    schedule.set_backlog(before.n_tasks)
    given = [worker for worker, _, _ in assign_all(schedule)]
    assert (given.count(0), given.count(1)) == (QUICK_DEPTH, DEPTH - 1)


def test_steps_behind_those_of_a_slow_worker_are_done_meanwhile() -> None:
    """A worker that takes 40 times as long as the other costs no more than its share of blocks."""
    n_blocks, slow_ns = 27, 40
    schedule = schedule_of(n_blocks, 0, 10_000, n_workers=2)
    at_work: dict[int, tuple[int, int]] = {}  # worker -> step, when it is done
    for now in range(20 * slow_ns):
        for worker in (0, 1):
            if worker in at_work and at_work[worker][1] <= now:
                schedule.complete(worker, at_work.pop(worker)[0], is_quick=worker == 1)
        while (delivered := schedule.deliver()) is not None:
            schedule.free(delivered)
        if schedule.has_nearly_idle_worker:
            list(assign_all(schedule))
        for worker, taken in ((0, slow_ns), (1, 1)):
            if worker not in at_work and (tasks := schedule.tasks_of(worker)):
                at_work[worker] = next(iter(tasks)), now + taken
    assert schedule.next_step >= 20 * n_blocks // 3
