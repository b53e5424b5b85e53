"""What a dataset in a store says of itself, in a folder of this machine: `dataset.json` and states.

What is published is never changed, so only `dataset.json` is asked for again. Where the store
cannot be reached, what it said last is gone by.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final

from shardio._base.stack_level import level_of_caller
from shardio.errors import DatasetNotFound, ShardNotFound, StoreUnavailable
from shardio.storage import fs
from shardio.storage.remote.locks import alone_in
from shardio.storage.remote.object_store import Objects

ListFiles = Callable[[Mapping[str, Any]], Collection[str]]

POINTER: Final = "dataset.json"
GENERATIONS: Final = "generations"
_PATIENCE_S: Final = 5.0
"""How long a store is tried that need not be asked."""
_DAMAGED: Final = (KeyError, TypeError, ValueError, OverflowError, RecursionError)
"""What `dataset.json` raises that is not one: whoever reads it says what is wrong."""


class Mirror:
    """Copies of the small files of a dataset; those of all processes, in the same folder.

    Args:
        folder: of this machine, which exists.
        objects: the dataset in its store.
        list_files: the function that returns the names of the files a generation's JSON refers to.
    """

    def __init__(self, folder: str, objects: Objects, list_files: ListFiles) -> None:
        self.folder, self._objects, self._list_files = folder, objects, list_files

    def bring(self, number: int | None) -> None:
        """Have `dataset.json`, and a state of the dataset by its number, else the published one.

        Nothing is asked for that is here, but `dataset.json` if there is no number.

        Raises:
            DatasetNotFound: there is none at the URL.
            StoreAccessDenied, StoreUnavailable: as `Objects` says; the latter not if all is here.
        """
        if number is None or not os.path.exists(self._path(POINTER)):
            self._bring_pointer()
        if number is None:
            with contextlib.suppress(*_DAMAGED):
                number = int(json.loads(Path(self._path(POINTER)).read_bytes())["generation"])
        if number is not None:  # else reading it says what is wrong
            name = f"{GENERATIONS}/{number:06d}.json"
            self._bring(name)
            for part in self._parts(self._path(name)):
                self._bring(f"{GENERATIONS}/{part}")

    def _bring(self, name: str) -> None:
        if not os.path.exists(self._path(name)):
            with contextlib.suppress(ShardNotFound):  # reading it says that it is missing
                self.write(name, self._objects.read(name))

    def forget(self) -> None:
        """Remove all states: what came is not what was written, or another dataset's."""
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self._path(GENERATIONS)):
                if not name.endswith(".tmp"):  # which another process is about to rename
                    fs.unlink(self._path(f"{GENERATIONS}/{name}"))

    def _bring_pointer(self) -> None:
        old = self._pointer()
        try:
            new = self._objects.read(POINTER, deadline_s=None if old is None else _PATIENCE_S)
        except ShardNotFound as error:
            raise DatasetNotFound(
                f"{self._objects.url}: holds no {POINTER}: not a dataset, or never finished"
            ) from error
        except StoreUnavailable as error:
            if old is None:
                raise
            warnings.warn(
                f"{self._objects.url}: goes by what the store said last, as it cannot be reached "
                f"now: {error}",
                stacklevel=level_of_caller(),
            )
            return
        with alone_in(self.folder):
            # Read again: of processes that begin at a time, the first may have brought states.
            old = self._pointer()
            if new != old:
                if old is None or _lineage(new) != _lineage(old):
                    self.forget()
                self.write(POINTER, new)

    def _pointer(self) -> bytes | None:
        """Return the content of `dataset.json` as it was brought last; None before that."""
        with contextlib.suppress(FileNotFoundError):
            return Path(self._path(POINTER)).read_bytes()
        return None

    def write(self, name: str, content: bytes) -> None:
        """Write a file that appears whole or not at all."""
        path = self._path(name)
        fs.make_folder(os.path.dirname(path))
        temporary = f"{path}.{secrets.token_hex(6)}.tmp"
        try:
            with fs.create(temporary) as file:
                file.write(content)
            fs.rename(temporary, path)
        except BaseException:
            fs.unlink(temporary)
            raise

    def _parts(self, generation: str) -> list[str]:
        """Return the names of a generation's external list files; none if it is damaged."""
        with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
            raw = Path(generation).read_bytes()
            if b'"external_lists"' in raw:  # in almost no generation
                named = self._list_files(json.loads(raw))
                return [name for name in sorted(named) if name == os.path.basename(name)]
        return []

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)


def _lineage(pointer: bytes) -> Any:
    with contextlib.suppress(*_DAMAGED):
        return json.loads(pointer)["lineage"]
    return None
