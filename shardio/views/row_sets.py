"""Sets of rows of a dataset, by position in a view: pure arithmetic.

A subset is kept as ascending runs of rows, searched for a position; memory is proportional to the
number of runs, not of samples. A selection is kept as a list of rows.
"""

from __future__ import annotations

from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from shardio._base.classes import cached_property
from shardio.errors import InvalidArgument
from shardio.format.arrays import is_masked
from shardio.format.checksum import hash_bytes

_Numbers = npt.NDArray[np.int64]
_MAX_ROWS: Final = 1 << 48


class RowRuns:
    """A set of rows of a dataset, ascending and unique. Immutable.

    Args:
        starts: the first row of every run.
        n_rows: the length of each, from 1 up; a run ends before the next one begins.
    """

    def __init__(self, starts: npt.ArrayLike, n_rows: npt.ArrayLike) -> None:
        self._starts: _Numbers = np.asarray(starts, np.int64)
        self._counts: _Numbers = np.asarray(n_rows, np.int64)
        self._ends: _Numbers = np.cumsum(self._counts)
        self._shifts: _Numbers = self._starts - (self._ends - self._counts)

    @classmethod
    def from_mask(cls, is_in: npt.NDArray[np.bool_]) -> Self:
        """Return the rows where `is_in` is true."""
        edges = np.flatnonzero(np.diff(np.concatenate([[False], is_in, [False]]).astype(np.int8)))
        return cls(edges[0::2], edges[1::2] - edges[0::2])

    @classmethod
    def from_text(cls, text: Any, n_rows: int) -> Self:
        """Parse the result of `to_text`, for a dataset of n_rows.

        Raises:
            InvalidArgument: the text has another form, or reaches beyond n_rows.
        """
        if not isinstance(text, str):
            raise InvalidArgument(f"expected runs of rows as a text; found {text!r}")
        try:
            numbers = np.array([int(word) for word in text.split()], np.int64).reshape(-1, 2)
        except (ValueError, OverflowError) as error:
            raise InvalidArgument(f"not runs of rows: {error}") from error
        gaps, counts = numbers[:, 0], numbers[:, 1]
        # Each is bounded before they are added: no sum overflows.
        if (numbers < 0).any() or (numbers > min(n_rows, _MAX_ROWS)).any() or (counts < 1).any():
            raise InvalidArgument(f"a run of rows lies outside of the dataset's {n_rows}")
        if (gaps[1:] < 1).any():
            raise InvalidArgument("a run of rows begins where the one before it ends")
        total = sum(numbers.reshape(-1).tolist())
        if total > n_rows:
            raise InvalidArgument(f"runs of rows end at row {total} of {n_rows}")
        starts = np.cumsum(numbers.reshape(-1))[0::2]
        found = cls(starts, counts)
        if found.to_text() != text:
            raise InvalidArgument("the runs of rows are not in canonical form")
        return found

    def to_text(self) -> str:
        """Return the runs as text, numbers of rows skipped and taken in turn: "0 90 10 90"."""
        gaps = self._starts - np.concatenate([[0], (self._starts + self._counts)[:-1]])
        return " ".join(map(str, np.stack([gaps, self._counts], axis=1).reshape(-1).tolist()))

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowRuns) and self.to_text() == other.to_text()

    def __hash__(self) -> int:
        return hash(self.to_text())

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
        # All runs that begin below the limit, minus the part of the last one that lies beyond it.
        counts = np.concatenate([[0], self._counts])
        found: _Numbers = ends[before] - np.maximum(0, starts[before] + counts[before] - limits)
        return found

    @property
    def runs(self) -> tuple[_Numbers, _Numbers]:
        """The first row and the length of every run; not to be written to."""
        return self._starts, self._counts

    def every(self) -> _Numbers:
        """Return all rows."""
        return self.rows(np.arange(len(self)))

    @cached_property
    def identity(self) -> str:
        """A hash that identifies the set of rows."""
        return f"{hash_bytes(self.to_text().encode()):016x}"


class RowList:
    """Rows of a dataset in any order, with repetitions. Immutable.

    Args:
        rows: the row at every position; not copied.
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

    def every(self) -> _Numbers:
        """Return all rows; not to be written to."""
        return self._rows

    def n_below(self, limits: _Numbers) -> _Numbers:
        """Return the number of rows below each of `limits`; the rows must ascend."""
        return np.searchsorted(self._rows, limits, "left")

    @cached_property
    def ascends(self) -> bool:
        """True if no row comes before a smaller one."""
        return bool((self._rows[1:] >= self._rows[:-1]).all())

    @cached_property
    def identity(self) -> str:
        """A hash that identifies the list of rows."""
        return f"list-{hash_bytes(self._rows.data):016x}"


def _as_array(found: Any, where: str) -> npt.NDArray[Any]:
    """Return an argument as an array; ragged input becomes an array that every check refuses.

    Raises:
        InvalidArgument: it is a masked array, which would lose its mask.
    """
    if is_masked(found):
        raise InvalidArgument(f"{where}: found a masked array, which would lose its mask; fill it")
    try:
        return np.asarray(found)
    except ValueError:
        return np.zeros((1, 1))


def check_positions(found: Any, n: int, where: str) -> _Numbers:
    """Return integers from 0 to n - 1, in any order and repeatable, as an array of int64.

    Args:
        found: a sequence or an array of one dimension.
        n: the number of samples.
        where: the name of the argument, for messages.

    Raises:
        InvalidArgument: `found` is something else, or an integer is out of range.
    """
    numbers = _as_array(found, where)
    if not numbers.size and numbers.ndim == 1:
        return np.zeros(0, np.int64)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        shown = f"{numbers.dtype} {numbers.shape}" if numbers.ndim else repr(found)
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
    """Return the positions at which a mask of n booleans is true.

    Raises:
        InvalidArgument: `found` is not n booleans.
    """
    mask = _as_array(found, where)
    if mask.shape != (n,) or mask.dtype != np.bool_:
        raise InvalidArgument(
            f"{where} must be {n} booleans, one for each sample; found {mask.dtype} {mask.shape}"
        )
    return np.flatnonzero(mask)
