"""Which inputs there are, their classes, and the units into which they are cut.

The plan follows from the source alone: neither the number of workers nor the machine has a part
in it, so that the same source gives the same shards anywhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from shardio.conversion.source import Input
from shardio.errors import InvalidArgument

MIN_UNIT_BYTES: Final = 1 << 20  # smaller units would give shards too small to read well
MAX_UNIT_BYTES: Final = 128 << 20  # larger ones would leave workers idle at the end
N_UNITS: Final = 64  # aimed at between the two: enough for the last units to end together


@dataclass(frozen=True, slots=True)
class Unit:
    """A run of inputs that one worker converts into shards of its own.

    `number` names the shards; `first` is the position of its first input among all.
    """

    number: int
    first: int
    inputs: tuple[Input, ...]


@dataclass(frozen=True, slots=True)
class Listing:
    """What a source holds: every file, sorted by name, and the classes, sorted."""

    inputs: tuple[Input, ...]
    classes: tuple[str, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of all inputs."""
        return sum(source.n_bytes for source in self.inputs)


def list_inputs(root: str) -> Listing:
    """List every file of a folder tree; a single file is a list of one.

    A class is a folder below `root` that holds files, or nothing at all: not one that only groups
    other folders. Its name is its path below `root`. Links are followed, but not in a circle.

    Raises:
        InvalidArgument: there is nothing at `root`, or no file in it, or it is a pipe or device.
        OSError: a folder cannot be read.
    """
    if not os.path.lexists(root):
        raise InvalidArgument(f"{root}: there is no such file or folder to convert")
    if not (os.path.isdir(root) or os.path.isfile(root)):
        is_link = os.path.islink(root)
        what = (
            "a link that leads to no file or folder" if is_link else "neither a file nor a folder"
        )
        raise InvalidArgument(f"{root}: {what}")
    if not os.path.isdir(root):
        path = os.path.abspath(root)
        return Listing((Input(_text(os.path.basename(path)), path, _size(path), -1),), ())
    files: list[tuple[str, str, str]] = []  # name, path, class
    folders: set[str] = set()
    for folder, names, has_folders in _walk(os.path.abspath(root), ""):
        if folder and (names or not has_folders):
            folders.add(folder)
        for name in names:
            path = os.path.join(os.path.abspath(root), folder, name)
            files.append((_text(os.path.join(folder, name)), path, _text(folder)))
    if not files:
        raise InvalidArgument(f"{root}: holds no file to convert")
    classes = tuple(sorted(map(_text, folders)))
    labels = {"": -1} | {name: label for label, name in enumerate(classes)}
    inputs = (
        Input(name, path, _size(path), labels[folder]) for name, path, folder in sorted(files)
    )
    return Listing(tuple(inputs), classes)


def cut(inputs: Sequence[Input]) -> list[Unit]:
    """Cut sorted inputs into units of about equal source bytes."""
    total = sum(source.n_bytes for source in inputs)
    unit_bytes = min(max(total // N_UNITS, MIN_UNIT_BYTES), MAX_UNIT_BYTES)
    units: list[Unit] = []
    run: list[Input] = []
    n_bytes = 0
    for position, source in enumerate(inputs):
        run.append(source)
        n_bytes += source.n_bytes
        if n_bytes >= unit_bytes or position + 1 == len(inputs):
            units.append(Unit(len(units), position + 1 - len(run), tuple(run)))
            run, n_bytes = [], 0
    return units


def _walk(
    root: str, folder: str, above: tuple[tuple[int, int], ...] = ()
) -> Iterator[tuple[str, list[str], bool]]:
    """Yield (folder below root, names of its files, whether it holds folders) of a tree."""
    here = os.path.join(root, folder)
    status = os.stat(here)
    identity = (status.st_dev, status.st_ino)
    if identity in above:  # a link to a folder that this one lies in
        return
    with os.scandir(here) as entries:
        found = [(entry.name, _is_folder(entry)) for entry in entries]
    folders = sorted(name for name, is_dir in found if is_dir)
    yield folder, [name for name, is_dir in found if not is_dir], bool(folders)
    for name in folders:
        yield from _walk(root, os.path.join(folder, name), (*above, identity))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder or a link to one; a link that leads to itself is none."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _size(path: str) -> int:
    """Bytes of a file; a link to nowhere, or to itself, has none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _text(name: str) -> str:
    """Make a file name storable: bytes that are no UTF-8 are written as hexadecimal escapes.

    Names that differ stay different: what has escapes, or looks as if it had, has its backslashes
    doubled.
    """
    raw = os.fsencode(name)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        text = "\\x"
    if "\\x" in text:
        raw = raw.replace(b"\\", b"\\\\")
    return raw.decode("utf-8", "backslashreplace")
