"""The files that are converted: which state one is in, and what tells its content from another."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from shardio._base.file_names import check_encodable, stored_name
from shardio.conversion.patterns import Pattern, Reached, pattern_of
from shardio.conversion.source import Input, Item
from shardio.errors import InvalidArgument
from shardio.format.checksum import Hasher, hash_bytes

_CHUNK_BYTES: Final = 1 << 20


class State(NamedTuple):
    """What tells a file from another, or from itself after a change."""

    mode: int
    inode: int
    n_bytes: int
    changed_ns: int


def state_of(path: str) -> State | None:
    """The state of the file at `path`; None where there is none, or nothing can be told of it."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return State(found.st_mode, found.st_ino, found.st_size, found.st_mtime_ns)


def states_of(one: Input) -> dict[str, State | None]:
    """The states of an input and of its parts, by their names; an item stays as it is."""
    if isinstance(one, Item):
        return {one.name: State(stat.S_IFREG, 0, one.n_bytes, 0)}
    return {each.name: state_of(each.path) for each in (one, *one.parts)}


def content_of(one: Input, stopped: threading.Event | None = None) -> str:
    """The hash of an input's content: with parts, of all names and hashes, in order.

    Raises:
        OSError: as of `hash_of`.
    """
    if isinstance(one, Item):
        return one.hash
    if not one.parts:
        return hash_of(one.path, stopped)
    lines = (f"{hash_of(each.path, stopped)} {each.name}\n" for each in (one, *one.parts))
    return f"{hash_bytes(''.join(lines).encode()):016x}"


def hash_of(path: str, stopped: threading.Event | None = None) -> str:
    """The xxh3-64 of a file's content, in 16 hex digits, as a generation keeps it.

    Once `stopped` is set by another thread, the hash is of no use: it ends where it is.

    Raises:
        OSError: it cannot be read; the error names it.
    """
    hasher = Hasher()
    try:
        with open(path, "rb", buffering=0) as file:
            while (stopped is None or not stopped.is_set()) and (chunk := file.read(_CHUNK_BYTES)):
                hasher.update(chunk)
    except OSError as error:
        error.filename = path  # the system does not say it of a read
        raise
    return f"{hasher.intdigest():016x}"


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
