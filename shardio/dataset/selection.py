"""The selected rows of a dataset: all rows, a set of rows, or a list of rows.

A row is given by its index over all shards of a dataset. The *position* of a row is its index
among the selected rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from shardio._base.classes import cached_property
from shardio.errors import InvalidArgument
from shardio.format.checksum import hash_bytes
from shardio.format.types.array_values import is_masked
from shardio.shard.verification import Rows

_Numbers = npt.NDArray[np.int64]


class RowRuns:
    """A set of rows of a dataset, in ascending order, as runs of consecutive rows. Immutable.

    `starts` contains the first row of each run, and `n_rows` the length of each run, which is at
    least 1. There is a gap between any two runs. The row at a position is found by binary search.
    """

    def __init__(self, starts: npt.ArrayLike, n_rows: npt.ArrayLike) -> None:
        self._starts: _Numbers = np.asarray(starts, np.int64)
        self._counts: _Numbers = np.asarray(n_rows, np.int64)
        self._ends: _Numbers = np.cumsum(self._counts)
        self._shifts: _Numbers = self._starts - (self._ends - self._counts)

    @classmethod
    def from_mask(cls, is_in: npt.NDArray[np.bool_]) -> Self:
        """Return the set of all rows i for which `is_in[i]` is True."""
        edges = np.flatnonzero(np.diff(np.concatenate([[False], is_in, [False]]).astype(np.int8)))
        return cls(edges[0::2], edges[1::2] - edges[0::2])

    @classmethod
    def from_text(cls, text: Any, n_rows: int) -> Self:
        """Parse a result of `to_text`.

        Raise InvalidArgument if it is not valid for a dataset of `n_rows` rows.
        """
        if not isinstance(text, str):
            raise InvalidArgument(f"expected runs of rows as a text; found {text!r}")
        try:
            numbers = np.array([int(word) for word in text.split()], np.int64).reshape(-1, 2)
        except (ValueError, OverflowError) as error:
            raise InvalidArgument(f"not runs of rows: {error}") from error
        is_wrong = (numbers < 0).any() or (numbers[:, 1] < 1).any() or (numbers[1:, 0] < 1).any()
        if is_wrong or sum(numbers.reshape(-1).tolist()) > n_rows:
            raise InvalidArgument(
                f"expected separate runs within {n_rows} rows; found {text!r:.99}"
            )
        found = cls(np.cumsum(numbers.reshape(-1))[0::2], numbers[:, 1])
        if found.to_text() != text:
            raise InvalidArgument("the runs of rows are not in canonical form")
        return found

    def to_text(self) -> str:
        """Return the runs as text: "0 90 10 90" skips 0 rows, selects 90, skips 10, selects 90."""
        gaps = self._starts - np.concatenate([[0], (self._starts + self._counts)[:-1]])
        return " ".join(map(str, np.stack([gaps, self._counts], axis=1).reshape(-1).tolist()))

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowRuns) and self.to_text() == other.to_text()

    def __repr__(self) -> str:
        return f"RowRuns({len(self)} rows in {len(self._starts)} runs)"

    def rows(self, positions: _Numbers) -> _Numbers:
        """Return the row at each of `positions`, which must be from 0 to len() - 1."""
        found: _Numbers = positions + self._shifts[np.searchsorted(self._ends, positions, "right")]
        return found

    def n_below(self, limits: _Numbers) -> _Numbers:
        """Return the number of rows below each of `limits`."""
        before = np.searchsorted(self._starts, limits, "left")
        ends, starts = np.concatenate([[0], self._ends]), np.concatenate([[0], self._starts])
        # Count the rows of all runs that begin below the limit. The last of these runs may end
        # above the limit: subtract the rows of this last run that are not below the limit.
        counts = np.concatenate([[0], self._counts])
        found: _Numbers = ends[before] - np.maximum(0, starts[before] + counts[before] - limits)
        return found

    @property
    def runs(self) -> tuple[_Numbers, _Numbers]:
        """The first row of each run, and its number of rows. Do not modify the arrays."""
        return self._starts, self._counts

    def all_rows(self) -> _Numbers:
        """Return all rows of the set."""
        return self.rows(np.arange(len(self)))

    @cached_property
    def identity(self) -> str:
        """A hash that identifies the set of rows."""
        return f"{hash_bytes(self.to_text().encode()):016x}"


class RowList:
    """A list of rows of a dataset, in any order, with or without repetitions. Immutable.

    The array `rows` is not copied.
    """

    def __init__(self, rows: _Numbers) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"RowList({len(self)} rows)"

    def rows(self, positions: _Numbers) -> _Numbers:
        """Return the row at each of `positions`, which must be from 0 to len() - 1."""
        return self._rows[positions]

    def all_rows(self) -> _Numbers:
        """Return all rows of the list. Do not modify the array."""
        return self._rows

    def n_below(self, limits: _Numbers) -> _Numbers:
        """Return the number of rows below each of `limits`; the list must be in ascending order."""
        return np.searchsorted(self._rows, limits, "left")

    @cached_property
    def is_ascending(self) -> bool:
        """True if the rows are in ascending order."""
        return bool((self._rows[1:] >= self._rows[:-1]).all())

    @cached_property
    def identity(self) -> str:
        """A hash that identifies the list of rows."""
        return f"list-{hash_bytes(self._rows.data):016x}"


def _as_array(found: Any, where: str) -> npt.NDArray[Any]:
    """Return an argument as an array; for uneven nested lists, an array that callers reject."""
    if is_masked(found):
        raise InvalidArgument(f"{where}: found a masked array, which would lose its mask; fill it")
    try:
        return np.asarray(found)
    except ValueError:
        return np.zeros((1, 1))


def check_positions(found: Any, n: int, where: str) -> _Numbers:
    """Return a sequence of integers from 0 to n - 1 as an array; errors name it `where`."""
    numbers = _as_array(found, where)
    if not numbers.size and numbers.ndim == 1:
        return np.zeros(0, np.int64)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        shown = f"{numbers.dtype} {numbers.shape}" if numbers.ndim else repr(found)
        if isinstance(found, slice):
            shown += f": write {range(*found.indices(n))!r}"
        elif numbers.ndim > 1:
            shown += ": join the inner sequences with np.concatenate"
        raise InvalidArgument(
            f"{where} must be a sequence of integers from 0 to {n - 1}; found {shown}"
        )
    wrong = np.flatnonzero((numbers < 0) | (numbers >= n))
    if len(wrong):
        raise InvalidArgument(
            f"{where} must be integers from 0 to {n - 1}; found {numbers[wrong[0]]} at "
            f"{int(wrong[0])}"
        )
    return numbers.astype(np.int64)


def check_mask(found: Any, n: int, where: str) -> _Numbers:
    """Return the positions at which a mask of n bools is True; errors name the mask `where`."""
    mask = _as_array(found, where)
    if mask.shape != (n,) or mask.dtype != np.bool_:
        raise InvalidArgument(
            f"{where} must be {n} booleans, one for each sample; found {mask.dtype} {mask.shape}"
        )
    return np.flatnonzero(mask)


def check_rows(found: Any, n: int, where: str = "select") -> _Numbers:
    """Return the positions that a mask or a sequence of positions selects from n samples.

    `where` names the argument in errors.
    """
    if _as_array(found, where).dtype == np.bool_:
        return check_mask(found, n, f"{where}, a mask,")
    return check_positions(found, n, where)


class RowSelection:
    """The selected rows of a dataset."""

    def __init__(self, shard_starts: Rows, selected: RowRuns | RowList | None = None) -> None:
        self.shard_starts = shard_starts
        """The index of each shard's first row, followed by the total number of rows."""
        self.selected = selected
        """The selected rows; None if all rows are selected, in their stored order."""

    def __len__(self) -> int:
        return int(self.shard_starts[-1]) if self.selected is None else len(self.selected)

    @property
    def selects_all(self) -> bool:
        """True if all rows are selected, in their stored order."""
        return self.selected is None

    @property
    def shard_ends(self) -> Rows:
        """For each shard, the number of selected rows before its end. The rows must ascend."""
        ends = self.shard_starts[1:]
        return ends if self.selected is None else self.selected.n_below(ends)

    @property
    def identity(self) -> str:
        """An id of the selected rows; "" if all rows are selected."""
        return "" if self.selected is None else self.selected.identity

    @property
    def row_list(self) -> RowList | None:
        """The selected rows if the method `select` of a dataset chose them, else None."""
        return self.selected if isinstance(self.selected, RowList) else None

    def set_rows(self, row_list: RowList) -> None:
        """Select the rows in `row_list` instead of the rows that are selected now."""
        self.selected = row_list

    @property
    def source_counts(self) -> list[int]:
        """The number of selected rows of each source. Only a mixture has several sources."""
        return [len(self)]

    def check_sources(self, counts: Rows, reason: str) -> None:
        """Do nothing; in a mixture, raise InvalidArgument with `reason` if a count is 0."""

    def at(self, numbers: Rows) -> Rows:
        """Return the row at each position in the selection, as an index over all shards."""
        return numbers if self.selected is None else self.selected.rows(numbers)


