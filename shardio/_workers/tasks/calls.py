"""Call a function for one item after another, in a worker or in this process.

A call is a header of 32 bytes and a pickled item; an answer is a header of 32 bytes and a small
result. A larger result is written to a block of shared memory, whose index the call contains.

The results of a generator are requested in chunks. A chunk is a list of results, or a `FailedCall`
if the generator has raised. Each result is pickled before the generator resumes and
may write to the same array again.
"""

from __future__ import annotations

import os
import pickle
import struct
import threading
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio._base.classes import Closing
from shardio._base.statistics import ItemStats, SkippedItem, now_ns
from shardio._workers.processes.blocks import BlockMap
from shardio._workers.processes.linux import keep_freed_memory, this_process, yield_to_main
from shardio._workers.processes.serialization import (
    ValuePickler,
    add_note,
    as_failure,
    pack_failure,
    short_repr,
    text_of,
    unpack_failure,
)
from shardio._workers.processes.stack_dumps import install_stack_handler, map_steps
from shardio._workers.processes.worker_main import (
    HEADER_BYTES,
    Channel,
    pack_message,
    unpack_message,
)
from shardio._workers.tasks.values import pack_value, write_to_block
from shardio.errors import (
    ClosedError,
    InsufficientMemory,
    InvalidArgument,
    TooManySkipped,
    UnsupportedEnvironment,
)

# A chunk ends after _MAX results, after _MAX_BYTES of pickled results, after _MAX_NS, or after a
# result with an array of at least _LARGE_BYTES; such an array is not copied into the pickle.
_MAX: Final = 64
_MAX_BYTES: Final = 64 << 10
_MAX_NS: Final = 10_000_000
_LARGE_BYTES: Final = 16 << 10
_END: Final = object()


class FailedCall:
    """The last results of a generator that has raised, and the exception with its traceback."""

    def __init__(self, results: list[Any], error: BaseException, name: str) -> None:
        self.results, self.error, self._name = results, error, name

    def __reduce__(self) -> Any:
        failure = pack_failure(self.error, self._name)
        return _unpacked_failed_call, (self.results, failure, self._name)


def _unpacked_failed_call(results: list[Any], failure: bytes, name: str) -> FailedCall:
    return FailedCall(results, unpack_failure(failure, "a worker"), name)


class _Pickled:
    def __init__(self, pickled: bytes) -> None:
        self._pickled = pickled

    def __reduce__(self) -> Any:
        return pickle.loads, (self._pickled,)


class ResultChunks:
    """The remaining results of a generator; `name` is the name of its function in messages."""

    def __init__(self, results: Iterator[Any], name: str) -> None:
        self._results, self._name = results, name
        self._pickler = ValuePickler(_LARGE_BYTES)
        self.n_passed_over = 0  # the number of results to skip, because an earlier worker sent them
        self.is_over = False

    def take(self) -> list[Any] | FailedCall:
        """Return the next results; the list is empty only if the generator has no more."""
        found: list[Any] = []
        try:
            self._gather(found)
        except BaseException as error:  # noqa: BLE001  # the user's function may raise anything
            self.is_over = True
            return FailedCall(found, error, self._name)
        return found

    def _gather(self, found: list[Any]) -> None:
        n_bytes, end_ns = 0, now_ns() + _MAX_NS
        while len(found) < _MAX and n_bytes < _MAX_BYTES and (now_ns() < end_ns or not found):
            value = next(self._results, _END)
            if value is _END:
                self.is_over = True
                return
            if self.n_passed_over:
                self.n_passed_over -= 1
                continue
            pickled, apart = self._pickler.dumps(value)
            if apart:
                found.append(value)
                return
            found.append(_Pickled(pickled))
            n_bytes += len(pickled)


HEADER: Final = struct.Struct("<HHIQQQ")
"""The header of each message; a step is the index of an item.

A request has: kind, 0, index of the block, step, number of results to skip, 0. An answer has:
outcome, number of results if the generator may yield more (else 0), index of the block, step,
number of bytes in the block, nanoseconds spent in the function.
"""

MAX_INLINE_BYTES: Final = 32 << 10
"""The maximum size of a value that is sent in the answer; larger values are faster in a block."""


