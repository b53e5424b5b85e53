"""The parts of a pipeline: start, source items, steps, and the functions that steps call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from types import CoroutineType
from typing import Any, Literal, NamedTuple

from shardio._workers.processes.serialization import shortened
from shardio._workers.tasks.schedule import DEPTH
from shardio.errors import InvalidArgument, TransformError

Kind = Literal["function", "generator", "coroutine", "async generator"]


@dataclass(frozen=True, slots=True)
class UserCall:
    """A function of one argument, and its kind: one or many results, synchronous or async."""

    function: Callable[[Any], Any]
    kind: Kind

    @property
    def is_async(self) -> bool:
        """True if calls run in an event loop."""
        return self.kind in ("coroutine", "async generator")

    @property
    def yields_many(self) -> bool:
        """True if a call yields any number of values."""
        return self.kind in ("generator", "async generator")


def user_call(name: str, function: Any) -> UserCall:
    """Classify a function; an object that supports indexing becomes a function of the index.

    Raises:
        InvalidArgument: `function` can neither be called nor indexed.
    """
    if not callable(function):
        look_up = getattr(function, "__getitem__", None)
        if look_up is None or isinstance(function, str | bytes):
            raise InvalidArgument(
                f"{name} must be a function, or something to look up in, such as a mapping; "
                f"found {shortened(function)}"
            )
        return UserCall(look_up, "function")
    return UserCall(function, _kind(function))


def _kind(function: Callable[..., Any]) -> Kind:
    # For a callable object, look at its `__call__`; for a class, do not.
    method = None if isinstance(function, type) else getattr(function, "__call__", None)  # noqa: B004
    for each in (function, method):
        if inspect.iscoroutinefunction(each):
            return "coroutine"
        if inspect.isasyncgenfunction(each):
            return "async generator"
        if inspect.isgeneratorfunction(each):
            return "generator"
    return "function"


def checked(value: Any) -> Any:
    """Return a function's result; raise TransformError for a coroutine, which nothing awaits."""
    if type(value) is CoroutineType:
        value.close()
        raise TransformError(
            "it returned a coroutine: define it with `async def`, so that it is awaited"
        )
    return value


Where = Literal["process"] | Executor | None
"""The place where calls run: threads of the pipeline, worker processes, or a given executor."""


def checked_where(executor: Any) -> Where:
    """Return `executor` if it is None, "process" or an Executor.

    Raises:
        InvalidArgument: `executor` is something else.
    """
    if executor is None or executor == "process" or isinstance(executor, Executor):
        return executor  # type: ignore[no-any-return]
    raise InvalidArgument(
        "executor must be None, 'process' or an Executor of concurrent.futures; found "
        f"{shortened(executor)}"
    )


class PipeStep(NamedTuple):
    """A step that calls a function for every item.

    Steps with the same `thread_group` share `concurrency` threads.
    """

    call: UserCall
    name: str
    concurrency: int
    in_order: bool
    thread_group: str
    executor: Where = None

    @property
    def most_under_way(self) -> int:
        """The maximum number of jobs in flight; more for processes, so that no worker idles."""
        if self.executor == "process":
            return DEPTH * self.concurrency + 2
        return self.concurrency


class BatchStep(NamedTuple):
    """A step that collects items into lists of `n`; a shorter last list is kept or dropped."""

    n: int
    drop_last: bool


class SourcePosition(NamedTuple):
    """An item, with the states of its source before and after it.

    The state before the item is used to repeat it, the state after it to continue.
    """

    before: Any
    after: Any
    item: Any


class PipelineStart(NamedTuple):
    """The position where a pipeline resumes: the first item, and the number of results to skip."""

    item: int = 0
    n_passed_over: int = 0
