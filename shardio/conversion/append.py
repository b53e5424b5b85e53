"""Append to a dataset: classify inputs as new or known, check options, build the next generation.

An input that gave samples is not converted again, because samples in a dataset cannot be replaced:
its outcome is `duplicate`, or `modified` if its content has changed. All other inputs are
converted. Existing samples keep their positions, existing classes keep their indices, and new
samples are added at the end.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from shardio.conversion.converter import OUTCOMES, Input, OutcomeKind
from shardio.conversion.inputs import Listing, input_hash, input_states
from shardio.conversion.journal import PLAN_FILE, different_settings, read_plan
from shardio.conversion.report import InputReport
from shardio.dataset.generation import Generation
from shardio.dataset.manifest import WORK_FOLDER, holds_dataset, load, recover
from shardio.dataset.selection import RowRuns
from shardio.errors import (
    DataError,
    DatasetConflict,
    DatasetExists,
    DatasetNotFound,
    InvalidArgument,
)
from shardio.format.schema import Schema
from shardio.shard.writer import ShardSummary
from shardio.storage.remote.object_store import run_parallel

RUN_OPTIONS: Final = ("on_error", "shard_bytes")
"""The options that are recorded but do not affect samples. An append may use other values."""

_NOT_CONVERTER: Final = ("keep_partial", "split_folders")
"""The recorded options that affect samples, but are not options of the converter."""

Entry = Mapping[str, Any]
PathName = str | os.PathLike[str]


def check_dataset_exists(out: PathName) -> None:
    """Raise DatasetNotFound unless there is a dataset to append to."""
    if not holds_dataset(out) and (Path(out) / WORK_FOLDER / PLAN_FILE).exists():
        raise DatasetNotFound(
            f"{os.fspath(out)}: holds an interrupted conversion; resume it (--resume) before "
            "appending"
        )
    if not holds_dataset(out):
        raise DatasetNotFound(
            f"{os.fspath(out)}: holds no dataset to append to; leave out append (--append) to "
            "create one"
        )


def load_base(out: PathName) -> Generation:
    """Load the current generation of a dataset; raise InvalidArgument if it has added columns."""
    check_dataset_exists(out)
    return _check_no_added_columns(load(out), out)


def _check_no_added_columns(base: Generation, out: PathName) -> Generation:
    if added := [group.name for group in base.column_groups]:
        raise InvalidArgument(
            f"{os.fspath(out)}: has added columns ({', '.join(added)}), which new samples would "
            "lack; convert into a separate folder, add the columns there, and merge both datasets"
        )
    return base


def check_not_repaired(base: Generation, out: PathName) -> None:
    """Raise InvalidArgument if the dataset was repaired: its source files are not recorded."""
    if any(entry["outcome"] not in (*OUTCOMES, "not_processed") for entry in base.inputs):
        raise InvalidArgument(
            f"{os.fspath(out)}: cannot append to a repaired dataset: its source files are no "
            "longer recorded, so inputs could be duplicated; convert new files into a separate "
            "folder, and merge both datasets"
        )


def inherit_options(
    base: Generation, kind: str | None, options: Mapping[str, Any]
) -> tuple[str | None, dict[str, Any]]:
    """Return the kind and options of the converter; by default, those that the dataset records."""
    name = base.converter.get("name")
    kind = kind or name
    if kind != name or name is None:
        return kind, dict(options)
    recorded = base.converter.get("options", {}).items()
    own = {key: value for key, value in recorded if key not in (*RUN_OPTIONS, *_NOT_CONVERTER)}
    order = {name: position for position, name in enumerate(base.schema)}
    return kind, {
        # Generations sort the keys of mappings. Restore the order of fields.
        key: dict(sorted(value.items(), key=lambda each: order.get(each[0], len(order))))
        if isinstance(value, Mapping)
        else value
        for key, value in {**own, **options}.items()
    }


def recorded_options(
    base: Generation | None, kind: str, out: PathName, *, resume: bool
) -> Mapping[str, Any]:
    """Return the converter's options, as recorded by the dataset or the interrupted conversion.

    `base` is the generation to append to, or None. The mapping is empty if nothing is recorded, or
    another kind.
    """
    recorded: Mapping[str, Any] = {} if base is None else base.converter
    if base is None and resume:
        # Ignore errors: the conversion raises them when it opens its work folder.
        with contextlib.suppress(DataError, InvalidArgument, OSError):
            if (plan := read_plan(Path(out) / WORK_FOLDER)) is not None:
                recorded = plan.settings.get("converter", {})
            elif holds_dataset(out):
                recorded = load(out).converter
    found: Mapping[str, Any] = recorded.get("options", {})
    return found if recorded.get("name") == kind else {}


def check_same_samples(
    base: Generation, converter: Mapping[str, Any], schema: Schema, out: PathName
) -> None:
    """Raise InvalidArgument if the converter, its version, its options or the schema differ."""
    differences = []
    if "name" in base.converter:
        found = different_settings(_sample_settings(base.converter), _sample_settings(converter))
        differences = [f"{name} was {before!r}, is {now!r}" for name, before, now in found]
    check_same_schema(base.schema, schema, out, differences)


def known_classes(
    base: Generation | None, classes: tuple[str, ...], out: str | os.PathLike[str]
) -> tuple[str, ...]:
    """Return the class names of the dataset; in an append, check the class names of the samples."""
    if base is None or not (base.n_samples or base.classes):
        return classes
    if not classes or classes == base.classes:
        return base.classes
    if not base.classes:
        has, wanted = "labels but no class names", "samples without names"
        label = base.schema.get("label")
        if label is not None and label.array is None:
            has = wanted = f"labels that are {label.things}"
        raise InvalidArgument(
            f"{os.fspath(out)}: has {has}, while the samples have the classes "
            f"{', '.join(map(repr, classes[:3]))}; append {wanted}, or convert into a separate "
            "folder"
        )
    raise InvalidArgument(
        f"{os.fspath(out)}: the samples have the classes {[*classes]}, the dataset has "
        f"{[*base.classes]}; convert into a separate folder"
    )


def check_same_schema(
    expected: Schema, found: Schema, out: PathName, differences: Iterable[str] = ()
) -> None:
    """Raise InvalidArgument if two schemas differ, or if there are other `differences`."""
    differing = [*differences]
    for name in dict.fromkeys([*expected, *found]):
        if expected.get(name) != found.get(name):
            recorded, current = (
                str(s[name]) if name in s else "missing" for s in (expected, found)
            )
            differing.append(
                f"field {name!r}: expected {recorded} as in the dataset, found {current}"
            )
    if not differing and expected != found:
        differing.append(f"expected the order {', '.join(expected)}; found {', '.join(found)}")
    if differing:
        raise InvalidArgument(
            f"{os.fspath(out)}: cannot append samples that differ from those of the dataset: "
            f"{'; '.join(differing)}; convert with the options of the dataset, or into a "
            "separate folder"
        )


def _sample_settings(converter: Mapping[str, Any]) -> dict[str, Any]:
    options = converter.get("options", {}).items()
    return {
        "converter": converter.get("name"),
        "version of the converter": converter.get("version"),
        "split_folders": False,
        **{name: value for name, value in options if name not in RUN_OPTIONS},
    }


def classify_inputs(
    listing: Listing, base: Generation, n_threads: int, out: PathName
) -> tuple[Listing, list[InputReport]]:
    """Return the inputs that an append must convert, and the reports on all other inputs.

    An input is converted unless a file of the same name gave samples to the dataset. The returned
    listing has the classes of the dataset after the append.
    """
    listing = _merge_classes(listing, base, out)
    known: dict[str, list[Entry]] = {}
    for entry in base.inputs:
        if entry.get("samples"):
            known.setdefault(entry["path"], []).append(entry)
    others: list[InputReport] = []

    def compare(one: Input) -> None:
        reason = _describe_change(one, known[one.name])
        outcome: OutcomeKind = "modified" if reason else "duplicate"
        others.append(InputReport(one.name, outcome, reason, 0, one.n_bytes, label=one.label))

    run_parallel(n_threads or 1, compare, [one for one in listing.inputs if one.name in known])
    new = tuple(one for one in listing.inputs if one.name not in known)
    return replace(listing, inputs=new), others


def _describe_change(one: Input, entries: Sequence[Entry]) -> str:
    """Describe how an input changed since its conversion; return "" if it is unchanged."""
    n_bytes = 0
    for state in input_states(one).values():
        if state is None:
            return "cannot be read: missing, or a broken link"
        if not stat.S_ISREG(state.mode):  # Do not open it: opening a pipe could block forever.
            return "no longer a regular file"
        n_bytes += state.n_bytes
    sizes = [entry["bytes"] for entry in entries if "bytes" in entry]
    if len(sizes) == len(entries) and n_bytes not in sizes:
        return f"{n_bytes:,} bytes, {sizes[-1]:,} when it was converted"
    hashes = [entry["hash"] for entry in entries if "hash" in entry]
    if len(hashes) < len(entries):
        return ""  # Without a recorded hash, only the sizes are compared.
    try:
        found = input_hash(one)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return "" if found in hashes else f"hash {found}, {hashes[-1]} when it was converted"


def _merge_classes(listing: Listing, base: Generation, out: PathName) -> Listing:
    if base.n_samples and not base.classes and "name" not in base.converter and listing.classes:
        raise InvalidArgument(
            f"{os.fspath(out)}: has labels but no class names, while the source has the classes "
            f"{', '.join(map(repr, listing.classes[:3]))}; append files without classes, or "
            "convert into a separate folder"
        )
    classes = tuple(dict.fromkeys([*base.classes, *listing.classes]))
    position = {name: number for number, name in enumerate(classes)}
    numbers = [position[name] for name in listing.classes]
    inputs = (
        replace(one, label=numbers[one.label]) if one.label >= 0 else one for one in listing.inputs
    )
    return replace(listing, inputs=tuple(inputs), classes=classes)


def reports_if_complete(
    found: Generation,
    listing: Listing,
    converter: Mapping[str, Any],
    libraries: Mapping[str, str],
    subsets: Mapping[str, RowRuns],
    n_threads: int,
    *,
    out: PathName,
    hint: str,
) -> list[InputReport]:
    """Return the reports on the inputs of a conversion whose dataset is already complete.

    Raise DatasetExists, ending in `hint`, if the dataset has other inputs, options or versions, or
    if one of `subsets` has other samples.
    """
    versions = {name: found.versions.get(name) for name in libraries}
    settings = different_settings(
        {"converter": found.converter, "versions": versions},
        {"converter": converter, "versions": libraries},
    )
    entries = {entry["path"]: entry for entry in found.inputs}
    names = {one.name: one for one in listing.inputs}
    differing = [f"{name} was {before!r}, is {now!r}" for name, before, now in settings]
    differing += [f"{name} is no input any more" for name in entries if name not in names]
    differing += [f"{name} is a new input" for name in names if name not in entries]
    for name, rows in subsets.items():
        known = found.subsets.get(name)
        if known is None or not np.array_equal(known.all_rows(), rows.all_rows()):
            differing.append(f"the subset {name!r} has other samples")
    reports: list[InputReport] = []
    if not differing:
        rest, reports = classify_inputs(listing, found, n_threads, out)
        differing = [f"{one.name}: {one.reason}" for one in reports if one.outcome == "modified"]
        reports += [InputReport.of_json(entries[one.name], names) for one in rest.inputs]
    if differing:
        more = f" (and {len(differing) - 1:,} more)" if len(differing) > 1 else ""
        raise DatasetExists(
            f"{os.fspath(out)}: already holds a dataset, which another conversion has made: "
            f"{differing[0]}{more}; {hint}"
        )
    order = {name: position for position, name in enumerate(names)}
    return sorted(reports, key=lambda one: order[one.name])


def rebase(base: Generation, out: Path) -> Generation:
    """Load the latest generation of the dataset in `out`, which the append will extend.

    Raise DatasetConflict if, since `base` was read, another writer has changed the schema or the
    classes, or has replaced the dataset with one that has another id (`lineage`).
    """
    latest = _check_no_added_columns(recover(out), out)
    if (latest.lineage, latest.schema, latest.classes) != (base.lineage, base.schema, base.classes):
        raise DatasetConflict(
            f"{out}: generation {latest.number} differs in lineage, fields or classes from "
            f"generation {base.number}, from which this append started: another writer has "
            "published meanwhile; append again"
        )
    return latest


def generation_changes(
    latest: Generation,
    shards: Sequence[ShardSummary],
    classes: tuple[str, ...],
    reports: Sequence[InputReport],
) -> dict[str, Any]:
    """Return the attributes in which the next generation differs from the generation `latest`.

    If an earlier report on an input has no samples, the new report replaces it. The statistics of
    the whole dataset are dropped; if there are new classes, those of subsets are dropped too.
    """
    new_entries = {report.name: report.as_json() for report in reports}
    kept = [
        entry if entry.get("samples") else new_entries.pop(entry["path"], entry)
        for entry in latest.inputs
    ]
    stats = {name: value for name, value in latest.stats.items() if name != "whole"}
    if classes != latest.classes:
        stats = {}
    return {
        "shards": (*latest.shards, *shards),
        "classes": classes,
        "inputs": (*kept, *new_entries.values()),
        "stats": stats,
    }
