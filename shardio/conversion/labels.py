"""Labels from a file instead of folders: CSV or JSON Lines, a path and a class name each."""

from __future__ import annotations

import csv
import json
import os
import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from shardio._base.file_names import check_encodable
from shardio.conversion.inputs import Listing
from shardio.errors import InvalidArgument

COLUMNS: Final = ("path", "label")
_JSON_SUFFIXES: Final = (".json", ".jsonl", ".ndjson")
_MAX_NAMED: Final = 3

Entry = tuple[int, Any, Any]  # line, path, label


def read_labels(path: str) -> dict[str, str]:
    """Read the class name of each path; those whose label is empty have none, and are left out.

    A file whose name ends in .json, .jsonl or .ndjson holds a JSON object in each line; any other
    is CSV whose first line names the columns. Both have `path`, below the source, and `label`, a
    name or a whole number; what else they have is not looked at.

    Raises:
        InvalidArgument: the file breaks one of these rules, or labels a path twice; it says where.
        OSError: the file cannot be read.
    """
    check_encodable(path, "labels (--labels)")
    is_json = path.lower().endswith(_JSON_SUFFIXES)
    found: dict[str, str] = {}
    lines: dict[str, int] = {}
    try:
        for line, name, label in (_json_lines if is_json else _csv_lines)(path):
            place = f"{path}, line {line}"
            if not isinstance(name, str) or not name or not _is_text(name):
                raise InvalidArgument(f"{place}: expected a path, found {name!r}")
            if label is not None and type(label) is not int and not _is_text(label):
                raise InvalidArgument(
                    f"{place}: expected a name or a whole number as label, found {label!r}"
                )
            name = posixpath.normpath(name)
            if name in lines:
                raise InvalidArgument(
                    f"{place}: {name!r} was labelled in line {lines[name]} already"
                )
            lines[name] = line
            if label not in (None, ""):
                found[name] = str(label)
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from error
    except (FileNotFoundError, IsADirectoryError) as error:
        raise InvalidArgument(f"{path}: there is no such file of labels") from error
    return found


def _is_text(value: object) -> bool:
    """Whether it is a string that files can hold: JSON can escape halves of characters."""
    return isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value)


def _csv_lines(path: str) -> Iterator[Entry]:
    with open(path, encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, strict=True)
        try:
            if lacking := [name for name in COLUMNS if name not in (rows.fieldnames or ())]:
                raise InvalidArgument(
                    f"{path}: the first line must name the columns path and label; it lacks "
                    f"{' and '.join(lacking)}, found {', '.join(map(repr, rows.fieldnames or ()))}"
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
            if not isinstance(entry, dict) or not entry.keys() >= {*COLUMNS}:
                raise InvalidArgument(
                    f"{path}, line {line}: expected an object with path and label, found "
                    f"{text.strip()[:80]!r}"
                )
            yield line, entry["path"], entry["label"]


def relabel(listing: Listing, labels: Mapping[str, str], where: str) -> Listing:
    """Give every input the class that `labels` has for its name, or none (-1).

    Classes are sorted by name; by number, where all of them are whole numbers.

    Raises:
        InvalidArgument: a path is none of the inputs': it is misspelt, or its file is gone.
    """
    if unknown := sorted(labels.keys() - {source.name for source in listing.inputs}):
        named = ", ".join(map(repr, unknown[:_MAX_NAMED]))
        rest = f" and {len(unknown) - _MAX_NAMED} more" if len(unknown) > _MAX_NAMED else ""
        raise InvalidArgument(
            f"{os.fspath(where)}: no file of the source: {named}{rest}; paths are those below it, "
            "with / between their parts"
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


def with_own_classes(listing: Listing, classes: tuple[str, ...]) -> Listing:
    """The inputs without classes of theirs: their samples have numbers that stand for `classes`."""
    return Listing(tuple(replace(one, label=-1) for one in listing.inputs), classes)
