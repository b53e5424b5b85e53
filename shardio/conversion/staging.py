"""The folder inside `out/` where a conversion's shards lie until all of them are done.

So `out/` never holds a shard that belongs to no dataset, and whatever happens, a killed worker or
a full disk, tidying up is the removal of one folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from shardio.errors import DatasetConflict
from shardio.manifest import refuse_existing
from shardio.storage import sync_folder

NAME: Final = ".conversion"


class Staging:
    """Owns `out/.conversion` from `with` to its end; two conversions cannot own the same.

    What a killed conversion left there is removed first. At the end the folder disappears, and
    `out/` too if it was made here and is still empty; shards that were moved into `out/` stay if
    `keep()` was called.

    Raises:
        DatasetExists: `out` is a file, or holds data.
        DatasetConflict: another conversion into `out` is running.
    """

    def __init__(self, out: str) -> None:
        self.out = Path(out)
        self.folder = self.out / NAME
        self._moved: list[Path] = []
        self._lock_fd: int | None = None
        self._made_out = False

    def __enter__(self) -> Self:
        if self.folder.is_dir():
            self._lock()
            shutil.rmtree(self.folder)
            self._unlock()
        refuse_existing(self.out)
        self._made_out = not self.out.exists()
        self.folder.mkdir(parents=True)
        self._lock()
        return self

    def move_out(self, names: Sequence[str]) -> None:
        """Move finished shards into `out/`, durably."""
        for name in names:
            place = self.out / name
            os.rename(self.folder / name, place)
            self._moved.append(place)
        sync_folder(str(self.out))

    def keep(self) -> None:
        """Leave the shards that were moved where they are: they belong to a dataset now."""
        self._moved = []

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        for place in self._moved:
            place.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._made_out:
            with contextlib.suppress(OSError):  # not empty: the dataset is there
                self.out.rmdir()
        self._unlock()

    def _lock(self) -> None:
        """Lock the folder itself: the kernel releases it with this process, however it ends."""
        self._lock_fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._unlock()
            raise DatasetConflict(
                f"{self.out}: another conversion is writing here; wait for it or choose another "
                "folder"
            ) from error

    def _unlock(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None
