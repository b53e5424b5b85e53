"""Staging folders of operations that publish files of a dataset, and conflicts between writers.

New files lie in a hidden, locked folder until all are written. Folders left by killed operations
are removed by the next one.

If another writer changes the dataset during an operation, files may be missing for that reason.
This is detected, and not reported as damage.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from shardio.dataset.manifest import GENERATIONS, load_generation, read_pointer
from shardio.errors import DataError, DatasetConflict, DatasetNotFound
from shardio.storage.fs import make_temporary_folder, perform, remove_tree, unlink

PathName = str | os.PathLike[str]


@contextlib.contextmanager
def detect_conflict(folder: PathName, before: int | None = None) -> Iterator[None]:
    """Raise DatasetConflict for an error in the block if another writer has removed its files.

    Args:
        before: the generation that is read; by default the one that is published now.

    Raises:
        DatasetConflict: from an error of the block, as `raise_conflict` does.
    """
    before = published_in(folder) if before is None else before
    try:
        yield
    except (DataError, FileNotFoundError) as error:
        raise_conflict(folder, before, error)
        raise


def raise_conflict(folder: PathName, before: int | None, because: Exception | None = None) -> None:
    """Make sure that no generation but `before` is published, or that its files still exist.

    Args:
        before: the number that `published_in` gave; None: nothing can be told.
        because: what showed that something is wrong.

    Raises:
        DatasetConflict: another writer has published, and removed files that are read.
    """
    now = published_in(folder)
    if before is None or now is None or now == before or not _has_gone(folder, before, now):
        return
    raise DatasetConflict(
        f"{os.fspath(folder)}: generation {now} is there: another writer published after "
        f"generation {before} was read, and removed shards of that; do it again, with what is "
        "published now"
    ) from because


def published_in(folder: PathName) -> int | None:
    """Return the number of the published generation; None if it cannot be read."""
    with contextlib.suppress(DataError, DatasetNotFound, OSError):
        return read_pointer(folder)[0]
    return None


def _has_gone(folder: PathName, before: int, now: int) -> bool:
    """Return True if a file is missing that a generation from `before` to `now` - 1 names."""
    try:
        older = [load_generation(folder, number) for number in range(before, now)]
    except DataError:
        return True
    return not all(Path(folder, shard.name).exists() for one in older for shard, _ in one.files)


_PREFIX: Final = ".maintenance-"
_NAMES: Final = "names.jsonl"
"""A line for each name that a shard was about to get: its inode, so that it is known again."""


def make_staging(root: Path) -> tuple[Path, int]:
    """Make and lock a folder; one that another process swept in between is made again."""
    while True:
        folder = make_temporary_folder(root, _PREFIX)
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        # On a file system without locks, no process removes leftovers
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), os.stat(folder)):
                return folder, fd
        os.close(fd)


def note_name(staging: Path, part: str, name: str) -> None:
    """Write down that a staged shard is about to be renamed to `name` in the dataset's folder."""
    line = json.dumps([os.stat(staging / part).st_ino, name])
    place = staging / _NAMES
    perform("write", str(place), _append, place, line + "\n")


def _append(place: Path, text: str) -> None:
    with open(place, "a", encoding="utf-8") as file:
        file.write(text)


def sweep(root: Path) -> None:
    """Remove the unlocked hidden folders that killed operations left.

    The shards that they had named already are removed too, unless a generation names them.
    """
    for folder in root.glob(_PREFIX + "*"):
        with contextlib.suppress(OSError):  # locked, removed meanwhile, or not a folder
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove_named(root, folder)
                remove_tree(folder)
            except DataError:
                continue  # a generation that cannot be read may name them: a later run removes them
            finally:
                os.close(fd)


def _remove_named(root: Path, folder: Path) -> None:
    """Remove the shards that came from a folder and that no generation names, published or not."""
    if not (folder / _NAMES).exists():
        return
    numbers = [int(p.stem) for p in (root / GENERATIONS).glob("[0-9]*.json") if p.stem.isdecimal()]
    named = {shard.name for n in numbers for shard, _ in load_generation(root, n).files}
    for line in (folder / _NAMES).read_text("utf-8").splitlines():
        # An incomplete line; its shard was never renamed
        with contextlib.suppress(ValueError, FileNotFoundError):
            inode, name = json.loads(line)
            # Another writer may have used the name since.
            if name not in named and (root / name).stat().st_ino == inode:
                unlink(root / name)