class MixtureSelection(RowSelection):
    """The selected rows of a mixture. Borrows `sources`; see RowSelection for `shard_starts`."""

    def __init__(
        self, shard_starts: Rows, sources: Sequence[RowSelection], names: Sequence[str]
    ) -> None:
        n_rows = [int(source.shard_starts[-1]) for source in sources]
        firsts = [0, *np.cumsum(n_rows).tolist()][:-1]
        """For each source, the index of its first row among the rows of all sources."""
        selects_all = all(source.selected is None for source in sources)
        selected = None if selects_all else _concatenate(sources, firsts, sum(n_rows))
        super().__init__(shard_starts, selected)
        self._sources, self._names, self._first_rows = tuple(sources), tuple(names), firsts
        self._has_row_list = any(source.row_list is not None for source in sources)
        self._row_list: RowList | None = None

    @property
    def identity(self) -> str:
        """An id of the selected rows, but not of the sources; "" if all rows are selected."""
        if self.selected is None:
            return ""
        return ",".join(source.identity for source in self._sources)

    @property
    def row_list(self) -> RowList | None:
        """The row lists of all sources, one after another; None if no source has a row list."""
        if self._row_list is None and self._has_row_list:
            parts = [
                source.row_list.all_rows() + first
                for source, first in zip(self._sources, self._first_rows, strict=True)
                if source.row_list is not None
            ]
            self._row_list = RowList(np.concatenate(parts))
        return self._row_list

    def set_rows(self, row_list: RowList) -> None:
        """Replace the list that `row_list` returns with another list of the same length."""
        self._row_list = row_list

    @property
    def source_counts(self) -> list[int]:
        """The number of selected rows of each source."""
        return [len(source) for source in self._sources]

    def check_sources(self, counts: Rows, reason: str) -> None:
        """Raise InvalidArgument with `reason` if a source has no samples."""
        for name, n in zip(self._names, counts, strict=True):
            if not n:
                raise InvalidArgument(f"{name} cannot be mixed: {reason}; leave it out")

    def at(self, numbers: Rows) -> Rows:
        """Return the row at each position in the selection, as an index over all shards."""
        rows = super().at(numbers)
        if self.row_list is not None:
            n_rows = self.shard_starts[-1]
            listed = np.flatnonzero(rows >= n_rows)
            rows[listed] = self.row_list.rows(rows[listed] - n_rows)
        return rows


def _concatenate(sources: Sequence[RowSelection], firsts: Sequence[int], n_rows: int) -> RowRuns:
    """Concatenate the selected rows of all sources, whose first rows are `firsts`.

    The rows of a RowList cannot be stored as runs. The placeholder n_rows + i therefore stands for
    element i of `MixtureSelection.row_list`; `n_rows` is the total number of rows of all sources.
    """
    starts, counts, n_listed = [], [], n_rows
    for source, first in zip(sources, firsts, strict=True):
        selected = source.selected
        if isinstance(selected, RowRuns):
            begins, lengths = selected.runs
            starts.append(begins + first)
            counts.append(lengths)
            continue
        starts.append(np.array([first if selected is None else n_listed]))
        counts.append(np.array([len(source)]))
        n_listed += 0 if selected is None else len(source)
    return RowRuns(np.concatenate(starts), np.concatenate(counts))
