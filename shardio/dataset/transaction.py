"""Publish new files of a dataset, or a folder, as a whole.

A new file is written in a hidden, locked staging folder. Once all files are complete, each gets its
final name as a second link (`link_staged`), and a generation that names the files is published.
Until then the links in the staging folder stay: their inodes show which files in the dataset belong
to the operation. If the operation fails, these files are removed again, unless a generation names
them (`undo`). If the operation is killed, the next operation removes the files.

Files may be missing because another writer has changed the dataset during an operation. This is
detected and reported as a conflict, not as damage.

A folder that is not a dataset, such as an export, is staged beside its final place and renamed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import types
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

from shardio.dataset.generation import Generation
from shardio.dataset.manifest import (
    GENERATIONS,
    POINTER,
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
)
from shardio.shard.reader import ShardReader
from shardio.storage.fs import (
    exchange,
    link,
    make_folder,
    make_temporary_folder,
    remove_tree,
    rename,
    sync_path,
    unlink,
)

PathName = str | os.PathLike[str]


@contextlib.contextmanager
def detect_conflict(folder: PathName, before: int | None = None) -> Iterator[None]:
    """Turn an error in the block into DatasetConflict if another writer has removed files.

    `before` is the number of the generation that is read; by default the published one.
    """
    before = published_in(folder) if before is None else before
    try:
        yield
    except (DataError, FileNotFoundError) as error:
        raise_conflict(folder, before, error)
        raise


def raise_conflict(folder: PathName, before: int | None, cause: Exception | None = None) -> None:
    """Raise DatasetConflict if a newer generation is published and files of older ones are missing.

    `before` is the number returned by `published_in`; with None, nothing is checked.
    """
    now = published_in(folder)
    if before is None or now is None or now == before or not _files_missing(folder, before, now):
        return
    raise DatasetConflict(
        f"{os.fspath(folder)}: another writer published generation {now} after generation {before} "
        "was read, and removed shards; run the operation again on the published generation"
    ) from cause


def published_in(folder: PathName) -> int | None:
    """Return the number of the published generation; None if it cannot be read."""
    with contextlib.suppress(DataError, DatasetNotFound, OSError):
        return read_pointer(folder)[0]
    return None


def _files_missing(folder: PathName, before: int, now: int) -> bool:
    """Return True if a shard named by a generation from `before` to `now` - 1 is missing."""
    try:
        older = [load_generation(folder, number) for number in range(before, now)]
    except DataError:
        return True
    return not all(Path(folder, name).exists() for one in older for name in one.names)


_PREFIX: Final = ".staging-"


def lock_folder(folder: Path, *, wait: bool = False) -> int:
    """Lock a folder and return a descriptor; closing it and all its duplicates releases the lock.

    Raises:
        BlockingIOError: another process holds the lock.
        FileNotFoundError: the folder does not exist, or its owner removed it in the meantime.
        OSError: the folder is a link, or the file system has no locks.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(fd), os.stat(folder)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
    except BaseException:
        os.close(fd)
        raise
    return fd


class StagingFolder:
    """A new hidden folder in `root`, locked and owned until `remove`."""

    def __init__(self, root: Path) -> None:
        sweep(root)
        self._root, self._fd = root, -1
        while True:
            self.path = make_temporary_folder(root, _PREFIX)
            try:
                self._fd = lock_folder(self.path, wait=True)
            except FileNotFoundError:  # another process removed the folder before it was locked
                continue
            except OSError:  # without locks on this file system, no process removes leftovers
                pass
            return

    def remove(self, error: BaseException | None) -> None:
        """Remove the folder; after an error, also remove the final names of unpublished files."""
        try:
            if error is None:
                remove_tree(self.path)
                return
            with contextlib.suppress(OSError, DataError):  # a later operation removes the files
                undo(self._root, self.path)
                remove_tree(self.path)
        finally:
            if self._fd >= 0:
                os.close(self._fd)


def sweep(root: Path) -> None:
    """Remove the unlocked staging folders that killed operations left, with unpublished files."""
    for folder in root.glob(_PREFIX + "*"):
        # Skip folders that are locked or were removed in the meantime. If a generation is
        # unreadable, keep the files, because the generation may name them.
        with contextlib.suppress(OSError, DataError):
            fd = lock_folder(folder)
            try:
                undo(root, folder)
                remove_tree(folder)
            finally:
                os.close(fd)


def remove_leftovers(root: Path) -> None:
    """Remove what killed writers left in a folder, generations too, and no process will resume.

    Shards are kept, because another writer may be about to commit them.
    """
    with contextlib.suppress(DatasetCorrupt, ShardUnsupported):
        if holds_dataset(root):
            recover(root)  # first, as an unpublished generation names files to be removed
        sweep(root)


