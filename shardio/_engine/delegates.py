"""Hands that have the jobs of a stage done elsewhere: in worker processes, or by an executor."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import TYPE_CHECKING, Any

from shardio._engine.flow import Flow
from shardio._engine.hands import Hands, Threads
from shardio._engine.lenience import Lenience
from shardio._engine.schedule import DEPTH
from shardio._engine.stage import Job, Stage
from shardio._engine.user_calls import UserCall, checked
from shardio.spent import now_ns

if TYPE_CHECKING:
    from shardio._engine.line import Line


def most_under_way(n_workers: int) -> int:
    """How many jobs workers are given, so that none waits for its next."""
    return DEPTH * n_workers + 2


class Processes(Hands):
    """A Flow, and the thread that drives it.

    Args:
        line: is told what jobs give.
        stage: whose jobs they are.
        n_workers: how many processes.
    """

    def __init__(self, line: Line, stage: Stage, n_workers: int) -> None:
        self._line, self._stage, self._n_workers = line, stage, n_workers
        self._flow: Flow | None = None
        self._jobs: dict[int, Job] = {}  # by the number that the flow gives them
        self._has_thread = self._is_rousing = False

    def rouse(self) -> None:
        """Have the thread look for jobs, if there is one."""
        if self._is_rousing or not self._stage.has_work:
            return
        self._is_rousing = True
        if self._flow is not None:
            self._flow.nudge()
        elif not self._has_thread:
            self._has_thread = True
            name = f"shardio {self._stage.name}"
            threading.Thread(target=self._work, name=name, daemon=True).start()

    def close(self) -> None:
        """Have the processes ended."""
        with self._line.lock:
            if self._flow is not None:
                self._flow.nudge()

    def _work(self) -> None:
        """What the thread does."""
        stage = self._stage
        try:
            with Flow(
                _in_one(stage.call),
                self._n_workers,
                most_items=stage.concurrency,
                in_order=False,  # the stage keeps what order there is
                is_called=stage.name,
            ) as flow:
                flow.lenience = _Reporting(self._fail)
                with self._line.lock:
                    self._flow = flow
                try:
                    self._drive(flow)
                finally:
                    with self._line.lock:
                        self._flow = None
        except BaseException as error:  # noqa: BLE001 - the loop must not wait for ever
            self._line.break_down(error)

    def _drive(self, flow: Flow) -> None:
        while not self._line.is_closed:
            self._put_all(flow)
            found = flow.take()
            if found is not None:
                number, value = found
                self._finish(self._jobs.pop(number), value, flow.stats.calling_s)
                del found, value  # it holds a block
            elif not self._stage.has_work:
                flow.wait()

    def _put_all(self, flow: Flow) -> None:
        jobs = []
        with self._line.lock:
            self._is_rousing = False
            while not self._line.is_closed and (job := self._stage.begin()) is not None:
                jobs.append(job)
                self._line.settle_before(self._stage)
        for job in jobs:
            try:
                self._jobs[flow.put(job.item)] = job
            except Exception as error:  # noqa: BLE001 - the item cannot be pickled
                self._line.fail(job, error, 0)

    def _finish(self, job: Job, value: Any, calling_s: float) -> None:
        busy_ns = int(calling_s * 1e9) - self._stage.busy_ns
        if job.stage.call.yields_many:
            self._line.finish_with(job, value, busy_ns)
        else:
            self._line.finish(job, value, busy_ns)

    def _fail(self, number: int, error: BaseException) -> None:
        self._line.fail(self._jobs.pop(number), error, 0)


class _Reporting(Lenience):
    """Leaves it to the line whether what failed is skipped, or raised in its turn."""

    def __init__(self, report: Callable[[int, BaseException], None]) -> None:
        super().__init__(0)
        self._report = report

    def skip(self, index: int, item: Any, error: BaseException) -> None:
        """Tell the line."""
        self._report(index, error)


class Executing(Threads):
    """A thread that submits jobs to an executor of the user, who owns it.

    Args:
        line: is told what jobs give.
        stage: whose jobs they are.
        executor: does them.
    """

    def __init__(self, line: Line, stage: Stage, executor: Executor) -> None:
        super().__init__(line, [stage], 1)
        self._executor, self._function = executor, _in_one(stage.call)
        self._futures: set[Future[Any]] = set()

    def close(self) -> None:
        """Cancel what has not begun."""
        super().close()
        for future in list(self._futures):
            future.cancel()

    def _perform(self, job: Job) -> None:
        try:
            future = self._executor.submit(self._function, job.item)
        except Exception as error:  # noqa: BLE001 - it was shut down
            self._line.fail(job, error, 0)
            return
        self._futures.add(future)
        future.add_done_callback(partial(self._take, job))

    def _take(self, job: Job, future: Future[Any]) -> None:
        line, busy_ns = self._line, now_ns() - job.began_ns
        self._futures.discard(future)
        try:
            value = checked(future.result())
        except BaseException as error:  # noqa: BLE001 - of the user's function, whatever it is
            line.fail(job, error, busy_ns)
        else:
            if job.stage.call.yields_many:
                line.finish_with(job, value, busy_ns)
            else:
                line.finish(job, value, busy_ns)
        with line.lock:
            if not line.is_closed:
                self.rouse()


def _in_one(call: UserCall) -> Callable[[Any], Any]:
    """A function that gives the results of a call at once: of a generator, a list."""
    return partial(_all_of, call.function) if call.yields_many else call.function


def _all_of(function: Callable[[Any], Any], item: Any) -> list[Any]:
    return list(function(item))
