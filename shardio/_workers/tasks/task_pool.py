"""A pool that calls one function in worker processes for item after item: the main process's side.

Large values travel in blocks of shared memory. A step is the index of an item.

        main                                                          worker
  A  put ── Schedule.assign ── BLOCK (once each), CALL: step, block ▶ the function
  B  wait ◀───────────── small value, or error, or bytes in block ─── `values`: into the block
  C  take ── lease ─▶ value, whose arrays are views of the block
  D  last view gone ─▶ the block is free for A
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from textwrap import indent
from typing import Any, Final

from shardio._base.classes import Closing
from shardio._base.statistics import ItemStats
from shardio._workers.processes.blocks import Block, Bytes
from shardio._workers.processes.limits import default_budget
from shardio._workers.processes.linux import Finalizer, translate_open_file_errors
from shardio._workers.processes.serialization import pickled, short_repr, text_of, unpack_failure
from shardio._workers.processes.stack_dumps import StepFiles, timeout_error
from shardio._workers.processes.worker_main import HEADER_BYTES, Start, pack_message, unpack_message
from shardio._workers.processes.worker_pool import (
    MAX_CRASHES,
    CrashLoop,
    Failed,
    Message,
    WorkerExit,
    WorkerPool,
)
from shardio._workers.tasks.calls import (
    HEADER,
    CallOutcome,
    CallRequest,
    ErrorBudget,
    answer_calls,
    pack_call,
)
from shardio._workers.tasks.schedule import DEPTH, ENDLESS, QUICK_NS, Schedule
from shardio._workers.tasks.values import ValueBlocks, pack_value, read_value
from shardio.errors import BatchTimeout, TransformError, WorkerDied


class PendingCall:
    """The state of a call: `request` is its pickled argument, and messages show `item`."""

    def __init__(self, step: int, item: Any, request: bytes) -> None:
        self.step, self.item, self.request = step, item, request
        self.block: Block | None = None  # borrowed from the pool's `ValueBlocks`
        self.n_bytes, self.n_crashes = 0, 0
        self.memory: memoryview | None = None  # the value, if it came with the answer
        self.error: BaseException | None = None  # the reason why the item is skipped
        self.worker: int | None = None
        self.is_begun = False  # True if the item was sent to its worker
        self.is_suspended = False  # True if a generator waits until more results are requested
        self.n_received = 0  # the number of results of the generator that have arrived

    @property
    def description(self) -> str:
        return f"item {self.step} ({short_repr(self.item)})"

    def split(self, n_results: int) -> PendingCall:
        """Return a new PendingCall for the arrived value, which is n_results of a generator."""
        chunk = PendingCall(self.step, self.item, b"")
        chunk.block, chunk.n_bytes, chunk.memory = self.block, self.n_bytes, self.memory
        self.block = self.memory = None
        self.n_received += n_results
        self.is_suspended = True
        return chunk

    def release_block(self, blocks: ValueBlocks) -> None:
        if self.block is not None:
            blocks.give_back(self.block)
            self.block = None

    def value(self, blocks: ValueBlocks, name: str, *, is_last: bool) -> Any:
        """Return the value, whose arrays lease the block; `is_last` means that no call follows."""
        memory: Bytes | memoryview = memoryview(b"") if self.memory is None else self.memory
        if self.block is not None:
            block, self.block = self.block, None
            memory = blocks.hand_over(block, self.n_bytes, is_spare=is_last)
        try:
            return read_value(memory)
        except Exception as error:
            raise TransformError(
                f"the result of {name} for {self.description} cannot be unpickled in this process: "
                f"{type(error).__name__}: {text_of(error)}"
            ) from error


_PRELOAD: Final = ("numpy.random", "shardio._workers.tasks.calls")


class TaskPool(Closing):
    """A pool of worker processes that each call `function` for items; `close` ends the processes.

    The pool has no thread: its owner puts items while there is room, takes values, and waits
    otherwise, in one thread at a time. A pool that is garbage-collected is closed. The arrays of
    taken values stay valid as long as the caller refers to them.

    Args:
        function: a function of an item, pickled once. If it returns `ResultChunks`, each chunk is a
            separate value; see `has_more` and `resume`.
        max_items: the maximum number of items in the pool, from `put` to the last `take`; by
            default two per worker, plus two.
        depth: the number of items that a worker has at a time. A quick worker (see `schedule`) has
            QUICK_DEPTH items, except if `depth` is 1.
        in_order: True to take values in the order of their items; False, as they become ready.
        memory_bytes: the budget for the blocks of all values, and the limit for one value; by
            default half of the available memory.
        max_skips: the number of failing items that may be skipped; None to raise the first failure.
        on_crash: a function `f(part, exit)` that returns the value of an item on which a worker has
            crashed; `part` is the index from `note_part`, or None. By default, the item is tried
            again.
        held_fds: descriptors that workers keep open, such as the descriptor of a lock.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        n_workers: int,
        *,
        max_items: int | None = None,
        depth: int = DEPTH,
        in_order: bool = True,
        memory_bytes: int | None = None,
        max_skips: int | None = None,
        start_method: Start = "zygote",
        preload: Sequence[str] = (),
        name: str = "the function",
        on_crash: Callable[[int | None, WorkerExit], Any] | None = None,
        held_fds: Sequence[int] = (),
    ) -> None:
        self._name, self._in_order, self._n_workers = name, in_order, n_workers
        self._max_items = DEPTH * n_workers + 2 if max_items is None else max_items
        self._on_crash = on_crash
        budget = default_budget() if memory_bytes is None else memory_bytes
        self.error_budget = ErrorBudget(max_skips)  # the owner may record further skipped items
        self._schedule = Schedule(0, ENDLESS, n_workers, depth)
        self._calls: dict[int, PendingCall] = {}
        self._chunks: deque[PendingCall] = deque()  # chunks of generators that have more results
        self._to_resume: deque[tuple[int, int]] = deque()  # (worker, step) of generators to resume
        self.n_put = self._n_skipped = self._n_bytes = self._calling_ns = 0
        self._n_restarts, self._crash_loop = 0, CrashLoop(n_workers)
        self._failure_texts: dict[int, str] = {}
        self._has_ended = False
        target = partial(answer_calls, function, budget, name)
        with ExitStack() as resources, translate_open_file_errors():
            self._blocks = resources.enter_context(ValueBlocks(n_workers + 1, budget))
            self._step_files = resources.enter_context(StepFiles())
            fds = [self._step_files.open(n_workers), *held_fds]
            modules = [*_PRELOAD, *preload]
            pool = WorkerPool(n_workers, target, fds=fds, preload=modules, start=start_method)
            self._pool = resources.enter_context(pool)
            self._end = Finalizer(self, resources.pop_all().close)
        for worker in range(n_workers):
            self._send_hello(worker)

    def _send_hello(self, worker: int) -> None:
        self._pool.send(worker, pack_call(CallRequest.HELLO), [self._step_files.stacks[worker]])

    @property
    def has_room(self) -> bool:
        n_under_way = self.n_put - self._schedule.next_step
        return not self._has_ended and n_under_way < self._max_items

    @property
    def is_over(self) -> bool:
        """True if all items were taken and no more will be put, or if an error was raised."""
        return self._schedule.is_over

    @property
    def stats(self) -> ItemStats:
        return ItemStats(
            n_put=self.n_put,
            n_taken=self._schedule.next_step - self._n_skipped,
            n_skipped=len(self.error_budget.skipped),
            n_restarts=self._n_restarts,
            n_copies=self._blocks.n_copies,
            n_bytes=self._n_bytes,
            calling_s=self._calling_ns / 1e9,
        )

    def put(self, request: Any, item: Any = None) -> int:
        """Queue a call of the function with `request`; return the item's index, from 0 up.

        Messages show `item` or, if it is None, `request`. Raises InvalidArgument if `request`
        cannot be pickled.
        """
        if not self.has_room:
            raise AssertionError("there is no room for another item")
        packed_request = pickled(request, "let the function create those from something simpler")
        named = request if item is None else item
        self._calls[self.n_put] = PendingCall(self.n_put, named, packed_request)
        self.n_put += 1
        self._schedule.free(0)  # a place holder: the item gets an actual block when it is sent
        self._send_waiting()
        return self.n_put - 1

    def end(self) -> None:
        """Declare that no more items will be put. Idempotent."""
        if not self._has_ended:
            self._has_ended = True
            if not self.is_over:
                self._schedule.end_at(self.n_put)

    def take(self) -> tuple[int, Any] | None:
        """Return the index and value of a finished item, or None, without waiting.

        Raise the error of an item that may not be skipped (after two crashes on it, WorkerDied);
        the error or its note names the item. The pool has then ended.
        """
        self._send_waiting()
        if self._chunks:
            chunk = self._chunks.popleft()
            return chunk.step, chunk.value(self._blocks, self._name, is_last=False)
        while (step := self._delivered()) is not None:
            call = self._calls.pop(step)
            if call.error is None:
                is_last = self._schedule.is_fully_assigned
                return step, call.value(self._blocks, self._name, is_last=is_last)
            self._n_skipped += 1
            self.error_budget.skip(step, call.item, call.error)
        return None

    def has_more(self, step: int) -> bool:
        """Return True if further values of the item will follow those that were taken."""
        return step in self._calls

    def resume(self, step: int) -> None:
        """Request the next value of an item for which `has_more` is True."""
        call = self._calls[step]
        call.is_suspended = False
        if call.worker is not None:  # if the worker has exited, another worker gets the item
            self._to_resume.append((call.worker, step))
            self._send_waiting()

    def _delivered(self) -> int | None:
        schedule = self._schedule
        if self._in_order:
            step = schedule.next_step
            return None if schedule.deliver() is None else step
        found = schedule.deliver_any()
        return None if found is None else found[0]

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until a value may be ready, the timeout has passed, or `nudge` is called."""
        self._send_waiting()
        for event in self._pool.wait(timeout_s):
            if isinstance(event, Message):
                self._crash_loop.n_crashes = 0
                self._take_answer(event.worker, unpack_message(event.data, event.fds))
            elif isinstance(event, Failed):
                self._failure_texts[event.worker] = event.text
            else:
                self._on_worker_exit(event)
        self._send_waiting()

    def nudge(self) -> None:
        """Make the current or next `wait` return; callable in any thread."""
        self._pool.nudge()

    def stacks(self) -> list[str]:
        """Return the name and the Python stacks of each worker."""
        found = self._pool.named_stacks(self._step_files.stacks)
        return [f"{who}:\n{indent(stacks, '    ')}" for who, stacks in found]

    def overdue(self, timeout_s: float) -> BatchTimeout:
        what = f"item {self._schedule.next_step}" if self._in_order else "any item"
        workers = self._pool.named_stacks(self._step_files.stacks)

        def tasks_of(worker: int) -> list[str]:
            calls = [self._calls[step] for step in self._schedule.tasks_of(worker)]
            return [call.description for call in calls if not call.is_suspended]

        return timeout_error(what, self._name, timeout_s, workers, tasks_of)

    def _send_waiting(self) -> None:
        """Send waiting items to workers with room, as long as there are blocks."""
        schedule = self._schedule
        while self._to_resume or (schedule.n_wanted and not schedule.wants_block):
            block = self._blocks.take()
            if block is None:
                return
            if self._to_resume:
                worker, step = self._to_resume.popleft()
            else:
                worker, step, _ = schedule.assign()
            call = self._calls[step]
            call.worker, call.block = worker, block
            if call.is_suspended:  # the worker has exited, and no more results were requested
                call.release_block(self._blocks)
            else:
                self._send(worker, step, call, block)

    def _send(self, worker: int, step: int, call: PendingCall, block: Block) -> None:
        if worker not in block.sent_to:
            self._pool.send(worker, pack_call(CallRequest.BLOCK, block.number), [block.fd])
            block.sent_to.add(worker)
        if call.is_begun:
            self._pool.send(worker, pack_call(CallRequest.RESUME, block.number, step))
            return
        call.is_begun = True
        head = pack_call(CallRequest.CALL, block.number, step, call.n_received)
        with pack_message(head + call.request) as parcel:
            self._pool.send(worker, *parcel)

    def _take_answer(self, worker: int, answer: bytes) -> None:
        outcome, n_results, _, step, n_bytes, taken_ns = HEADER.unpack_from(answer)
        call = self._calls[step]
        self._calling_ns += taken_ns
        if outcome == CallOutcome.FAILED:
            where = f"worker {worker}, {call.description}"
            self._fail(worker, step, unpack_failure(memoryview(answer)[HEADER_BYTES:], where))
            return
        if outcome == CallOutcome.INLINE:
            call.release_block(self._blocks)
            call.memory = memoryview(answer)[HEADER_BYTES:]
        elif call.block is not None:
            self._blocks.note_filled(call.block, n_bytes)
            call.n_bytes = n_bytes
            self._n_bytes += n_bytes
        if n_results:
            self._chunks.append(call.split(n_results))
            return
        self._schedule.complete(worker, step, is_quick=taken_ns < QUICK_NS)

    def _fail(self, worker: int, step: int, error: BaseException) -> None:
        call = self._calls[step]
        call.release_block(self._blocks)
        if self.error_budget.allows_skip(error):
            call.error = error
            self._schedule.complete(worker, step)
        else:
            self._schedule.fail(worker, step, error)

    def _on_worker_exit(self, died: WorkerExit) -> None:
        """Replace a worker that has exited; assign its unanswered items again, or give them up."""
        worker, how = died.worker, died.description
        step, part = self._step_files.take(worker)
        if text := self._failure_texts.pop(worker, ""):
            raise TransformError(f"{self._name} cannot be loaded in a worker; {how}:\n\n{text}")
        if step is None:  # otherwise, the crash counts for the item (below)
            self._crash_loop.count(how)
        tasks = self._schedule.tasks_of(worker)
        if step is not None and step in tasks and not self._calls[step].is_suspended:
            call = self._calls[step]
            call.n_crashes += 1
            if self._on_crash is not None:
                call.release_block(self._blocks)
                call.memory = memoryview(pack_value(self._on_crash(part, died)).to_bytes())
                self._schedule.complete(worker, step)
                del tasks[step]
            elif call.n_crashes == MAX_CRASHES:
                crashes = f"{MAX_CRASHES} workers crashed on {call.description} in {self._name}"
                self._fail(worker, step, WorkerDied(f"{crashes}; the last: {how}"))
                del tasks[step]
        for each in tasks:
            call = self._calls[each]
            call.release_block(self._blocks)
            call.worker, call.is_begun = None, False
        self._to_resume = deque(each for each in self._to_resume if each[0] != worker)
        self._schedule.reassign(worker)
        self._blocks.forget(worker)
        self._n_restarts += 1
        with translate_open_file_errors():
            self._pool.restart(worker)
        self._send_hello(worker)

    def close(self) -> None:
        """End the workers, even busy ones. Values that were taken stay valid. Idempotent."""
        self._end()
