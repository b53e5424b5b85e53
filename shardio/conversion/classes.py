"""Classes of inputs: labels from a file, and a warning about folders that are named like splits.

By default, the class of a file is its folder, and the label of a file is the index of its class. A
label file assigns other classes to files. A split is a subset of a data set, such as train or test.
If the splits of a source are in separate folders, these folders are read as classes, which is
rarely intended.
"""

from __future__ import annotations

import csv
import json
import os
import posixpath
import re
import shlex
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from shardio._base.callers import caller_stacklevel
from shardio._base.file_names import check_encodable
from shardio.conversion.inputs import ANY_FOLDERS, Listing, parse_pattern
from shardio.errors import InvalidArgument

LABEL_COLUMNS: Final = ("path", "label")
_JSON_SUFFIXES: Final = (".json", ".jsonl", ".ndjson")
_MAX_PATHS_NAMED: Final = 3

Entry = tuple[int, Any, Any]  # the number of a line in a label file, and its path and label


def read_labels(path: str) -> dict[str, str]:
    """Read a label file; return a dict from the paths of files to the names of their classes.

    If the name of the label file ends in .json, .jsonl or .ndjson, each line is a JSON object. Any
    other label file is CSV, and its first line names the columns. The columns (or JSON keys) are
    `path`, which is relative to the source, and `label`, which is a string or an integer. Other
    columns are ignored. A path with an empty label is not in the result. Error messages name the
    label file and the line.
    """
    check_encodable(path, "labels (--labels)")
    is_json = path.lower().endswith(_JSON_SUFFIXES)
    found: dict[str, str] = {}
    lines: dict[str, int] = {}
    try:
        for line, name, label in (_json_lines if is_json else _csv_lines)(path):
            where = f"{path}, line {line}"
            if not isinstance(name, str) or not name or not _is_text(name):
                raise InvalidArgument(f"{where}: expected a path, found {name!r}")
            if label is not None and type(label) is not int and not _is_text(label):
                raise InvalidArgument(
                    f"{where}: expected a name or a whole number as label, found {label!r}"
                )
            name = posixpath.normpath(name)
            if name in lines:
                raise InvalidArgument(
                    f"{where}: {name!r} is already labelled in line {lines[name]}"
                )
            lines[name] = line
            if label not in (None, ""):
                found[name] = str(label)
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from error
    except (FileNotFoundError, IsADirectoryError) as error:
        raise InvalidArgument(f"{path}: label file not found") from error
    return found


def _is_text(value: object) -> bool:
    """Return True if `value` is a string that UTF-8 can encode.

    UTF-8 cannot encode lone surrogates, which JSON may contain as escapes.
    """
    return isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value)


def _csv_lines(path: str) -> Iterator[Entry]:
    with open(path, encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, strict=True)
        try:
            if missing := [name for name in LABEL_COLUMNS if name not in (rows.fieldnames or ())]:
                raise InvalidArgument(
                    f"{path}: the first line must name the columns path and label; it lacks "
                    f"{' and '.join(missing)}, found {', '.join(map(repr, rows.fieldnames or ()))}"
                )
            for row in rows:
                yield rows.line_num, row["path"], row["label"]
        except csv.Error as error:
            raise InvalidArgument(
                f"{path}, line {rows.reader.line_num}: not CSV: {error}"
            ) from error


def _json_lines(path: str) -> Iterator[Entry]:
    with open(path, encoding="utf-8-sig") as file:
        for line, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                entry = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise InvalidArgument(f"{path}, line {line}: not JSON: {error}") from error
            if not isinstance(entry, dict) or not entry.keys() >= {*LABEL_COLUMNS}:
                raise InvalidArgument(
                    f"{path}, line {line}: expected an object with path and label, found "
                    f"{text.strip()[:80]!r}"
                )
            yield line, entry["path"], entry["label"]


def apply_labels(listing: Listing, labels: Mapping[str, str], where: str) -> Listing:
    """Return the listing with the classes and labels of a label file, instead of folders.

    `labels` maps names of inputs to names of classes. Inputs that it does not contain get the label
    -1. The classes are sorted by name, or by number if the names of all classes are integers. If
    `labels` contains a path that is not an input, raise InvalidArgument. `where` is the path of the
    label file for this message.
    """
    if unknown := sorted(labels.keys() - {source.name for source in listing.inputs}):
        named = ", ".join(map(repr, unknown[:_MAX_PATHS_NAMED]))
        rest = (
            f" and {len(unknown) - _MAX_PATHS_NAMED} more"
            if len(unknown) > _MAX_PATHS_NAMED
            else ""
        )
        raise InvalidArgument(
            f"{os.fspath(where)}: not a file of the source: {named}{rest}; paths are relative to "
            "the source, with / as separator"
        )
    names = {*labels.values()}
    is_numeric = all(name.isascii() and name.isdigit() for name in names)
    classes = sorted(names, key=lambda name: (int(name) if is_numeric else 0, name))
    numbers = {name: number for number, name in enumerate(classes)}
    inputs = (
        replace(source, label=numbers[labels[source.name]] if source.name in labels else -1)
        for source in listing.inputs
    )
    return Listing(tuple(inputs), tuple(classes))


def without_folder_classes(listing: Listing, classes: tuple[str, ...]) -> Listing:
    """Return the listing with the classes `classes`, and with the label -1 for every input.

    The labels are not needed, because the converter reads a label for each sample.
    """
    return Listing(tuple(replace(one, label=-1) for one in listing.inputs), classes)


