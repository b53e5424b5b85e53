"""Detect that another writer has changed a dataset during an operation on it.

Files that are missing for that reason are not damage.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from shardio.dataset.manifest import load_generation, read_pointer
from shardio.errors import DataError, DatasetConflict, DatasetNotFound

PathName = str | os.PathLike[str]


@contextlib.contextmanager
def tell_overtaken(folder: PathName, before: int | None = None) -> Iterator[None]:
    """Raise DatasetConflict for an error in the block if another writer has removed its files.

    Args:
        before: the generation that is read; by default the one that is published now.

    Raises:
        DatasetConflict: from an error of the block, as `refuse_overtaken` does.
    """
    before = published_in(folder) if before is None else before
    try:
        yield
    except (DataError, FileNotFoundError) as error:
        refuse_overtaken(folder, before, error)
        raise


def refuse_overtaken(
    folder: PathName, before: int | None, because: Exception | None = None
) -> None:
    """Make sure that no generation but `before` is published, or its files are there still.

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
