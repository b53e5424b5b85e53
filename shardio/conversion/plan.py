"""Which inputs there are, their classes, and the units into which they are cut.

The plan follows from the source alone: neither the number of workers nor the machine has a part
in it, so that the same source gives the same shards anywhere.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from shardio._base.file_names import check_encodable, stored_name
from shardio.conversion.patterns import Pattern, Reached, pattern_of
from shardio.conversion.source import Input, Item
from shardio.errors import InvalidArgument
from shardio.format.checksum import hash_bytes
from shardio.shard.writer import ShardSummary

MIN_UNIT_BYTES: Final = 1 << 20  # smaller units would give shards too small to read well
MAX_UNIT_BYTES: Final = 128 << 20  # larger ones would leave workers idle at the end
N_UNITS: Final = 64  # at least, between the two: enough for the last units to end together
MIN_INPUT_BYTES: Final = 4096  # what an input counts for at least: opening it takes its time, too
MAX_UNIT_ITEMS: Final = 4096  # what is not finished is done anew by a conversion that goes on


@dataclass(frozen=True, slots=True)
class Unit:
    """A run of inputs that one worker converts into shards of its own.

    `number` names the shards; `first` is the position of its first input among all. `lost` are
    positions of inputs that end every process which reads them, each with the reason: they are
    not read again.
    """

    number: int
    first: int
    inputs: tuple[Input, ...]
    lost: tuple[tuple[int, str], ...] = ()

    @property
    def key(self) -> str:
        """Name the unit by its inputs and the state they are in: the same in any plan."""
        content = [
            [one.name, one.label, one.n_bytes, *one.stamp]
            + [[part.name, part.n_bytes, *part.stamp] for part in one.parts]
            for one in self.inputs
        ]
        return f"{hash_bytes(json.dumps(content).encode()):016x}"

    def published(self, shard: ShardSummary) -> ShardSummary:
        """A shard of the unit, by the name that it has in the dataset."""
        return replace(shard, name=f"{self.number:06d}-{shard.name}")


@dataclass(frozen=True, slots=True)
class Listing:
    """What a source holds: every file, sorted by name, and the classes, sorted."""

    inputs: tuple[Input, ...]
    classes: tuple[str, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of all inputs; they are summed at each call."""
        return sum(source.n_bytes for source in self.inputs)


def list_inputs(source: str, but: str = "") -> Listing:
    """List every file of a folder tree, or what matches a pattern; a file is a list of one.

    A class is a folder below the source that holds files, or nothing at all: not one that only
    groups other folders. Its name is its path below the source. Links are followed, but not in a
    circle. A folder that cannot be listed is itself an input, which says so when it is read.

    A source that is not there and has one of `*?[` in its name is a `Pattern`: of its root, this
    lists the files that match, and those in folders that match.

    Args:
        but: a folder that is left out wherever it lies: the one that is written to.

    Raises:
        InvalidArgument: there is nothing at `source`, or no file in it, or nothing matches, or it
            is a pipe or device, or it is `but`.
        OSError: `source` itself, or the root of a pattern, cannot be listed.
    """
    pattern = pattern_of(source)
    _check_root(source, pattern)
    root = os.path.abspath(pattern.root)
    if not os.path.isdir(root):
        return Listing((_input(stored_name(os.path.basename(root)), root, -1),), ())
    if (written := _identity(but)) is not None and _identity(root) == written:
        raise InvalidArgument(
            f"{pattern.root}: is the folder that is written to; choose another one"
        )
    files: list[tuple[str, str, str]] = []  # name, path, class
    folders: set[str] = set()
    for folder, names, is_class in _walk(root, pattern, written):
        if folder and is_class:
            folders.add(folder)
        for name in names:
            below = os.path.join(folder, name) if name else folder
            files.append((stored_name(below), os.path.join(root, below), stored_name(folder)))
    if not files:
        raise InvalidArgument(
            f"{source}: matches no file below the folder {pattern.root}"
            if pattern.parts
            else f"{source}: holds no file to convert"
        )
    classes = tuple(sorted(map(stored_name, folders)))
    labels = {"": -1} | {name: label for label, name in enumerate(classes)}
    inputs = (_input(name, path, labels[folder]) for name, path, folder in sorted(files))
    return Listing(tuple(inputs), classes)


