"""The common parts of DataLoader and Pipeline: sources, resumable iterations, checked steps."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Self

from shardio._base.classes import Closing
from shardio._base.statistics import PipelineStats
from shardio._loading.options import one_of, refuse_path
from shardio._workers.processes.linux import Finalizer, interrupts_held
from shardio._workers.processes.serialization import shortened
from shardio._workers.tasks.pipeline_runner import PipelineRunner
from shardio._workers.tasks.pipeline_spec import (
    PipelineStart,
    PipeStep,
    SourcePosition,
    checked_where,
    user_call,
)
from shardio._workers.tasks.stage import SourceItem
from shardio.errors import ClosedError, InvalidArgument
from shardio.order.sampling import count

_VERSION: Final = 1


class MapIterator:
    """An iterable over the values of a mapping, in the order in which a sampler yields the keys.

    Args:
        mapping: a mapping or a sequence; the keys of a sequence are 0, 1, ….
        sampler: an iterable of keys, iterated again for every iteration; None for all keys in
            order. To resume in the middle of an iteration, the sampler must repeat its keys.

    Raises:
        InvalidArgument: `mapping` cannot be indexed, or `sampler` cannot be iterated.
    """

    def __init__(self, mapping: Any, sampler: Iterable[Any] | None = None) -> None:
        if not hasattr(type(mapping), "__getitem__"):
            raise InvalidArgument(
                f"mapping must be a mapping or a sequence; found {shortened(mapping)}"
            )
        if sampler is None and not (isinstance(mapping, Mapping) or hasattr(mapping, "__len__")):
            raise InvalidArgument(
                "the keys of a mapping without a length are unknown; pass a sampler"
            )
        if not (sampler is None or _is_iterable(sampler)):
            raise InvalidArgument(f"sampler must be iterable; found {shortened(sampler)}")
        self._mapping, self._sampler = mapping, sampler

    def __iter__(self) -> Iterator[Any]:
        return self.iterate_from(0)

    def __len__(self) -> int:
        """Return the number of keys.

        Raises:
            TypeError: the sampler has no length.
        """
        return len(self._mapping if self._sampler is None else self._sampler)  # type: ignore[arg-type]

    def iterate_from(self, index: int) -> Iterator[Any]:
        """Yield the values from the key at position `index` on, without looking up earlier keys."""
        for place, key in enumerate(self._keys()):
            if place >= index:
                yield self._mapping[key]

    def _keys(self) -> Iterable[Any]:
        if self._sampler is not None:
            return self._sampler
        return self._mapping if isinstance(self._mapping, Mapping) else range(len(self._mapping))


class ResumePosition(NamedTuple):
    """A position in an iteration.

    `item` items are finished, and `n_passed_over` results of the next item have been yielded.
    """

    item: int = 0
    n_passed_over: int = 0
    source_state: Any = None
    """The result of the source's `state_dict`, if it has one."""


def behind(origin: SourceItem) -> ResumePosition:
    """Return the position after a result: the next item, or the next result of a generator."""
    if origin.n_given:
        return ResumePosition(origin.last, origin.n_given, origin.before)
    return ResumePosition(origin.last + 1, 0, origin.after)


