"""A disk that refuses a call, injected where shardio changes the file system."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from shardio.storage import fs


class Call(NamedTuple):
    """One call that changes a file system, and the file it is about."""

    kind: str
    path: str


class FailingDisk:
    """A disk that records every change of a file and refuses number `fail_at`.

    It takes the place of `shardio.storage.fs.perform`. `for_good`: it refuses all later calls as
    well, as a disk that stays full does.
    """

    def __init__(self, code: int = 0, fail_at: int = -1, *, for_good: bool = False) -> None:
        self.calls: list[Call] = []
        self.refused: Call | None = None
        self.refused_paths: set[str] = set()  # several, where threads are at work
        self.code, self._fail_at, self._for_good = code, fail_at, for_good

    def perform(
        self, kind: str, path: str, function: Callable[..., Any], *given: Any, **named: Any
    ) -> Any:
        call = Call(kind, path)
        self.calls.append(call)
        n = len(self.calls) - 1
        if n == self._fail_at or (self._for_good and n > self._fail_at >= 0):
            if self.refused is None:
                self.refused = call
            self.refused_paths.add(path)
            raise OSError(self.code, os.strerror(self.code), path)
        return function(*given, **named)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(fs, "perform", self.perform)


def before_calls(patch: pytest.MonkeyPatch, act: Callable[[str, str], object]) -> None:
    """Call `act` with kind and path before each change of a file; it may raise."""
    perform = fs.perform

    def acting(kind: str, path: Any, function: Any, *given: Any, **named: Any) -> Any:
        act(kind, str(path))
        return perform(kind, path, function, *given, **named)

    patch.setattr(fs, "perform", acting)


def fill_disk(
    patch: pytest.MonkeyPatch, n_refused: int = 1 << 20, kind: str = "write", end: str = ".part"
) -> None:
    """Refuse the next n calls of a kind to files whose names have this end: the disk is full."""
    left = [n_refused]

    def refuse(call: str, path: str) -> None:
        if call == kind and path.endswith(end) and left[0]:
            left[0] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    before_calls(patch, refuse)
