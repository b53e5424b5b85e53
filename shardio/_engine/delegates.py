"""Hands that have the jobs of a stage done elsewhere: in worker processes, or by an executor."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from shardio._engine.flow import Flow
from shardio._engine.hands import Hands, Threads
from shardio._engine.late import said
from shardio._engine.lenience import Lenience
from shardio._engine.portions import Broken, Portions
from shardio._engine.schedule import DEPTH
from shardio._engine.stage import Job, Stage
from shardio._engine.user_calls import UserCall, checked
from shardio.errors import EnvironmentUnsuitable, MemoryShort
from shardio.spent import now_ns

if TYPE_CHECKING:
    from shardio._engine.line import Line


_PATIENCE_S: Final = 5.0
"""Workers have a second to say what they do, and the thread has to come to ask them."""


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
        self._asked: Future[list[str]] | None = None

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

    def tell(self) -> list[str]:
        """What each worker is doing; the thread is asked, and has little time to say so."""
        asked: Future[list[str]] = Future()
        with self._line.lock:
            if self._flow is None:
                return []
            self._asked = asked
            self._flow.nudge()
        try:
            return asked.result(_PATIENCE_S)
        except TimeoutError:
            return []

    def _work(self) -> None:
        """What the thread does."""
        stage = self._stage
        try:
            with Flow(
                _in_portions(stage.call, stage.name),
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
            if (asked := self._asked) is not None:
                self._asked = None  # who asks waits: there is no other
                asked.set_result(flow.at_work(lambda number: said(self._jobs[number])))
            self._put_all(flow)
            found = flow.take()
            if found is not None:
                self._hand_on(flow, *found)
                del found  # it holds a block
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
            if job.results is not None:
                flow.go_on(job.results)
                continue
            try:
                job.results = flow.put(job.item)  # by which its generator is asked for more
            except (EnvironmentUnsuitable, MemoryShort):
                raise  # it has been put
            except BaseException as error:  # noqa: BLE001 - the item cannot be pickled
                self._line.fail(job, error, 0)
            else:
                self._jobs[job.results] = job

    def _hand_on(self, flow: Flow, number: int, value: Any) -> None:
        job = self._jobs[number]
        busy_ns = int(flow.stats.calling_s * 1e9) - self._stage.busy_ns
        if not flow.has_more(number):
            _conclude(self._line, self._jobs.pop(number), value, busy_ns)
        elif self._line.give(job, value, busy_ns):
            flow.go_on(number)

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
        self._executor, self._function = executor, _in_one(stage.call, stage.name)
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
        if self._line.is_closed:  # and `close` may have been through with those before
            future.cancel()
        future.add_done_callback(partial(self._take, job))

    def _take(self, job: Job, future: Future[Any]) -> None:
        line, busy_ns = self._line, now_ns() - job.began_ns
        self._futures.discard(future)
        try:
            value = future.result()
        except BaseException as error:  # noqa: BLE001 - of the user's function, whatever it is
            line.fail(job, error, busy_ns)
        else:
            _conclude(line, job, value, busy_ns)
        with line.lock:
            if not line.is_closed:
                self.rouse()


def _conclude(line: Line, job: Job, value: Any, busy_ns: int) -> None:
    """Tell a line what `_in_one` gave for a job."""
    if not job.stage.call.yields_many:
        line.finish(job, value, busy_ns)
    elif isinstance(value, Broken):
        line.fail(job, value.error, busy_ns, value.found)
    else:
        line.finish_with(job, value, busy_ns)


def _in_one(call: UserCall, name: str) -> Callable[[Any], Any]:
    """A function that gives the results of a call at once: of a generator, a list or `Broken`."""
    return partial(_all_of if call.yields_many else _one_of, call.function, name)


def _in_portions(call: UserCall, name: str) -> Callable[[Any], Any]:
    """The same, but for a generator its `Portions`."""
    return partial(_portions_of if call.yields_many else _one_of, call.function, name)


def _one_of(function: Callable[[Any], Any], name: str, item: Any) -> Any:
    return checked(function(item))


def _all_of(function: Callable[[Any], Any], name: str, item: Any) -> list[Any] | Broken:
    found: list[Any] = []
    try:
        found.extend(function(item))
    except BaseException as error:  # noqa: BLE001 - of the user's function, whatever it is
        return Broken(found, error, name)
    return found


def _portions_of(function: Callable[[Any], Any], name: str, item: Any) -> Portions:
    return Portions(iter(function(item)), name)
