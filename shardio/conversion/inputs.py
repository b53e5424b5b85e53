"""List the inputs of a source: patterns, folder classes, file states, and inputs with parts."""

from __future__ import annotations

import os
import re
import stat
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import translate
from functools import lru_cache
from typing import Final, NamedTuple

from shardio._base.file_names import check_encodable, stored_name, utf8_name
from shardio.conversion.converter import Converter, Input, Item
from shardio.errors import InvalidArgument
from shardio.format.checksum import Hasher, hash_bytes


@dataclass(frozen=True, slots=True)
class Listing:
    """The inputs of a source, sorted by name, and its classes, sorted."""

    inputs: tuple[Input, ...]
    classes: tuple[str, ...]

    @property
    def n_bytes(self) -> int:
        """The total size of all inputs; computed at each access."""
        return sum(source.n_bytes for source in self.inputs)


def list_inputs(source: str, exclude: str = "") -> Listing:
    """List every file of a folder tree, all matches of a pattern, or a single file.

    Each folder below the source that contains files, or is empty, is a class; a folder that
    contains only folders is not. A class is named by its path below the source. Links are followed,
    but cycles are not. A folder that cannot be listed is itself an input, which is reported as
    broken when it is read.

    If nothing exists at `source` and its name contains one of `*?[`, then `source` is a `Pattern`:
    the listing has the matching files, and the files in matching folders. The output folder
    `exclude` is not searched, even if it is inside the source.

    Raises:
        InvalidArgument: `source` does not exist, contains or matches no file, is a pipe or device,
            or is `exclude`.
        OSError: `source` itself, or the root of a pattern, cannot be listed.
    """
    pattern = parse_pattern(source)
    _check_root(source, pattern)
    root = os.path.abspath(pattern.root)
    if not os.path.isdir(root):
        return Listing((_make_input(stored_name(os.path.basename(root)), root, -1),), ())
    if (written := _file_id(exclude)) is not None and _file_id(root) == written:
        raise InvalidArgument(
            f"{pattern.root}: is the output folder; choose another source or output folder"
        )
    files: list[tuple[str, str, str]] = []  # name, path, class
    folders: set[str] = set()
    for folder, names, is_class in _walk(root, pattern, written):
        if folder and is_class:
            folders.add(folder)
        for name in names:
            relative = os.path.join(folder, name) if name else folder
            path = os.path.join(root, relative)
            files.append((stored_name(relative), path, stored_name(folder)))
    if not files:
        raise InvalidArgument(
            f"{source}: matches no file below the folder {pattern.root}"
            if pattern.parts
            else f"{source}: holds no file to convert"
        )
    classes = tuple(sorted(map(stored_name, folders)))
    labels = {"": -1} | {name: label for label, name in enumerate(classes)}
    inputs = (_make_input(name, path, labels[folder]) for name, path, folder in sorted(files))
    return Listing(tuple(inputs), classes)


def _check_root(source: str, pattern: Pattern) -> None:
    """Check that the source is a file or folder, and that the root of a pattern is a folder."""
    root = pattern.root
    check_encodable(source, "src (SRC)")
    if pattern.parts and not os.path.isdir(root):
        raise InvalidArgument(f"{source}: matches no file: the folder {root} does not exist")
    if not os.path.lexists(root):
        raise InvalidArgument(f"{root}: no such file or folder to convert")
    if not (os.path.isdir(root) or os.path.isfile(root)):
        is_link = os.path.islink(root)
        what = "a broken link" if is_link else "neither a file nor a folder"
        raise InvalidArgument(f"{root}: {what}")


FileId = tuple[int, int]


