"""Work on a dataset that another writer overtakes: what is gone for that reason is no damage."""

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
    """Work on a dataset; an error because another writer has removed what is read says just that.

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
    """The number of the published generation; None where that cannot be told."""
    with contextlib.suppress(DataError, DatasetNotFound, OSError):
        return read_pointer(folder)[0]
    return None


def _has_gone(folder: PathName, before: int, now: int) -> bool:
    """Whether a file is gone that the generations from `before` to the one before `now` name."""
    try:
        older = [load_generation(folder, number) for number in range(before, now)]
    except DataError:
        return True
    return not all(Path(folder, shard.name).exists() for one in older for shard, _ in one.files)