class PipelineSource:
    """The source of an iteration, and its positions; `name` is its name in messages.

    Raises:
        InvalidArgument: the source cannot be iterated.
    """

    def __init__(self, name: str, source: Iterable[Any] | AsyncIterable[Any]) -> None:
        refuse_path(name, source)
        is_sync = not hasattr(type(source), "__aiter__")
        if is_sync and not _is_iterable(source):
            raise InvalidArgument(
                f"{name} must be iterable, or async iterable; found {shortened(source)}"
            )
        self.source: Any = source
        states = (getattr(source, name, None) for name in ("state_dict", "load_state_dict"))
        self._has_state = is_sync and all(callable(each) for each in states)
        is_sequence = isinstance(source, Sequence) or (
            hasattr(source, "__getitem__") and hasattr(source, "__len__")
        )
        is_mapping = isinstance(source, Mapping) or hasattr(source, "keys")
        self._is_sequence = is_sync and is_sequence and not is_mapping

    def count(self) -> int:
        """Return the number of items.

        Raises:
            TypeError: the source has no length.
        """
        if not hasattr(self.source, "__len__"):
            raise TypeError(f"the source has no length: {shortened(self.source)}")
        return len(self.source)

    def begin_at(self, position: ResumePosition) -> tuple[Any, PipelineStart, ResumePosition]:
        """Return an iterable that starts at a position, the runner's start, and the position.

        The returned position also has the state of the source.
        """
        start = PipelineStart(position.item, position.n_passed_over)
        if self._has_state:
            if position.source_state is not None:
                self.source.load_state_dict(position.source_state)
            else:
                position = position._replace(source_state=self.source.state_dict())
            return _WatchedIterator(self.source), start, position
        if not position.item:
            return self.source, start, position
        if isinstance(self.source, MapIterator):
            return self.source.iterate_from(position.item), start, position
        rest = map(self.source.__getitem__, range(position.item, len(self.source)))
        return rest, start, position

    def state_of(self, position: ResumePosition) -> dict[str, Any]:
        """Return the state for a position.

        Raises:
            InvalidArgument: the source cannot resume in the middle.
        """
        self._check_positions()
        n_items = len(self.source) if hasattr(self.source, "__len__") else None
        state = None
        if self._has_state:
            state = position.source_state
            state = self.source.state_dict() if state is None else state
        return {
            "version": _VERSION,
            "item": position.item,
            "n_passed_over": position.n_passed_over,
            "n_items": n_items,
            "source": state,
        }

    def position_in(self, state: Any) -> ResumePosition:
        """Return the position in a state.

        Raises:
            InvalidArgument: the state is invalid, or belongs to another source.
        """
        self._check_positions()
        kept = {*self.state_of(ResumePosition(0, 0, {}))}
        if not isinstance(state, Mapping) or set(state) != kept or state["version"] != _VERSION:
            raise InvalidArgument(
                f"state: expected a result of DataLoader.state_dict(); found {shortened(state)}"
            )
        n_items = len(self.source) if hasattr(self.source, "__len__") else None
        if state["n_items"] != n_items:
            raise InvalidArgument(
                f"state: belongs to a source of {state['n_items']} items; this one has {n_items}"
            )
        item = count("state['item']", state["item"], 0, n_items)
        passed_over = count("state['n_passed_over']", state["n_passed_over"], 0)
        return ResumePosition(item, passed_over, state["source"])

    def _check_positions(self) -> None:
        if not (self._has_state or self._is_sequence or isinstance(self.source, MapIterator)):
            raise InvalidArgument(
                "an iteration of this source cannot resume in the middle: expected a sequence, a "
                "MapIterator, or an object with state_dict and load_state_dict; found "
                f"{shortened(self.source)}"
            )


class _WatchedIterator:
    """Iterates over a source with `state_dict`, and adds its state before and after each item."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __iter__(self) -> Iterator[SourcePosition]:
        items = iter(self._source)
        before = self._source.state_dict()
        for item in items:
            after = self._source.state_dict()
            yield SourcePosition(before, after, item)
            before = after


def _is_iterable(value: Any) -> bool:
    # An object with only __getitem__ is iterated with 0, 1, …. Look at the type: a class has the
    # attributes of its instances, but is not iterable itself.
    return hasattr(type(value), "__iter__") or hasattr(type(value), "__getitem__")


ORDERS: Final = ("completion", "input")
_UNUSED: Final = PipelineStats((), 0, (), 0.0, 0.0, 0.0)


class PipelineIterations(Closing):
    """The base of DataLoader and Pipeline: starts and tracks iterations."""

    def __init__(self) -> None:
        self._lines: weakref.WeakSet[PipelineRunner] = weakref.WeakSet()
        self._latest: PipelineRunner | None = None
        self._is_closed = False

    def iterate(
        self,
        make: Callable[[], PipelineRunner],
        timeout_s: float | None,
        note: Callable[[SourceItem | None], None],
    ) -> Iterator[Any]:
        """Start an iteration with a new runner.

        `note` is called with each result's source item, and with None at the end.
        """
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
        """Return the figures of the latest iteration; empty before the first."""
        return _UNUSED if self._latest is None else self._latest.stats()

    def close(self) -> None:
        """End all running iterations, and allow no further ones. Idempotent."""
        self._is_closed = True
        for line in list(self._lines):
            line.close()


class _Iteration:
    """An iterator over results.

    The runner ends when the iterator is exhausted, raises or is garbage-collected.
    """

    def __init__(
        self,
        line: PipelineRunner,
        timeout_s: float | None,
        note: Callable[[SourceItem | None], None],
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
    thread_group: str = "threads",
) -> PipeStep:
    """Return a pipeline step that calls a function; check all options."""
    call = user_call(argument, function)
    if not isinstance(name, str | None):
        raise InvalidArgument(f"name must be a string; found {shortened(name)}")
    if checked_where(executor) is not None and call.is_async:
        raise InvalidArgument(
            f"{argument} is async, and runs in an event loop; found executor={executor!r}"
        )
    return PipeStep(
        call,
        argument if name is None else name,
        count("concurrency", concurrency, 1),
        one_of("order", order, ORDERS) == "input",
        thread_group,
        executor,
    )


def one_for_one(step: PipeStep) -> PipeStep:
    """Return the step; raise InvalidArgument if it may yield several results for an item."""
    if step.call.yields_many:
        raise InvalidArgument(
            f"{step.name} must return one result; only the preprocessor may be a generator function"
        )
    return step


def each_of(items: Iterable[Any]) -> Iterator[Any]:
    """Yield the elements of an item."""
    yield from items