def _walk(
    root: str, pattern: Pattern, exclude: FileId | None
) -> Iterator[tuple[str, list[str], bool]]:
    """Yield (folder below root, names of its files, True if it is a class) for each match.

    If a folder cannot be listed, yield it with a single file name, "", for the folder itself.
    """
    waiting: list[tuple[str, MatchState, frozenset[FileId]]] = [("", pattern.start, frozenset())]
    while waiting:
        folder, reached, above = waiting.pop()
        here = os.path.join(root, folder)
        identity = _file_id(here)
        if identity in above:  # a link to a folder above
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
        files = [
            name for name, is_dir in found if not is_dir and pattern.matches_file(reached, name)
        ]
        if exclude is not None:
            folders = [name for name in folders if _file_id(os.path.join(here, name)) != exclude]
        yield folder, files, bool(files) or (not found and pattern.matches_all(reached))
        circle = above | {identity} if identity else above
        waiting += [
            (os.path.join(folder, name), descended, circle)
            for name in reversed(folders)
            if (descended := pattern.descend(reached, name))
        ]


def _file_id(path: str) -> FileId | None:
    """Return the device and inode of a path; None if it does not exist."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return True for a folder or a link to a folder; False for a cyclic link."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _make_input(name: str, path: str, label: int) -> Input:
    """Return the input for a file; the input for a broken link has 0 bytes."""
    try:
        status = os.stat(path)
    except OSError:
        return Input(name, path, 0, label)
    stamp = status.st_mtime_ns, status.st_ctime_ns
    return Input(name, path, status.st_size, label, stamp)


_SPECIAL: Final = re.compile(r"[*?\[]")
ANY_FOLDERS: Final = "**"
MatchState = frozenset[int]
"""The indices of the pattern parts that may match the next path component."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern for paths below `root`. If `parts` match a folder, its whole content matches too.

    Without parts, every path matches. A part matches one name, as in a shell (`*`, `?`, `[…]`; a
    leading dot must be explicit); `**` matches any number of folders, including 0.
    """

    root: str
    parts: tuple[str, ...] = ()

    @property
    def start(self) -> MatchState:
        """The match state of the root itself."""
        return self._with_following([0])

    def matches_all(self, reached: MatchState) -> bool:
        """Return True if everything inside the folder matches."""
        return len(self.parts) in reached

    def descend(self, reached: MatchState, name: str) -> MatchState:
        """Return the match state of a subfolder; empty if nothing below it matches."""
        if self.matches_all(reached):
            return reached
        stays = [k for k in reached if self.parts[k] == ANY_FOLDERS and name[:1] != "."]
        return self._with_following([*stays, *(k + 1 for k in self._matching(reached, name))])

    def matches_file(self, reached: MatchState, name: str) -> bool:
        """Return True if a file of this name matches."""
        return self.matches_all(reached) or len(self.parts) - 1 in self._matching(reached, name)

    def _matching(self, reached: MatchState, name: str) -> list[int]:
        """Return the indices of the parts that match a name, among the indices in `reached`."""
        return [
            k
            for k in reached
            if self.parts[k] != ANY_FOLDERS and _name_matches(self.parts[k], name)
        ]

    def _with_following(self, numbers: Iterable[int]) -> MatchState:
        """Return the indices, plus the index after each `**`, because `**` may match no folder."""
        found = set(numbers)
        for k, part in enumerate(self.parts):
            if k in found and part == ANY_FOLDERS:
                found.add(k + 1)
        return frozenset(found)


def parse_pattern(source: str) -> Pattern:
    """Return the pattern for a source; a path that exists is never a pattern.

    The root ends before the first component that contains one of `*?[`, unless a folder of that
    name exists.
    """
    if not _SPECIAL.search(source) or os.path.lexists(source):
        return Pattern(source)
    root = os.sep if source.startswith(os.sep) else ""
    parts = [part for part in source.split(os.sep) if part not in ("", os.curdir)]
    while parts and _is_fixed(root, parts[0]):
        root = os.path.join(root, parts.pop(0))
    if source.endswith(os.sep):  # folders only
        parts.append(ANY_FOLDERS)
    return Pattern(root or os.curdir, tuple(parts))


def _is_fixed(root: str, part: str) -> bool:
    return not _SPECIAL.search(part) or os.path.lexists(os.path.join(root, part))


def _name_matches(part: str, name: str) -> bool:
    # Decode as UTF-8: the locale may decode one character to several, and `?` must match it.
    return bool(_compiled(utf8_name(part)).match(utf8_name(name))) and (
        name[:1] != "." or part[:1] == "."
    )


@lru_cache(maxsize=256)
def _compiled(part: str) -> re.Pattern[str]:
    return re.compile(translate(part))


_CHUNK_BYTES: Final = 1 << 20


class InputState(NamedTuple):
    """Attributes that identify a file and change when its content changes."""

    mode: int
    inode: int
    n_bytes: int
    changed_ns: int


def path_state(path: str) -> InputState | None:
    """Return the state of the file at `path`; None if it cannot be inspected."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return InputState(found.st_mode, found.st_ino, found.st_size, found.st_mtime_ns)


