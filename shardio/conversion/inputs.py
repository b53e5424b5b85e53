"""List the inputs of a source: match patterns, find classes, read file states, join parts.

Python decodes file names according to the locale: in an ASCII locale, for example, the two bytes of
`ß` become two surrogates. The names under which a dataset records inputs do not depend on the
locale.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

from shardio._base.callers import check_encodable, similar_name
from shardio.conversion.converter import Converter, Input, Item
from shardio.dataset.manifest import GENERATIONS, POINTER
from shardio.errors import InvalidArgument
from shardio.format.checksum import Hasher, hash_bytes


@dataclass(frozen=True, slots=True)
class Listing:
    """The inputs of a source, and the classes. The label of an input is an index of `classes`.

    `subsets` maps the name of each input that lies in a subset's folder (such as `train`), or is a
    subset's file (such as `train.csv`), to the name of that subset. `ignored` has the names of
    hidden files and folders, and of folders that would be classes without inputs; the name of a
    folder ends in /.
    """

    inputs: tuple[Input, ...]
    classes: tuple[str, ...]
    subsets: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


def list_inputs(source: str, exclude: str = "") -> Listing:
    """List all files in a folder and its subfolders, all matches of a pattern, or a single file.

    Each folder below the source that contains files, or is empty, is a class, unless it is the
    folder of a shardio dataset. The name of a class is its path relative to the source. Links are
    followed, except a link to a folder that contains the link. A folder that cannot be listed
    becomes an input, which is reported as broken when it is read. Hidden files and folders, except
    the metadata of Zarr stores, and folders named `__MACOSX` are not searched.

    If nothing exists at the path `source`, and the path contains one of `*?[`, it is a pattern: the
    listing contains all files that match the pattern, and all files in folders that match it. Files
    in the output folder `exclude` are not listed.
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
    files: list[tuple[str, str, str]] = []  # the name, the path and the class of each file
    folders: set[str] = set()
    datasets: set[str] = set()
    ignored: list[str] = []
    for folder, names, is_class in _walk(root, pattern, written, ignored):
        if POINTER in names and os.path.isdir(os.path.join(root, folder, GENERATIONS)):
            datasets |= {folder, os.path.join(folder, GENERATIONS)}
        if folder and is_class and folder not in datasets:
            folders.add(folder)
        for name in names:
            relative = os.path.join(folder, name) if name else folder
            path = os.path.join(root, relative)
            files.append((stored_name(relative), path, stored_name(folder)))
    if not files:
        hidden = f", except hidden ones, such as {ignored[0]!r}" if ignored else ""
        raise InvalidArgument(
            f"{source}: matches no file below the folder {pattern.root}"
            if pattern.parts
            else f"{source}: holds no file to convert{hidden}"
        )
    classes = tuple(sorted(map(stored_name, folders)))
    labels = {"": -1} | {name: label for label, name in enumerate(classes)}
    inputs = (
        _make_input(name, path, labels.get(folder, -1)) for name, path, folder in sorted(files)
    )
    return Listing(tuple(inputs), classes, ignored=tuple(map(stored_name, sorted(ignored))))


def _check_root(source: str, pattern: Pattern) -> None:
    root = pattern.root
    check_encodable(source, "src (SRC)")
    if pattern.parts and not os.path.isdir(root):
        raise InvalidArgument(f"{source}: matches no file: the folder {root} does not exist")
    if not os.path.lexists(root):
        raise InvalidArgument(f"{root}: no such file or folder to convert{similar_name(root)}")
    if not (os.path.isdir(root) or os.path.isfile(root)):
        is_link = os.path.islink(root)
        what = "a broken link" if is_link else "neither a file nor a folder"
        raise InvalidArgument(f"{root}: {what}")


FileId = tuple[int, int]


