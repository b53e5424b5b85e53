"""The plan of a conversion, and its journal on disk, from which the conversion can resume.

The plan divides the inputs into units, which depend only on the source, so that the same source
always gives the same shards.

The journal consists of two kinds of files in the work folder. Each file has a checksum and is
written atomically. `plan.json` contains the settings of the conversion and the keys of its units.
When a unit is finished, its record `unit.json` is written to the folder of the unit. The record
lists the shards of the unit and the outcomes of its inputs. After the dataset is published, the
plan is renamed to `published.json`, which is the last file to be removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import zstandard

from shardio._base import __version__
from shardio.conversion.converter import Input, Item
from shardio.conversion.report import InputReport
from shardio.errors import DataError, DatasetCorrupt, DatasetExists, InvalidArgument
from shardio.format.checksum import hash_bytes
from shardio.format.layout import MAJOR, MINOR
from shardio.maintenance import verify_shard
from shardio.shard.reader import ShardReader
from shardio.shard.writer import ShardSummary
from shardio.storage.fs import read_checksummed_json, to_checksummed_json, write_atomic

MIN_UNIT_BYTES: Final = 1 << 20
"""The minimum target size of a unit. Shards of smaller units would be slow to read."""
MAX_UNIT_BYTES: Final = 128 << 20
"""The maximum target size of a unit. With larger units, workers would wait longer at the end."""
N_UNITS: Final = 64
"""The number of units, if their size is within the limits: enough to keep all workers busy."""
MIN_INPUT_BYTES: Final = 4096
"""The size that the plan assumes for smaller inputs, because opening a file takes time too."""
MAX_UNIT_ITEMS: Final = 4096
"""The maximum number of items in a unit: an interruption loses all work on unfinished units."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Consecutive inputs that one worker converts into shards of their own.

    `number` is part of the names of these shards. `first` is the index of the unit's first input
    among all inputs. Each item of `skipped` stands for an input that is not read again because it
    crashed workers: the index of the input among all inputs, and the reason for the report.
    """

    number: int
    first: int
    inputs: tuple[Input, ...]
    skipped: tuple[tuple[int, str], ...] = ()

    @property
    def key(self) -> str:
        """The name of the unit's folder: a hash of its inputs' names, labels, sizes and times."""
        content = [
            [one.name, one.label, one.n_bytes, *one.stamp]
            + [[part.name, part.n_bytes, *part.stamp] for part in one.parts]
            for one in self.inputs
        ]
        return f"{hash_bytes(json.dumps(content).encode()):016x}"

    @property
    def title(self) -> str:
        """The names of the first and the last input, for messages."""
        return f"{self.inputs[0].name} to {self.inputs[-1].name}"

    def published_shard(self, shard: ShardSummary) -> ShardSummary:
        """Return the summary of a shard of the unit, with the name of the shard in the dataset."""
        return replace(shard, name=f"{self.number:06d}-{shard.name}")


def cut_units(inputs: Sequence[Input]) -> list[Unit]:
    """Divide files into units of similar size, and Python items into units of equal length."""
    if has_items(inputs):
        n_items = min(max(_power_of_two(len(inputs) // N_UNITS), 1), MAX_UNIT_ITEMS)
        starts = range(0, len(inputs), n_items)
        return [
            Unit(n, first, tuple(inputs[first : first + n_items])) for n, first in enumerate(starts)
        ]
    total = sum(_weight(source) for source in inputs)
    unit_bytes = min(max(_power_of_two(total // N_UNITS), MIN_UNIT_BYTES), MAX_UNIT_BYTES)
    units: list[Unit] = []
    run: list[Input] = []
    n_bytes = 0
    for position, source in enumerate(inputs):
        run.append(source)
        n_bytes += _weight(source)
        if n_bytes >= unit_bytes or position + 1 == len(inputs):
            units.append(Unit(len(units), position + 1 - len(run), tuple(run)))
            run, n_bytes = [], 0
    return units


def has_items(inputs: Sequence[Input]) -> bool:
    """Return True if the inputs are items of a Python iterable instead of files."""
    return bool(inputs) and isinstance(inputs[0], Item)


def _weight(one: Input) -> int:
    """Return the size of an input and its parts, which predicts the time to convert them."""
    if one.part_of:
        return 0  # Its size is included in that of another input.
    return max(one.n_bytes + sum(part.n_bytes for part in one.parts), MIN_INPUT_BYTES)


def _power_of_two(n: int) -> int:
    """Round `n` down to a power of 2, so that a few more files do not change the size of units."""
    return 1 << n.bit_length() - 1 if n else 0


class InputDone(NamedTuple):
    """The event of a finished input, whose index among all inputs is `position`.

    The report contains the size that the input had when it was read. A later append compares this
    size with that of the file.
    """

    unit: int
    position: int
    report: InputReport


class UnitDone(NamedTuple):
    """The event of a finished unit; `stopped` is True if it ended at a broken input."""

    unit: int
    stopped: bool
    shards: tuple[ShardSummary, ...]


UnitEvent = InputDone | UnitDone


PLAN_FILE: Final = "plan.json"
PUBLISHED_FILE: Final = "published.json"
"""The name of the plan after the dataset is published: the rest of the folder can be removed."""
RECORD_FILE: Final = "unit.json"
_VERSION: Final = 2


@dataclass(frozen=True, slots=True)
class JournaledPlan:
    """The content of `plan.json`. `units` are the keys of the units.

    `replaces` and `appends` are True if the conversion replaces or extends a dataset.
    """

    settings: Mapping[str, Any]
    units: tuple[str, ...]
    replaces: bool
    appends: bool


def conversion_settings(
    converter: Mapping[str, Any], libraries: Mapping[str, str]
) -> dict[str, Any]:
    """Return all settings that determine the bytes of the shards, apart from the source itself."""
    versions = {
        "shardio": __version__,
        "format": f"{MAJOR}.{MINOR}",
        "zstd": ".".join(map(str, zstandard.ZSTD_VERSION)),
        **libraries,
    }
    return {"converter": dict(converter), "versions": versions, "machine": platform.machine()}


def write_plan(folder: Path, plan: JournaledPlan) -> None:
    """Write the plan to the work folder of the conversion, durably."""
    content = {"version": _VERSION, **asdict(plan)}
    write_atomic(folder / PLAN_FILE, to_checksummed_json(content), exclusive=False)


def plan_path(folder: Path) -> Path | None:
    """Return the path of the plan in a work folder; None if there is none."""
    paths = (folder / PLAN_FILE, folder / PUBLISHED_FILE)
    return next((path for path in paths if path.exists()), None)


def read_plan(folder: Path) -> JournaledPlan | None:
    """Read the plan in a work folder; return None if there is none.

    Raise InvalidArgument if another version of shardio wrote the plan, and DatasetCorrupt if it is
    damaged.
    """
    path = plan_path(folder)
    if path is None:
        return None
    content = read_checksummed_json(path)
    if content.get("version") != _VERSION:
        raise InvalidArgument(
            f"{path}: version {content.get('version')!r} of the journal; this shardio reads "
            f"{_VERSION}; resume with the version of shardio that started the conversion"
        )
    settings, units = content.get("settings"), content.get("units")
    replaces, appends = content.get("replaces"), content.get("appends")
    is_whole = type(replaces) is bool and type(appends) is bool
    if not (is_whole and isinstance(settings, dict) and isinstance(units, list)):
        raise DatasetCorrupt(
            f"{path}: expected settings, units, replaces and appends; found {sorted(content)}"
        )
    return JournaledPlan(settings, tuple(map(str, units)), bool(replaces), bool(appends))


def check_same_settings(
    plan: JournaledPlan, settings: Mapping[str, Any], out: Path, hint: str
) -> None:
    """Raise InvalidArgument if the settings of the conversion to resume differ from `settings`."""
    if found := different_settings(plan.settings, settings):
        differences = [f"{name} was {before!r}, is {now!r}" for name, before, now in found]
        raise InvalidArgument(
            f"{out}: cannot resume with other settings: {'; '.join(differences)}; use the original "
            f"settings; {hint}"
        )


def different_settings(
    recorded: Mapping[str, Any], current: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    """Return the dotted name and both values of each setting that differs."""
    before, now = dict(_flatten(recorded)), dict(_flatten(current))
    names = sorted({*before, *now})
    differing = [name for name in names if before.get(name) != now.get(name)]
    return [(name, before.get(name), now.get(name)) for name in differing]


def check_same_units(plan: JournaledPlan, units: Sequence[str], out: Path, hint: str) -> None:
    """Raise DatasetExists if the inputs have changed since an earlier conversion published them.

    If that conversion were resumed, success would be reported, although the dataset lacks some of
    the current inputs.
    """
    if plan.units != tuple(units):
        default = "append (--append) adds new inputs, overwrite (--overwrite) starts again"
        raise DatasetExists(
            f"{out}: the interrupted conversion has published its dataset, and its inputs have "
            f"changed since; {hint or default}"
        )


def _flatten(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        full = f"{above}.{name}" if above else name
        if isinstance(value, Mapping):
            yield from _flatten(value, full)
        else:
            yield full, list(value) if isinstance(value, tuple) else value


def write_record(folder: Path, done: Sequence[InputDone], end: UnitDone) -> None:
    """Write the record of a finished unit to the folder of the unit, durably."""
    content = {
        "inputs": [{**one.report.as_json(), "bytes": one.report.n_bytes} for one in done],
        "shards": [
            {"name": s.name, "samples": s.n_samples, "bytes": s.n_bytes, "id": s.id}
            for s in end.shards
        ],
        "stopped": end.stopped,
    }
    write_atomic(folder / RECORD_FILE, to_checksummed_json(content), exclusive=False)


def lacks_units(folder: Path) -> bool:
    """Return True if the plan in a work folder has no units, so that nothing can be resumed."""
    with contextlib.suppress(DataError, InvalidArgument, OSError):
        plan = read_plan(folder)
        return plan is not None and not plan.units
    return False


def has_records(folder: Path) -> bool:
    """Return True if the work folder has the record of a finished unit."""
    return next(folder.glob(f"*/{RECORD_FILE}"), None) is not None


def read_record(folder: Path, unit: Unit) -> tuple[list[InputDone], UnitDone] | None:
    """Read the record of a finished unit, verify every byte of its shards, and return its events.

    Return None if a file is damaged or missing, or a shard was uploaded under another name.
    """
    with contextlib.suppress(DataError, OSError, LookupError, TypeError, ValueError):
        content = read_checksummed_json(folder / RECORD_FILE)
        shards = [
            ShardSummary(one["name"], one["samples"], one["bytes"], one["id"])
            for one in content["shards"]
        ]
        known = {one.name: one for one in unit.inputs}
        done = [
            InputDone(unit.number, position, InputReport.of_json(one, known))
            for position, one in enumerate(content["inputs"], unit.first)
        ]
        if all(_is_intact(folder, unit, shard) for shard in shards):
            return done, UnitDone(unit.number, content["stopped"], tuple(shards))
    return None


def _is_intact(folder: Path, unit: Unit, shard: ShardSummary) -> bool:
    if os.path.basename(shard.name) != shard.name:
        return False  # The name contains a folder. A conversion writes no such name.
    path = os.path.join(folder, shard.name)
    if (name := uploaded_name(path)) is not None:  # The main process checks the uploaded shard.
        return name == unit.published_shard(shard).name
    with ShardReader(path, verify="off") as reader:
        found = ShardSummary(shard.name, len(reader), reader.header.file_size, reader.id)
    return found == shard and not verify_shard(path)


def uploaded_name(path: str) -> str | None:
    """Return the name that the shard at `path` has in the store; None if it is not uploaded."""
    with contextlib.suppress(DataError, OSError):
        return str(read_checksummed_json(_note_path(path)).get("name"))
    return None


def write_upload_note(path: str, name: str) -> None:
    """Record beside the shard at `path`, durably, that it is uploaded under the name `name`."""
    write_atomic(_note_path(path), to_checksummed_json({"name": name}), exclusive=False)


def _note_path(path: str) -> Path:
    return Path(f"{path}.sent")
