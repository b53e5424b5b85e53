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
from shardio.manifest import holds_dataset, refuse_existing, withdraw
from shardio.storage import rename_new, sync_folder

NAME: Final = ".conversion"
_MOVED: Final = "moved"
"""A file that says what is about to be published: the lineage, then the shards, a line each."""


class Staging:
    """Owns `out/.conversion` from `with` to its end; two conversions cannot own the same.

    What a killed conversion left there is removed first. At the end the folder disappears, and
    `out/` too if it was made here and is still empty; shards that were moved into `out/` stay if
    a dataset was published there.

    Raises:
        DatasetExists: `out` is a file, or holds data.
        DatasetConflict: another writer is at work in `out`.
    """

    def __init__(self, out: str) -> None:
        self.out = Path(os.path.abspath(out))
        self.folder = self.out / NAME
        self._lock_fd: int | None = None
        self._made_out = False

    def __enter__(self) -> Self:
        if not (self.folder / _MOVED).exists():  # else what lies there may be taken back
            refuse_existing(self.out, but=NAME)
        self._made_out = not self.out.exists()
        self._lock()
        try:
            self._take_back()
            refuse_existing(self.out, but=NAME)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def move_out(self, names: Sequence[str], lineage: str) -> None:
        """Move finished shards into `out/`, durably.

        Raises:
            DatasetConflict: another writer has put something of the same name there.
        """
        # Written first: should this process be killed, the next one can take them back.
        (self.folder / _MOVED).write_text("".join(f"{line}\n" for line in (lineage, *names)))
        for name in names:
            try:
                rename_new(str(self.folder / name), str(self.out / name))
            except FileExistsError as error:
                raise DatasetConflict(
                    f"{self.out / name}: another writer has put it there meanwhile; nothing of "
                    "theirs was changed; choose another folder"
                ) from error
        sync_folder(str(self.out))

    def _take_back(self) -> None:
        """Empty the folder, and remove what was moved out of it unless that is a dataset now."""
        moved = self.folder / _MOVED
        if moved.exists() and not holds_dataset(self.out):
            lineage, *names = moved.read_text().splitlines() or [""]
            for name in names:
                if not (self.folder / name).exists():  # else what is in `out` is another's
                    (self.out / name).unlink(missing_ok=True)
            withdraw(self.out, lineage)
        for entry in self.folder.iterdir():
            entry.unlink()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        try:
            with contextlib.suppress(OSError):  # somebody has removed it under our hands
                self._take_back()
            shutil.rmtree(self.folder, ignore_errors=True)
            if self._made_out:
                with contextlib.suppress(OSError):  # not empty: the dataset is there
                    self.out.rmdir()
        finally:
            self._unlock()

    def _lock(self) -> None:
        """Make the folder and lock it: the kernel releases it with this process, however it ends.

        The one that is locked may have been removed by its owner meanwhile: then another is made.
        """
        while self._lock_fd is None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:  # removed between the two
                continue
            self._lock_fd = fd
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not os.path.samestat(os.fstat(fd), os.stat(self.folder)):
                    self._unlock()
            except BlockingIOError as error:
                self._unlock()
                raise DatasetConflict(
                    f"{self.out}: another conversion is writing here; wait for it or choose "
                    "another folder"
                ) from error
            except FileNotFoundError:
                self._unlock()

    def _unlock(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None
