"""Coroutines at the stages of a line, all in one event loop, in one thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardio._engine.hands import Hands
from shardio._engine.linux import files_explained
from shardio._engine.stage import Job, Stage
from shardio.spent import now_ns

if TYPE_CHECKING:
    from shardio._engine.line import Line


class Coroutines(Hands):
    """Works at stages whose functions are async. Owns a thread and an event loop.

    Args:
        line: is told what jobs give.
        stages: in the order of the line.
    """

    def __init__(self, line: Line, stages: Sequence[Stage]) -> None:
        self._line, self._stages = line, stages[::-1]
        self._tasks: set[asyncio.Task[None]] = set()
        self._suspended: dict[Job, asyncio.Event] = {}
        self._is_rousing = False
        with files_explained():
            self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name="shardio event loop", daemon=True).start()

    def rouse(self) -> None:
        """Have the event loop look for jobs, if there is one."""
        if not self._is_rousing and any(stage.has_work for stage in self._stages):
            self._is_rousing = True
            self._loop.call_soon_threadsafe(self._begin)

    def close(self) -> None:
        """Have all coroutines cancelled."""
        try:
            self._loop.call_soon_threadsafe(self._loop.stop)
        except RuntimeError:  # it is closed already
            return

    def _run(self) -> None:
        """What the thread does."""
        loop = self._loop
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            loop.run_until_complete(self._end())
            loop.run_until_complete(loop.shutdown_asyncgens())
        except BaseException as error:  # noqa: BLE001 - ours; the loop must not wait for ever
            self._line.break_down(error)
        finally:
            loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks(self._loop) - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self) -> None:
        """Begin, or go on with, every job that may be."""
        with self._line.lock:
            self._is_rousing = False
            jobs = [] if self._line.is_closed else self._next_jobs()
        for job in jobs:
            if job in self._suspended:
                self._suspended.pop(job).set()
                continue
            task = self._loop.create_task(self._perform(job))
            self._tasks.add(task)
            task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._line.break_down(error)  # ours; the loop must not wait for ever

    def _next_jobs(self) -> list[Job]:
        jobs = []
        for stage in self._stages:
            while (job := stage.begin()) is not None:
                jobs.append(job)
                self._line.settle_before(stage)
        return jobs

    async def _perform(self, job: Job) -> None:
        call, start_ns = job.stage.call, now_ns()
        try:
            result: Any = call.function(job.item)
            if call.yields_many:
                await self._go_on(job, result)
                return
            value = await result
        except BaseException as error:  # noqa: BLE001 - of the user's function, whatever it is
            if self._line.is_closed:  # it was cancelled for that
                return
            self._line.fail(job, error, now_ns() - start_ns)
        else:
            self._line.finish(job, value, now_ns() - start_ns)
        self._begin()

    async def _go_on(self, job: Job, results: Any) -> None:
        """Have an async generator give results, waiting for room."""
        start_ns = now_ns()
        async for value in results:
            if not self._line.give(job, (value,), now_ns() - start_ns):
                # `_begin` finds it here: both run in this thread, one after the other.
                room = self._suspended[job] = asyncio.Event()
                await room.wait()
            start_ns = now_ns()
            del value
        self._line.end(job, now_ns() - start_ns)
        self._begin()
