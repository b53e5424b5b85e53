"""Datasets that workers of a MultiLoader iterate."""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio.multi import worker_info

NEEDS_ZEROMQ = pytest.mark.skipif(
    importlib.util.find_spec("zmq") is None, reason="MultiLoader needs pyzmq: pip install '.[zmq]'"
)


@dataclass
class Count:
    """Numbers from 0 up, and what happens when one of a worker is reached."""

    n: int
    at: int = -1
    happens: Callable[[], object] = int
    worker: int = 0

    def __iter__(self) -> Iterator[int]:
        here = worker_info()
        for number in range(self.n):
            if number == self.at and here is not None and here.number == self.worker:
                self.happens()
            yield number


@dataclass
class Shared:
    """Numbers from 0 up, of which each worker gives its own."""

    n: int

    def __iter__(self) -> Iterator[int]:
        here = worker_info()
        first, step = (0, 1) if here is None else here
        return iter(range(first, self.n, step))


class OneArray:
    """Arrays that are one and the same memory, with other content for every sample."""

    def __init__(self, n: int, *n_bytes: int) -> None:
        self.n, self.n_bytes = n, n_bytes

    def __iter__(self) -> Iterator[dict[str, Any]]:
        arrays = [np.empty(n_bytes, np.uint8) for n_bytes in self.n_bytes]
        for number in range(self.n):
            for pixels in arrays:
                pixels[:] = number % 251
            yield {"number": number, "pixels": arrays}


@dataclass
class Given:
    """Samples that are given."""

    samples: list[Any]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


@dataclass
class Endless:
    """Numbers without an end, but for one worker, which has none."""

    but: int = -1

    def __iter__(self) -> Iterator[int]:
        here = worker_info()
        number = 0
        while here is None or here.number != self.but:
            yield number
            number += 1


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    os._exit(0)


def fail() -> None:
    raise KeyError("the file is gone")


def fork_and_go_on() -> None:
    pid = os.fork()
    if pid != 0:
        os.waitpid(pid, 0)


def hang(reached: Path | None = None) -> None:
    if reached is not None:
        reached.touch()
    threading.Event().wait()


def say_exit() -> None:
    raise SystemExit(3)


def say_stop() -> None:
    raise StopAsyncIteration


class Anew:
    """An iterable whose iterator is itself and starts over on each request."""

    def __iter__(self) -> Anew:
        self._number = -1
        return self

    def __next__(self) -> int:
        self._number += 1
        if self._number == 9:
            raise StopIteration
        return self._number


@dataclass(frozen=True)
class Frozen(Exception):
    field: int = 1


def fail_frozen() -> None:
    raise Frozen


def odd(number: int) -> int:
    if number % 2 == 0:
        raise ValueError(f"{number} is even")
    return number


class Odd:
    """Odd numbers of which each worker gives all; an even one fails, and the next comes."""

    def __iter__(self) -> Iterator[int]:
        return map(odd, range(10))


class Broken:
    """Cannot be begun to iterate."""

    def __iter__(self) -> Iterator[int]:
        raise OSError("no such folder")


class Made(Given):
    """Samples, of which functions are called in the worker."""

    def __iter__(self) -> Iterator[object]:
        return (sample() if callable(sample) else sample for sample in self.samples)


class Half:
    """Can be pickled, and not unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return _refuse, ()


def _refuse() -> None:
    raise ValueError("half a sample")
