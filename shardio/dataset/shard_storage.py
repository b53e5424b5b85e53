"""The storage of a dataset's files: a local folder, or an object store with a cache.

A dataset pins every file that it opens and unpins it when it is no longer used. A storage can thus
download a file first, and evict unpinned ones.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol, overload

from shardio.shard.verification import Rows
from shardio.shard.writer import ShardSummary
from shardio.storage.content import PreadFile
from shardio.storage.file_access import Access, choose_access
from shardio.storage.fs import refuse_links_outside


class ShardStorage(Protocol):
    """The files of a dataset, by their entries in its generation. Thread-safe."""

    @property
    def root(self) -> str:
        """The absolute path of the folder, or the URL."""

    def resolve_access(self, asked: Access) -> Access:
        """Return the access method: "mmap" or "pread".

        Raises:
            InvalidArgument: the files cannot be read as requested.
        """

    def manifest_folder(self, generation: int | None) -> str:
        """Return a local folder with `dataset.json` and a generation, by default the published one.

        Raises:
            DatasetNotFound, ShardioError: they cannot be downloaded.
        """

    def invalidate(self) -> bool:
        """Drop damaged copies of generations; returns True if they can be downloaded again."""

    def max_pinned(self, sizes: Rows) -> int | None:
        """Return how many files of these sizes may be pinned at a time; None if unlimited.

        With a limit, no file is opened before it is needed. A file that is still in use when it is
        evicted stays pinned beyond the limit.
        """

    def path_of(self, summary: ShardSummary) -> str:
        """Return the path of a file, which may not be downloaded yet."""

    def pin(self, summary: ShardSummary) -> str:
        """Pin a file until as many calls of `unpin`, and return its path or URL.

        Raises:
            DatasetCorrupt: it is a link out of the dataset.
            ShardNotFound: it is missing, if that is known without opening it.
        """

    def pin_if_cached(self, summary: ShardSummary) -> str:
        """Pin a file without downloading it; returns its path, or its URL if it is not local."""

    def remote_file(self, summary: ShardSummary, path: str) -> PreadFile | None:
        """Return a reader for the URL that `pin` returned; None if it returned a local path.

        A URL is not pinned, and not to be unpinned.
        """

    def unpin(self, summary: ShardSummary) -> None:
        """Unpin a file. Safe in any thread at any point, also after `close`."""

    def close(self) -> None:
        """Stop downloading. Pinned files stay until they are unpinned. Idempotent."""


class LocalStorage:
    """The files in a local folder: nothing is downloaded or evicted.

    Args:
        root: the folder, absolute.
        named: the folder as the user named it, for messages.
    """

    def __init__(self, root: str, named: str) -> None:
        self.root, self._named = root, named

    def resolve_access(self, asked: Access) -> Access:
        """Return the requested access method; "auto" depends on the file system."""
        return choose_access(self.root, asked)

    def manifest_folder(self, generation: int | None) -> str:
        """Return the folder itself."""
        return self._named

    def invalidate(self) -> bool:
        """Return False: there is no other copy."""
        return False

    def max_pinned(self, sizes: Rows) -> int | None:
        """Return None: every file stays where it is."""
        return None

    def remote_file(self, summary: ShardSummary, path: str) -> None:
        """Return None: every file is local."""

    def path_of(self, summary: ShardSummary) -> str:
        """Return the path of a file."""
        return os.path.join(self.root, summary.name)

    def pin(self, summary: ShardSummary) -> str:
        """Return the path of a file after checking links; opening it reports a missing one.

        Raises:
            DatasetCorrupt: it is a link out of the folder.
        """
        path = self.path_of(summary)
        refuse_links_outside(self.root, path)
        return path

    def pin_if_cached(self, summary: ShardSummary) -> str:
        """Return the path of a file, as `pin` does."""
        return self.pin(summary)

    def unpin(self, summary: ShardSummary) -> None:
        """Do nothing: files stay."""

    def close(self) -> None:
        """Do nothing."""


class ShardPaths(Sequence[str]):
    """The paths of shards in a folder, built on demand, as there may be very many.

    Args:
        folder: as messages name it.
        shards: in their order.
    """

    def __init__(self, folder: str, shards: Sequence[ShardSummary]) -> None:
        self._folder, self._shards = folder, shards

    def __len__(self) -> int:
        return len(self._shards)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[k] for k in range(*index.indices(len(self)))]
        return os.path.join(self._folder, self._shards[index].name)