class CallRequest(IntEnum):
    CALL = 1  # call the function with the item that follows the header
    BLOCK = 2  # receive a block, whose descriptor is attached
    HELLO = 3  # receive the file for Python stacks, whose descriptor is attached
    RESUME = 4  # send more results of a suspended generator


class CallOutcome(IntEnum):
    INLINE = 1  # the value follows the header
    IN_BLOCK = 2  # the value is in the block
    FAILED = 3  # the pickled exception and the text of its traceback follow the header


def pack_call(kind: CallRequest, block: int = 0, step: int = 0, n_passed_over: int = 0) -> bytes:
    return HEADER.pack(kind, 0, block, step, n_passed_over, 0)


def answer_calls(
    function: Callable[[Any], Any], max_bytes: int, name: str, channel: Channel
) -> None:
    """Call the function for one item after another until the main process closes the channel.

    The function returns a value, or `ResultChunks`, whose chunks are sent on request. A result of
    more than `max_bytes` is an error. The channel's first descriptor is that of the step file,
    in which a worker records what it is working on (see `stack_dumps`).
    """
    global _at_work
    yield_to_main()
    keep_freed_memory()
    caller = _Caller(function, max_bytes, name)
    at_work = _at_work = map_steps(channel.fds[0])[channel.index]
    while (received := channel.recv()) is not None:
        message, fds = received
        request_kind, _, number, step, *_ = HEADER.unpack_from(message)
        if request_kind == CallRequest.HELLO:
            install_stack_handler(fds[0])
        elif request_kind == CallRequest.BLOCK:
            caller.blocks[number] = BlockMap(fds[0])
        else:
            at_work[0] = step + 1
            with pack_message(caller.answer(unpack_message(message, fds))) as parcel:
                channel.send(*parcel)
            # Clear step and part, so that no later crash is attributed to the answered item.
            at_work[0] = at_work[1] = 0


_at_work: npt.NDArray[np.uint64] | None = None  # the step and the part, each plus 1


def note_part(part: int | None) -> None:
    """Record, for crash reports, the index of the part of an item that is being worked on."""
    if _at_work is not None:
        _at_work[1] = 0 if part is None else part + 1


class _Caller:
    def __init__(self, function: Callable[[Any], Any], max_bytes: int, name: str) -> None:
        self._function, self._max_bytes, self._name = function, max_bytes, name
        self._pid = this_process.pid
        self._pickler, self.blocks = ValuePickler(0), dict[int, BlockMap]()
        self._suspended: dict[int, ResultChunks] = {}

    def answer(self, message: bytes) -> bytes:
        request_kind, _, number, step, n_passed_over, _ = HEADER.unpack_from(message)
        start_ns = now_ns()
        try:
            if request_kind == CallRequest.RESUME:
                value: Any = self._suspended.pop(step)
            else:
                request = pickle.loads(memoryview(message)[HEADER_BYTES:])
                value = self._guarded(lambda: self._function(request))
            n_results = 0
            if isinstance(value, ResultChunks):
                chunks = value
                chunks.n_passed_over += n_passed_over
                value = self._guarded(chunks.take)
                if not chunks.is_over:
                    self._suspended[step], n_results = chunks, len(value)
            taken_ns = now_ns() - start_ns
            found = pack_value(value, self._pickler)
            if found.n_bytes <= MAX_INLINE_BYTES:
                head = HEADER.pack(CallOutcome.INLINE, n_results, number, step, 0, taken_ns)
                return head + found.to_bytes()
            if found.n_bytes > self._max_bytes:
                raise InsufficientMemory(
                    f"the result of {self._name} has {found.n_bytes} bytes; memory_bytes allows "
                    f"{self._max_bytes}: raise it, or return less at a time"
                )
            what = f"the bytes that {self._name} returned"
            hint = "return less, or fewer results at a time"
            write_to_block(found, self.blocks[number], what, hint)
        except BaseException as error:  # noqa: BLE001  # sent to the main process, even SystemExit
            self._suspended.pop(step, None)
            failure = pack_failure(error, self._name)
            taken_ns = now_ns() - start_ns
            return HEADER.pack(CallOutcome.FAILED, 0, number, step, 0, taken_ns) + failure
        return HEADER.pack(CallOutcome.IN_BLOCK, n_results, number, step, found.n_bytes, taken_ns)

    def _guarded(self, function: Callable[[], Any]) -> Any:
        """Call a function and return its result; if the function has forked, end the child."""
        try:
            return function()
        finally:
            if this_process.pid != self._pid:  # a fork; only the worker may answer
                os._exit(1)


