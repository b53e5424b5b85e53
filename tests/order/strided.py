"""An order that is no part of shardio: the example of docs/contributing/extend.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from shardio.errors import InvalidArgument
from shardio.order import EpochOrder, Order, Samples
from shardio.order.permutation import Positions


@dataclass(frozen=True)
class Strided(Order):
    """Every k-th sample, then those behind them, and so on."""

    name = "strided"
    needs_shards = True
    k: int = 2

    def to_state(self) -> dict[str, Any]:
        """Return the stride."""
        return {"stride": self.k}

    def from_state(self, state: Mapping[str, Any], samples: Samples, n: int) -> Self:
        """Return the order with the stride in a state."""
        k = state.get("stride")
        if type(k) is not int or k < 1:
            raise InvalidArgument(f"load_state_dict: stride must be from 1 up; found {k!r}")
        return replace(self, k=k)

    def arrange(self, samples: Samples, n: int, *, seed: int, epoch: int) -> EpochOrder:
        """Return the samples of an epoch."""
        return StridedEpochOrder(n, self.k)


class StridedEpochOrder:
    """The samples of one epoch, by position."""

    def __init__(self, n: int, k: int) -> None:
        self._k, starts = k, np.arange(k)
        self._ends = np.cumsum((n - starts + k - 1) // k)

    def at(self, positions: Positions) -> Positions:
        """Return the sample at each of `positions`, in any order."""
        turns = np.searchsorted(self._ends, positions, "right")
        begins = np.concatenate([[0], self._ends])[turns]
        found: Positions = turns + (positions - begins) * self._k
        return found
