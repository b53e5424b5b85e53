"""Classes and subsets of a dataset: labels from a file, folders named like splits, random subsets.

A split is a subset that is recognized by the name of a folder or file, such as `train` or `val`.
"""

from __future__ import annotations

import csv
import json
import os
import posixpath
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from shardio._base.callers import check_encodable, warn
from shardio._base.progress import counted
from shardio.conversion.converter import SHARD_NUMBER, Converter, is_media_name
from shardio.conversion.inputs import Listing
from shardio.conversion.report import InputReport
from shardio.dataset.generation import Generation
from shardio.dataset.selection import RowRuns
from shardio.errors import InvalidArgument, SchemaError
from shardio.format.schema import Schema
from shardio.maintenance.splitting import random_subsets, split_operation

LABEL_COLUMNS: Final = ("path", "label")
_JSON_SUFFIXES: Final = (".json", ".jsonl", ".ndjson")
_MAX_PATHS_NAMED: Final = 3

Entry = tuple[int, Any, Any]  # a line of a label file: its number, path and label


def read_labels(path: str) -> dict[str, str]:
    """Read a label file; return a dict from the paths of files to the names of their classes.

    A file whose name ends in .json, .jsonl or .ndjson contains one JSON object per line; any other
    file is CSV. A path with an empty label is not in the result.
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
    """Return True for a string without lone surrogates, which JSON escapes may produce."""
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


def without_empty_classes(listing: Listing) -> Listing:
    """Return the listing without classes that have no input; they are added to `ignored`."""
    used = sorted({one.label for one in listing.inputs} - {-1})
    numbers = {label: number for number, label in enumerate(used)} | {-1: -1}
    empty = (f"{name}/" for label, name in enumerate(listing.classes) if label not in numbers)
    return replace(
        listing,
        inputs=tuple(replace(one, label=numbers[one.label]) for one in listing.inputs),
        classes=tuple(listing.classes[label] for label in used),
        ignored=(*listing.ignored, *empty),
    )


def warn_of_equal_names(classes: Iterable[str], where: str | os.PathLike[str]) -> None:
    """Warn about classes whose names look the same, but are in different Unicode normal forms.

    In folder names from macOS, a character such as `é` is often decomposed into a letter and an
    accent.
    """
    by_text: dict[str, list[str]] = {}
    for name in dict.fromkeys(classes):
        by_text.setdefault(unicodedata.normalize("NFC", name), []).append(name)
    for text, names in by_text.items():
        if len(names) > 1:
            warn(
                f"{os.fspath(where)}: {len(names)} classes look like {text!r}, but their names are "
                f"in different Unicode normal forms: {' and '.join(map(ascii, names))}; to have "
                "one class, give them one name, and convert again"
            )


def check_label_field(schema: Schema) -> None:
    """Raise InvalidArgument unless the field `label` can be the number of a class."""
    label = schema["label"].array if "label" in schema else None
    if label is None or label.shape or np.dtype(label.numpy).kind not in "iu":
        found = f"{schema['label']}" if "label" in schema else f"the fields {', '.join(schema)}"
        raise InvalidArgument(
            "classes are the names of the integers in the field 'label', counted from 0; found "
            f"{found}"
        )


def check_label(sample: Mapping[str, Any], n_classes: int) -> None:
    """Raise SchemaError if the label of a sample has no name among the classes."""
    label = sample.get("label")
    if label is None or np.ndim(label):  # The writer refuses what the field cannot store.
        return
    if not 0 <= label < n_classes:
        raise SchemaError(
            f"label {label} has no name; classes has {counted(n_classes, 'names')}, for the labels "
            "from 0"
        )


SPLIT_FOLDERS: Final = "split_folders"
"""The name of the recorded option that is True if folders or files became subsets."""


def uses_split_folders(base: Generation | None, *, wanted: bool | None) -> bool | None:
    """Return True if folders are subsets, False if they are not, None if their names decide.

    `wanted` is the option of the caller. If it is None, an append to `base` uses the setting that
    `base` records.
    """
    if base is None or wanted is not None:
        return wanted
    return bool(base.converter.get("options", {}).get(SPLIT_FOLDERS))


def split_listing(
    listing: Listing, source: Converter, *, wanted: bool | None, appends: bool
) -> Listing:
    """Return the listing with the subsets of its inputs, and with classes that all subsets share.

    The subsets are the folders that the converter names. If the converter names none, they are the
    folders named like splits. If there are no such folders, they are the files named like splits,
    provided that the converter supports this.

    If `wanted` is None, names count only if they denote at least two different splits; if it is
    True, one is enough; if it is False, there are no subsets. If `wanted` is True and no subset is
    found, InvalidArgument is raised, except in an append.
    """
    if wanted is False:
        return listing
    n_least = 1 if wanted else 2
    named = find_split_folders(listing.classes, n_least)
    found = source.subset_folders(listing.inputs) or {path: name for name, path in named.items()}
    files: dict[str, str] = {}
    if not found and source.splits_by_file_name:
        names = [one.name for one in listing.inputs if not is_media_name(one.name)]
        files = find_split_files(names, n_least)
    if not (found or files):
        if wanted and not appends:
            what = "folder or file" if source.splits_by_file_name else "folder"
            raise InvalidArgument(
                f"split_folders: no {what} of the source is named like a split, such as train, val "
                f"or test; rename the {what}s, or leave the option out"
            )
        return listing
    patterns = {tuple(path.split("/")): name for path, name in found.items()}
    class_of = {folder: _subset_and_class(folder, patterns)[1] for folder in listing.classes}
    if len(folders := {*map(posixpath.dirname, files)}) == 1:
        class_of[folders.pop()] = ""  # a folder such as data/, with the files of all splits
    classes = tuple(sorted({*class_of.values()} - {""}))
    labels = {"": -1} | {name: label for label, name in enumerate(classes)}
    numbers = [*(labels[class_of[folder]] for folder in listing.classes), -1]
    subsets = {
        one.name: subset
        for one in listing.inputs
        if (subset := files.get(one.name) or _subset_and_class(one.name, patterns)[0])
    }
    inputs = tuple(replace(one, label=numbers[one.label]) for one in listing.inputs)
    return replace(listing, inputs=inputs, classes=classes, subsets=subsets)


def _subset_and_class(folder: str, patterns: Mapping[tuple[str, ...], str]) -> tuple[str, str]:
    """Return the subset of a folder ("" for none), and the name of its class.

    The name of the class is the path of the folder without the folder that is the subset.
    """
    parts = folder.split("/")
    for pattern, subset in patterns.items():
        depth = len(pattern)
        pairs = zip(pattern, parts, strict=False)
        if len(parts) >= depth and all(one in ("*", part) for one, part in pairs):
            return subset, "/".join(parts[: depth - 1] + parts[depth:])
    return "", folder


def subset_details(runs: Sequence[tuple[str, int]], previous: Generation | None) -> dict[str, Any]:
    """Return the attributes of the next generation that assign samples to subsets.

    Each item of `runs` consists of a subset ("" for none), and the number of consecutive new
    samples that belong to it. New samples follow the samples of `previous`. If any subset grows,
    the statistics of `previous` are dropped.
    """
    names = [name for name, _ in runs]
    counts = [n for _, n in runs]
    found = dict(previous.subsets) if previous else {}
    new = dict.fromkeys(name for name, n in runs if name and n)
    for subset in new:
        before = np.zeros(previous.n_samples if previous else 0, np.bool_)
        if subset in found:
            before[found[subset].all_rows()] = True
        rows = np.repeat([name == subset for name in names], counts)
        found[subset] = RowRuns.from_mask(np.concatenate([before, rows]))
    if not new:
        return {}
    return {"subsets": found, **({"stats": {}} if previous else {})}


def input_runs(listing: Listing, reports: Sequence[InputReport]) -> list[tuple[str, int]]:
    """Return the subset ("" for none) and the number of samples of the input of each report."""
    return [(listing.subsets.get(report.name, ""), report.n_samples) for report in reports]


def subset_sizes(found: Generation | None) -> dict[str, int]:
    """Return the number of samples of each subset of a generation."""
    return {name: len(rows) for name, rows in found.subsets.items()} if found else {}


def random_split_details(
    split: Mapping[str, float] | None, seed: int, n_samples: int, out: str | os.PathLike[str]
) -> dict[str, Any]:
    """Return the attributes of a new generation that assign samples to subsets at random.

    `split` maps the name of each subset to its share of the samples; with None, no sample is
    assigned. Errors name `out`.
    """
    if split is None:
        return {}
    return {
        "subsets": random_subsets(n_samples, split, seed, out),
        "operation": split_operation(split, seed),
    }


_SPLIT_NAMES: Final = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
    **dict.fromkeys(("eval", "evaluation"), "eval"),
    **dict.fromkeys(("holdout", "heldout"), "holdout"),
}
"""Words in the names of folders, and the name of the split that each denotes."""
_NEUTRAL_WORDS: Final = frozenset(
    "audio clean clips data files images img imgs other set split videos".split()
)
"""The words that the name of a split's folder may also contain, as in train_images or dev-clean."""
_WORD: Final = re.compile(r"[^\W\d_]+")