def _walk(
    root: str, pattern: Pattern, exclude: FileId | None, ignored: list[str]
) -> Iterator[tuple[str, list[str], bool]]:
    """Search the folder `root` for files that match `pattern`; do not search the folder `exclude`.

    For each folder that may contain matches, yield the path of the folder relative to `root`, the
    names of the matching files in it, and True if the folder can be a class. For a folder that
    cannot be listed, the only name is "". Hidden entries are added to `ignored`, unless a pattern
    could not match them.
    """
    start = _expand_stars({pattern.parts})
    waiting: list[tuple[str, set[RemainingParts], frozenset[FileId]]] = [("", start, frozenset())]
    while waiting:
        folder, remaining, ancestors = waiting.pop()
        here = os.path.join(root, folder)
        identity = _file_id(here)
        if identity in ancestors:  # This folder is a link to a folder that contains it.
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
            name for name, is_dir in found if not is_dir and () in _match_name(remaining, name)
        ]
        if exclude is not None:
            folders = [name for name in folders if _file_id(os.path.join(here, name)) != exclude]
        if () in remaining:
            ignored += [os.path.join(folder, name, "") for name in folders if _is_hidden(name)]
            hidden = [name for name, is_dir in found if not is_dir and _is_hidden(name)]
            ignored += [os.path.join(folder, name) for name in hidden if name not in files]
        yield folder, files, bool(files) or (not found and () in remaining)
        ancestors = ancestors | {identity} if identity else ancestors
        waiting += [
            (os.path.join(folder, name), descended, ancestors)
            for name in reversed(folders)
            if (descended := _expand_stars(_match_name(remaining, name)))
        ]


def _file_id(path: str) -> FileId | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return True for a folder or a link to a folder; False for a link that leads to itself."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _make_input(name: str, path: str, label: int) -> Input:
    """Return the input for a file; the size of a broken link is 0."""
    try:
        status = os.stat(path)
    except OSError:
        return Input(name, path, 0, label)
    stamp = status.st_mtime_ns, status.st_ctime_ns
    return Input(name, path, status.st_size, label, stamp)


_SPECIAL: Final = re.compile(r"[*?\[]")
_ANY_FOLDERS: Final = "**"
RemainingParts = tuple[str, ...]
"""The parts of a pattern that the rest of a path must match; () matches any rest."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern for paths below the folder `root`. Each part matches one name, as in a shell.

    A name that starts with a dot is only matched by a part that starts with a dot. The part `**`
    matches any number of folders, including none. Everything in a matching folder matches too,
    unless it is hidden.
    """

    root: str
    parts: tuple[str, ...] = ()


_MAC_FOLDER: Final = "__MACOSX"
"""The folder of resource forks in an archive that was made on macOS."""
_ZARR_METADATA: Final = (".zarray", ".zattrs", ".zgroup", ".zmetadata")


def _is_hidden(name: str) -> bool:
    """Return True for an entry that is no input unless a path or a pattern names it."""
    return (name[:1] == "." and name not in _ZARR_METADATA) or name == _MAC_FOLDER


def _match_name(remaining: set[RemainingParts], name: str) -> set[RemainingParts]:
    """Return the parts still to be matched after the component `name` of a path is matched."""
    found = set()
    for rest in remaining:
        if not rest or rest[0] == _ANY_FOLDERS:
            found |= set() if _is_hidden(name) else {rest}
        elif rest[0] != _ANY_FOLDERS and _name_matches(rest[0], name):
            found.add(rest[1:])
    return found


def _expand_stars(remaining: set[RemainingParts]) -> set[RemainingParts]:
    found = set(remaining)
    for rest in remaining:
        while rest[:1] == (_ANY_FOLDERS,):
            rest = rest[1:]
            found.add(rest)
    return found


def parse_pattern(source: str) -> Pattern:
    """Return the pattern for a source.

    It has no parts if `source` contains no wildcards, or if the path `source` exists.
    """
    if not _SPECIAL.search(source) or os.path.lexists(source):
        return Pattern(source)
    root = os.sep if source.startswith(os.sep) else ""
    parts = [part for part in source.split(os.sep) if part not in ("", os.curdir)]
    while parts and (
        not _SPECIAL.search(parts[0]) or os.path.lexists(os.path.join(root, parts[0]))
    ):
        root = os.path.join(root, parts.pop(0))
    if source.endswith(os.sep):  # As in a shell, a pattern that ends in / matches only folders.
        parts.append(_ANY_FOLDERS)
    return Pattern(root or os.curdir, tuple(parts))


