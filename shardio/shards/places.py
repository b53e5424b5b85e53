"""Where the files of a dataset lie: a folder of this machine, or what stands for one.

A dataset asks its place for every file that it opens, and says when it has let go of it: so a
place can bring a file here first, and remove those that nobody uses.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final, Protocol, overload

from shardio.access.links import refuse_links_outside
from shardio.writer import ShardSummary


class Place(Protocol):
    """Files of a dataset, by their entries in its generation. For any thread."""

    @property
    def root(self) -> str:
        """The folder of this machine that they lie in, absolute."""

    @property
    def most_held(self) -> int | None:
        """How many may be held at a time, if that is bounded: none is opened before it is needed.

        A file that is still in use when its turn has come to be let go of is held beyond that.
        """

    def path_of(self, summary: ShardSummary) -> str:
        """Where a file is, or will be once it is held."""

    def hold(self, summary: ShardSummary) -> str:
        """Have a file here, and keep it until as many calls of `release`; returns its path.

        Raises:
            DatasetCorrupt: it leads out of the dataset.
            ShardNotFound: there is none, as far as that is known without opening it.
        """

    def release(self, summary: ShardSummary) -> None:
        """No longer keep a file. In any thread, in the middle of anything, also once closed."""

    def close(self) -> None:
        """Bring no more files. Those that are held stay until they are released. Idempotent."""


class Folder:
    """The files in a folder of this machine: nothing has to be brought, or kept.

    Args:
        root: the folder, absolute.
    """

    most_held: Final = None
    """Every file stays where it is."""

    def __init__(self, root: str) -> None:
        self.root: Final = root

    def path_of(self, summary: ShardSummary) -> str:
        """Where a file is."""
        return os.path.join(self.root, summary.name)

    def hold(self, summary: ShardSummary) -> str:
        """The same, once it is known to lead nowhere else; that it exists, opening it will say.

        Raises:
            DatasetCorrupt: it is a link out of the folder.
        """
        path = self.path_of(summary)
        refuse_links_outside(self.root, path)
        return path

    def release(self, summary: ShardSummary) -> None:
        """Do nothing: files stay."""

    def close(self) -> None:
        """Do nothing."""


class Paths(Sequence[str]):
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
