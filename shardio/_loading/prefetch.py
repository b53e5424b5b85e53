"""Download the shards of an iteration before workers need them, in the order of their use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from shardio._engine.dispatch.iterations import EpochIteration
from shardio._engine.filling.batch_spec import BatchSpec, EpochPlan, IndexPlanner
from shardio.dataset.dataset import Dataset
from shardio.order import Order
from shardio.samples.preload import remote_files, remote_sizes
from shardio.samples.view import SampleView
from shardio.shard.verification import Rows
from shardio.storage.remote.storage import Prefetcher, PrefetchRequest, RemoteStorage

_SAMPLES_AT_ONCE: Final = 1 << 14


class RemotePrefetch:
    """A downloader of the shards of a loader's latest iteration, ahead of their use.

    Does nothing if the dataset is a folder. `order` is the order of every epoch; None if epochs
    have different orders. Raises InvalidArgument if the cache is too small for an epoch.
    """

    def __init__(self, dataset: Dataset, batch_spec: BatchSpec, order: Order | None) -> None:
        self._dataset, self._batch_spec = dataset, batch_spec
        self._prefetcher: Prefetcher | None = None
        self._bytes_in_use = 0
        """The total size of the files that an iteration uses at the same time, in bytes."""
        self._downloaded = set[str]()
        self._is_done = not dataset.remote_storages
        if not self._is_done and order is not None and not self._all_fit():
            most, by_shard = self._max_cache_bytes(), self._sizes().reshape(-1, len(dataset.shards))
            text = f"{dataset.path}: has {by_shard.sum()} bytes, of which {most} fit into its cache"
            self._bytes_in_use = order.check_cache(by_shard.sum(axis=0), most, text)

    def start(self, iteration: EpochIteration, view: SampleView) -> None:
        """Start to download the shards of an iteration; stop downloads for the previous one."""
        if self._is_done or self._has_all():
            return
        if self._prefetcher is not None:
            self._prefetcher.cancel()

        def reached() -> int | None:
            is_over = iteration.is_cancelled or iteration.is_exhausted
            return None if is_over else iteration.next_loop_step

        requests = _requests(view, self._batch_spec, iteration.plan)
        most = self._max_cache_bytes()
        max_ahead = min(most // 2, max(0, most - self._bytes_in_use))
        self._prefetcher = Prefetcher(requests, reached, max_ahead, self._downloaded)

    def _has_all(self) -> bool:
        files = remote_files(self._dataset, self._batch_spec.fields)
        self._is_done = self._all_fit() and all(
            storage.path_of(summary) in self._downloaded for storage, summary in files
        )
        return self._is_done

    def _sizes(self) -> Rows:
        return remote_sizes(self._dataset, self._batch_spec.fields)

    def _max_cache_bytes(self) -> int:
        return min(storage.max_bytes for storage in self._dataset.remote_storages)

    def _all_fit(self) -> bool:
        return all(storage.fits(self._sizes()) for storage in self._dataset.remote_storages)

    def cancel_and_close(self, close: Callable[[], None]) -> None:
        """Cancel all downloads, call `close` (of the engine), and wait until the downloads end."""
        if self._prefetcher is not None:
            self._prefetcher.cancel()
        try:
            close()
        finally:
            if self._prefetcher is not None:
                self._prefetcher.close()
                for storage in self._dataset.remote_storages:
                    storage.close()  # the last downloads may have opened files again


def _requests(
    view: SampleView, batch_spec: BatchSpec, plan: EpochPlan
) -> Iterator[PrefetchRequest]:
    """Yield the files that an iteration needs, ordered by the first step that needs each.

    A file that is needed again after a long gap is yielded again: the cache may have dropped it.
    """
    partition, dataset = plan.partition, view.dataset
    index_planner = IndexPlanner(view, seed=batch_spec.seed)
    n_steps = max(1, _SAMPLES_AT_ONCE // partition.batch_size)
    last_seen = np.full(len(dataset.shards), -2)
    for number, first in enumerate(range(partition.first_step, partition.stop_step, n_steps)):
        last = min(first + n_steps, partition.stop_step)
        index_chunk = index_planner.chunk_at(plan, partition.positions(first, last))
        rows, located = index_chunk.covered(slice(None))
        shards, first_uses = np.unique(located, return_index=True)
        for i in np.argsort(first_uses, kind="stable").tolist():
            shard = int(shards[i])
            if last_seen[shard] < number - 1:
                step = first + int(first_uses[i]) * (last - first) // len(rows)
                for storage, summary in dataset.files.files_with_storage(shard, batch_spec.fields):
                    if isinstance(storage, RemoteStorage):
                        yield PrefetchRequest(step, storage, summary)
        last_seen[shards] = number
