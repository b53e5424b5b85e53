"""Weighted draws: which rows an epoch has, by position, when some are to come oftener than others.

With replacement, every position draws for itself: a keyed number below the sum of all weights is
looked up in their running sums. Without, every row is given the key -log(u) / weight, and rows come
in the order of their keys (P. Efraimidis and P. Spirakis, 2006): as if each were drawn of those
that are left. The logarithm is our own, of additions, multiplications and divisions, which IEEE 754
rounds alike everywhere; a library's last bits are not the same on every machine.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from shardio.order.permutation import Positions, hashes_of, key_of

Numbers = npt.NDArray[np.float64]

_LN_2: Final = 0.6931471805599453
_SQRT_HALF: Final = 0.7071067811865476
_AT_ONCE: Final = 1 << 14
_N_TERMS: Final = 12
"""Of the series; what is left out is below 2^-60 of the first."""


def running_sums(weights: Numbers) -> Numbers:
    """The table that `WeightedOrder` looks up: the sum of weights 0..i, for every i."""
    return np.cumsum(weights)


class WeightedOrder:
    """Draws with replacement: the row at each position of one epoch.

    Args:
        sums: what `running_sums` gave; borrowed.
        seed, epoch: the key.
    """

    def __init__(self, sums: Numbers, *, seed: int, epoch: int) -> None:
        self._sums, self._key = sums, key_of(20, seed, epoch)
        # Rounding may give the sum itself; then it is the last row that has a weight.
        self._last = int(np.searchsorted(sums, sums[-1], side="left"))

    def at(self, positions: Positions) -> Positions:
        """The row at each of `positions`, in any order."""
        drawn = _fractions(positions, self._key) * self._sums[-1]
        # In their order they are found twice as fast: neighbours share what a search has read.
        ascending = np.argsort(drawn)
        rows = np.empty(len(drawn), np.int64)
        rows[ascending] = np.searchsorted(self._sums, drawn[ascending], side="right")
        return np.minimum(rows, self._last)


def draw_once(weights: Numbers, n: int, *, seed: int, epoch: int) -> Positions:
    """Draws without replacement: n rows in the order in which they come, none of weight zero."""
    rows = np.flatnonzero(weights)
    keys = np.empty(len(rows))
    key = key_of(21, seed, epoch)
    for start in range(0, len(rows), _AT_ONCE):
        part = rows[start : start + _AT_ONCE]
        with np.errstate(over="ignore"):  # of the smallest weights: they come last
            keys[start : start + len(part)] = -_log(1 - _fractions(part, key)) / weights[part]
    return rows[np.argsort(keys, kind="stable")[:n]]


def _fractions(numbers: Positions, key: int) -> Numbers:
    """A number from 0 to 1 - 2^-53 for each of `numbers`."""
    found: Numbers = (hashes_of(numbers, key) >> np.uint64(11)).astype(np.float64)
    return found * 2.0**-53


def _log(numbers: Numbers) -> Numbers:
    """Natural logarithms of numbers above 0."""
    parts, exponents = np.frexp(numbers)
    is_low = parts < _SQRT_HALF
    parts = np.where(is_low, 2 * parts, parts)
    ratio = (parts - 1) / (parts + 1)  # log(x) is 2 artanh of it
    square = ratio * ratio
    total = np.zeros_like(square)
    for k in range(_N_TERMS - 1, -1, -1):
        total = total * square + 1 / (2 * k + 1)
    found: Numbers = (exponents - is_low) * _LN_2 + 2 * ratio * total
    return found
