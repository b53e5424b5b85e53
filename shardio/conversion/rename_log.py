"""The renames that publish a conversion's shards, logged so that any process can undo them.

Replaced files are moved out of `out` first, then the new shards are moved in. Whether a rename
has happened is visible from its two paths, so the log alone is enough to undo it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from shardio.dataset.manifest import (
    GENERATIONS,
    POINTER,
    holds_dataset,
    load,
    load_generation,
    recover,
    refuse_existing,
    remove_temporary_files,
    withdraw,
)
from shardio.dataset.transaction import sweep
from shardio.errors import (
    DatasetConflict,
    DatasetCorrupt,
    DatasetExists,
    DatasetNotFound,
    ShardUnsupported,
)
from shardio.storage.fs import (
    make_folder,
    read_checksummed_json,
    rename_exclusive,
    sync_folder,
    to_checksummed_json,
    unlink,
    write_atomic,
)

_LOG_FILE: Final = "moves.json"
_REPLACED: Final = "replaced"


def check_only_dataset(out: Path, exclude: str) -> None:
    """Check that `out` is missing, empty, or holds only a dataset, apart from `exclude`.

    Raises:
        DatasetExists: it holds something that does not belong to the dataset.
        DatasetCorrupt, ShardUnsupported: the files of the dataset cannot be determined.
    """
    if not holds_dataset(out):
        refuse_existing(out, exclude=exclude)
        return
    if others := sorted({*os.listdir(out)} - {exclude, *_dataset_entries(out)}):
        raise DatasetExists(
            f"{out}: holds {others[0]} beside the dataset ({len(others)} such entries in "
            "all), which overwrite would leave behind; choose another folder"
        )


def _dataset_entries(out: Path) -> list[str]:
    """Return the entries of a dataset, the pointer first: without it, the rest is not a dataset.

    Raises:
        DatasetCorrupt, ShardUnsupported: a generation is unreadable.
    """
    numbers = [int(path.stem) for path in (out / GENERATIONS).glob("[0-9]*.json")]
    named = {shard.name for n in numbers for shard, _ in load_generation(out, n).files}
    return [POINTER, GENERATIONS, *sorted(name for name in named if (out / name).exists())]


def remove_leftovers(out: Path) -> None:
    """Remove files that killed writers of a dataset left behind and that no one will resume.

    Shards stay, because another writer may be about to commit them.
    """
    with contextlib.suppress(DatasetCorrupt, DatasetNotFound, ShardUnsupported):
        recover(out)
        sweep(out)


def _is_entry_name(name: str) -> bool:
    """Return True if a string names an entry of a folder, and not another path."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


class RenameLog:
    """The logged renames between `out` and a folder in it; owns neither of them."""

    def __init__(self, out: Path, folder: Path) -> None:
        self._out, self._folder = out, folder

    def apply(
        self, shards: Sequence[tuple[str, str]], lineage: str, number: int, *, replace: bool
    ) -> None:
        """Move shards, given as (name in the folder, name in `out`), durably.

        Args:
            shards: the shards to move into `out`.
            lineage: the lineage of their dataset.
            number: the number of the generation that will list them.
            replace: whether to move the dataset in `out` away first.

        Raises:
            DatasetConflict: another writer has created a file of the same name.
        """
        here = self._folder.name
        old = _dataset_entries(self._out) if replace and holds_dataset(self._out) else []
        moves = [(name, f"{here}/{_REPLACED}/{name}") for name in old]
        moves += [(f"{here}/{name}", final) for name, final in shards]
        content = {
            "lineage": lineage,
            "generation": number,
            "moves": [list(move) for move in moves],
        }
        write_atomic(self._folder / _LOG_FILE, to_checksummed_json(content), exclusive=False)
        if old:
            make_folder(self._folder / _REPLACED)
        for source, target in moves:
            try:
                rename_exclusive(str(self._out / source), str(self._out / target))
            except FileExistsError as error:
                raise DatasetConflict(
                    f"{self._out / target}: created by another writer meanwhile; its files are "
                    "unchanged; choose another folder"
                ) from error
        sync_folder(str(self._out))

    def is_published(self) -> bool:
        """Return True if the dataset in `out` lists the shards that were moved there.

        A generation that only lacks its pointer counts as published: the next commit would complete
        it.
        """
        found = self._read()
        if found is None or not holds_dataset(self._out):
            return False
        lineage, number, moves = found
        if self._replaces(moves) and not (self._folder / _REPLACED / POINTER).exists():
            return False
        with contextlib.suppress(DatasetCorrupt, ShardUnsupported, DatasetNotFound):
            if number == 1:
                return load(self._out).lineage == lineage
            if recover(self._out).number >= number:
                made = load_generation(self._out, number)
                names = {shard.name for shard in made.shards}
                return made.lineage == lineage and names.issuperset(name for _, name in moves)
        return False

    def undo(self) -> None:
        """Undo all renames; a replaced dataset is complete again at the end."""
        found = self._read()
        if found is None:
            return
        lineage, number, moves = found
        is_first = number == 1
        if is_first and (
            not self._replaces(moves) or (self._folder / _REPLACED / GENERATIONS).exists()
        ):
            remove_temporary_files(self._out)
            withdraw(self._out, lineage)
        for source, target in reversed(moves):
            # If the source still exists, it was not renamed: the target is another writer's.
            if not (self._out / source).exists() and (self._out / target).exists():
                make_folder((self._out / source).parent)
                rename_exclusive(str(self._out / target), str(self._out / source))
        unlink(self._folder / _LOG_FILE)

    def _read(self) -> tuple[str, int, list[tuple[str, str]]] | None:
        path = self._folder / _LOG_FILE
        if not path.exists():
            return None
        try:
            content = read_checksummed_json(path)
            if not self._is_valid(content):
                raise DatasetCorrupt(f"{path}: invalid rename log")
        except DatasetCorrupt as error:
            replaced = self._folder / _REPLACED
            first = f"move the content of {replaced} back into {self._out}, " * replaced.exists()
            raise DatasetCorrupt(
                f"{error}; to abandon the conversion, {first}delete {self._folder}"
            ) from error
        return content["lineage"], content["generation"], [(a, b) for a, b in content["moves"]]

    def _is_valid(self, content: Mapping[str, Any]) -> bool:
        """Return True if `apply` can have written the log: it moves nothing from elsewhere."""
        moves = content.get("moves")
        if type(content.get("lineage")) is not str or type(content.get("generation")) is not int:
            return False
        return isinstance(moves, list) and all(
            isinstance(move, list) and len(move) == 2 and self._is_valid_move(*move)
            for move in moves
        )

    def _is_valid_move(self, source: object, target: object) -> bool:
        """Return True if a move leads from the folder into `out`, or from `out` to `replaced`."""
        if not (isinstance(source, str) and isinstance(target, str)):
            return False
        if target == f"{self._folder.name}/{_REPLACED}/{source}":
            return _is_entry_name(source)
        here, *parts = source.split("/")
        return here == self._folder.name and all(map(_is_entry_name, [*parts, target]))

    def _replaces(self, moves: Sequence[tuple[str, str]]) -> bool:
        return bool(moves) and moves[0][0] == POINTER
