"""Executors of the jobs of `stage`: threads, coroutines, worker processes, concurrent.futures."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from shardio._base.statistics import now_ns
from shardio._workers.processes.linux import translate_open_file_errors
from shardio._workers.tasks.calls import ErrorBudget, FailedCall, ResultChunks
from shardio._workers.tasks.stage import PipeStep, Stage, StageJob, UserCall
from shardio._workers.tasks.task_pool import TaskPool
from shardio.errors import InsufficientMemory, UnsupportedEnvironment

if TYPE_CHECKING:
    from shardio._workers.tasks.pipeline_runner import PipelineRunner

SOURCE: Final = "source"
_STACKS_TIMEOUT_S: Final = 5.0  # the maximum time to wait for the stacks of workers


class StageExecutor(ABC):
    @abstractmethod
    def wake(self) -> None:
        """Start a thread or task for new jobs, if there are any. Called under the runner's lock."""

    @abstractmethod
    def close(self) -> None:
        """Start no more jobs; do not wait for running jobs. Called without the runner's lock."""

    def stacks(self) -> list[str]:
        """Return the name and stacks of each worker process. Called without the runner's lock."""
        return []


def create_executors(
    runner: PipelineRunner, stages: Mapping[Stage, PipeStep | None]
) -> dict[Stage, StageExecutor]:
    """Create an executor for every stage.

    `stages` maps each stage to its step, and the stage that runs the source to None.

    All async stages share an event loop. Stages of the same thread group share their threads.
    """
    found: dict[Stage, StageExecutor] = {}
    asynchronous: list[Stage] = []
    groups: dict[str, list[Stage]] = {}
    for stage, step in stages.items():
        executor = None if step is None else step.executor
        if executor == "process":
            found[stage] = ProcessExecutor(runner, stage)
        elif executor is not None:
            found[stage] = FutureExecutor(runner, stage, executor)
        elif stage.call.is_async:
            asynchronous.append(stage)
        else:
            groups.setdefault(SOURCE if step is None else step.thread_group, []).append(stage)
    if asynchronous:
        found |= dict.fromkeys(asynchronous, AsyncExecutor(runner, asynchronous))
    for members in groups.values():
        n_threads = max(stage.concurrency for stage in members)
        found |= dict.fromkeys(members, ThreadExecutor(runner, members, n_threads))
    return found


class ThreadExecutor(StageExecutor):
    """An executor whose threads run the jobs of several stages; later stages come first.

    Only one thread is woken or started at a time; this thread wakes another if there are more jobs.
    Thus, if the functions are quick, one thread runs all jobs.
    """

    def __init__(self, runner: PipelineRunner, stages: Sequence[Stage], n_threads: int) -> None:
        self._runner, self._stages, self._n_not_started = runner, stages[::-1], n_threads
        # Each idle thread waits on a lock. The thread that became idle last is woken first. With a
        # Condition instead, 100,000 quick calls take 10 % more CPU time.
        self._idle: list[threading.Lock] = []
        self._is_waking = self._is_closed = False
        self._generators: list[Any] = []

    def wake(self) -> None:
        if self._is_waking or not any(stage.has_work for stage in self._stages):
            return
        if self._idle:
            self._is_waking = True
            self._idle.pop().release()
        elif self._n_not_started:
            self._is_waking = True
            self._n_not_started -= 1
            name = f"shardio {self._stages[-1].name}"
            threading.Thread(target=self._work, name=name, daemon=True).start()

    def close(self) -> None:
        with self._runner.lock:
            # Leave suspended generators to a thread, because closing them may take long.
            self._generators = [each for stage in self._stages for each in stage.take_suspended()]
            self._is_closed = True
            for wakeup_lock in self._idle:
                wakeup_lock.release()
            self._idle.clear()

    def _work(self) -> None:
        wakeup_lock = threading.Lock()
        wakeup_lock.acquire()
        is_woken = True
        try:
            while True:
                job = self._next_job(wakeup_lock, is_woken=is_woken)
                if job is not None:
                    self._perform(job)
                elif self._is_closed:
                    self._generators = []
                    return
                else:
                    wakeup_lock.acquire()
                is_woken = job is None
                del job  # an idle thread must not keep the user's objects alive
        except BaseException as error:  # noqa: BLE001  # `runner.take` raises this internal error
            self._runner.record_internal_error(error)

    def _next_job(self, wakeup_lock: threading.Lock, *, is_woken: bool) -> StageJob | None:
        """Return the next job; if there is none, add `wakeup_lock` to the locks of idle threads."""
        runner = self._runner
        with runner.lock:
            if is_woken:
                self._is_waking = False
            if self._is_closed:
                return None
            for stage in self._stages if not runner.is_closed else ():
                job = stage.begin()
                if job is not None:
                    runner.pass_on_to(stage)
                    self.wake()
                    return job
            self._idle.append(wakeup_lock)
            return None

    def _perform(self, job: StageJob) -> None:
        runner, call = self._runner, job.stage.call
        job.thread_id = threading.get_ident()
        start_ns = now_ns()
        try:
            if call.yields_many:
                self._run_generator(job)
                return
            value = call.invoke(job.item)
        except BaseException as error:  # noqa: BLE001  # the user's function may raise anything
            runner.fail(job, error, now_ns() - start_ns)
        else:
            runner.finish(job, (value,), now_ns() - start_ns)

    def _run_generator(self, job: StageJob) -> None:
        """Run a generator until it ends, or until the pipeline has no room for more results."""
        start_ns = now_ns()
        if job.results is None:
            job.results = iter(job.stage.call.function(job.item))
        while True:
            try:
                value = next(job.results)
            except StopIteration:
                self._runner.finish(job, (), now_ns() - start_ns)
                return
            if not self._runner.add_results(job, (value,), now_ns() - start_ns):
                if self._runner.is_closed:
                    job.results = None  # closes the generator, in this thread
                return
            start_ns = now_ns()
            del value


