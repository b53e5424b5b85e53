"""Documents of tokens packed into windows of one length.

All documents of a dataset form one stream of tokens, which is cut into windows of equal length. A
binary search over the ends of documents finds the contents of a window.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from shardio._base.callers import one_of
from shardio.errors import InvalidArgument
from shardio.format.schema import Schema
from shardio.format.types import Array, Field

Rest = Literal["pad", "drop"]

_Numbers = npt.NDArray[np.int64]
_LONGEST: Final = 1 << 30
_AT_ONCE: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Pack:
    """The options of `dataset.pack`, which documents them."""

    length: int
    field: str | None = None
    targets: bool = False
    apart: bool = False
    eot: int | None = None
    pad: int = 0
    rest: Rest = "pad"

    def __post_init__(self) -> None:
        if type(self.length) is not int or not 1 <= self.length <= _LONGEST:
            raise InvalidArgument(
                f"length must be a whole number of tokens from 1 up to {_LONGEST:,}; found "
                f"{self.length!r}"
            )
        if not isinstance(self.field, str | None):
            raise InvalidArgument(f"field must be the name of a field; found {self.field!r}")
        for name in ("targets", "apart"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgument(f"{name} must be True or False; found {getattr(self, name)}")
        for name, value in (("eot", self.eot), ("pad", self.pad)):
            if type(value) is not int and (value is not None or name == "pad"):
                raise InvalidArgument(f"{name} must be a token, an integer; found {value!r}")
        one_of("rest", self.rest, get_args(Rest))

    @property
    def name(self) -> str:
        """The name of the packed field; only valid for a result of `resolve_pack`."""
        if self.field is None:
            raise AssertionError("resolve_pack must set the field first")
        return self.field

    @property
    def has_mask(self) -> bool:
        """True if a batch has a mask of its valid tokens."""
        return self.rest == "pad" or (self.targets and self.apart)

    @property
    def reach(self) -> int:
        """The number of tokens that a window reads: its length, plus 1 with targets."""
        return self.length + self.targets

    @property
    def identity(self) -> str:
        """A text that identifies the windows, regardless of the values of `pad`, `apart`, `eot`."""
        known = {
            "eot": self.eot is not None,
            "field": self.field,
            "length": self.length,
            "rest": self.rest,
            "targets": self.targets,
        }
        return "windows " + json.dumps(known, sort_keys=True, separators=(",", ":"))

    def document_type(self, schema: Schema) -> Array:
        """Return the type of the packed field, which holds the documents."""
        if (array := schema[self.name].array) is None:
            raise AssertionError("resolve_pack must check the field first")
        return array

    def window_fields(self, field: Array) -> dict[str, Array]:
        """Return the fields of a window, given the type of the packed field."""
        name, shape = self.name, (self.length,)
        found = {name: Array(field.dtype, shape)}
        if self.targets:
            found[f"{name}_targets"] = Array(field.dtype, shape)
        if self.apart:
            found[f"{name}_segments"] = Array("int32", shape)
            found[f"{name}_positions"] = Array("int32", shape)
        if self.has_mask:
            found[f"{name}_mask"] = Array("bool", shape)
        return found

    def sample_schema(self, schema: Schema) -> Schema:
        """Return the schema of samples that are windows."""
        return Schema(dict[str, Field](self.window_fields(self.document_type(schema))))


class WindowParts(NamedTuple):
    """The parts of documents in some windows, in order.

    Attributes:
        windows, offsets: for each part, its window, as an index from 0 into the requested windows,
            and its offset in the window.
        documents, starts: the document, and the offset of the part's first token in the document.
        counts: the token count, at least 1.
        is_last: True if the part ends with the document's last token.
        n_tokens: the token count of each window; below `Pack.reach` only at the end of a stream.
    """

    windows: _Numbers
    offsets: _Numbers
    documents: _Numbers
    starts: _Numbers
    counts: _Numbers
    is_last: npt.NDArray[np.bool_]
    n_tokens: _Numbers

    def select(self, selection: slice | npt.NDArray[np.bool_]) -> WindowParts:
        """Return the parts that a slice or mask selects; the indices of windows do not change."""
        return WindowParts._make((*(column[selection] for column in self[:-1]), self.n_tokens))

    def of_windows(self, first: int, last: int, parts: slice) -> WindowParts:
        """Return the parts of the windows `first` to `last` - 1; the slice `parts` selects them."""
        found = self.select(parts)
        return found._replace(windows=found.windows - first, n_tokens=self.n_tokens[first:last])


class PackedWindows:
    """The windows of some documents, by index, in the order of their tokens.

    Args:
        pack: the options of the windows.
        ends: the cumulative token counts of the documents, eot included.
        sources: the number of documents of each source of a mixture; each source is a stream.
        first_documents: the first document of each window; None to compute them.
    """

    def __init__(
        self,
        pack: Pack,
        ends: _Numbers,
        sources: Sequence[int] | None = None,
        first_documents: _Numbers | None = None,
    ) -> None:
        self.pack, self.ends = pack, ends
        n_documents = np.cumsum([len(ends)] if sources is None else sources)
        self._last_documents: _Numbers = n_documents - 1
        self._stops: _Numbers = np.concatenate([[0], ends])[n_documents]
        self._starts: _Numbers = np.concatenate([[0], self._stops[:-1]])
        self.n_windows: _Numbers = self.count(self._stops - self._starts)
        """The number of windows of each source."""
        self._window_ends: _Numbers = np.cumsum(self.n_windows)
        # Keep a table: two searches among 10^10 tokens took half of the 8 µs for a window.
        if first_documents is None:
            first_documents = self._find_first_documents()
        self.first_documents: _Numbers = first_documents

    def __len__(self) -> int:
        return int(self._window_ends[-1])

    def count(self, n_tokens: npt.ArrayLike) -> _Numbers:
        """Return the number of windows of each stream, given its number of tokens."""
        pack, found = self.pack, np.asarray(n_tokens, np.int64)
        inputs = np.maximum(found - pack.targets, 0)
        return (inputs if pack.rest == "drop" else inputs + pack.length - 1) // pack.length

    @property
    def n_tokens(self) -> tuple[int, ...]:
        """The number of tokens of each source's stream, eot included."""
        return tuple((self._stops - self._starts).tolist())

    def lengths(self, documents: _Numbers) -> _Numbers:
        """Return the number of tokens of some documents as stored, without eot."""
        starts = np.where(documents > 0, self.ends[documents - 1], 0)
        found: _Numbers = self.ends[documents] - starts - (self.pack.eot is not None)
        return found

    def _find_first_documents(self) -> _Numbers:
        found = np.empty(len(self), np.int64)
        for start, stop in zip(self._window_ends - self.n_windows, self._window_ends, strict=True):
            for i in range(start, stop, _AT_ONCE):
                numbers = np.arange(i, min(i + _AT_ONCE, stop))
                found[numbers] = np.searchsorted(self.ends, self._begins(numbers)[0], "right")
        return found

    def _begins(self, numbers: _Numbers) -> tuple[_Numbers, _Numbers]:
        """Return each window's offset in the concatenated documents, and the window's source."""
        sources = np.searchsorted(self._window_ends, numbers, "right")
        numbers_in_source = numbers - (self._window_ends - self.n_windows).take(sources)
        return self._starts.take(sources) + numbers_in_source * self.pack.length, sources

    def parts(self, numbers: _Numbers, n_tokens: Sequence[int] | None = None) -> WindowParts:
        """Return the parts of the windows with the indices `numbers`.

        `n_tokens` is the length of each source's stream at the start of the epoch, without tokens
        appended later; None takes the current lengths.
        """
        begins, sources = self._begins(numbers)
        stops = self._stops if n_tokens is None else self._starts + np.array(n_tokens)
        ends = np.minimum(begins + self.pack.reach, stops.take(sources))
        ends = np.maximum(ends, begins + 1)
        firsts = self.first_documents.take(numbers)
        following = self.first_documents.take(numbers + 1, mode="clip")
        is_last = numbers + 1 == self._window_ends.take(sources)
        lasts = np.where(is_last, self._last_documents.take(sources), following)
        counts = lasts - firsts + 1
        windows = np.repeat(np.arange(len(numbers)), counts)
        before = np.cumsum(counts) - counts
        documents = np.arange(len(windows)) + (firsts - before)[windows]
        stops = self.ends[documents]
        starts = np.where(documents > 0, self.ends[documents - 1], 0)
        from_ = np.maximum(starts, begins[windows])
        to = np.minimum(stops, ends[windows])
        offsets, is_last = from_ - begins[windows], to == stops
        found = WindowParts(
            windows, offsets, documents, from_ - starts, to - from_, is_last, ends - begins
        )
        # Drop empty parts: of empty documents, and of documents that begin in the next window.
        return found if (is_there := to > from_).all() else found.select(is_there)
