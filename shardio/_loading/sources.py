"""The sources of DataLoader and Pipeline, and the positions at which an iteration can resume."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Self

from shardio._loading.options import refuse_path
from shardio._workers.processes.serialization import short_repr
from shardio._workers.tasks.stage import SourceItem, SourcePosition
from shardio.errors import InvalidArgument
from shardio.order.sampling import check_count

_VERSION: Final = 1


class MapIterator:
    """An iterable over the values of a mapping, in the order in which a sampler yields the keys.

    Args:
        mapping: a mapping or a sequence; the keys of a sequence are 0, 1, ….
        sampler: an iterable of keys, iterated anew for every iteration; None for all keys in order.
            An iteration can only resume in the middle if the sampler yields the same keys again.

    Raises:
        InvalidArgument: `mapping` cannot be indexed, or `sampler` cannot be iterated.
    """

    def __init__(self, mapping: Any, sampler: Iterable[Any] | None = None) -> None:
        if not hasattr(type(mapping), "__getitem__"):
            raise InvalidArgument(
                f"mapping must be a mapping or a sequence; found {short_repr(mapping)}"
            )
        if sampler is None and not (isinstance(mapping, Mapping) or hasattr(mapping, "__len__")):
            raise InvalidArgument(
                "the keys of a mapping without a length are unknown; pass a sampler"
            )
        if not (sampler is None or _is_iterable(sampler)):
            raise InvalidArgument(f"sampler must be iterable; found {short_repr(sampler)}")
        self._mapping, self._sampler = mapping, sampler

    def __iter__(self) -> Iterator[Any]:
        return self.iterate_from(0)

    def __len__(self) -> int:
        """Return the number of keys; raise TypeError if the sampler has no length."""
        return len(self._mapping if self._sampler is None else self._sampler)  # type: ignore[arg-type]

    def iterate_from(self, index: int) -> Iterator[Any]:
        """Yield the values from position `index` on, without looking up earlier ones."""
        for position, key in enumerate(self._keys()):
            if position >= index:
                yield self._mapping[key]

    def _keys(self) -> Iterable[Any]:
        if self._sampler is not None:
            return self._sampler
        return self._mapping if isinstance(self._mapping, Mapping) else range(len(self._mapping))


class ResumePosition(NamedTuple):
    """A position in an iteration: after all results of the first `item` items.

    The first `n_passed_over` results of the next item have also been yielded.
    """

    item: int = 0
    n_passed_over: int = 0
    source_state: Any = None
    """The result of the source's method `state_dict`, if the source has this method."""

    @classmethod
    def after(cls, origin: SourceItem | None) -> Self:
        """Return the position after a result of `origin`; if `origin` is None, return the start."""
        if origin is None:
            return cls()
        if origin.n_yielded:  # the item went to a generator function, which may yield more results
            return cls(origin.last, origin.n_yielded, origin.before)
        return cls(origin.last + 1, 0, origin.after)


class PipelineSource:
    """The source of a DataLoader or a Pipeline; `name` is its name in messages."""

    def __init__(self, name: str, source: Iterable[Any] | AsyncIterable[Any]) -> None:
        refuse_path(name, source)
        is_sync = not hasattr(type(source), "__aiter__")
        if is_sync and not _is_iterable(source):
            raise InvalidArgument(
                f"{name} must be iterable, or async iterable; found {short_repr(source)}"
            )
        self.source: Any = source
        states = (getattr(source, name, None) for name in ("state_dict", "load_state_dict"))
        self._has_state = is_sync and all(callable(each) for each in states)
        is_sequence = isinstance(source, Sequence) or (
            hasattr(source, "__getitem__") and hasattr(source, "__len__")
        )
        is_mapping = isinstance(source, Mapping) or hasattr(source, "keys")
        self._is_sequence = is_sync and is_sequence and not is_mapping

    @property
    def n_items(self) -> int | None:
        return len(self.source) if hasattr(self.source, "__len__") else None

    def begin_at(self, position: ResumePosition) -> tuple[Any, ResumePosition]:
        """Return an iterable over the items from a position on, and the position.

        If the source has a `state_dict`, the returned position contains the state of the source,
        and the iterable yields each item in a SourcePosition.
        """
        if self._has_state:
            if position.source_state is not None:
                self.source.load_state_dict(position.source_state)
            else:
                position = position._replace(source_state=self.source.state_dict())
            return self._iterate_with_states(), position
        if not position.item:
            return self.source, position
        if isinstance(self.source, MapIterator):
            return self.source.iterate_from(position.item), position
        rest = map(self.source.__getitem__, range(position.item, len(self.source)))
        return rest, position

    def _iterate_with_states(self) -> Iterator[SourcePosition]:
        items = iter(self.source)
        before = self.source.state_dict()
        for item in items:
            after = self.source.state_dict()
            yield SourcePosition(before, after, item)
            before = after

    def state_of(self, position: ResumePosition) -> dict[str, Any]:
        self._check_positions()
        # A source without state_dict needs no state: `item` alone says where to continue.
        state = None
        if self._has_state:
            state = position.source_state
            if state is None:
                state = self.source.state_dict()
        return {
            "version": _VERSION,
            "item": position.item,
            "n_passed_over": position.n_passed_over,
            "n_items": self.n_items,
            "source": state,
        }

    def position_from_state(self, state: Any) -> ResumePosition:
        self._check_positions()
        kept = {"version", "item", "n_passed_over", "n_items", "source"}
        if not isinstance(state, Mapping) or set(state) != kept or state["version"] != _VERSION:
            raise InvalidArgument(
                f"state must be a result of DataLoader.state_dict(); found {short_repr(state)}"
            )
        n_items = self.n_items
        if state["n_items"] != n_items:
            raise InvalidArgument(
                f"the state belongs to a source of {state['n_items']} items; this one has {n_items}"
            )
        item = check_count("state['item']", state["item"], 0, n_items)
        passed_over = check_count("state['n_passed_over']", state["n_passed_over"], 0)
        return ResumePosition(item, passed_over, state["source"])

    def _check_positions(self) -> None:
        if not (self._has_state or self._is_sequence or isinstance(self.source, MapIterator)):
            raise InvalidArgument(
                "an iteration of this source cannot resume in the middle: expected a sequence, a "
                "MapIterator, or an object with state_dict and load_state_dict; found "
                f"{short_repr(self.source)}"
            )


def _is_iterable(value: Any) -> bool:
    # Python iterates over an object that has only __getitem__ with the indices 0, 1, …. Look at the
    # type of the value: if the value is a class, its attribute __iter__ is for its instances.
    return hasattr(type(value), "__iter__") or hasattr(type(value), "__getitem__")
