"""Which files of a dataset are open: each from when it is first needed.

Where a dataset has many, only so many are open at a time; those used longest ago make room. A file
that makes room is not closed but let go of: whoever still reads it goes on, and its map lasts as
long as the last view of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Final

import numpy as np

from shardio.errors import ClosedError, UnsupportedEnvironment
from shardio.shard.reader import ShardReader
from shardio.shard.verification import Rows
from shardio.storage.mmap import disable_readahead, max_maps

ALL_OPEN_LIMIT: Final = 1024
"""A dataset of so many files has all of them open at a time."""
MAX_OPEN_FILES: Final = 16384
"""No more are open of one that has more, in each process that reads it: 6.5 KiB of memory each."""
_MIN_OPEN_FILES: Final = 16
"""So many may be open in any case, unless their place keeps fewer."""
_EVICTED_SHARE: Final = 8
"""One in so many makes room at a time: to find those used longest ago takes a look at all."""


def open_limit(n_files: int, max_pinned: int | None = None) -> int | None:
    """How many files of a dataset may be open at a time; None if all may.

    Args:
        n_files: how many there are.
        most_held: how many their place keeps, if that is bounded.
    """
    if max_pinned is not None:
        return max(1, max_pinned)
    return None if n_files <= ALL_OPEN_LIMIT else MAX_OPEN_FILES


class OpenFiles:
    """The readers of a dataset's files, by number. Owns them until `close`. For one thread.

    Args:
        n_files: how many there are.
        open_file: opens one, given its number; a method of their owner, whom this does not keep.
        most: how many may be open at a time; None for all.
        n_maps: how many maps an open file has, besides those of what is told of it.
        path: of the dataset, for messages.
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
        """How many may be open at a time, which may become fewer; None for all."""
        self._maps_per_file = n_maps
        if max_open is not None:
            _instances.append(weakref.ref(self, _instances.remove))
        self._used: Rows = np.zeros(0 if max_open is None else n_files, np.int64)
        """When each was last used, as numbers of `_turn`."""
        self._turn = 0
        self._listeners: list[weakref.WeakMethod[Callable[[int], None]]] = []

    def __len__(self) -> int:
        return len(self._readers)

    def reader(self, file: int) -> ShardReader:
        """The reader of a file, opened if need be.

        Raises:
            ClosedError: all are closed.
            ShardNotFound, ShardCorrupt, …: from opening it.
        """
        reader = self._readers.get(file)
        if reader is None:
            reader = self._open(file)
        elif self.max_open is not None:
            self._used[file] = self._turn
        return reader

    def reader_if_open(self, file: int) -> ShardReader | None:
        """The reader of a file if it is open."""
        return self._readers.get(file)

    def items(self) -> list[tuple[int, ShardReader]]:
        """The files that are open, with their readers."""
        return list(self._readers.items())

    def disable_readahead(self) -> None:
        """Have the kernel read no more of mapped files than the pages that are touched."""
        self._is_scattered = True
        for reader in self._readers.values():
            _expect_scattered(reader)

    def add_listener(self, method: Callable[[int], None], n_maps: int) -> None:
        """Have a method, whose object this does not keep, called before a file makes room.

        The object has so many maps of a file, and fewer files may be open for it.
        """
        self._listeners.append(weakref.WeakMethod(method))
        self._maps_per_file += n_maps
        if self.max_open is not None:
            self._share_maps()
            self._evict(len(self._readers) - self.max_open)

    def _share_maps(self) -> None:
        """Have no more files open than there are maps for.

        Of those that the kernel lets a process have, three quarters are for datasets, and each that
        has files open has as many as any other: a loader's threads have a dataset each.
        """
        if self.max_open is None or not self._maps_per_file:
            return
        others = (each() for each in tuple(_instances))
        n = 1 + sum(bool(each is not None and each is not self and len(each)) for each in others)
        max_open = max_maps() * 3 // 4 // (n * self._maps_per_file)
        self.max_open = min(self.max_open, max(_MIN_OPEN_FILES, max_open))

    def mark_used(self, files: Rows) -> None:
        """Have these files make room after all that were used before, where files make room."""
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
            _expect_scattered(reader)
        return reader

    def _open_with_fewer_others(self, file: int) -> ShardReader:
        """Open a file, if need be with fewer others beside it."""
        while True:
            try:
                open_file = self._open_file()
                if open_file is None:
                    raise AssertionError("the owner of the files opens them")
                return open_file(file)
            except UnsupportedEnvironment:  # no more maps
                if not self.halve():
                    raise

    def check_open(self) -> None:
        """Make sure that files may be opened.

        Raises:
            ClosedError: all are closed.
        """
        if self._is_closed:
            raise ClosedError(f"{self._path}: the dataset is closed")

    def halve(self) -> bool:
        """From now on have half as many open at a time; False where they are few, or all may be."""
        if self.max_open is None or self.max_open <= _MIN_OPEN_FILES:
            return False
        self.max_open = max(_MIN_OPEN_FILES, self.max_open // 2)
        self._evict(len(self._readers) - self.max_open)
        return True

    def _evict(self, n: int) -> None:
        """Let go of the n files that were used longest ago."""
        files = np.fromiter(self._readers, np.int64)
        for file in files[np.argsort(self._used[files], kind="stable")[: max(0, n)]].tolist():
            for method in self._listeners:
                if (add_listener := method()) is not None:
                    add_listener(file)
            del self._readers[file]

    def close(self) -> None:
        """Close all; what was handed out of them stays valid. Idempotent."""
        self._is_closed = True
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()


_instances: Final[list[weakref.ref[OpenFiles]]] = []
"""Those of this process that do not have all files open."""


def _expect_scattered(reader: ShardReader) -> None:
    if isinstance(reader.content, memoryview):
        disable_readahead(reader.content)