def _check_root(source: str, pattern: Pattern) -> None:
    """Make sure that there is a file or folder; for a pattern, a folder."""
    root = pattern.root
    check_encodable(source, "src (SRC)")
    if pattern.parts and not os.path.isdir(root):
        raise InvalidArgument(f"{source}: matches no file: there is no folder {root}")
    if not os.path.lexists(root):
        raise InvalidArgument(f"{root}: there is no such file or folder to convert")
    if not (os.path.isdir(root) or os.path.isfile(root)):
        is_link = os.path.islink(root)
        what = (
            "a link that leads to no file or folder" if is_link else "neither a file nor a folder"
        )
        raise InvalidArgument(f"{root}: {what}")


def cut(inputs: Sequence[Input]) -> list[Unit]:
    """Cut inputs into units of about equal cost; items, whose bytes say nothing, evenly.

    The small shards that units of items may give are put together by `compact`.
    """
    if has_items(inputs):
        n_items = min(max(_power_of_two(len(inputs) // N_UNITS), 1), MAX_UNIT_ITEMS)
        starts = range(0, len(inputs), n_items)
        return [
            Unit(n, first, tuple(inputs[first : first + n_items])) for n, first in enumerate(starts)
        ]
    total = sum(_weight(source) for source in inputs)
    unit_bytes = min(max(_power_of_two(total // N_UNITS), MIN_UNIT_BYTES), MAX_UNIT_BYTES)
    units: list[Unit] = []
    run: list[Input] = []
    n_bytes = 0
    for position, source in enumerate(inputs):
        run.append(source)
        n_bytes += _weight(source)
        if n_bytes >= unit_bytes or position + 1 == len(inputs):
            units.append(Unit(len(units), position + 1 - len(run), tuple(run)))
            run, n_bytes = [], 0
    return units


def has_items(inputs: Sequence[Input]) -> bool:
    """Return whether these are items, whose own bytes do not tell how many bytes they give."""
    return bool(inputs) and isinstance(inputs[0], Item)


def _weight(one: Input) -> int:
    """What reading an input costs, in bytes; the bytes of a part are read for another input."""
    if one.part_of:
        return 0
    return max(one.n_bytes + sum(part.n_bytes for part in one.parts), MIN_INPUT_BYTES)


def _power_of_two(n: int) -> int:
    """Round down: so that a few files more or less leave the cuts before them where they are."""
    return 1 << n.bit_length() - 1 if n else 0


Identity = tuple[int, int]


def _walk(
    root: str, pattern: Pattern, but: Identity | None
) -> Iterator[tuple[str, list[str], bool]]:
    """Yield (folder below root, names of its files, whether it is a class) of what is meant.

    The one name of a folder that cannot be listed is "": it stands for the folder itself.
    """
    waiting: list[tuple[str, Reached, frozenset[Identity]]] = [("", pattern.start, frozenset())]
    while waiting:
        folder, reached, above = waiting.pop()
        here = os.path.join(root, folder)
        identity = _identity(here)
        if identity in above:  # a link to a folder that this one lies in
            continue
        try:
            with os.scandir(here) as entries:
                found = [(entry.name, _is_folder(entry)) for entry in entries]
        except OSError:
            if not folder:
                raise
            yield folder, [""], True
            continue
        folders = sorted(name for name, is_dir in found if is_dir)
        files = [name for name, is_dir in found if not is_dir and pattern.takes(reached, name)]
        if but is not None:
            folders = [name for name in folders if _identity(os.path.join(here, name)) != but]
        yield folder, files, bool(files) or (not found and pattern.is_whole(reached))
        circle = above | {identity} if identity else above
        waiting += [
            (os.path.join(folder, name), below, circle)
            for name in reversed(folders)
            if (below := pattern.below(reached, name))
        ]


def _identity(path: str) -> Identity | None:
    """Device and inode of what lies at a path; None for nothing."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder or a link to one; a link that leads to itself is none."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _input(name: str, path: str, label: int) -> Input:
    """Look at a file; a link to nowhere, or to itself, has no bytes."""
    try:
        status = os.stat(path)
    except OSError:
        return Input(name, path, 0, label)
    stamp = status.st_mtime_ns, status.st_ctime_ns
    return Input(name, path, status.st_size, label, stamp)
