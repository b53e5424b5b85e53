"""Who works at the stages of a line: threads that take the next job by themselves."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardio._engine.stage import Job, Stage
from shardio._engine.user_calls import checked
from shardio.spent import now_ns

if TYPE_CHECKING:
    from shardio._engine.line import Line


class Hands(ABC):
    """Works at some stages of a line."""

    @abstractmethod
    def rouse(self) -> None:
        """There may be a job; called under the line's lock."""

    @abstractmethod
    def close(self) -> None:
        """Begin no job any more, and wait for none; the line is closed, its lock free."""

    def tell(self) -> list[str]:
        """What is done elsewhere than in threads of this process, in lines; by any thread."""
        return []


class Threads(Hands):
    """Threads that share some stages, whichever has a job, the last of them first.

    They are started as they are needed. One at a time is woken, and wakes the next if there is more
    to do: if functions are quick, one thread does it all, and none is woken in vain.

    Args:
        line: is told what jobs give.
        stages: in the order of the line.
        n_threads: at most.
    """

    def __init__(self, line: Line, stages: Sequence[Stage], n_threads: int) -> None:
        self._line, self._stages, self._n_left = line, stages[::-1], n_threads
        self._idle: list[threading.Lock] = []  # the one that has worked last is woken first
        self._is_rousing = self._is_closed = False
        self._left: list[Any] = []

    def rouse(self) -> None:
        """Wake a thread, or start one, if there is a job and no thread is on its way."""
        if self._is_rousing or not any(stage.has_work for stage in self._stages):
            return
        if self._idle:
            self._is_rousing = True
            self._idle.pop().release()
        elif self._n_left:
            self._is_rousing = True
            self._n_left -= 1
            name = f"shardio {self._stages[-1].name}"
            threading.Thread(target=self._work, name=name, daemon=True).start()

    def close(self) -> None:
        """Wake all threads that are idle, for them to end."""
        with self._line.lock:
            # What generators do at their end is for a thread, too: it may take long.
            self._left = [each for stage in self._stages for each in stage.surrender()]
            self._is_closed = True
            for bell in self._idle:
                bell.release()
            self._idle.clear()

    def _work(self) -> None:
        """What a thread does."""
        bell = threading.Lock()
        bell.acquire()
        is_roused = True
        try:
            while True:
                job = self._next_job(bell, is_roused=is_roused)
                if job is not None:
                    self._perform(job)
                elif self._is_closed:
                    self._left = []
                    return
                else:
                    bell.acquire()
                is_roused = job is None
                del job  # nothing of the user's is held while there is nothing to do
        except BaseException as error:  # noqa: BLE001 - ours; the loop must not wait for ever
            self._line.break_down(error)

    def _next_job(self, bell: threading.Lock, *, is_roused: bool) -> Job | None:
        """The next job; else, the bell will be rung for one."""
        line = self._line
        with line.lock:
            if is_roused:
                self._is_rousing = False
            if self._is_closed:
                return None
            for stage in self._stages if not line.is_closed else ():  # and soon these are
                job = stage.begin()
                if job is not None:
                    line.settle_before(stage)
                    self.rouse()
                    return job
            self._idle.append(bell)
            return None

    def _perform(self, job: Job) -> None:
        line, call = self._line, job.stage.call
        job.thread_id = threading.get_ident()
        start_ns = now_ns()
        try:
            if call.yields_many:
                self._go_on(job)
                return
            value = checked(call.function(job.item))
        except BaseException as error:  # noqa: BLE001 - of the user's function, whatever it is
            line.fail(job, error, now_ns() - start_ns)
        else:
            line.finish(job, value, now_ns() - start_ns)

    def _go_on(self, job: Job) -> None:
        """Have a generator give results, as long as there is room for them."""
        start_ns = now_ns()
        if job.results is None:
            job.results = iter(job.stage.call.function(job.item))
        while True:
            try:
                value = next(job.results)
            except StopIteration:
                self._line.end(job, now_ns() - start_ns)
                return
            if not self._line.give(job, (value,), now_ns() - start_ns):
                if self._line.is_closed:
                    job.results = None  # it ends here, and not with whoever clears the line
                return
            start_ns = now_ns()
            del value
