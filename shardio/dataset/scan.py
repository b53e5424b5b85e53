"""A look into every shard of a dataset, one after another; where they are in a store, ahead.

For what has to be known of all samples before the first is loaded: how many frames videos have,
whether pictures are of one size. A look takes a few requests where shards are in a store. So there
threads look ahead, each by a reader of its own, and by ranges: nothing is downloaded for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, TypeVar

import numpy as np

from shardio.dataset.dataset import Dataset
from shardio.shard.reader import ShardReader
from shardio.shard.verification import Rows
from shardio.storage.remote.object_store import map_ordered

T = TypeVar("T")

_SAMPLES_AT_ONCE: Final = 1 << 20
_N_THREADS: Final = 16
"""So many requests are under way, of which each brings 64 KiB or a table."""


class ShardSamples(NamedTuple):
    """Samples that lie in one shard.

    `numbers` are theirs, `rows` where they are in the shard; `reader` gives the reader of the file
    that has a field, which is for `find` only.
    """

    shard: int
    numbers: Rows
    rows: Rows
    reader: Callable[[str], ShardReader]


def scan(
    dataset: Dataset,
    find: Callable[[ShardSamples], T],
    *,
    n: int | None = None,
    rows_of: Callable[[Rows], Rows] | None = None,
) -> Iterator[tuple[ShardSamples, T]]:
    """What a function finds in each shard, one after another, of samples in their order.

    Shards come again where more than a million samples are looked at.

    Args:
        dataset: whose shards are opened.
        find: called in any thread where the dataset is in a store.
        n, rows_of: how many samples there are, and the rows of some of them; by default of all rows
            that the dataset shows.

    Raises:
        ShardioError: from opening a shard, or from `find`.
    """
    parts = _parts(
        dataset, dataset.rows.n_rows if n is None else n, rows_of or dataset.rows.map_rows
    )
    if dataset.remote_storages:
        yield from map_ordered(_N_THREADS, lambda part: (part, find(part)), parts)
    else:
        for part in parts:
            yield part, find(part)


def _parts(dataset: Dataset, n: int, rows_of: Callable[[Rows], Rows]) -> Iterator[ShardSamples]:
    for start in range(0, n, _SAMPLES_AT_ONCE):
        rows = rows_of(np.arange(start, min(start + _SAMPLES_AT_ONCE, n)))
        shards = dataset.locate(rows)
        in_turn = np.argsort(shards, kind="stable")
        firsts = np.flatnonzero(np.diff(shards[in_turn], prepend=-1))
        for at in np.split(in_turn, firsts[1:]):
            shard = int(shards[at[0]])
            local = rows[at] - dataset.starts[shard]
            yield ShardSamples(shard, start + at, local, _readers(dataset, shard))


def _readers(dataset: Dataset, shard: int) -> Callable[[str], ShardReader]:
    if not dataset.remote_storages:
        return lambda name: dataset.reader(shard, name)
    opened: dict[str, ShardReader] = {}

    def open_metadata(name: str) -> ShardReader:
        ((_, summary),) = dataset.files.files_with_storage(shard, [name])
        if summary.name not in opened:
            opened[summary.name] = dataset.files.open_metadata(shard, name)
        return opened[summary.name]

    return open_metadata
