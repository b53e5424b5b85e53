"""The open files of a dataset, and the storage that holds them: a folder, or an object store.

A dataset pins every file that it opens, and unpins each file after its last use. A storage can thus
download a file when the file is pinned, and delete unpinned files.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import numpy as np

from shardio.errors import ClosedError, UnsupportedEnvironment
from shardio.shard.reader import ShardReader
from shardio.shard.verification import Rows
from shardio.shard.writer import ShardSummary
from shardio.storage.content import PreadFile
from shardio.storage.file_access import Access, choose_access, disable_readahead, max_maps
from shardio.storage.fs import refuse_links_outside


class ShardStorage(Protocol):
    """The files of a dataset, identified by their entries in its generation. Thread-safe."""

    @property
    def root(self) -> str:
        """The absolute path of the folder, or the URL."""

    def resolve_access(self, asked: Access) -> Access:
        """Return "mmap" or "pread"; raise InvalidArgument if the files cannot be read as asked."""

    def manifest_folder(self, generation: int | None) -> str:
        """Return a local folder with `dataset.json` and a generation; None: the published one."""

    def invalidate(self) -> bool:
        """Remove local copies of generations; return True if they can be downloaded again."""

    def max_pinned(self, sizes: Rows) -> int | None:
        """Return the number of files of these sizes that may be pinned at a time; None: unlimited.

        An evicted file that is still in use stays pinned beyond the limit.
        """

    def path_of(self, summary: ShardSummary) -> str:
        """Return the local path of a file; the file may not be downloaded yet."""

    def pin(self, summary: ShardSummary) -> str:
        """Pin a file and return its path or URL. Each call needs one call of `unpin`.

        Raises:
            DatasetCorrupt: the file is a link to a target outside of the dataset.
        """

    def pin_if_cached(self, summary: ShardSummary) -> str:
        """Pin a file without downloading it; return its path, or its URL if it is not local."""

    def remote_file(self, summary: ShardSummary, path: str) -> PreadFile | None:
        """Return a reader for the URL that `pin` returned; None if `pin` returned a local path.

        A file at a URL is not pinned and must not be unpinned.
        """

    def unpin(self, summary: ShardSummary) -> None:
        """Unpin a file. Safe in any thread at any point, also after `close`."""

    def close(self) -> None:
        """Stop downloading. Pinned files stay until they are unpinned. Idempotent."""


class LocalStorage:
    """The files in a local folder: nothing is downloaded or evicted.

    `root` is the absolute path, `named` the path as the user gave it.
    """

    def __init__(self, root: str, named: str) -> None:
        self.root, self._named = root, named

    def resolve_access(self, asked: Access) -> Access:
        """Return the requested access method, or for "auto" the one that suits the file system."""
        return choose_access(self.root, asked)

    def manifest_folder(self, generation: int | None) -> str:
        """Return the folder itself."""
        return self._named

    def invalidate(self) -> bool:
        """Return False: there is no other copy."""
        return False

    def max_pinned(self, sizes: Rows) -> int | None:
        """Return None: local files need no limit."""
        return None

    def remote_file(self, summary: ShardSummary, path: str) -> None:
        """Return None: every file is local."""

    def path_of(self, summary: ShardSummary) -> str:
        """Return the path of a file."""
        return os.path.join(self.root, summary.name)

    def pin(self, summary: ShardSummary) -> str:
        """Check links and return the path of a file, which may be missing."""
        path = self.path_of(summary)
        refuse_links_outside(self.root, path)
        return path

    def pin_if_cached(self, summary: ShardSummary) -> str:
        """Return the path of a file, as `pin` does."""
        return self.pin(summary)

    def unpin(self, summary: ShardSummary) -> None:
        """Do nothing: local files are not evicted."""

    def close(self) -> None:
        """Do nothing."""


class ShardPaths(Sequence[str]):
    """The paths of the shards in a folder, created on access, because there may be very many."""

    def __init__(self, folder: str, shards: Sequence[ShardSummary]) -> None:
        self._folder, self._shards = folder, shards

    def __len__(self) -> int:
        return len(self._shards)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[k] for k in range(*index.indices(len(self)))]
        return os.path.join(self._folder, self._shards[index].name)


ALL_OPEN_LIMIT: Final = 1024
"""A dataset of at most this many files keeps all of them open."""
MAX_OPEN_FILES: Final = 16384
"""The maximum number of open files of a larger dataset; each takes 6.5 KiB of memory."""
_MIN_OPEN_FILES: Final = 16
"""The minimum number of open files, unless the storage can pin only fewer."""
_EVICTED_SHARE: Final = 8
"""Evict one in 8 open files at a time, because finding the least recently used scans all files."""


def open_limit(n_files: int, max_pinned: int | None = None) -> int | None:
    """Return how many of n_files may be open at a time; None if unlimited, as in `max_pinned`."""
    if max_pinned is not None:
        return max(1, max_pinned)
    return None if n_files <= ALL_OPEN_LIMIT else MAX_OPEN_FILES


class OpenFiles:
    """The readers of a dataset's files, by index. Owns the readers until `close`. Not thread-safe.

    Files are opened on demand; with a limit, the least recently used are evicted. The map of an
    evicted file lives as long as the last view into the map.

    Args:
        n_files: the number of files.
        open_file: opens a file by index; a method of the owner, referenced weakly.
        max_open: the maximum number of open files; None if unlimited.
        n_maps: the number of maps per open file, not counting the maps of listeners.
        path: the dataset, for messages.
    """

    def __init__(
        self,
        n_files: int,
        open_file: Callable[[int], ShardReader],
        *,
        max_open: int | None,
        n_maps: int,
        path: str,
    ) -> None:
        self._readers: dict[int, ShardReader] = {}
        self._open_file = weakref.WeakMethod(open_file)
        self._path, self._is_closed, self._is_scattered = path, False, False
        self.max_open = max_open
        """The maximum number of open files, which may be lowered; None if unlimited."""
        self._maps_per_file = n_maps
        if max_open is not None:
            _instances.append(weakref.ref(self, _instances.remove))
        self._used: Rows = np.zeros(0 if max_open is None else n_files, np.int64)
        """The value of `_turn` when each file was last used."""
        self._turn = 0
        self._listeners: list[weakref.WeakMethod[Callable[[int], None]]] = []

    def __len__(self) -> int:
        return len(self._readers)

    def reader(self, file: int) -> ShardReader:
        """Return the reader of a file, opened if needed."""
        reader = self._readers.get(file)
        if reader is None:
            reader = self._open(file)
        elif self.max_open is not None:
            self._used[file] = self._turn
        return reader

    def reader_if_open(self, file: int) -> ShardReader | None:
        """Return the reader of a file, or None if it is not open."""
        return self._readers.get(file)

    def items(self) -> list[tuple[int, ShardReader]]:
        """Return the indices and readers of the open files."""
        return list(self._readers.items())

    def disable_readahead(self) -> None:
        """Disable read-ahead for mapped files."""
        self._is_scattered = True
        for reader in self._readers.values():
            _disable_readahead(reader)

    def add_listener(self, method: Callable[[int], None], n_maps: int) -> None:
        """Call a method before a file is evicted; the method's object is referenced weakly.

        The object maps each file `n_maps` times, which lowers the maximum number of open files.
        """
        self._listeners.append(weakref.WeakMethod(method))
        self._maps_per_file += n_maps
        if self.max_open is not None:
            self._share_maps()
            self._evict(len(self._readers) - self.max_open)

    def _share_maps(self) -> None:
        """Lower `max_open` to this dataset's share of the kernel's limit on maps.

        Three quarters of the process's maps are divided equally among the Dataset objects that
        limit their open files and have files open. There may be many of these objects, because each
        thread of a loader has its own.
        """
        if self.max_open is None or not self._maps_per_file:
            return
        others = (each() for each in tuple(_instances))
        n = 1 + sum(bool(each is not None and each is not self and len(each)) for each in others)
        max_open = max_maps() * 3 // 4 // (n * self._maps_per_file)
        self.max_open = min(self.max_open, max(_MIN_OPEN_FILES, max_open))

    def mark_used(self, files: Rows) -> None:
        """Mark files as the most recently used."""
        self._turn += 1
        self._used[files] = self._turn

    def _open(self, file: int) -> ShardReader:
        self.check_open()
        if self.max_open is not None:
            self._share_maps()
            if len(self._readers) >= self.max_open:
                self._evict(
                    max(1, self.max_open // _EVICTED_SHARE) + len(self._readers) - self.max_open
                )
            self._turn += 1
            self._used[file] = self._turn
        reader = self._readers[file] = self._open_with_fewer_others(file)
        if self._is_scattered:
            _disable_readahead(reader)
        return reader

    def _open_with_fewer_others(self, file: int) -> ShardReader:
        """Open a file; evict others if the kernel's limit on maps is reached."""
        while True:
            try:
                open_file = self._open_file()
                if open_file is None:
                    raise AssertionError("the owner of the files opens them")
                return open_file(file)
            except UnsupportedEnvironment:  # the limit on maps is reached
                if not self.halve():
                    raise

    def check_open(self) -> None:
        """Raise ClosedError if the files are closed."""
        if self._is_closed:
            raise ClosedError(f"{self._path}: the dataset is closed")

    def halve(self) -> bool:
        """Halve the maximum number of open files; return False if that is not possible."""
        if self.max_open is None or self.max_open <= _MIN_OPEN_FILES:
            return False
        self.max_open = max(_MIN_OPEN_FILES, self.max_open // 2)
        self._evict(len(self._readers) - self.max_open)
        return True

    def _evict(self, n: int) -> None:
        """Evict the n least recently used files."""
        files = np.fromiter(self._readers, np.int64)
        for file in files[np.argsort(self._used[files], kind="stable")[: max(0, n)]].tolist():
            for method in self._listeners:
                if (listener := method()) is not None:
                    listener(file)
            del self._readers[file]

    def close(self) -> None:
        """Close all files; data returned from them stays valid. Idempotent."""
        self._is_closed = True
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()


_instances: Final[list[weakref.ref[OpenFiles]]] = []
"""The objects in this process that limit the number of open files."""


def _disable_readahead(reader: ShardReader) -> None:
    if isinstance(reader.content, memoryview):
        disable_readahead(reader.content)
