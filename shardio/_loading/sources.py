"""Where the items of a pipeline come from, and where in them a pass may begin."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from shardio._loading.options import count, refuse_path
from shardio._workers.processes.serialization import shortened
from shardio._workers.tasks.pipeline_spec import Positioned, Start
from shardio._workers.tasks.stage import Origin
from shardio.errors import InvalidArgument

_VERSION: Final = 1


class MapIterator:
    """Goes over the values of a mapping, in the order in which a sampler gives its keys.

    Args:
        mapping: a mapping, or a sequence, whose keys are 0, 1, ….
        sampler: an iterable of keys, asked anew for every pass, and the same again where one goes
            on in the midst of another; None is all keys in their order.

    Raises:
        InvalidArgument: `mapping` cannot be looked up in, or `sampler` not be iterated.
    """

    def __init__(self, mapping: Any, sampler: Iterable[Any] | None = None) -> None:
        if not hasattr(type(mapping), "__getitem__"):
            raise InvalidArgument(
                f"mapping must be a mapping or a sequence; found {shortened(mapping)}"
            )
        if sampler is None and not (isinstance(mapping, Mapping) or hasattr(mapping, "__len__")):
            raise InvalidArgument(
                "the keys are not known of a mapping without a length; give a sampler"
            )
        if not (sampler is None or _is_iterable(sampler)):
            raise InvalidArgument(f"sampler must be iterable; found {shortened(sampler)}")
        self._mapping, self._sampler = mapping, sampler

    def __iter__(self) -> Iterator[Any]:
        return self.iterate_from(0)

    def __len__(self) -> int:
        """How many values: as many as the sampler has keys, if it tells.

        Raises:
            TypeError: it does not.
        """
        return len(self._mapping if self._sampler is None else self._sampler)  # type: ignore[arg-type]

    def iterate_from(self, index: int) -> Iterator[Any]:
        """The values from the key at a place on; nothing is looked up for those before."""
        for place, key in enumerate(self._keys()):
            if place >= index:
                yield self._mapping[key]

    def _keys(self) -> Iterable[Any]:
        if self._sampler is not None:
            return self._sampler
        return self._mapping if isinstance(self._mapping, Mapping) else range(len(self._mapping))


class Position(NamedTuple):
    """Where a pass is: behind so many items of the source, and so many results of the next."""

    item: int = 0
    n_passed_over: int = 0
    source_state: Any = None
    """Where the source is by its own account, if it gives one."""


def behind(origin: Origin) -> Position:
    """The position behind a result: the next item, or what else a generator made of this one."""
    if origin.n_given:
        return Position(origin.last, origin.n_given, origin.before)
    return Position(origin.last + 1, 0, origin.after)


class Supply:
    """A source, which messages call `name`, and how it is brought to a position.

    Raises:
        InvalidArgument: it cannot be iterated.
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
        """How many items it has.

        Raises:
            TypeError: it does not tell.
        """
        if not hasattr(self.source, "__len__"):
            raise TypeError(f"the source has no length: {shortened(self.source)}")
        return len(self.source)

    def begin_at(self, position: Position) -> tuple[Any, Start, Position]:
        """What a line is to go over, to begin at a position; which item that is; the position."""
        start = Start(position.item, position.n_passed_over)
        if self._has_state:
            if position.source_state is not None:
                self.source.load_state_dict(position.source_state)
            else:
                position = position._replace(source_state=self.source.state_dict())
            return _Watched(self.source), start, position
        if not position.item:
            return self.source, start, position
        if isinstance(self.source, MapIterator):
            return self.source.iterate_from(position.item), start, position
        rest = map(self.source.__getitem__, range(position.item, len(self.source)))
        return rest, start, position

    def state_of(self, position: Position) -> dict[str, Any]:
        """A position as it is kept.

        Raises:
            InvalidArgument: the source cannot be brought there again.
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

    def position_in(self, state: Any) -> Position:
        """The position that was kept.

        Raises:
            InvalidArgument: it is none, or not one of this source.
        """
        self._check_positions()
        kept = {*self.state_of(Position(0, 0, {}))}
        if not isinstance(state, Mapping) or set(state) != kept or state["version"] != _VERSION:
            raise InvalidArgument(
                f"state: expected what state_dict() of a DataLoader gives; found {shortened(state)}"
            )
        n_items = len(self.source) if hasattr(self.source, "__len__") else None
        if state["n_items"] != n_items:
            raise InvalidArgument(
                f"state: it is of a source of {state['n_items']} items; this one has {n_items}"
            )
        item = count("state['item']", state["item"], 0, n_items)
        passed_over = count("state['n_passed_over']", state["n_passed_over"], 0)
        return Position(item, passed_over, state["source"])

    def _check_positions(self) -> None:
        if not (self._has_state or self._is_sequence or isinstance(self.source, MapIterator)):
            raise InvalidArgument(
                "a pass over this source cannot go on in its midst: expected a sequence, a "
                "MapIterator, or something with state_dict and load_state_dict; found "
                f"{shortened(self.source)}"
            )


class _Watched:
    """A source that tells where it is, asked before and after every item."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __iter__(self) -> Iterator[Positioned]:
        items = iter(self._source)
        before = self._source.state_dict()
        for item in items:
            after = self._source.state_dict()
            yield Positioned(before, after, item)
            before = after


def _is_iterable(value: Any) -> bool:
    # What has only __getitem__ is iterated by 0, 1, …; a class is not, whatever its instances are.
    return hasattr(type(value), "__iter__") or hasattr(type(value), "__getitem__")