_SPLIT_NAMES: Final = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
    **dict.fromkeys(("eval", "evaluation"), "eval"),
    **dict.fromkeys(("holdout", "heldout"), "holdout"),
}
"""A dict from words in the names of folders to the names of the splits that the words denote."""
_NEUTRAL_WORDS: Final = frozenset(
    "audio clean clips data files images img imgs other set split videos".split()
)
"""The words that the name of a split's folder may also contain, as in train_images or dev-clean."""
_WORD: Final = re.compile(r"[^\W\d_]+")
_MAX_NAMED_FOLDERS: Final = 4


@dataclass(frozen=True, slots=True)
class SplitFolders:
    """The folders of a source that are named like splits, such as train, val and test.

    They are called split folders. `parents` are the folders that contain split folders, as paths
    below the source; all of them have the same depth. `classes` maps the name of each split folder
    to the paths of the folders inside it, relative to the split folder.
    """

    parents: tuple[str, ...]
    classes: dict[str, frozenset[str]]

    @property
    def depth(self) -> int:
        """The number of path components between the source and the split folders."""
        return self.parents[0].count("/") + 1 if self.parents[0] else 0


def warn_about_split(folders: Iterable[str], source: str, out: str, *, are_classes: bool) -> None:
    """Warn if folders of a source are named like splits, because they all go into one dataset.

    `folders` are the folders of the source that contain files or are empty. The warning suggests
    commands; `source` and `out` are the arguments of these commands. `are_classes` is True if the
    folders are the classes of the samples.
    """
    if (found := find_split(folders)) is not None:
        text = _split_warning(found, source, out, are_classes=are_classes)
        warnings.warn(text, stacklevel=caller_stacklevel())


def find_split(folders: Iterable[str]) -> SplitFolders | None:
    """Return the folders that are named like splits, at the lowest depth that has such folders.

    A folder that is named like a split counts only if its parent also contains a folder that is
    named like another split. Return None if there are no such folders.
    """
    paths = [tuple(folder.split("/")) for folder in folders]
    for depth in range(max(map(len, paths), default=0)):
        sides: dict[tuple[str, ...], set[str]] = {}
        for path in paths:
            if len(path) > depth and _split_name(path[depth]):
                sides.setdefault(path[:depth], set()).add(path[depth])
        parents = {parent for parent, names in sides.items() if len({*map(_split_name, names)}) > 1}
        if not parents:
            continue
        classes: dict[str, set[str]] = {}
        for path in paths:
            if path[:depth] in parents and _split_name(path[depth]):
                classes.setdefault(path[depth], set()).add("/".join(path[depth + 1 :]))
        return SplitFolders(
            tuple(sorted(map("/".join, parents))),
            {name: frozenset(classes[name] - {""}) for name in sorted(classes)},
        )
    return None


def _split_name(name: str) -> str:
    """Return the name of the split that the name of a folder denotes; "" if it denotes none."""
    words = _WORD.findall(name.casefold())
    found = [_SPLIT_NAMES[word] for word in words if word in _SPLIT_NAMES]
    is_one = len(found) == 1 and all(
        word in _SPLIT_NAMES or word in _NEUTRAL_WORDS for word in words
    )
    return found[0] if is_one else ""


def _split_warning(found: SplitFolders, source: str, out: str, *, are_classes: bool) -> str:
    """Return the text of the warning, which suggests a command to convert each split separately."""
    named = [
        f"{name} ({len(inner):,} folder{'s' * (len(inner) > 1)})" if inner else name
        for name, inner in found.classes.items()
    ]
    text = (
        f"{source}: the folders {_join_names(named)} are named like splits; all "
        "their samples go into one dataset"
    )
    if are_classes:
        first = [_example_class(found, name) for name in found.classes]
        text += f", with classes such as {_join_names([repr(name) for name in first])}"
    commands = [_convert_command(found, name, source, out) for name in found.classes]
    text += f". To create a dataset of each, convert them separately: {'; '.join(commands)}"
    missing = _missing_class(found)
    if are_classes and missing:
        text += (
            ". Classes are numbered by name: for equal numbers create an empty folder for each "
            f"class that a split lacks, such as {missing}"
        )
    return text


def _example_class(found: SplitFolders, name: str) -> str:
    """Return the path, relative to the source, of a class in the split folder `name`."""
    return "/".join(filter(None, (found.parents[0], name, min(found.classes[name], default=""))))


def _join_names(names: Sequence[str]) -> str:
    shown = [*names[:_MAX_NAMED_FOLDERS], *["…"] * (len(names) > _MAX_NAMED_FOLDERS)]
    return ", ".join(shown) if len(shown) > 2 else " and ".join(shown)


def _convert_command(found: SplitFolders, name: str, source: str, out: str) -> str:
    """Return the command that converts the split folder `name` into a separate dataset.

    If the source is a pattern, the source in the command is a pattern too.
    """
    pattern = parse_pattern(source)
    above = found.parents[0].split("/") if len(found.parents) == 1 else ["*"] * found.depth
    before, rest = pattern.parts[: found.depth + 1], pattern.parts[found.depth + 1 :]
    if ANY_FOLDERS in before:
        rest = pattern.parts[before.index(ANY_FOLDERS) :]
    path = os.path.join(pattern.root, *above, name, *rest)
    return shlex.join(["shardio", "convert", path, f"{out.rstrip('/')}-{name}"])


def _missing_class(found: SplitFolders) -> str:
    """Return the path of a folder to create, for a class that only some of the splits have.

    Return "" if all splits that have classes have the same classes.
    """
    splits = {name: inner for name, inner in found.classes.items() if inner}
    every = frozenset[str]().union(*splits.values())
    for name, inner in splits.items():
        if len(found.parents) == 1 and every - inner:
            return "/".join(filter(None, (found.parents[0], name, min(every - inner))))
    return ""
