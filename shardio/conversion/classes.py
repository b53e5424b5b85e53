"""Classes of inputs: labels from a file instead of folders."""

from __future__ import annotations

import csv
import json
import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from shardio._base.file_names import check_encodable
from shardio.conversion.inputs import Listing
from shardio.errors import InvalidArgument

LABEL_COLUMNS: Final = ("path", "label")
_JSON_SUFFIXES: Final = (".json", ".jsonl", ".ndjson")
_MAX_PATHS_NAMED: Final = 3

Entry = tuple[int, Any, Any]  # a line of a label file: its number, path and label


def read_labels(path: str) -> dict[str, str]:
    """Read a label file; return a dict from the paths of files to the names of their classes.

    The names .json, .jsonl and .ndjson are for lines of JSON objects; any other file is CSV. A path
    with an empty label is not in the result.
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
    """Return True for a string that UTF-8 can encode; JSON escapes may add lone surrogates."""
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
    """Return the listing with classes and labels from a label file instead of from folders.

    Inputs that are not in `labels` get the label -1. Classes are sorted by name, or by number if
    all names are integers. `where` is the path of the label file.
    """
    if unknown := sorted(labels.keys() - {source.name for source in listing.inputs}):
        named = ", ".join(map(repr, unknown[:_MAX_PATHS_NAMED]))
        raise InvalidArgument(
            f"{where}: paths that are not files of the source ({len(unknown):,}): {named}; they "
            "must be relative to the source, with / as separator"
        )
    names = {*labels.values()}
    is_numeric = all(name.isascii() and name.isdigit() for name in names)
    classes = sorted(names, key=lambda name: (int(name) if is_numeric else 0, name))
    numbers = {name: number for number, name in enumerate(classes)}
    inputs = (
        replace(source, label=numbers[labels[source.name]] if source.name in labels else -1)
        for source in listing.inputs
    )
    return replace(listing, inputs=tuple(inputs), classes=tuple(classes))


def without_folder_classes(listing: Listing, classes: tuple[str, ...]) -> Listing:
    """Return the listing with the classes `classes`; every input has the label -1."""
    inputs = tuple(replace(one, label=-1) for one in listing.inputs)
    return replace(listing, inputs=inputs, classes=classes)
