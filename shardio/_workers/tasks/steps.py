"""What a line is made of: where it begins, what its source gives, and what is done to that."""

from __future__ import annotations

from concurrent.futures import Executor
from typing import Any, Literal, NamedTuple

from shardio._workers.processes.serialization import shortened
from shardio._workers.tasks.schedule import DEPTH
from shardio._workers.tasks.user_calls import UserCall
from shardio.errors import InvalidArgument

Where = Literal["process"] | Executor | None
"""What makes calls: threads of the line, worker processes, or an executor of the user."""


def checked_where(executor: Any) -> Where:
    """One of these.

    Raises:
        InvalidArgument: it is none.
    """
    if executor is None or executor == "process" or isinstance(executor, Executor):
        return executor  # type: ignore[no-any-return]
    raise InvalidArgument(
        "executor must be None, 'process' or an Executor of concurrent.futures; found "
        f"{shortened(executor)}"
    )


class Piped(NamedTuple):
    """A function for every item; steps with the same `crew` have `concurrency` threads together."""

    call: UserCall
    name: str
    concurrency: int
    in_order: bool
    crew: str
    executor: Where = None

    @property
    def most_under_way(self) -> int:
        """The maximum number of jobs in flight: more for processes, so that no worker idles."""
        if self.executor == "process":
            return DEPTH * self.concurrency + 2
        return self.concurrency


class Batched(NamedTuple):
    """Lists of `n` items; of what is left at the end a shorter one, unless that is dropped."""

    n: int
    drop_last: bool


class Positioned(NamedTuple):
    """An item of a source that says where it is to go on: to give it again, or the next."""

    before: Any
    after: Any
    item: Any


class Start(NamedTuple):
    """Where a line begins: the number of its first item, and how many results of it to omit."""

    item: int = 0
    n_passed_over: int = 0