class AsyncExecutor(StageExecutor):
    """An executor of stages with async functions; owns a thread and an event loop."""

    def __init__(self, runner: PipelineRunner, stages: Sequence[Stage]) -> None:
        self._runner, self._stages = runner, stages[::-1]
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_waking = False
        with translate_open_file_errors():
            self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name="shardio event loop", daemon=True).start()

    def wake(self) -> None:
        if not self._is_waking and any(stage.has_work for stage in self._stages):
            self._is_waking = True
            self._loop.call_soon_threadsafe(self._begin)

    def close(self) -> None:
        """Stop the event loop; its thread then cancels all coroutines."""
        with contextlib.suppress(RuntimeError):  # the loop is already closed
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        loop = self._loop
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            loop.run_until_complete(self._end())
            loop.run_until_complete(loop.shutdown_asyncgens())
        except BaseException as error:  # noqa: BLE001  # `runner.take` raises this internal error
            self._runner.record_internal_error(error)
        finally:
            loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks(self._loop) - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self) -> None:
        jobs = []
        with self._runner.lock:
            self._is_waking = False
            for stage in self._stages if not self._runner.is_closed else ():
                while (job := stage.begin()) is not None:
                    jobs.append(job)
                    self._runner.pass_on_to(stage)
        for job in jobs:
            if job.results is not None:  # the event that a suspended job awaits
                job.results.set()
                continue
            task = self._loop.create_task(self._perform(job))
            self._tasks.add(task)
            task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._runner.record_internal_error(error)  # `runner.take` raises this internal error

    async def _perform(self, job: StageJob) -> None:
        call, start_ns = job.stage.call, now_ns()
        try:
            result: Any = call.function(job.item)
            if call.yields_many:
                await self._run_generator(job, result)
                return
            value = await result
        except BaseException as error:  # noqa: BLE001  # the user's function may raise anything
            if self._runner.is_closed:  # the job was cancelled by `close`
                return
            self._runner.fail(job, error, now_ns() - start_ns)
        else:
            self._runner.finish(job, (value,), now_ns() - start_ns)
        self._begin()

    async def _run_generator(self, job: StageJob, results: Any) -> None:
        """Run an async generator to its end; wait while the pipeline has no room for results."""
        start_ns = now_ns()
        async for value in results:
            if not self._runner.add_results(job, (value,), now_ns() - start_ns):
                # `_begin` runs in this thread, so it cannot set the event before the `await`.
                job.results = asyncio.Event()
                await job.results.wait()
            start_ns = now_ns()
            del value
        self._runner.finish(job, (), now_ns() - start_ns)
        self._begin()


