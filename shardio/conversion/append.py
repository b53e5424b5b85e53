"""Append to a dataset: classify inputs as new or known, check options, build the next generation.

An input that gave samples is never converted again, because samples cannot be replaced: its outcome
is `duplicate`, or `modified` if its content has changed. All other inputs are converted: new ones,
and known ones that gave no samples before. Existing samples keep their positions, classes keep
their indices, and new samples are added at the end.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from shardio.conversion.converter import OUTCOMES, Input, OutcomeKind
from shardio.conversion.inputs import Listing, input_hash, input_states
from shardio.conversion.journal import PLAN_FILE, WORK_FOLDER
from shardio.conversion.report import InputReport
from shardio.dataset.generation import Generation
from shardio.dataset.manifest import holds_dataset, load, recover
from shardio.errors import DatasetConflict, DatasetNotFound, InvalidArgument
from shardio.format.schema import Schema
from shardio.shard.writer import ShardSummary

RUN_OPTIONS: Final = ("on_error", "shard_bytes")
"""The recorded options that do not affect samples; an append may change them."""

_MAX_FILES_PER_TASK: Final = 256
"""The maximum number of files that one task compares: one task per file would take much memory."""
_TASKS_PER_THREAD: Final = 8
"""The number of tasks per thread, if there are enough files. With several tasks per thread, all
threads finish at about the same time."""

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
    """Load the generation to append to; refuse a missing dataset and one with added columns."""
    check_dataset_exists(out)
    return _check_no_added_columns(load(out), out)


def _check_no_added_columns(base: Generation, out: PathName) -> Generation:
    """Return the generation; refuse added columns, which new samples would lack."""
    if added := [group.name for group in base.column_groups]:
        work = Path(out) / WORK_FOLDER
        left = f"; {work} belongs to an interrupted conversion: delete it, unless that is to be "
        "resumed"
        left *= (work / PLAN_FILE).exists()
        raise InvalidArgument(
            f"{os.fspath(out)}: has added columns ({', '.join(added)}), which new samples would "
            "lack; convert into a separate folder, add the columns there, and merge both datasets"
            f"{left}"
        )
    return base


def check_not_repaired(base: Generation, out: PathName) -> None:
    """Refuse a repaired dataset: a repair knows only shards, not the files of the samples."""
    if any(entry["outcome"] not in (*OUTCOMES, "not_processed") for entry in base.inputs):
        raise InvalidArgument(
            f"{os.fspath(out)}: cannot append to a repaired dataset: its source files are no "
            "longer recorded, so inputs could be duplicated; convert new files into a separate "
            "folder, and merge both datasets"
        )


def inherit_options(
    base: Generation, kind: str | None, options: Mapping[str, Any]
) -> tuple[str | None, dict[str, Any], bool]:
    """Return kind and options of an append, with the dataset's as defaults, and keep_partial."""
    if not base.converter:
        return kind, dict(options), False
    of_samples = base.converter.get("options", {}).items()
    recorded = {option: value for option, value in of_samples if option not in RUN_OPTIONS}
    keep = bool(recorded.pop("keep_partial", False))
    name: str = base.converter.get("name", "")
    kind = kind or name or None
    return kind, {**recorded, **options} if kind == name else dict(options), keep


def check_same_options(base: Generation, options: Mapping[str, Any], out: PathName) -> None:
    """Refuse options that differ from the dataset's, and name all of them.

    Called when the converter rejects the given options combined with the dataset's options.
    """
    recorded = _sample_settings(base.converter)
    differences = [
        f"{name} was {recorded.get(name)!r}, is {value!r}"
        for name, value in options.items()
        if recorded.get(name) != value
    ]
    check_same_schema(base.schema, base.schema, out, differences)


def check_same_samples(
    base: Generation, converter: Mapping[str, Any], schema: Schema, out: PathName
) -> None:
    """Refuse to append if converter, options or schema differ from the dataset's."""
    differences = []
    if base.converter:
        recorded, current = _sample_settings(base.converter), _sample_settings(converter)
        differences = [
            f"{name} was {recorded.get(name)!r}, is {current.get(name)!r}"
            for name in sorted({*recorded, *current})
            if recorded.get(name) != current.get(name)
        ]
    check_same_schema(base.schema, schema, out, differences)


