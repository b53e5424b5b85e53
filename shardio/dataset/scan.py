"""Scan the shards of a dataset for facts about all samples that a loader needs beforehand.

Examples are the number of frames of each video, and whether all images have the same size. In an
object store, reading a shard takes a few requests. Threads therefore scan several shards at a time,
each with its own reader, by range requests instead of downloading whole files.
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
"""The number of threads, and thus of concurrent requests; each fetches 64 KiB or a table."""


class ShardSamples(NamedTuple):
    """Samples in one shard.

    `numbers` are the samples' indices, `rows` their rows in the shard. `reader` returns the reader
    of the file with a field; the reader may only be used in `find`.
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
    """Yield the result of `find` for the samples of each shard.

    Samples are scanned in chunks of about a million, and a shard is visited once per chunk.

    Args:
        dataset: the dataset; its shards are opened.
        find: called with the samples of one shard; in any thread if the dataset is in a store.
        n, rows_of: the number of samples, and a function that maps their indices to rows; by
            default, every selected row is a sample.

    Raises:
        ShardioError: a shard cannot be opened, or `find` failed.
    """
    parts = _parts(dataset, len(dataset) if n is None else n, rows_of or dataset.rows.at)
    if dataset.remote_storages:
        yield from map_ordered(_N_THREADS, lambda part: (part, find(part)), parts)
    else:
        for part in parts:
            yield part, find(part)


def _parts(dataset: Dataset, n: int, rows_of: Callable[[Rows], Rows]) -> Iterator[ShardSamples]:
    for start in range(0, n, _SAMPLES_AT_ONCE):
        rows = rows_of(np.arange(start, min(start + _SAMPLES_AT_ONCE, n)))
        shards = dataset.locate(rows)
        order = np.argsort(shards, kind="stable")
        firsts = np.flatnonzero(np.diff(shards[order], prepend=-1))
        for at in np.split(order, firsts[1:]):
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
