"""This process as its own worker: for num_workers=0."""

from __future__ import annotations

import contextlib
import mmap
from collections import deque
from collections.abc import Sequence

import numpy as np

from shardio._engine.dispatch.protocol import CANCELLED, TALLIES, Answer, Done, Loss, Status, Task
from shardio._engine.dispatch.tally import Tally
from shardio._engine.dispatch.thread_workers import TURNS
from shardio._engine.filling.careful import CarefulFiller, LeftOut
from shardio._engine.filling.fill import Filler
from shardio._engine.filling.recipe import Plan, Recipe, Schemas
from shardio._workers.processes.blocks import Block
from shardio._workers.processes.shared_memory import SharedArray
from shardio.batch.batch import Skipped
from shardio.batch.layout import BlockLayout
from shardio.dataset.dataset import Dataset
from shardio.errors import ClosedError


class Local:
    """This process as its only worker: tasks are done when their answers are waited for.

    The global generators are left as they were.
    """

    depth = 1
    n_workers = 1
    is_starting = False
    goes_ahead = False

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._filler: Filler | None = None
        self._careful: CarefulFiller | None = None
        self._layout: BlockLayout | None = None
        self._cancelled = np.zeros(0, np.uint8)
        self._tally: Tally | None = None
        self._tasks: deque[tuple[Task, Block | None]] = deque()
        self._plans: dict[int, Plan] = {}

    def introduce(
        self, dataset: Dataset, fds: Sequence[int], tables: tuple[SharedArray, ...] = ()
    ) -> None:
        """Use main's own dataset."""
        self._filler = Filler(
            self._recipe,
            dataset,
            # Ctrl-C is meant for this process; in a worker it could only come from user code.
            passes=(KeyboardInterrupt,),
            # What costs a worker its life, which is reported, would cost this program its own.
            beware=dataset.files.check_lengths if dataset.access == "mmap" else None,
        )
        if self._recipe.skips:
            self._careful = CarefulFiller(self._filler, self._recipe.seed)
        self._cancelled = np.frombuffer(mmap.mmap(fds[CANCELLED], 0), np.uint8)
        self._tally = Tally(fds[TALLIES], 0)

    def use_layout(self, layout: BlockLayout, schemas: Schemas, memory_bytes: int) -> None:
        """Lay blocks out so from now on; main's own know how large they may be."""
        self._layout = layout

    def explain(self, worker: int, slot: int, plan: Plan) -> None:
        """Note what the tasks of an iteration are about."""
        self._plans[slot] = plan

    def caution(self, worker: int, left_out: LeftOut) -> None:
        """Nothing: what costs a worker its life would have cost this process its own."""

    def forgive(self) -> None:
        """Nothing: nobody dies."""

    def give(self, worker: int, task: Task, block: Block | None) -> None:
        """Keep a task for the next `wait`."""
        self._tasks.append((task, block))

    def post(self) -> None:
        """Nothing: a task is here as soon as it is given."""

    def wait(self, timeout_s: float | None = None) -> list[Answer | Loss]:
        """Do the oldest task, however long it takes."""
        if not self._tasks:
            raise ClosedError("the loader is closed")
        task, block = self._tasks[0]  # stays until it is done: Ctrl-C may strike
        if not self._recipe.runs_user_code:
            answer = self._do(task, block)
        else:
            with TURNS.one():
                answer = self._do(task, block)
        with contextlib.suppress(IndexError):  # another thread has closed the loader meanwhile
            self._tasks.popleft()
        try:
            return [answer]
        finally:
            del answer  # as in `_do`: a traceback keeps the frames of all callers

    def _do(self, task: Task, block: Block | None) -> Answer:
        n_rows = heap_bytes = 0
        status = Status.CANCELLED
        error: BaseException | None = None
        schemas: Schemas | None = None
        skips: tuple[Skipped, ...] = ()
        tally = self._tally
        if self._filler is None or tally is None:
            raise AssertionError("introduce() comes first")
        try:
            if block is None or self._layout is None:
                schemas = self._filler.schemas(task.step)
                status = Status.SCHEMA
            elif not self._cancelled[task.slot]:
                plan = self._plans[task.slot]
                start_ns = tally.start()
                if self._careful is None:
                    filled = self._filler.fill(self._layout, block, plan, task.step)
                    n_rows, heap_bytes = filled
                else:
                    careful = self._careful.fill(self._layout, block, plan, task.step)
                    n_rows, heap_bytes, skips = careful
                tally.add(task.slot, task.step, start_ns)
                status = Status.FILLED
        except Exception as failure:  # noqa: BLE001  # raised when the batch's turn comes
            status, error = Status.FAILED, failure
        done = Done(status, task.slot, task.block, task.step, heap_bytes, task.use, n_rows)
        try:
            return Answer(0, done, error, schemas, skips)
        finally:
            del error  # or its traceback, this frame and the block keep each other

    def ask_what_they_do(self) -> list[tuple[str, str]]:
        """Nobody works while main asks."""
        return []

    def close(self) -> None:
        """Forget all tasks, and what was shared."""
        self._tasks.clear()
        self._cancelled, self._filler = np.zeros(0, np.uint8), None
        self._careful = self._tally = None