def input_states(one: Input) -> dict[str, InputState | None]:
    """Return the states of an input and its parts, by name; an item has a constant state."""
    if isinstance(one, Item):
        return {one.name: InputState(stat.S_IFREG, 0, one.n_bytes, 0)}
    return {each.name: path_state(each.path) for each in (one, *one.parts)}


def input_hash(one: Input, stopped: threading.Event | None = None) -> str:
    """Return the content hash of an input; if it has parts, a hash of all names and hashes."""
    if isinstance(one, Item):
        return one.hash
    if not one.parts:
        return file_hash(one.path, stopped)
    lines = (f"{file_hash(each.path, stopped)} {each.name}\n" for each in (one, *one.parts))
    return f"{hash_bytes(''.join(lines).encode()):016x}"


def file_hash(path: str, stopped: threading.Event | None = None) -> str:
    """Return the xxh3-64 hash of a file's content as 16 hex digits, as a generation stores it.

    If another thread sets `stopped`, reading ends early and the result is meaningless. An OSError
    names the file.
    """
    hasher = Hasher()
    try:
        with open(path, "rb", buffering=0) as file:
            while (stopped is None or not stopped.is_set()) and (chunk := file.read(_CHUNK_BYTES)):
                hasher.update(chunk)
    except OSError as error:
        error.filename = path  # set by a failed open, but not by a failed read
        raise
    return f"{hasher.intdigest():016x}"


def join_parts(listing: Listing, source: Converter) -> Listing:
    """Attach parts to inputs, as determined by the source's method `parts`.

    An input that has parts in its own folder, or an empty list of parts, represents this folder:
    the class of the input is the parent folder. A folder that contains only parts is not a class.
    """
    if not (parts := source.parts(listing.inputs)):
        return listing
    by_name = {one.name: one for one in listing.inputs}
    part_of: dict[str, str] = {}  # part -> the first input with this part
    for name, names in parts.items():
        part_of |= {part: name for part in names if part not in parts and part not in part_of}
    folder_of = {one.name: listing.classes[one.label] for one in listing.inputs if one.label >= 0}
    class_of = {name: folder for name, folder in folder_of.items() if name not in part_of}
    for name in parts.keys() & class_of.keys():
        here = os.path.dirname(name) + "/"
        stands_for_folder = not parts[name] or any(part.startswith(here) for part in parts[name])
        if stands_for_folder:
            class_of[name] = os.path.dirname(class_of[name])
    used = {*class_of.values()}
    part_folders = {folder_of[name] for name in (*parts, *part_of) if name in folder_of}
    classes = tuple(sorted({*used, *listing.classes} - (part_folders - used) - {""}))
    labels = {name: label for label, name in enumerate(classes)}
    inputs = (
        replace(
            one,
            label=labels.get(class_of.get(one.name, ""), -1),
            parts=tuple(by_name[part] for part in parts.get(one.name, ())),
            part_of=part_of.get(one.name, ""),
        )
        for one in listing.inputs
    )
    return Listing(tuple(inputs), classes)
