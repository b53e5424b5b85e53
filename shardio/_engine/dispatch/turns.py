"""Whose turn it is with the global generators of `global_generators.py`, which a process has once.

Wherever code of the user runs in this process, in worker threads or with num_workers=0, they are
keyed for the sample; so one thread at a time has them.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from shardio._workers.processes.global_generators import (
    States,
    generator_states,
    restore_generators,
)


class Turns:
    """Gives the global generators to one thread at a time; the program's own states come back.

    A thread that is given up loses its turn: it may never come back from the user's code.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: threading.Thread | None = None
        self._waiting: deque[object] = deque()
        self._states: States

    def take(self, is_unwanted: Callable[[], bool] = lambda: False) -> bool:
        """Wait for the turn of this thread, in the order of asking; end it with `end`.

        False, without it, when this becomes unwanted: `wake` has that looked at.
        """
        ticket, queue = object(), self._waiting
        with self._changed:
            queue.append(ticket)
            try:
                self._changed.wait_for(
                    lambda: is_unwanted() or (self._holder is None and queue[0] is ticket)
                )
                if is_unwanted():
                    return False
                self._states = generator_states()
                self._holder = threading.current_thread()
                return True
            finally:
                queue.remove(ticket)
                self._changed.notify_all()  # another is first now

    def wake(self) -> None:
        """Have all that wait look whether they are still wanted."""
        with self._changed:
            self._changed.notify_all()

    def end(self, thread: threading.Thread) -> None:
        """End the turn of a thread, if it has it."""
        with self._changed:
            if self._holder is thread:
                restore_generators(self._states)
                self._holder = None
                self._changed.notify_all()

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """A turn of this thread, or a part of the one that it has; the states come back after."""
        thread = threading.current_thread()
        if self._holder is thread:
            states = generator_states()
            try:
                yield
            finally:
                restore_generators(states)
            return
        try:
            self.take()
            yield
        finally:
            self.end(thread)

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """If this thread has the turn: others may have theirs meanwhile, which it waits for."""
        thread = threading.current_thread()
        if self._holder is not thread:
            yield
            return
        states = generator_states()
        self.end(thread)
        try:
            yield
        finally:
            self.take()
            restore_generators(states)


TURNS: Final = Turns()
"""Those of this process."""

os.register_at_fork(after_in_child=TURNS.__init__)  # type: ignore[misc]  # nobody's turn there