def find_split_folders(folders: Iterable[str], min_splits: int = 2) -> dict[str, str]:
    """Return a dict from the name to the path of each folder that is named like a split.

    A folder counts only if the names of it and its siblings denote at least `min_splits` different
    splits. Only the folders at the smallest depth at which there are such siblings count. If these
    folders have several parents, the returned paths are patterns, such as `*/train`. If none of
    these folders has subfolders, their parents are classes, and a folder without such siblings
    counts too.
    """
    paths = [tuple(folder.split("/")) for folder in folders]
    for depth in range(max(map(len, paths), default=0)):
        inside: dict[str, set[str]] = {}  # maps a parent to the folders in it named like splits
        deepest = 0
        for path in paths:
            if len(path) > depth and _split_name(path[depth]):
                inside.setdefault("/".join(path[:depth]), set()).add(path[depth])
                deepest = max(deepest, len(path))
        parents = [
            one for one, names in inside.items() if len({*map(_split_name, names)}) >= min_splits
        ]
        if parents and deepest == depth + 1:
            parents = [*inside]
        if parents:
            parent = parents[0] if len(parents) == 1 else "/".join("*" * depth)
            found = sorted(set().union(*(inside[one] for one in parents)))
            return {name: posixpath.join(parent, name) for name in found}
    return {}