def link_staged(staged: Path, final: Path) -> None:
    """Link a staged file to its final name, too; raise DatasetConflict if that name exists."""
    try:
        link(staged, final)
    except FileExistsError as error:
        raise DatasetConflict(
            f"{final}: created by another writer meanwhile; its files are unchanged; choose "
            "another folder"
        ) from error


def undo(root: Path, staging: Path, *, is_private: bool = False) -> None:
    """Remove the files of an unpublished operation from `root`; staged files stay in `staging`.

    The staging folder is locked; `is_private` is True if no other writer can have used `root`.

    Raises:
        DataError: a generation that may name the staged shards cannot be read.
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
    _unlink(root, inodes)


def _unlink(root: Path, inodes: set[int]) -> None:
    """Remove the final names of staged shards from `root`, unless a generation names the shards."""
    found = {entry.name: entry.stat(follow_symlinks=False).st_ino for entry in os.scandir(root)}
    names = [name for name, inode in found.items() if inode in inodes]
    if not names:
        return
    named: defaultdict[str, set[str]] = defaultdict(set)
    for number in generation_numbers(root):
        for shard, _ in load_generation(root, number).files:
            named[shard.name].add(shard.id)
    for name in names:
        if name not in named or _id_of(root / name) not in named[name]:
            unlink(root / name)


def names_staged(root: Path, staging: Path, generation: Generation) -> bool:
    """Return True if a generation of the dataset in `root` names shards staged in a folder."""
    if inodes := _staged_inodes(staging):
        for shard, _ in generation.files:
            with contextlib.suppress(FileNotFoundError):
                if (root / shard.name).stat().st_ino in inodes:
                    return _id_of(root / shard.name) == shard.id
    return False


def _staged_inodes(staging: Path) -> set[int]:
    """Return the inodes of staged shards that have a second link."""
    found = (path.lstat() for path in staging.rglob("*.shard"))
    return {one.st_ino for one in found if one.st_nlink > 1}


def _id_of(path: Path) -> str:
    with ShardReader(path, verify="off") as reader:
        return reader.id


def dataset_entries(root: Path) -> list[str]:
    """Return the entries of a dataset, the pointer first.

    Once the pointer is moved away, the other entries no longer count as a dataset.
    """
    generations = (load_generation(root, number) for number in generation_numbers(root))
    named = {name for generation in generations for name in generation.names}
    return [POINTER, GENERATIONS, *sorted(name for name in named if (root / name).exists())]


def check_only_dataset(root: Path, exclude: str) -> None:
    """Check that `root` is missing, empty, or holds only a dataset, apart from `exclude`.

    Raises:
        DatasetExists: `root` contains something that does not belong to the dataset.
        DatasetCorrupt, ShardUnsupported: the files of the dataset cannot be determined.
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


class StagedFolder:
    """A new folder beside `out`, owned by the `with` block; `publish` renames the folder to `out`.

    `marker` is the name of a file that every such folder has once it is complete.
    """

    def __init__(self, out: Path, marker: str) -> None:
        self.out, self._marker = out, marker
        # The temporary name of the old folder, on file systems that cannot exchange two folders.
        self._replaced = out.with_name(f".{out.name}.replaced")

    def __enter__(self) -> Self:
        make_folder(self.out.parent)
        self._staging = StagingFolder(self.out.parent)
        self.folder = self._staging.path / "new"
        try:
            if (self._replaced / self._marker).exists():  # left by a process killed in `_rename`
                is_moved_away = not os.path.lexists(self.out)
                rename(self._replaced, self.out if is_moved_away else self._staging.path / "older")
            make_folder(self.folder)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def publish(self, *, replace: bool) -> None:
        """Rename the folder to `out`; with `replace`, an existing folder there is replaced.

        Raises:
            DatasetExists: another process has created something at `out` in the meantime.
        """
        sync_path(self.folder)
        if not (replace and exchange(str(self.folder), str(self.out))):
            self._rename(replace=replace)
        sync_path(self.out.parent)

    def _rename(self, *, replace: bool) -> None:
        if replace:
            rename(self.out, self._replaced)
        try:
            rename(self.folder, self.out)
        except BaseException as error:
            if replace:
                with contextlib.suppress(OSError):  # raise the first error instead
                    rename(self._replaced, self.out)
            if not isinstance(error, OSError) or error.errno not in _NOT_EMPTY_ERRNOS:
                raise
            raise DatasetExists(
                f"{self.out}: another process has written there meanwhile"
            ) from error
        if replace:
            rename(self._replaced, self._staging.path / "old")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self._staging.remove(error)
