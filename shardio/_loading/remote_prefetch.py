"""Downloads of a pass ahead of its use: the shards it needs from object stores, in order."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np

from shardio._base.callers import caller_stacklevel
from shardio._engine.dispatch.iterations import EpochIteration
from shardio._engine.filling.batch_index import IndexPlanner
from shardio._engine.filling.batch_spec import BatchSpec, EpochPlan
from shardio._workers.processes.limits import usable_cpus
from shardio.dataset.dataset import Dataset
from shardio.errors import InvalidArgument
from shardio.order.sampling import SamplingOptions
from shardio.order.shuffle import SHARDS_PER_WINDOW
from shardio.shard.verification import Rows
from shardio.shard.writer import ShardSummary
from shardio.storage.file_access import Access
from shardio.storage.remote.object_store import run_parallel
from shardio.storage.remote.options import RemoteOptions
from shardio.storage.remote.storage import N_THREADS, Prefetcher, PrefetchRequest, RemoteStorage

_SAMPLES_AT_ONCE: Final = 1 << 14


def remote_of(
    cache: str | os.PathLike[str] | None,
    cache_bytes: int | None,
    storage_options: Mapping[str, Any] | None,
    num_workers: Any,
    access: Access,
) -> RemoteOptions:
    """Return how a loader with n_workers workers reads a dataset in an object store.

    With workers, main reads only small parts of it, by ranges.
    """
    n_workers = num_workers if isinstance(num_workers, int) else usable_cpus()
    return RemoteOptions.of(
        cache,
        cache_bytes,
        storage_options,
        whole=n_workers <= 0,
        n_readers=max(1, n_workers),
        access=access,
    )


class RemotePrefetch:
    """Downloads shards for a loader's latest pass ahead of their use; does nothing for folders.

    Args:
        dataset: opened by main.
        recipe: determines the content of batches.
        choice: the order of its epochs.

    Raises:
        InvalidArgument: epochs need more at once than the cache may hold.
    """

    def __init__(self, dataset: Dataset, recipe: BatchSpec, choice: SamplingOptions) -> None:
        self._dataset, self._recipe = dataset, recipe
        self._ahead: Prefetcher | None = None
        self._at_once = 0
        """The bytes that a pass uses in turn, which must not evict each other."""
        self._here = set[str]()
        """The paths of files that have come, and stay, if all fit into the cache."""
        self._is_done = not dataset.remote_storages
        if not self._is_done:
            self._check_room(choice)

    def _check_room(self, choice: SamplingOptions) -> None:
        """Make sure that an order that goes through all shards at once has them all here."""
        if self._all_fit():
            return
        most = self._most_bytes()
        n_bytes = sum(self._sizes().tolist())
        room = f"{self._dataset.path}: has {n_bytes} bytes, of which {most} fit into its cache"
        hint = "raise cache_bytes, or take shuffle='shards'"
        if choice.is_in_shards:
            self._at_once = self._bytes_of_windows()
            if self._at_once > most:
                warnings.warn(
                    f"{room}: with shuffle='shards' a window of {SHARDS_PER_WINDOW} shards is read "
                    f"at a time, up to {self._at_once} bytes, which are downloaded again and "
                    "again: raise cache_bytes to twice that, or make smaller shards",
                    stacklevel=caller_stacklevel(),
                )
        if choice.is_full:
            raise InvalidArgument(
                f"{room}: with shuffle={choice.shuffle!r} every batch needs samples from all of "
                f"it, which would be downloaded again and again: {hint}"
            )
        if choice.is_in_blocks:
            warnings.warn(
                f"{room}: with shuffle='blocks' a window of 256 MiB needs parts of many shards, "
                f"which are downloaded whole: {hint}",
                stacklevel=caller_stacklevel(),
            )

    def follow(self, iteration: EpochIteration) -> None:
        """Download for a pass, and stop downloading for the one before."""
        if self._is_done or self._has_all():
            return
        if self._ahead is not None:
            self._ahead.cancel()

        def reached() -> int | None:
            is_over = iteration.is_cancelled or iteration.is_exhausted
            return None if is_over else iteration.n_handed_over

        wanted = _wanted(self._dataset, self._recipe, iteration.plan)
        most = self._most_bytes()
        most_ahead = min(most // 2, max(0, most - self._at_once))
        self._ahead = Prefetcher(wanted, reached, most_ahead, self._here)

    def bring_all(self) -> None:
        """Download all files now.

        Raises:
            InvalidArgument: they do not fit into the cache.
            StoreUnavailable, StoreAccessDenied, ShardCorrupt, …: a file cannot be downloaded.
        """
        if not self._all_fit():
            raise InvalidArgument(
                f"{self._dataset.path}: preload=True brings {sum(self._sizes().tolist())} bytes, "
                "and the cache is for less: raise cache_bytes"
            )
        run_parallel(N_THREADS, lambda file: file[0].download(file[1]), self._all_files())

    def _has_all(self) -> bool:
        """Return True if there is nothing left to download."""
        self._is_done = self._all_fit() and all(
            storage.path_of(summary) in self._here for storage, summary in self._all_files()
        )
        return self._is_done

    def _all_files(self) -> Iterator[tuple[RemoteStorage, ShardSummary]]:
        for shard in range(len(self._dataset.shards)):
            for storage, summary in self._dataset.files.files_with_storage(
                shard, self._recipe.fields
            ):
                if isinstance(storage, RemoteStorage):
                    yield storage, summary

    def _sizes(self) -> Rows:
        """Return the sizes of the files in object stores that hold the fields."""
        storages = self._dataset.files.sizes_by_storage(self._recipe.fields)
        brought = [sizes for storage, sizes in storages if isinstance(storage, RemoteStorage)]
        return np.concatenate([np.zeros(0, np.int64), *brought])

    def _most_bytes(self) -> int:
        """Return how many bytes the caches may hold."""
        return min(storage.max_bytes for storage in self._dataset.remote_storages)

    def _bytes_of_windows(self) -> int:
        """Return the size of the largest window of shards."""
        of_shards = self._sizes().reshape(-1, len(self._dataset.shards)).sum(axis=0)
        return int(np.sort(of_shards)[-SHARDS_PER_WINDOW:].sum())

    def _all_fit(self) -> bool:
        return all(storage.fits(self._sizes()) for storage in self._dataset.remote_storages)

    def end_with(self, close: Callable[[], None]) -> None:
        """Stop downloading, and close the engine at the same time."""
        if self._ahead is not None:
            self._ahead.cancel()
        try:
            close()
        finally:
            if self._ahead is not None:
                self._ahead.close()
                for storage in self._dataset.remote_storages:
                    storage.close()  # once more: what they had under way is in nobody's use now


def _wanted(dataset: Dataset, recipe: BatchSpec, plan: EpochPlan) -> Iterator[PrefetchRequest]:
    """Yield the files of a pass, each where it is first needed, and again after a long gap."""
    partition = plan.partition
    itinerary = IndexPlanner(dataset, shuffle=recipe.shuffle, seed=recipe.seed)
    n_steps = max(1, _SAMPLES_AT_ONCE // partition.batch_size)
    last_seen = np.full(len(dataset.shards), -2)
    for number, first in enumerate(range(partition.first_step, partition.last_step, n_steps)):
        last = min(first + n_steps, partition.last_step)
        stretch = itinerary.at(plan, partition.positions(first, last))
        rows = (
            stretch.rows
            if dataset.rows.packed is None
            else dataset.rows.covered_rows(stretch.numbers)
        )
        shards, storages = np.unique(dataset.locate(rows), return_index=True)
        for i in np.argsort(storages, kind="stable").tolist():
            shard = int(shards[i])
            if last_seen[shard] < number - 1:
                step = first + int(storages[i]) * (last - first) // len(rows)
                for storage, summary in dataset.files.files_with_storage(shard, recipe.fields):
                    if isinstance(storage, RemoteStorage):
                        yield PrefetchRequest(step, storage, summary)
        last_seen[shards] = number
