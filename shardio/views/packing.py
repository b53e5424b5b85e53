"""Documents of tokens packed into windows of one length: which part of which lies where. Pure.

All documents of a dataset, in the order of its rows, are one stream of tokens, and a window has so
many of them. Windows are a view: nothing is stored for them, and what lies in any of them is found
by a search over the places where documents end.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from shardio.errors import InvalidArgument
from shardio.format.fields import Array, Field
from shardio.format.schema import Schema

Rest = Literal["pad", "drop"]

_Numbers = npt.NDArray[np.int64]
_LONGEST: Final = 1 << 30
_AT_ONCE: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Pack:
    """How the documents in a field of tokens become windows, and what is beside them in a batch.

    With a field `tokens` a batch has `tokens`, (batch, length), in the dtype of the field, and what
    is asked for of `tokens_targets`, `tokens_segments`, `tokens_positions` and `tokens_mask`.

    Args:
        length: how many tokens a window has.
        field: which field; needed where a dataset has several that could be packed.
        targets: add `tokens_targets`: of every token the next one of the stream, also where that
            is in the next window. Windows lie `length` apart all the same.
        apart: add what keeps documents apart, both int32: `tokens_segments`, which of the window's
            documents a token is of, from 1 up, 0 in padding; and `tokens_positions`, how many
            tokens of it come before in the window.
        eot: a token that is put behind every document, also an empty one, and belongs to it.
        pad: the token that fills up the last window.
        rest: what becomes of the tokens at the end that fill no window: `"pad"` them, or `"drop"`.

    `tokens_mask`, bool, is there with `rest="pad"`, and with `targets` and `apart` together: False
    in padding; with targets also at the last token of all, which has none, and with `apart` at the
    last token of every document, whose target is of another.

    Raises:
        InvalidArgument: an option is not acceptable.
    """

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
        if self.rest not in get_args(Rest):
            known = ", ".join(map(repr, get_args(Rest)))
            raise InvalidArgument(f"rest must be one of {known}; found {self.rest!r}")

    @property
    def name(self) -> str:
        """The field, once it is known which."""
        if self.field is None:
            raise AssertionError("which field is packed is found out before anything is read")
        return self.field

    @property
    def has_mask(self) -> bool:
        """Whether a batch says which of its tokens count."""
        return self.rest == "pad" or (self.targets and self.apart)

    @property
    def reach(self) -> int:
        """How many tokens of the stream a window needs: with targets one more than it has."""
        return self.length + self.targets

    @property
    def identity(self) -> str:
        """What tells its windows from others; nothing of what lies beside them."""
        known = {
            "eot": self.eot is not None,
            "field": self.field,
            "length": self.length,
            "rest": self.rest,
            "targets": self.targets,
        }
        return "windows " + json.dumps(known, sort_keys=True, separators=(",", ":"))

    def documents(self, schema: Schema) -> Array:
        """The field that is packed."""
        field = schema[self.name]
        if not isinstance(field, Array):
            raise AssertionError("it is looked at which field is packed before anything is read")
        return field

    def made(self, field: Array) -> dict[str, Array]:
        """What a window is: the fields that are made of the one that is packed."""
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

    def delivered(self, schema: Schema) -> Schema:
        """The schema of samples that are windows."""
        return Schema(dict[str, Field](self.made(self.documents(schema))))


class Packing(NamedTuple):
    """How a dataset is packed, and how many documents it has."""

    pack: Pack
    n_documents: int


class WindowParts(NamedTuple):
    """The parts of documents that some windows are made of, one after another.

    Of each part: `windows`, which of the windows it is in, from 0; `places`, where in the window;
    `documents`, which document; `firsts`, with which of its tokens it begins; `counts`, how many it
    has, one at least; `is_last`, whether with the document's last. `n_tokens` is of each window:
    how many the parts have together, less than the window's reach where the stream ends.
    """

    windows: _Numbers
    places: _Numbers
    documents: _Numbers
    firsts: _Numbers
    counts: _Numbers
    is_last: npt.NDArray[np.bool_]
    n_tokens: _Numbers

    def some(self, within: slice | npt.NDArray[np.bool_]) -> WindowParts:
        """Some of the parts, of the same windows."""
        return WindowParts(
            self.windows[within],
            self.places[within],
            self.documents[within],
            self.firsts[within],
            self.counts[within],
            self.is_last[within],
            self.n_tokens,
        )

    def of_windows(self, first: int, last: int, within: slice) -> WindowParts:
        """Those of some of the windows, which are numbered from 0 then; `within` is where."""
        found = self.some(within)
        return found._replace(windows=found.windows - first, n_tokens=self.n_tokens[first:last])


class PackedWindows:
    """The windows of some documents, by position: those of the first tokens first.

    Args:
        pack: how they are cut.
        ends: how many tokens the first document has, the first two, and so on, eot included.
        sources: how many documents each source of a mixture has; every source is a stream of its
            own. None: all documents are one.
        firsts: which document each window begins in, if that is known already.
    """

    def __init__(
        self,
        pack: Pack,
        ends: _Numbers,
        sources: Sequence[int] | None = None,
        firsts: _Numbers | None = None,
    ) -> None:
        self.pack, self.ends = pack, ends
        n_documents = np.cumsum([len(ends)] if sources is None else sources)
        self._last_documents: _Numbers = n_documents - 1
        self._stops: _Numbers = np.concatenate([[0], ends])[n_documents]
        self._starts: _Numbers = np.concatenate([[0], self._stops[:-1]])
        self.n_windows: _Numbers = self.count(self._stops - self._starts)
        """How many each source has."""
        self._behind: _Numbers = np.cumsum(self.n_windows)
        # A table: of 10^10 tokens, two searches for each window took 4 µs, as much as all else.
        self.firsts: _Numbers = self._find_firsts() if firsts is None else firsts

    def __len__(self) -> int:
        return int(self._behind[-1])

    def count(self, n_tokens: npt.ArrayLike) -> _Numbers:
        """How many windows streams of so many tokens have."""
        pack, found = self.pack, np.asarray(n_tokens, np.int64)
        inputs = np.maximum(found - pack.targets, 0)
        return (inputs if pack.rest == "drop" else inputs + pack.length - 1) // pack.length

    @property
    def is_padded(self) -> bool:
        """Whether tokens that are appended to a stream may change its last window."""
        return self.pack.rest == "pad"

    @property
    def n_tokens(self) -> tuple[int, ...]:
        """How many tokens the stream of each source has, eot included."""
        return tuple((self._stops - self._starts).tolist())

    def lengths(self, documents: _Numbers) -> _Numbers:
        """How many tokens are stored of each of some documents."""
        starts = np.where(documents > 0, self.ends[documents - 1], 0)
        found: _Numbers = self.ends[documents] - starts - (self.pack.eot is not None)
        return found

    def _find_firsts(self) -> _Numbers:
        found = np.empty(len(self), np.int64)
        for start, stop in zip(self._behind - self.n_windows, self._behind, strict=True):
            for i in range(start, stop, _AT_ONCE):
                numbers = np.arange(i, min(i + _AT_ONCE, stop))
                found[numbers] = np.searchsorted(self.ends, self._begins(numbers)[0], "right")
        return found

    def _begins(self, numbers: _Numbers) -> tuple[_Numbers, _Numbers]:
        """With which token of all each window begins, and the source that it is of."""
        sources = np.searchsorted(self._behind, numbers, "right")
        locals_ = numbers - (self._behind - self.n_windows).take(sources)
        return self._starts.take(sources) + locals_ * self.pack.length, sources

    def parts(self, numbers: _Numbers, n_tokens: Sequence[int] | None = None) -> WindowParts:
        """What some windows are made of; `numbers` are from 0 to len() - 1.

        `n_tokens` is how many tokens the stream of each source had when the epoch began that they
        belong to: what is appended later is no part of it. None: as many as now.
        """
        begins, sources = self._begins(numbers)
        stops = self._stops if n_tokens is None else self._starts + np.array(n_tokens)
        ends = np.minimum(begins + self.pack.reach, stops.take(sources))
        ends = np.maximum(ends, begins + 1)
        firsts = self.firsts.take(numbers)
        following = self.firsts.take(numbers + 1, mode="clip")
        is_last = numbers + 1 == self._behind.take(sources)
        lasts = np.where(is_last, self._last_documents.take(sources), following)
        counts = lasts - firsts + 1
        windows = np.repeat(np.arange(len(numbers)), counts)
        before = np.cumsum(counts) - counts
        documents = np.arange(len(windows)) + (firsts - before)[windows]
        stops = self.ends[documents]
        starts = np.where(documents > 0, self.ends[documents - 1], 0)
        from_ = np.maximum(starts, begins[windows])
        to = np.minimum(stops, ends[windows])
        places, is_last = from_ - begins[windows], to == stops
        found = WindowParts(
            windows, places, documents, from_ - starts, to - from_, is_last, ends - begins
        )
        # Empty documents are nowhere; nor is the one that the next window begins with, if all of it
        # is there.
        return found if (is_there := to > from_).all() else found.some(is_there)