_SHARDED_FILE: Final = re.compile(r"(\w+)-\d{5}-of-\d{5}|(\w+(?:\.\w+)*)-\d{5}-of-\d{5}(?:\.\w+)+")
"""Matches the names that `datasets` and the Hugging Face Hub give to the files of a split."""


def find_split_files(names: Sequence[str], min_splits: int = 2) -> dict[str, str]:
    """Return a dict from each file that is named like a split to the split.

    If all files with names such as `train-00000-of-00002.parquet` lie in one folder and have at
    least `min_splits` splits, the result contains only these files, and any text in place of
    `train` is a split. Otherwise, a name must contain exactly one word for a split, as in
    `train.csv` or `mnist-test-01.tar`. Such a file counts only if, in some folder, the files with
    the same suffix have at least `min_splits` different splits.
    """
    matches = {name: _SHARDED_FILE.fullmatch(posixpath.basename(name)) for name in names}
    sharded = {name: match[1] or match[2] for name, match in matches.items() if match}
    is_one_folder = len({*map(posixpath.dirname, sharded)}) == 1
    if is_one_folder and len({*sharded.values()}) >= min_splits:
        return sharded
    found: dict[str, tuple[str, str]] = {}  # maps a file to its suffix and split
    side_by_side: dict[tuple[str, str], set[str]] = {}  # maps a folder and a suffix to splits
    for name in names:
        folder, base = posixpath.split(name)
        stem, suffix = posixpath.splitext(SHARD_NUMBER.sub("", base))
        words = [word for word in _WORD.findall(stem) if word.casefold() in _SPLIT_NAMES]
        if len(words) == 1:
            found[name] = suffix, words[0]
            splits = side_by_side.setdefault((folder, suffix), set())
            splits.add(_SPLIT_NAMES[words[0].casefold()])
    suffixes = {one for (_, one), splits in side_by_side.items() if len(splits) >= min_splits}
    return {name: split for name, (suffix, split) in found.items() if suffix in suffixes}


def _split_name(name: str) -> str:
    """Return the name of the split that the name of a folder denotes; "" if it denotes none."""
    if not name.isprintable():
        return ""
    words = [word for word in _WORD.findall(name.casefold()) if word not in _NEUTRAL_WORDS]
    return _SPLIT_NAMES.get(words[0], "") if len(words) == 1 else ""
