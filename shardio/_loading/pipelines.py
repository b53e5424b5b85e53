"""What DataLoader and Pipeline have in common: passes, and steps whose arguments are checked."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Self

from shardio._base.closing import Closing
from shardio._base.statistics import PipelineStats
from shardio._loading.options import count, one_of
from shardio._workers.processes.linux import Finalizer, interrupts_held
from shardio._workers.processes.serialization import shortened
from shardio._workers.tasks.pipeline_runner import Line
from shardio._workers.tasks.pipeline_spec import Piped, checked_where, user_call
from shardio._workers.tasks.stage import Origin
from shardio.errors import ClosedError, InvalidArgument

ORDERS: Final = ("completion", "input")
_UNUSED: Final = PipelineStats((), 0, (), 0.0, 0.0, 0.0)


class Passes(Closing):
    """Begins a new pass whenever it is iterated, and keeps track of those under way."""

    def __init__(self) -> None:
        self._lines: weakref.WeakSet[Line] = weakref.WeakSet()
        self._latest: Line | None = None
        self._is_closed = False

    def iterate(
        self,
        make: Callable[[], Line],
        timeout_s: float | None,
        note: Callable[[Origin | None], None],
    ) -> Iterator[Any]:
        """Iterate over a new line; `note` hears what every result was made of, and then None."""
        self.check_open()
        with interrupts_held():
            line = make()
            found = _Iteration(line, timeout_s, note)
        self._lines.add(line)
        self._latest = line
        return found

    def check_open(self) -> None:
        """Raise ClosedError after `close`."""
        if self._is_closed:
            raise ClosedError(f"this {type(self).__name__} was closed")

    def stats(self) -> PipelineStats:
        """What the stages of the latest iteration have done, so far; of none before the first."""
        return _UNUSED if self._latest is None else self._latest.stats()

    def close(self) -> None:
        """End all iterations that are under way; there can be no other. May be called again."""
        self._is_closed = True
        for line in list(self._lines):
            line.close()


class _Iteration:
    """One pass: an iterator. Leaving it, in whatever way, ends it at once."""

    def __init__(
        self, line: Line, timeout_s: float | None, note: Callable[[Origin | None], None]
    ) -> None:
        self._take, self._timeout_s, self._note = line.take, timeout_s, note
        self._close = Finalizer(self, line.abandon)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if not self._close.alive:
            raise StopIteration
        try:
            entry = self._take(self._timeout_s)
        except BaseException:
            self._close()
            raise
        if entry is None:
            self._close()
            self._note(None)
            raise StopIteration
        self._note(entry[0])
        return entry[1]


def piped(
    argument: str,
    function: Any,
    *,
    concurrency: Any = 1,
    executor: Any = None,
    order: Any = "input",
    name: str | None = None,
    crew: str = "threads",
) -> Piped:
    """A function as a step, with everything about it checked."""
    call = user_call(argument, function)
    if not isinstance(name, str | None):
        raise InvalidArgument(f"name must be a string; found {shortened(name)}")
    if checked_where(executor) is not None and call.is_async:
        raise InvalidArgument(
            f"{argument} is async, and runs in an event loop here; found executor={executor!r}"
        )
    return Piped(
        call,
        argument if name is None else name,
        count("concurrency", concurrency, 1),
        one_of("order", order, ORDERS) == "input",
        crew,
        executor,
    )


def one_for_one(step: Piped) -> Piped:
    """A step that gives one result for what comes."""
    if step.call.yields_many:
        raise InvalidArgument(
            f"{step.name} gives one result; a generator function is for the preprocessor"
        )
    return step


def each_of(items: Iterable[Any]) -> Iterator[Any]:
    """The elements of what comes."""
    yield from items
