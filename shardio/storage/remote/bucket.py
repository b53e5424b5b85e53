"""The files of a dataset in an object store, as `shards.places` has them for a folder."""

from __future__ import annotations

import os
from collections.abc import Callable

from shardio.errors import InvalidArgument
from shardio.shard.verification import Rows
from shardio.shard.writer import ShardSummary
from shardio.storage.file_access import Access, choose_access
from shardio.storage.pread import PreadFile
from shardio.storage.remote.cache import ShardCache
from shardio.storage.remote.mirror import ListFiles, Mirror
from shardio.storage.remote.object_store import Objects, never_ends
from shardio.storage.remote.options import Remote, checked_url
from shardio.storage.remote.ranges import RangeFile


class Bucket:
    """Whole shards are brought into a cache and mapped there; or parts of them are read by ranges.

    Which of both `remote.whole` says. For any thread, in any process but a fork.

    Args:
        url: of the dataset.
        remote: how it is read.
        list_files: see `Mirror`.
    """

    def __init__(self, url: str, remote: Remote, list_files: ListFiles) -> None:
        self.root = checked_url(url)
        self._remote, self._objects = remote, Objects(url, remote.options)
        self._cache = ShardCache(remote.folder, remote.cache_bytes, self._objects)
        self._mirror = Mirror(self._cache.root, self._objects, list_files)

    def access(self, asked: Access) -> Access:
        """How its files are read: by offset where they are not brought whole."""
        if not self._remote.whole:
            if asked == "mmap":
                raise InvalidArgument(
                    f"{self.root}: access='mmap' is for shards that are here: load it by a "
                    "ShardLoader, which brings them"
                )
            return "pread"
        return choose_access(self._cache.root, asked)

    @property
    def access_of_workers(self) -> Access:
        """How those read its files who have them brought whole."""
        return choose_access(self._cache.root, self._remote.access)

    def described(self, generation: int | None) -> str:
        """The folder that `dataset.json` and a state of the dataset lie in, brought if need be."""
        self._mirror.bring(generation)
        return self._cache.root

    def distrust(self) -> bool:
        """Have the states brought anew: what came is damaged."""
        self._mirror.forget()
        return True

    def most_held(self, sizes: Rows) -> int:
        """How many files may be held at a time, of which these are the bytes.

        All, if they fit; else such a part of the cache as leaves every reader its own, and as much
        for what is brought ahead.
        """
        if not self._remote.whole or self.keeps(sizes):
            return max(1, len(sizes))
        share = self._cache.most_bytes // (2 * self._remote.n_readers)
        return max(1, share // int(sizes.max(initial=1)))

    def path_of(self, summary: ShardSummary) -> str:
        """Where a file is, or will be once it is held."""
        return self._cache.path_of(summary)

    def hold(self, summary: ShardSummary) -> str:
        """Have a file here, and keep it until as many calls of `release`; returns its path.

        Where it is read by ranges, and not here, this is its URL.

        Raises:
            ShardCorrupt, CacheFull, StoreUnavailable, StoreAccessDenied, ShardNotFound,
                ShardChanged: as `ShardCache.hold` says.
        """
        return self._cache.hold(summary) if self._remote.whole else self.glance(summary)

    def glance(self, summary: ShardSummary) -> str:
        """The same for a look at a file: where it is not here, this is its URL."""
        return self._cache.hold_if_here(summary) or f"{self.root}/{summary.name}"

    @property
    def most_bytes(self) -> int:
        """How much the cache may hold."""
        return self._cache.most_bytes

    def keeps(self, sizes: Rows) -> bool:
        """Whether files of these bytes all fit into the cache, and stay where they are."""
        n_bytes: int = sum(sizes.tolist())
        return n_bytes <= self._cache.most_bytes

    def bring(self, summary: ShardSummary, check: Callable[[], None] = never_ends) -> None:
        """Have a file here for whoever holds it next; `check` as in `ShardCache.hold`."""
        self.keep(summary, check)
        self._cache.release(summary)

    def keep(self, summary: ShardSummary, check: Callable[[], None] = never_ends) -> None:
        """Bring a file, and keep it until `release`; `check` as in `ShardCache.hold`."""
        self._cache.hold(summary, check)

    def content(self, summary: ShardSummary, path: str) -> PreadFile | None:
        """What reads a file by the path that it was held by, if it is not here; else None."""
        if os.path.isabs(path):
            return None
        return RangeFile(self._objects, summary.name)

    def release(self, summary: ShardSummary) -> None:
        """No longer keep a file. In any thread, in the middle of anything, also once closed."""
        self._cache.release(summary)

    def close(self) -> None:
        """Bring no more files. Those that are held stay until they are released. Idempotent."""
        self._cache.close()
