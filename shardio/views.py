"""From positions of a view to rows of a dataset: pure arithmetic.

A subset is kept as ascending runs of rows, which a position is found in by a search over the runs:
however many samples there are, only the runs take memory.
"""

from __future__ import annotations

from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from shardio.errors import InvalidArgument

_Numbers = npt.NDArray[np.int64]
_MAX_ROWS: Final = 1 << 48


class RowRuns:
    """Some rows of a dataset, ascending, each once. Immutable.

    Args:
        starts: the first row of every run.
        n_rows: how many rows each has, from 1 up; a run ends before the next one begins.
    """

    def __init__(self, starts: npt.ArrayLike, n_rows: npt.ArrayLike) -> None:
        self._starts: _Numbers = np.asarray(starts, np.int64)
        self._counts: _Numbers = np.asarray(n_rows, np.int64)
        self._ends: _Numbers = np.cumsum(self._counts)
        self._shifts: _Numbers = self._starts - (self._ends - self._counts)

    @classmethod
    def from_mask(cls, is_in: npt.NDArray[np.bool_]) -> Self:
        """The rows where `is_in` is true."""
        edges = np.flatnonzero(np.diff(np.concatenate([[False], is_in, [False]]).astype(np.int8)))
        return cls(edges[0::2], edges[1::2] - edges[0::2])

    @classmethod
    def from_text(cls, text: Any, n_rows: int) -> Self:
        """What `to_text` wrote, of a dataset of n_rows.

        Raises:
            InvalidArgument: it is not in that form, or reaches beyond n_rows.
        """
        if not isinstance(text, str):
            raise InvalidArgument(f"expected runs of rows as a text; found {text!r}")
        try:
            numbers = np.array([int(word) for word in text.split()], np.int64).reshape(-1, 2)
        except (ValueError, OverflowError) as error:
            raise InvalidArgument(f"not runs of rows: {error}") from error
        gaps, counts = numbers[:, 0], numbers[:, 1]
        # Each is bounded before they are added up: no sum wraps.
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
            raise InvalidArgument("runs of rows are not in the one form that they have")
        return found

    def to_text(self) -> str:
        """How many rows are skipped, then how many are taken, and so on: "0 90 10 90"."""
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
        """The row at each of `positions`, which must be from 0 to len() - 1."""
        found: _Numbers = positions + self._shifts[np.searchsorted(self._ends, positions, "right")]
        return found

    def every(self) -> _Numbers:
        """All rows."""
        return self.rows(np.arange(len(self)))