class ProcessExecutor(StageExecutor):
    """An executor of one stage; owns a TaskPool, and a thread that drives the pool."""

    def __init__(self, runner: PipelineRunner, stage: Stage) -> None:
        self._runner, self._stage = runner, stage
        self._task_pool: TaskPool | None = None
        self._jobs: dict[int, StageJob] = {}  # by the item's index in the task pool
        self._has_thread = self._is_waking = False
        self._stacks_request: Future[list[str]] | None = None

    def wake(self) -> None:
        if self._is_waking or not self._stage.has_work:
            return
        self._is_waking = True
        if self._task_pool is not None:
            self._task_pool.nudge()
        elif not self._has_thread:
            self._has_thread = True
            name = f"shardio {self._stage.name}"
            threading.Thread(target=self._work, name=name, daemon=True).start()

    def close(self) -> None:
        with self._runner.lock:
            if self._task_pool is not None:
                self._task_pool.nudge()

    def stacks(self) -> list[str]:
        request: Future[list[str]] = Future()
        with self._runner.lock:
            if self._task_pool is None:
                return []
            self._stacks_request = request
            self._task_pool.nudge()
        with contextlib.suppress(TimeoutError):
            return request.result(_STACKS_TIMEOUT_S)
        return []

    def _work(self) -> None:
        stage = self._stage
        try:
            with TaskPool(
                partial(_call_in_chunks, stage.call, stage.name),
                stage.n_workers,
                max_items=stage.concurrency,
                in_order=False,  # the stage puts the results in order, if needed
                name=stage.name,
            ) as task_pool:
                task_pool.error_budget = _ReportingBudget(self._fail)
                with self._runner.lock:
                    self._task_pool = task_pool
                try:
                    self._drive(task_pool)
                finally:
                    with self._runner.lock:
                        self._task_pool = None
        except BaseException as error:  # noqa: BLE001  # `runner.take` raises the error
            self._runner.record_internal_error(error)

    def _drive(self, task_pool: TaskPool) -> None:
        while not self._runner.is_closed:
            if (request := self._stacks_request) is not None:
                self._stacks_request = None
                request.set_result(task_pool.stacks())
            self._put_all(task_pool)
            found = task_pool.take()
            if found is not None:
                self._report_value(task_pool, *found)
                del found  # otherwise the arrays of the value would keep a block in use
            elif not self._stage.has_work:
                task_pool.wait()

    def _put_all(self, task_pool: TaskPool) -> None:
        jobs = []
        with self._runner.lock:
            self._is_waking = False
            while not self._runner.is_closed and (job := self._stage.begin()) is not None:
                jobs.append(job)
                self._runner.pass_on_to(self._stage)
        for job in jobs:
            if job.results is not None:
                task_pool.resume(job.results)
                continue
            try:
                # If the function is a generator, `resume` takes this index of the item to request
                # more results.
                job.results = task_pool.put(job.item)
            except (UnsupportedEnvironment, InsufficientMemory):
                raise  # not an error of the item
            except BaseException as error:  # noqa: BLE001  # the item cannot be pickled
                self._runner.fail(job, error, 0)
            else:
                self._jobs[job.results] = job

    def _report_value(self, task_pool: TaskPool, number: int, value: Any) -> None:
        job = self._jobs[number]
        busy_ns = int(task_pool.stats.calling_s * 1e9) - self._stage.busy_ns
        if not task_pool.has_more(number):
            _report_end(self._runner, self._jobs.pop(number), value, busy_ns)
        elif self._runner.add_results(job, value, busy_ns):
            task_pool.resume(number)

    def _fail(self, number: int, error: BaseException) -> None:
        self._runner.fail(self._jobs.pop(number), error, 0)


class _ReportingBudget(ErrorBudget):
    """An error budget that reports failures to the pipeline, which skips the item or fails."""

    def __init__(self, report: Callable[[int, BaseException], None]) -> None:
        super().__init__(0)
        self._report = report

    def skip(self, index: int, item: Any, error: BaseException) -> None:
        self._report(index, error)


class FutureExecutor(ThreadExecutor):
    """An executor whose thread submits jobs to a concurrent.futures executor of the caller."""

    def __init__(self, runner: PipelineRunner, stage: Stage, executor: Executor) -> None:
        super().__init__(runner, [stage], 1)
        self._executor, self._function = executor, partial(_call_once, stage.call, stage.name)
        self._futures: set[Future[Any]] = set()

    def close(self) -> None:
        super().close()
        for future in list(self._futures):
            future.cancel()

    def _perform(self, job: StageJob) -> None:
        try:
            future = self._executor.submit(self._function, job.item)
        except Exception as error:  # noqa: BLE001  # the executor was shut down
            self._runner.fail(job, error, 0)
            return
        self._futures.add(future)
        if self._runner.is_closed:  # `close` may have missed this future
            future.cancel()
        future.add_done_callback(partial(self._take, job))

    def _take(self, job: StageJob, future: Future[Any]) -> None:
        runner, busy_ns = self._runner, now_ns() - job.began_ns
        self._futures.discard(future)
        try:
            value = future.result()
        except BaseException as error:  # noqa: BLE001  # the user's function may raise anything
            runner.fail(job, error, busy_ns)
        else:
            _report_end(runner, job, value, busy_ns)
        with runner.lock:
            if not runner.is_closed:
                self.wake()


def _report_end(runner: PipelineRunner, job: StageJob, value: Any, busy_ns: int) -> None:
    """Report the end of a job; `value` is its result, or the last chunk of its results."""
    if not job.stage.call.yields_many:
        runner.finish(job, (value,), busy_ns)
    elif isinstance(value, FailedCall):
        runner.fail(job, value.error, busy_ns, value.results)
    else:
        runner.finish(job, value, busy_ns)


def _call_once(call: UserCall, name: str, item: Any) -> Any:
    """Return the result of a call; for a generator, a list of all its results.

    If the generator fails, return a `FailedCall` with the results before the failure.
    """
    if not call.yields_many:
        return call.invoke(item)
    found: list[Any] = []
    try:
        found.extend(call.function(item))
    except BaseException as error:  # noqa: BLE001  # the user's function may raise anything
        return FailedCall(found, error, name)
    return found


def _call_in_chunks(call: UserCall, name: str, item: Any) -> Any:
    if not call.yields_many:
        return call.invoke(item)
    return ResultChunks(iter(call.function(item)), name)
