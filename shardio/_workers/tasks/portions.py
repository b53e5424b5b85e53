"""What a generator in a worker gives: in portions, of which main asks for one after the other.

A portion is a list of results, or `Broken` where the generator has failed. Results are pickled as
they come, so that a generator may go on to write into an array that it has given.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from typing import Any, Final

from shardio._base.phase_timers import now_ns
from shardio._workers.processes.serialization import pack_failure, pickle_apart, unpack_failure

_MOST: Final = 64
_MOST_BYTES: Final = 64 << 10
_MOST_NS: Final = 10_000_000
"""A portion ends with the result that makes it so many, so large, or takes so long."""
_ALONE_BYTES: Final = 16 << 10
"""A result with an array of so many bytes is a portion of its own."""
_END: Final = object()


class Broken:
    """What a generator gave, and what it raised then, which travels as failures do."""

    def __init__(self, found: list[Any], error: BaseException, name: str) -> None:
        self.found, self.error, self._name = found, error, name

    def __reduce__(self) -> Any:
        return _broken, (self.found, pack_failure(self.error, self._name), self._name)


def _broken(found: list[Any], failure: bytes, name: str) -> Broken:
    return Broken(found, unpack_failure(failure, "a worker"), name)


class _Pickled:
    """A result as it was when it came."""

    def __init__(self, pickled: bytes) -> None:
        self._pickled = pickled

    def __reduce__(self) -> Any:
        return pickle.loads, (self._pickled,)


class Portions:
    """The results of a generator that are still to come.

    Args:
        results: the generator.
        name: what it is in messages.
    """

    def __init__(self, results: Iterator[Any], name: str) -> None:
        self._results, self._name = results, name
        self._large: list[Any] = []  # what waits for a portion of its own
        self.n_passed_over = 0
        """How many results are left out, since main has them of a worker that died."""
        self.is_over = False

    def take(self) -> list[Any] | Broken:
        """The next results; none only where it is over."""
        found: list[Any] = []
        end_ns = now_ns() + _MOST_NS
        try:
            self._gather(found, end_ns)
        except BaseException as error:  # noqa: BLE001 - of the user's function, whatever it is
            self.is_over = True
            return Broken(found, error, self._name)
        return found

    def _gather(self, found: list[Any], end_ns: int) -> None:
        if self._large:
            found.append(self._large.pop())
            return
        n_bytes = 0
        while len(found) < _MOST and n_bytes < _MOST_BYTES and (now_ns() < end_ns or not found):
            value = next(self._results, _END)
            if value is _END:
                self.is_over = True
                return
            if self.n_passed_over:
                self.n_passed_over -= 1
                continue
            file, apart = io.BytesIO(), list[pickle.PickleBuffer]()
            pickle_apart(value, file, apart, _ALONE_BYTES)
            if not apart:
                found.append(_Pickled(file.getvalue()))
                n_bytes += len(file.getbuffer())
            elif found:
                self._large.append(value)
                return
            else:
                found.append(value)
                return
