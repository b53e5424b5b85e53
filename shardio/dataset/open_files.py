"""Keep files of a dataset open. The files are in a storage: a local folder or an object store.

A dataset *pins* every file that it opens, and unpins the file after the last use. The cache of an
object store does not remove pinned files.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from shardio._base.callers import path_as_given
from shardio.errors import ClosedError, UnsupportedEnvironment
from shardio.shard.reader import ShardReader
from shardio.shard.verification import Rows
from shardio.shard.writer import ShardSummary
from shardio.storage.file_access import Access, choose_access, disable_readahead, max_maps
from shardio.storage.fs import refuse_links_outside
from shardio.storage.remote.storage import RemoteStorage


class LocalStorage:
    """A storage for files in a local folder, which are never downloaded or deleted. Thread-safe.

    A file is identified by its ShardSummary. `root` is the absolute path of the folder, and
    `user_path` is its path as the user gave it.
    """

    def __init__(self, root: str, user_path: str) -> None:
        self.root, self._user_path = root, user_path

    def resolve_access(self, access: Access) -> Access:
        """Return the access method, "mmap" or "pread", for an option that may be "auto"."""
        return choose_access(self.root, access)

    def manifest_folder(self, generation: int | None) -> str:
        """Return a local folder that contains the given generation (None: the published one)."""
        return path_as_given(self._user_path, self.root)

    def invalidate(self) -> bool:
        """Remove local copies of generations; return True if they can be downloaded again."""
        return False

    def max_pinned(self, sizes: Rows) -> int | None:
        """Return how many files of these sizes may be pinned at the same time; None: no limit.

        Closed files also stay pinned while user code holds views of their content. They are not
        counted.
        """
        return None

    def path_of(self, summary: ShardSummary) -> str:
        """Return the local path of a file, which may be missing or not downloaded yet."""
        return os.path.join(self.root, summary.name)

    def pin(self, summary: ShardSummary) -> str:
        """Pin a file; return its path. Raise DatasetCorrupt for a link that leads out of `root`."""
        path = os.path.join(path_as_given(self._user_path, self.root), summary.name)
        refuse_links_outside(self.root, path)
        return path

    def pin_if_cached(self, summary: ShardSummary) -> str:
        """Pin a file and return its path; for an uncached file, a RemoteStorage returns a URL."""
        return self.pin(summary)

    def remote_file(self, summary: ShardSummary, path: str) -> None:
        """Return None: `path` is not a URL. A RemoteStorage returns a reader for a URL."""

    def unpin(self, summary: ShardSummary) -> None:
        """Unpin a file. Called by finalizers: in any thread, at any time, even after `close`."""

    def close(self) -> None:
        """Stop downloading. Pinned files stay until they are unpinned. Idempotent."""


ShardStorage = LocalStorage | RemoteStorage
"""The storage of all files of a dataset. Both classes have the methods of LocalStorage."""


class ShardPaths(Sequence[str]):
    """The paths of the shards in a folder, created on access to save memory."""

    def __init__(self, folder: str, shards: Sequence[ShardSummary]) -> None:
        self._folder, self._shards = folder, shards

    def __len__(self) -> int:
        return len(self._shards)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[k] for k in range(*index.indices(len(self)))]
        return os.path.join(self._folder, self._shards[index].name)


ALL_OPEN_LIMIT: Final = 1024
"""A dataset with at most this number of files keeps all of them open, if its storage permits."""
MAX_OPEN_FILES: Final = 16384
"""The maximum number of open files of a larger dataset. An open file takes 6.5 KiB of memory."""
_MIN_OPEN_FILES: Final = 16
"""The smallest value to which a limit on open files is lowered."""


class OpenFiles:
    """The readers of the open files of a dataset, which are opened on demand. Not thread-safe.

    Owns the readers until `close`. If the number of open files is limited, the least recently used
    ones are evicted: their readers are dropped. A mapped file stays mapped until the last view of
    its content is deleted.

    Args:
        open_file: the method that opens a file, given its index. Only a weak reference to the
            object of this method is kept.
        max_pinned: the number of files that the storage can pin at the same time; None: no limit.
        n_maps: the number of memory maps per open file, without those of listeners (see
            `add_listener`).
    """

    def __init__(
        self,
        n_files: int,
        open_file: Callable[[int], ShardReader],
        *,
        max_pinned: int | None,
        n_maps: int,
        path: str,
    ) -> None:
        self._readers: dict[int, ShardReader] = {}
        self._open_file = weakref.WeakMethod(open_file)
        self._path, self._is_readahead_disabled = path, False
        self.is_closed = False
        all_open = None if n_files <= ALL_OPEN_LIMIT else MAX_OPEN_FILES
        self.max_open = all_open if max_pinned is None else max(1, max_pinned)
        """The maximum number of open files; None if there is no limit. May be lowered later."""
        self._maps_per_file = n_maps
        if self.max_open is not None:
            _instances.append(weakref.ref(self, _instances.remove))
        self._last_used: Rows = np.zeros(0 if self.max_open is None else n_files, np.int64)
        """For each file, the value of the counter `_clock` at the last use of the file."""
        self._clock = 0
        self._listeners: list[weakref.WeakMethod[Callable[[int], None]]] = []

    def __len__(self) -> int:
        return len(self._readers)

    def reader(self, file: int) -> ShardReader:
        """Return the reader of the file with the index `file`; open the file if needed."""
        reader = self._readers.get(file)
        if reader is None:
            reader = self._open(file)
        elif self.max_open is not None:
            self._last_used[file] = self._clock
        return reader

    def reader_if_open(self, file: int) -> ShardReader | None:
        """Return the reader of the file with the index `file`; None if the file is not open."""
        return self._readers.get(file)

    def items(self) -> list[tuple[int, ShardReader]]:
        """Return the index and the reader of each open file."""
        return list(self._readers.items())

    def disable_readahead(self) -> None:
        """Disable the kernel's read-ahead for mapped files, including files opened later."""
        self._is_readahead_disabled = True
        for reader in self._readers.values():
            _disable_readahead(reader)

    def add_listener(self, method: Callable[[int], None], n_maps: int) -> None:
        """Call `method` with the index of each file that is about to be evicted.

        Only a weak reference to the method's object is kept. The method's object creates `n_maps`
        memory maps for each open file: `max_open` is lowered accordingly, and surplus files are
        evicted now.
        """
        self._listeners.append(weakref.WeakMethod(method))
        self._maps_per_file += n_maps
        self._share_maps()
        if self.max_open is not None:
            self._evict(len(self._readers) - self.max_open)

    def _share_maps(self) -> None:
        """Lower `max_open` if necessary: all OpenFiles share 3/4 of the kernel's limit on maps."""
        if self.max_open is None or not self._maps_per_file:
            return
        others = (each() for each in tuple(_instances))
        n = 1 + sum(bool(each is not None and each is not self and len(each)) for each in others)
        max_open = max_maps() * 3 // 4 // (n * self._maps_per_file)
        self.max_open = min(self.max_open, max(_MIN_OPEN_FILES, max_open))

    def mark_used(self, files: Rows) -> None:
        """Record that `files` are now the most recently used."""
        self._clock += 1
        self._last_used[files] = self._clock

    def _open(self, file: int) -> ShardReader:
        self.check_open()
        if self.max_open is not None:
            self._share_maps()
            if (surplus := len(self._readers) - self.max_open) >= 0:
                # Evict an eighth at once: finding the least recently used files scans all files.
                self._evict(surplus + max(1, self.max_open // 8))
            self._clock += 1
            self._last_used[file] = self._clock
        open_file = self._open_file()
        if open_file is None:
            raise AssertionError("the owner of the files opens them")
        while file not in self._readers:
            try:
                self._readers[file] = open_file(file)
            except UnsupportedEnvironment:  # the kernel's limit on memory maps is reached
                if not self.halve():
                    raise
        reader = self._readers[file]
        if self._is_readahead_disabled:
            _disable_readahead(reader)
        return reader

    def check_open(self) -> None:
        """Raise ClosedError if the files are closed."""
        if self.is_closed:
            raise ClosedError(
                f"{self._path}: the dataset is closed: use it inside its `with` block, or open it "
                "again"
            )

    def halve(self) -> bool:
        """Halve the maximum number of open files; return False if it cannot be lowered further."""
        if self.max_open is None or self.max_open <= _MIN_OPEN_FILES:
            return False
        self.max_open = max(_MIN_OPEN_FILES, self.max_open // 2)
        self._evict(len(self._readers) - self.max_open)
        return True

    def _evict(self, n: int) -> None:
        """Evict the n least recently used files."""
        files = np.fromiter(self._readers, np.int64)
        for file in files[np.argsort(self._last_used[files], kind="stable")[: max(0, n)]].tolist():
            for method in self._listeners:
                if (listener := method()) is not None:
                    listener(file)
            del self._readers[file]

    def close(self) -> None:
        """Close all files. Data that was returned from the files stays valid. Idempotent."""
        self.is_closed = True
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()


_instances: Final[list[weakref.ref[OpenFiles]]] = []
"""All OpenFiles objects in this process that have a limit on their number of open files."""


def _disable_readahead(reader: ShardReader) -> None:
    if isinstance(reader.content, memoryview):
        disable_readahead(reader.content)