def _name_matches(part: str, name: str) -> bool:
    # Decode both names as UTF-8, whatever the locale is. In some locales, one character of a UTF-8
    # name is decoded as several characters, and `?` would not match them.
    is_visible = name[:1] != "." or part[:1] == "."
    is_visible &= name != _MAC_FOLDER or part == name
    return is_visible and fnmatchcase(utf8_name(name), utf8_name(part))


_ESCAPE: Final = re.compile(rb"\\(?:\\|x([0-9a-f]{2}))")


def stored_name(name: str) -> str:
    r"""Return a file name as text that can be stored; bytes that are not UTF-8 become `\xNN`.

    If a name contains such bytes or `\x`, its backslashes are doubled, so that different names have
    different results.
    """
    raw = os.fsencode(name)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        text = "\\x"
    if "\\x" in text:
        raw = raw.replace(b"\\", b"\\\\")
    return raw.decode("utf-8", "backslashreplace")


def original_name(stored: str) -> str:
    """Return the file name that `stored_name` turned into `stored`, decoded as in this locale."""
    raw = stored.encode()
    if "\\x" in stored:
        raw = _ESCAPE.sub(lambda found: bytes.fromhex((found[1] or b"5c").decode()), raw)
    return os.fsdecode(raw)


def utf8_name(name: str) -> str:
    """Return a file name as Python decodes it in a UTF-8 locale."""
    return os.fsencode(name).decode("utf-8", "surrogateescape")


_CHUNK_BYTES: Final = 1 << 20


class InputState(NamedTuple):
    """Attributes of a file that are compared to detect that it was changed or replaced."""

    mode: int
    inode: int
    n_bytes: int
    modified_ns: int


def _path_state(path: str) -> InputState | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return InputState(found.st_mode, found.st_ino, found.st_size, found.st_mtime_ns)


def input_states(one: Input) -> dict[str, InputState | None]:
    """Return the states of an input and of its parts, by name."""
    if isinstance(one, Item):
        return {one.name: InputState(stat.S_IFREG, 0, one.n_bytes, 0)}  # An item never changes.
    return {each.name: _path_state(each.path) for each in (one, *one.parts)}


def input_hash(one: Input) -> str:
    """Return the hash of the content of an input and its parts."""
    if isinstance(one, Item):
        return one.hash
    if not one.parts:
        return file_hash(one.path)
    lines = (f"{file_hash(each.path)} {each.name}\n" for each in (one, *one.parts))
    return f"{hash_bytes(''.join(lines).encode()):016x}"


def file_hash(path: str) -> str:
    """Return the xxh3-64 hash of a file's content in hexadecimal.

    If the file cannot be read, OSError is raised; its attribute `filename` is `path`.
    """
    hasher = Hasher()
    try:
        with open(path, "rb", buffering=0) as file:
            while chunk := file.read(_CHUNK_BYTES):
                hasher.update(chunk)
    except OSError as error:
        error.filename = path  # `open` sets this attribute if it fails, but `read` does not.
        raise
    return f"{hasher.intdigest():016x}"


def join_parts(listing: Listing, converter: Converter) -> Listing:
    """Return a listing whose inputs have the parts that `converter.parts` returns for them.

    An input represents the folder in which it lies if it has parts in this folder, or if
    `converter.parts` returns an empty list for the input. An example is the metadata file of a Zarr
    store. The class of such an input is the parent of the folder. A folder that contains only
    parts, or only the input that represents it, is not a class.
    """
    if not (parts := converter.parts(listing.inputs)):
        return listing
    by_name = {one.name: one for one in listing.inputs}
    part_of: dict[str, str] = {}  # the name of a part -> the name of the first input with this part
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
    return replace(listing, inputs=tuple(inputs), classes=classes)
