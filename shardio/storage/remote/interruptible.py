"""Calls that may hang in a network are made in other threads, so that Ctrl-C ends the wait for it.

Python runs the handler of a signal in the main thread, and only once a request there has come back,
which takes up to `stores.REQUEST_S`. A call that is no longer waited for goes on to its own end, or
that of the process.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Final, TypeVar

Item = TypeVar("Item")
R = TypeVar("R")

_LOOK_UP_S: Final = 0.25
"""A signal that comes just before the wait begins does not end it: it is heeded so much later."""


def interruptible(call: Callable[[], R]) -> R:
    """Make a call; where it is made in the main thread, signals are heeded meanwhile."""
    if threading.current_thread() is not threading.main_thread():
        return call()
    running = [future := _begun(call)]
    while running:
        running, _ = _some_ended(running)
    return future.result()


def side_by_side(n_threads: int, call: Callable[[R], object], items: Iterable[R]) -> None:
    """Make a call for each of some items; after an error begin none, and raise the first.

    What is under way at an error is waited for, but not at Ctrl-C.
    """
    left, mutex = list(reversed(list(items))), threading.Lock()

    def run() -> None:
        while True:
            with mutex:
                if not left:
                    return
                item = left.pop()
            call(item)

    failed: list[Future[None]] = []
    try:
        running = [_begun(run) for _ in range(min(n_threads, len(left)))]
        while running and not failed:
            running, failed = _some_ended(running)
    finally:
        with mutex:
            left.clear()
    while running:
        running, _ = _some_ended(running)
    for each in failed:
        each.result()


def in_order(n_threads: int, call: Callable[[Item], R], items: Iterable[Item]) -> Iterator[R]:
    """What a call gives for each of some items, in their order; so many are made at a time.

    What it raises is raised in its turn. What is under way then, or when no more is wanted, is not
    waited for.
    """
    left, coming = iter(items), deque[Future[R]]()
    while True:
        begun = (_begun(functools.partial(call, item)) for item in left)
        coming.extend(itertools.islice(begun, n_threads - len(coming)))
        if not coming:
            return
        running = [first := coming.popleft()]
        while running:
            running, _ = _some_ended(running)
        yield first.result()


def _some_ended(running: list[Future[R]]) -> tuple[list[Future[R]], list[Future[R]]]:
    """Wait until all have ended, one has failed, or a while is over; those left, those failed."""
    done, left = wait(running, _LOOK_UP_S, FIRST_EXCEPTION)
    return list(left), [each for each in done if each.exception() is not None]


def _begun(call: Callable[[], R]) -> Future[R]:
    """What a call in a thread of its own will come to."""
    future: Future[R] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  # whoever waits raises it
            future.set_exception(error)

    threading.Thread(target=run, name="shardio-request", daemon=True).start()
    return future
