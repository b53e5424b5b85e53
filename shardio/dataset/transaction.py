"""Make all new files of an operation appear in a dataset together, or none of them.

An operation writes new files in a *staging folder*, which is hidden and locked. When all files are
complete, each file gets its final name as a second hard link, and a generation that names the files
is published. Until the operation ends, the files that it added to the dataset are recognized by
their inodes, because the links in the staging folder have the same inodes. If the operation fails,
`undo` removes these files, unless a generation names them. If the operation is killed, the next
operation on the dataset removes them.

A file may be missing because another writer has changed the dataset during an operation.
`detect_conflict` reports this as a conflict, not as damage.

A folder that is not a dataset, such as an export, is created in a staging folder beside its final
path and then renamed (`NewFolder`).
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

from shardio._base.classes import undo_on_error
from shardio.dataset.generation import Generation
from shardio.dataset.manifest import (
    GENERATIONS,
    POINTER,
    STAGING_PREFIX,
    generation_numbers,
    holds_dataset,
    load_generation,
    read_pointer,
    recover,
    refuse_existing,
    remove_temporary_files,
    withdraw,
)
from shardio.errors import (
    DataError,
    DatasetConflict,
    DatasetCorrupt,
    DatasetExists,
    DatasetNotFound,
    ShardUnsupported,
    UnsupportedEnvironment,
)
from shardio.shard.reader import ShardReader
from shardio.storage.fs import (
    exchange,
    link,
    lock_folder,
    make_folder,
    make_temporary_folder,
    remove_folder,
    remove_tree,
    rename,
    sync_path,
    unlink,
)

PathName = str | os.PathLike[str]


@contextlib.contextmanager
def detect_conflict(folder: PathName, before: int | None = None) -> Iterator[None]:
    """Raise DatasetConflict if another writer has caused an error in the `with` block.

    `before` is the number of the generation that the block reads; by default, the published one.
    """
    before = published_number(folder) if before is None else before
    try:
        yield
    except (DataError, FileNotFoundError) as error:
        raise_conflict(folder, before, error)
        raise


def raise_conflict(folder: PathName, before: int | None, cause: Exception | None = None) -> None:
    """Raise DatasetConflict if another writer has published a generation and removed files.

    Check the files of the generations from `before` up to, but not including, the published one. If
    `before` is None, check nothing.
    """
    now = published_number(folder)
    if before is None or now is None or now == before or not _files_missing(folder, before, now):
        return
    raise DatasetConflict(
        f"{os.fspath(folder)}: another writer published generation {now} after generation {before} "
        "was read, and removed shards; run the operation again on the published generation"
    ) from cause


def published_number(folder: PathName) -> int | None:
    """Return the number of the published generation; None if `dataset.json` cannot be read."""
    with contextlib.suppress(DataError, DatasetNotFound, OSError):
        return read_pointer(folder)[0]
    return None


def _files_missing(folder: PathName, before: int, now: int) -> bool:
    try:
        older = [load_generation(folder, number) for number in range(before, now)]
    except DataError:
        return True
    return not all(Path(folder, name).exists() for one in older for name in one.names)


class StagingFolder:
    """A new hidden folder in `root`. The object owns the folder and its lock until `remove`."""

    def __init__(self, root: Path) -> None:
        sweep(root)
        self._root = root
        while True:
            self.path = make_temporary_folder(root, STAGING_PREFIX)
            # FileNotFoundError: another process removed the folder before it was locked.
            with contextlib.suppress(FileNotFoundError), undo_on_error(remove_folder, self.path):
                self._fd = lock_folder(self.path, wait=True)
                return

    def remove(self, error: BaseException | None) -> None:
        """Remove the folder. If `error` is given, also remove the unpublished files from `root`."""
        try:
            if error is None:
                remove_tree(self.path)
                return
            # If this fails, a later operation removes the files.
            with contextlib.suppress(OSError, DataError):
                undo(self._root, self.path)
                remove_tree(self.path)
        finally:
            os.close(self._fd)


def explain_error(error: BaseException | None, hidden: Path, shown: PathName) -> None:
    """Name `shown` in an OSError about a path in `hidden`; if the disk is full, add a hint."""
    path = error.filename if isinstance(error, OSError) else None  # may be a descriptor
    if not isinstance(error, OSError) or not str(path).startswith(str(hidden)):
        return
    error.filename = os.fspath(shown)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        error.strerror = (
            f"{error.strerror}; nothing was published: free some space and try again, or choose "
            "a folder on another disk"
        )
        error.args = (error.errno, error.strerror)  # `args` is what pickle stores


def sweep(root: Path) -> None:
    """Remove the staging folders of killed operations, and their unpublished files in `root`.

    A staging folder whose lock is free belongs to a killed operation: the kernel releases the locks
    of a killed process.
    """
    for folder in root.glob(STAGING_PREFIX + "*"):
        # Skip a folder that is locked, or that another process has just removed. If a generation
        # cannot be read, keep the files, because the unreadable generation may name them.
        with contextlib.suppress(OSError, DataError):
            fd = lock_folder(folder)
            try:
                undo(root, folder)
                remove_tree(folder)
            finally:
                os.close(fd)


def remove_leftovers(root: Path) -> None:
    """Remove the unpublished generations, staging folders and staged files of killed writers.

    A shard in `root` that has no link in a staging folder is kept: another writer may be about to
    commit it.
    """
    with contextlib.suppress(DatasetCorrupt, ShardUnsupported):
        if holds_dataset(root):
            # Call `recover` first: `sweep` would keep the files that an unpublished generation
            # names.
            recover(root)
        sweep(root)


def link_staged(staged: Path, final: Path) -> None:
    """Give a staged file its final name as a second link; raise DatasetConflict if it exists."""
    try:
        link(staged, final)
    except FileExistsError as error:
        raise DatasetConflict(
            f"{final}: created by another writer meanwhile; its files are unchanged; choose "
            "another folder"
        ) from error


def undo(root: Path, staging: Path, *, is_private: bool = False) -> None:
    """Remove the unpublished files of an operation from `root`. Files in `staging` are kept.

    If `root` is not a dataset yet, the first generation of the operation is removed, too. The
    caller must hold the lock of the staging folder. `is_private` is True if no other writer can
    have used `root`. Raises DataError if a generation that may name the staged shards cannot be
    read.
    """
    inodes = _staged_inodes(staging)
    if not holds_dataset(root) and (inodes or is_private):
        lineage = ""
        with contextlib.suppress(DataError):
            first = load_generation(root, 1)
            if is_private or names_staged(root, staging, first):
                lineage = first.lineage
        remove_temporary_files(root)
        withdraw(root, lineage)
    found = {entry.name: entry.stat(follow_symlinks=False).st_ino for entry in os.scandir(root)}
    names = [name for name, inode in found.items() if inode in inodes]
    if not names:
        return
    named: defaultdict[str, set[str]] = defaultdict(set)
    for number in generation_numbers(root):
        for shard, _ in load_generation(root, number).files:
            named[shard.name].add(shard.id)
    for name in names:
        if name not in named or id_of(root / name) not in named[name]:
            unlink(root / name)


def names_staged(root: Path, staging: Path, generation: Generation) -> bool:
    """Return True if `generation` names a shard in `root` that is a link to a file in `staging`."""
    if inodes := _staged_inodes(staging):
        for shard, _ in generation.files:
            with contextlib.suppress(FileNotFoundError):
                if (root / shard.name).stat().st_ino in inodes:
                    return id_of(root / shard.name) == shard.id
    return False


def _staged_inodes(staging: Path) -> set[int]:
    """Return the inodes of the staged shards that already have their final names."""
    found = (path.lstat() for path in staging.rglob("*.shard"))
    return {one.st_ino for one in found if one.st_nlink > 1}


def id_of(path: Path) -> str:
    """Return the id that the shard at `path` states."""
    with ShardReader(path, verify="off") as reader:
        return reader.id


def dataset_entries(root: Path) -> list[str]:
    """Return the names of the files and folders in `root` that belong to the dataset.

    The first is `dataset.json`. Move it first, so that no process opens an incomplete dataset.
    """
    generations = (load_generation(root, number) for number in generation_numbers(root))
    named = {name for generation in generations for name in generation.names}
    return [POINTER, GENERATIONS, *sorted(name for name in named if (root / name).exists())]


def check_only_dataset(root: Path, exclude: str) -> None:
    """Raise DatasetExists if `root` holds more than a dataset and the entry `exclude`.

    A missing `root` is accepted. Raises the errors of `load` if a generation cannot be read.
    """
    if not holds_dataset(root):
        refuse_existing(root, exclude=exclude)
        return
    if others := sorted({*os.listdir(root)} - {exclude, *dataset_entries(root)}):
        raise DatasetExists(
            f"{root}: holds {others[0]} beside the dataset ({len(others)} such entries in "
            "all), which overwrite would leave behind; choose another folder"
        )


_NOT_EMPTY_ERRNOS: Final = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


class NewFolder:
    """A new folder. The caller fills it at the path `folder`; `publish` renames it to `out`."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def __enter__(self) -> Self:
        make_folder(self.out.parent)
        self._staging = StagingFolder(self.out.parent)
        self.folder = self._staging.path / "new"
        try:
            make_folder(self.folder)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def check_can_replace(self) -> None:
        """Raise UnsupportedEnvironment if this file system cannot replace a folder in one step."""
        other = self._staging.path / "other"
        make_folder(other)
        self._exchange(other)

    def publish(self, *, replace: bool) -> None:
        """Rename the new folder to `out`; with `replace`, exchange it with the existing folder.

        Raises DatasetExists if another process has created `out` in the meantime.
        """
        sync_path(self.folder)
        if replace:
            self._exchange(self.out)
        else:
            try:
                rename(self.folder, self.out)
            except OSError as error:
                if error.errno not in _NOT_EMPTY_ERRNOS:
                    raise
                raise DatasetExists(
                    f"{self.out}: another process has written there meanwhile"
                ) from error
        sync_path(self.out.parent)

    def _exchange(self, other: Path) -> None:
        if not exchange(str(self.folder), str(other)):
            raise UnsupportedEnvironment(
                f"{self.out}: this file system cannot replace a folder in one step; remove the "
                "folder first, or choose another one"
            )

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        explain_error(error, self._staging.path, self.out)
        try:
            self._staging.remove(error)
        except OSError as failure:
            explain_error(failure, self._staging.path, self.out)
            raise
