"""Where the samples of an epoch lie, worked out for thousands of positions at a time.

Used by `fill`. What is the same for every sample is cheap when it is done for many: a batch only
takes its slice.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from shardio.collate import CLAIMED, NO_FIELD, pack_state
from shardio.dataset import ShardDataset
from shardio.order import CHUNK, Order
from shardio.units import Rows

_STATE_SHIFT: Final = 32


class Stretch:
    """The samples at positions `start` to `stop` - 1 of an epoch; arrays are not to be written to.

    `rows` are their rows of all shards, `shards` the numbers of their shards, `origins` their
    lines of a block's origin table, (n, 3), claimed for no field yet.
    """

    def __init__(self, dataset: ShardDataset, start: int, numbers: Rows) -> None:
        self._dataset = dataset
        self.start, self.stop = start, start + len(numbers)
        rows = dataset.rows(numbers)
        self.rows, self.shards = rows, dataset.locate(rows)
        self.origins: npt.NDArray[np.int64] = np.empty((len(rows), 3), np.int64)
        self.origins[:, 0] = numbers
        self.origins[:, 1] = rows - dataset.starts.take(self.shards)
        self.origins[:, 2] = self.shards + (pack_state(NO_FIELD, CLAIMED) << _STATE_SHIFT)
        self._slots: dict[str, Rows] = {}

    def slots(self, name: str) -> Rows:
        """Where each sample's row of a column lies; for `ColumnGather.gather`."""
        found = self._slots.get(name)
        if found is None:
            found = self._dataset.gather(name).place(self.rows, self.shards)
            self._slots[name] = found
        return found


class Itinerary:
    """The order of a loader's epochs, over a dataset; keeps the latest stretch."""

    def __init__(self, dataset: ShardDataset, n_samples: int, *, shuffle: bool, seed: int) -> None:
        self._dataset, self._n = dataset, n_samples
        self._shuffle, self._seed = shuffle, seed
        self._epoch = -1
        self._order: Order
        self._stretch: Stretch

    def stretch(self, epoch: int, start: int, stop: int) -> Stretch:
        """A stretch that positions start..stop-1 lie in."""
        if epoch == self._epoch:
            found, order = self._stretch, self._order
            if found.start <= start and stop <= found.stop:
                return found
        else:
            order = Order(self._n, shuffle=self._shuffle, seed=self._seed, epoch=epoch)
        first = start - start % CHUNK
        rows = order.rows(first, min(self._n, max(stop, first + CHUNK)))
        found = Stretch(self._dataset, first, rows)
        self._epoch = -1  # none, should Ctrl-C strike here: never the order of another epoch
        self._order, self._stretch = order, found
        self._epoch = epoch
        return found
