"""Whose turn it is with Python's and NumPy's global generators, which a process has once.

Wherever code of the user runs in this process, in worker threads or with num_workers=0, they are
keyed for the sample; so one thread at a time has them.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np


class Turns:
    """Gives the global generators to one thread at a time; the program's own states come back.

    A thread that is given up loses its turn: it may never come back from the user's code.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: threading.Thread | None = None
        self._waiting: deque[object] = deque()
        self._states: tuple[Any, Any]

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
                self._states = _states()
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
                _set_states(self._states)
                self._holder = None
                self._changed.notify_all()

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """A turn of this thread, or a part of the one that it has; the states come back after."""
        thread = threading.current_thread()
        if self._holder is thread:
            states = _states()
            try:
                yield
            finally:
                _set_states(states)
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
        states = _states()
        self.end(thread)
        try:
            yield
        finally:
            self.take()
            _set_states(states)


def _states() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


def _set_states(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


TURNS: Final = Turns()
"""Those of this process."""

os.register_at_fork(after_in_child=TURNS.__init__)  # type: ignore[misc]  # nobody's turn there
