"""The hidden folder that a surgery writes its shards in, and what one that was killed leaves."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from shardio.dataset.manifest import GENERATIONS, load_generation
from shardio.errors import DataError
from shardio.storage.fs import perform

_PREFIX: Final = ".maintenance-"
_NAMES: Final = "names.jsonl"
"""A line for each name that a shard was about to get: its inode, so that it is known again."""


def make_staging(root: Path) -> tuple[Path, int]:
    """Make and lock a folder; one that another process swept in between is made again."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        with contextlib.suppress(OSError):  # a file system without locks: nobody sweeps there
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
    """Remove what surgeries that were killed left: folders that nobody holds a lock on.

    And the shards that they had named already, unless a generation came to name them.
    """
    for folder in root.glob(_PREFIX + "*"):
        with contextlib.suppress(OSError):  # held, gone, or no folder
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove_named(root, folder)
                shutil.rmtree(folder, ignore_errors=True)
            except DataError:
                continue  # a generation that cannot be read may name them: for a later sweep
            finally:
                os.close(fd)


def _remove_named(root: Path, folder: Path) -> None:
    """Remove the shards that came from a folder and that no generation names, published or not."""
    if not (folder / _NAMES).exists():
        return
    numbers = [int(p.stem) for p in (root / GENERATIONS).glob("[0-9]*.json") if p.stem.isdecimal()]
    named = {shard.name for n in numbers for shard, _ in load_generation(root, n).files}
    for line in (folder / _NAMES).read_text("utf-8").splitlines():
        with contextlib.suppress(ValueError, FileNotFoundError):  # half a line; renamed never
            inode, name = json.loads(line)
            # Under the name may lie what another writer put there.
            if name not in named and (root / name).stat().st_ino == inode:
                (root / name).unlink()
