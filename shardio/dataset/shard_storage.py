"""Where the files of a dataset lie: a folder of this machine, or what stands for one.

A dataset asks its place for every file that it opens, and says when it has let go of it: so a
place can bring a file here first, and remove those that nobody uses.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol, overload

from shardio.shard.verification import Rows
from shardio.shard.writer import ShardSummary
from shardio.storage.file_access import Access, choose_access
from shardio.storage.fs import refuse_links_outside
from shardio.storage.pread import PreadFile


class ShardStorage(Protocol):
    """Files of a dataset, by their entries in its generation. For any thread."""

    @property
    def root(self) -> str:
        """The folder of this machine that they lie in, absolute; or the URL that they come from."""

    def resolve_access(self, asked: Access) -> Access:
        """How they are read: "mmap" or "pread".

        Raises:
            InvalidArgument: as is asked for, they cannot be.
        """

    def manifest_folder(self, generation: int | None) -> str:
        """The folder of this machine with `dataset.json` and a state, by default the published one.

        Raises:
            DatasetNotFound, ShardioError: they cannot be brought there.
        """

    def invalidate(self) -> bool:
        """What `manifest_folder` has brought is damaged; whether it will be brought anew."""

    def max_pinned(self, sizes: Rows) -> int | None:
        """How many of them, of so many bytes each, may be held at a time, if that is bounded.

        Then none is opened before it is needed.

        A file that is still in use when its turn has come to be let go of is held beyond that.
        """

    def path_of(self, summary: ShardSummary) -> str:
        """Where a file is, or will be once it is held."""

    def pin(self, summary: ShardSummary) -> str:
        """Have a file here, and keep it until as many calls of `unpin`; returns its path.

        Raises:
            DatasetCorrupt: it leads out of the dataset.
            ShardNotFound: there is none, as far as that is known without opening it.
        """

    def pin_if_cached(self, summary: ShardSummary) -> str:
        """The same for a look at a file, which is not brought here for it."""

    def remote_file(self, summary: ShardSummary, path: str) -> PreadFile | None:
        """What reads a file by the path that it was held by, if it is not here; else None.

        That one is not held, and not to be released.
        """

    def unpin(self, summary: ShardSummary) -> None:
        """No longer keep a file. In any thread, in the middle of anything, also once closed."""

    def close(self) -> None:
        """Bring no more files. Those that are held stay until they are released. Idempotent."""


class LocalStorage:
    """The files in a folder of this machine: nothing has to be brought, or kept.

    Args:
        root: the folder, absolute.
        named: as it was named, for messages.
    """

    def __init__(self, root: str, named: str) -> None:
        self.root, self._named = root, named

    def resolve_access(self, asked: Access) -> Access:
        """What is asked for, or what suits the file system."""
        return choose_access(self.root, asked)

    def manifest_folder(self, generation: int | None) -> str:
        """The folder itself."""
        return self._named

    def invalidate(self) -> bool:
        """There is nowhere else to ask."""
        return False

    def max_pinned(self, sizes: Rows) -> int | None:
        """Any number: every file stays where it is."""
        return None

    def remote_file(self, summary: ShardSummary, path: str) -> None:
        """Nothing: every file is here."""

    def path_of(self, summary: ShardSummary) -> str:
        """Where a file is."""
        return os.path.join(self.root, summary.name)

    def pin(self, summary: ShardSummary) -> str:
        """The same, once it is known to lead nowhere else; that it exists, opening it will say.

        Raises:
            DatasetCorrupt: it is a link out of the folder.
        """
        path = self.path_of(summary)
        refuse_links_outside(self.root, path)
        return path

    def pin_if_cached(self, summary: ShardSummary) -> str:
        """The same."""
        return self.pin(summary)

    def unpin(self, summary: ShardSummary) -> None:
        """Do nothing: files stay."""

    def close(self) -> None:
        """Do nothing."""


class ShardPaths(Sequence[str]):
    """Where shards lie in a folder as it was named, made up one by one: there may be very many.

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