def check_same_schema(
    expected: Schema, found: Schema, out: PathName, differences: Iterable[str] = ()
) -> None:
    """Raise InvalidArgument for every differing field, and for the caller's `differences`."""
    differing = [*differences]
    for name in dict.fromkeys([*expected, *found]):
        if expected.get(name) != found.get(name):
            recorded, current = (
                str(s[name]) if name in s else "missing" for s in (expected, found)
            )
            differing.append(
                f"field {name!r}: expected {recorded}, as the dataset has it, found {current}"
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
    """Return the settings that determine the samples: converter, version and options, by name."""
    options = {k: v for k, v in converter.get("options", {}).items() if k not in RUN_OPTIONS}
    return {
        "converter": converter.get("name"),
        "version of the converter": converter.get("version"),
        **{k: list(v) if isinstance(v, tuple) else v for k, v in options.items()},
    }


def classify_inputs(
    listing: Listing, base: Generation, n_threads: int, out: PathName
) -> tuple[Listing, list[InputReport]]:
    """Return the inputs that an append converts, and the reports on all other inputs.

    The classes of the returned listing are the classes of the dataset after the append. Files with
    a known name and size are read and compared by hash.
    """
    listing = _merge_classes(listing, base, out)
    known: dict[str, list[Entry]] = {}
    for entry in base.inputs:
        if entry.get("samples"):
            known.setdefault(entry["path"], []).append(entry)
    existing = [one for one in listing.inputs if one.name in known]
    n_threads = max(1, n_threads)
    n_files = min(max(1, len(existing) // (n_threads * _TASKS_PER_THREAD)), _MAX_FILES_PER_TASK)
    runs = [existing[first : first + n_files] for first in range(0, len(existing), n_files)]
    stopped = threading.Event()

    def compare_run(run: Sequence[Input]) -> list[InputReport]:
        return [_compare(one, known[one.name], stopped) for one in run]

    with ThreadPoolExecutor(n_threads) as pool:
        try:
            others = [report for reports in pool.map(compare_run, runs) for report in reports]
        finally:
            stopped.set()  # so that Ctrl-C does not wait for large files
    new = tuple(one for one in listing.inputs if one.name not in known)
    return replace(listing, inputs=new), others


def _compare(one: Input, entries: Sequence[Entry], stopped: threading.Event) -> InputReport:
    """Report on a file that already gave samples; `entries` are its recorded states."""
    reason = "" if stopped.is_set() else _describe_change(one, entries, stopped)
    outcome: OutcomeKind = "modified" if reason else "duplicate"
    return InputReport(one.name, outcome, reason, 0, one.n_bytes, label=one.label)


def _describe_change(one: Input, entries: Sequence[Entry], stopped: threading.Event) -> str:
    """Return the difference to the last recorded state; "" if the file equals a recorded state."""
    n_bytes = 0
    for state in input_states(one).values():
        if state is None:
            return "cannot be read: missing, or a broken link"
        if not stat.S_ISREG(state.mode):  # opening a pipe could block forever
            return "no longer a regular file"
        n_bytes += state.n_bytes
    sizes = [entry["bytes"] for entry in entries if "bytes" in entry]
    if len(sizes) == len(entries) and n_bytes not in sizes:
        return f"{n_bytes:,} bytes, {sizes[-1]:,} when it was converted"
    hashes = [entry["hash"] for entry in entries if "hash" in entry]
    if len(hashes) < len(entries):
        return ""  # converted by a program that did not record hashes
    try:
        found = input_hash(one, stopped)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return "" if found in hashes else f"hash {found}, {hashes[-1]} when it was converted"


def _merge_classes(listing: Listing, base: Generation, out: PathName) -> Listing:
    """Return the listing with labels renumbered: the dataset's classes first, then new classes."""
    if base.n_samples and not base.classes and not base.converter and listing.classes:
        raise InvalidArgument(
            f"{os.fspath(out)}: has no class names, while the source has "
            f"{', '.join(map(repr, listing.classes[:3]))}: the labels of the dataset have no "
            "known meaning; append files without classes, or convert into a separate folder"
        )
    classes = tuple(dict.fromkeys([*base.classes, *listing.classes]))
    position = {name: number for number, name in enumerate(classes)}
    numbers = [position[name] for name in listing.classes]
    inputs = (
        replace(one, label=numbers[one.label]) if one.label >= 0 else one for one in listing.inputs
    )
    return Listing(tuple(inputs), classes)


def rebase(base: Generation, out: Path) -> Generation:
    """Load the latest generation, which another writer may have published since `base` was read.

    An unfinished commit of a killed writer is undone first.

    Raises:
        DatasetConflict: the lineage, schema or classes have changed.
    """
    latest = _check_no_added_columns(recover(out), out)
    if (latest.lineage, latest.schema, latest.classes) != (base.lineage, base.schema, base.classes):
        raise DatasetConflict(
            f"{out}: generation {latest.number} differs in lineage, fields or classes from "
            f"generation {base.number}, which this append started from: another writer has "
            "published meanwhile; append again"
        )
    return latest


def generation_changes(
    latest: Generation,
    shards: Sequence[ShardSummary],
    classes: tuple[str, ...],
    reports: Sequence[InputReport],
) -> dict[str, Any]:
    """Return the fields of the next generation that differ from `latest`.

    Statistics of the whole dataset become invalid. Statistics of subsets stay valid, unless they
    count classes and the number of classes has grown.
    """
    new_entries = {report.name: report.as_json() for report in reports}
    kept = [
        entry if entry.get("samples") else new_entries.pop(entry["path"], entry)
        for entry in latest.inputs
    ]
    entries = (*kept, *new_entries.values())
    stats = {name: value for name, value in latest.stats.items() if name != "whole"}
    if classes != latest.classes:
        stats = {}
    return {
        "shards": (*latest.shards, *shards),
        "classes": classes,
        "inputs": entries,
        "stats": stats,
    }