class SingleCaller:
    """A context manager for one caller at a time; a second caller gets InvalidArgument."""

    def __init__(self, refusal: str) -> None:
        self._refusal, self._lock = refusal, threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise InvalidArgument(self._refusal)

    def __exit__(self, *raised: object) -> None:
        self._lock.release()


_NEVER_SKIPPED: Final = (UnsupportedEnvironment, ClosedError, InsufficientMemory)


class ErrorBudget:
    """The items that were skipped, at most `max_skips`; None allows no skips."""

    def __init__(self, max_skips: int | None) -> None:
        self.max_skips = max_skips
        self.skipped: list[SkippedItem] = []

    def allows_skip(self, error: BaseException) -> bool:
        is_of_item = isinstance(error, Exception) and not isinstance(error, _NEVER_SKIPPED)
        return self.max_skips is not None and is_of_item

    def skip(self, index: int, item: Any, error: BaseException) -> None:
        """Record that an item is skipped; raise TooManySkipped after too many skips."""
        found = SkippedItem(index, short_repr(item), type(error).__name__, text_of(error))
        self.skipped.append(found)
        n_skipped = len(self.skipped)
        if self.max_skips is not None and n_skipped > self.max_skips:
            raise TooManySkipped(
                f"{n_skipped} item{'s' * (n_skipped > 1)} failed; max_skips allows "
                f"{self.max_skips}; the last is item {index} ({found.item}): {found.error}: "
                f"{found.text}"
            ) from error


class InlinePool(Closing):
    """A `TaskPool` for num_workers=0, with room for one item; `take` calls the function."""

    def __init__(
        self, function: Callable[[Any], Any], name: str, max_skips: int | None = None
    ) -> None:
        self._function, self._name = function, name
        self.error_budget = ErrorBudget(max_skips)
        self._waiting: list[tuple[Any, Any]] = []
        self.n_put = self._n_taken = self._calling_ns = 0
        self._has_ended = False

    @property
    def has_room(self) -> bool:
        return not (self._waiting or self._has_ended)

    @property
    def is_over(self) -> bool:
        return self._has_ended and not self._waiting

    @property
    def stats(self) -> ItemStats:
        return ItemStats(
            n_put=self.n_put,
            n_taken=self._n_taken,
            n_skipped=len(self.error_budget.skipped),
            calling_s=self._calling_ns / 1e9,
        )

    def put(self, request: Any, item: Any = None) -> int:
        self._waiting.append((request, request if item is None else item))
        self.n_put += 1
        return self.n_put - 1

    def end(self) -> None:
        self._has_ended = True

    def take(self) -> tuple[int, Any] | None:
        """Return the queued item's index and value; None if no item is queued or it is skipped."""
        if not self._waiting:
            return None
        (request, item), number = self._waiting.pop(), self.n_put - 1
        start_ns = now_ns()
        error: Exception | None = None
        try:
            value = self._function(request)
        except KeyboardInterrupt:  # Ctrl-C, not an error of the item
            raise
        except BaseException as raised:  # noqa: BLE001  # even sys.exit, as in a worker
            error = as_failure(raised, self._name)
            add_note(error, f"in this process, item {number} ({short_repr(item)})")
            if not self.error_budget.allows_skip(error):
                raise error  # noqa: B904  # `as_failure` sets the cause
            self.error_budget.skip(number, item, error)
            return None
        finally:
            error = None  # breaks the reference cycle of error, traceback and frame
            self._calling_ns += now_ns() - start_ns
        self._n_taken += 1
        return number, value

    def close(self) -> None:
        self._waiting.clear()
        self._has_ended = True
