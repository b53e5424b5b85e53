"""The plan of a conversion, and its journal on disk, from which the conversion can resume.

The plan cuts the inputs into units of work. It depends only on the source, not on the number of
workers or the machine, so the same source always gives the same shards. Workers send the events of
a unit to the main process: an InputDone per input, then UnitDone.

`plan.json` contains the settings of the conversion and the keys of its units. Every unit has a
folder for its shards; the folder's name is the unit's key. When the shards are complete, a file
`unit.json` is written there, which lists the shards and the outcomes of the unit's inputs. Both
files are checksummed and written atomically. A unit is reused only if every byte of its shards is
unchanged. After the dataset is published, the plan is renamed to `published.json`, which is removed
last.
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

from shardio._base.version import __version__
from shardio.conversion.converter import Input, Item, Outcome
from shardio.errors import DataError, DatasetCorrupt, DatasetExists, InvalidArgument
from shardio.format.checksum import hash_bytes
from shardio.format.layout import MAJOR, MINOR
from shardio.maintenance import verify_shard
from shardio.shard.reader import ShardReader
from shardio.shard.writer import ShardSummary
from shardio.storage.fs import read_checksummed_json, to_checksummed_json, unlink, write_atomic

MIN_UNIT_BYTES: Final = 1 << 20  # smaller units would give shards too small to read efficiently
MAX_UNIT_BYTES: Final = 128 << 20  # larger units would leave workers idle at the end
N_UNITS: Final = 64  # minimum number, within these limits, so that all workers finish together
MIN_INPUT_BYTES: Final = 4096  # minimum weight of an input, because opening it takes time
MAX_UNIT_ITEMS: Final = 4096  # limits the work repeated on resume


@dataclass(frozen=True, slots=True)
class Unit:
    """A run of consecutive inputs that one worker converts into separate shards.

    `number` is part of the shards' names; `first` is the index of the first input among all inputs.
    `skipped` has an (index, reason) for each input that crashed the processes reading it; such
    inputs are not read again.
    """

    number: int
    first: int
    inputs: tuple[Input, ...]
    skipped: tuple[tuple[int, str], ...] = ()

    @property
    def key(self) -> str:
        """A name derived only from the inputs and their state, not from the rest of the plan."""
        content = [
            [one.name, one.label, one.n_bytes, *one.stamp]
            + [[part.name, part.n_bytes, *part.stamp] for part in one.parts]
            for one in self.inputs
        ]
        return f"{hash_bytes(json.dumps(content).encode()):016x}"

    @property
    def title(self) -> str:
        """The first and the last input, for messages."""
        return f"{self.inputs[0].name} to {self.inputs[-1].name}"

    def published_shard(self, shard: ShardSummary) -> ShardSummary:
        """Return a shard of the unit with its name in the dataset."""
        return replace(shard, name=f"{self.number:06d}-{shard.name}")


def cut_units(inputs: Sequence[Input]) -> list[Unit]:
    """Cut inputs into units of about equal cost; cut items, whose size is unknown, by count."""
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
    """Return True for items, whose size does not predict the size of their samples."""
    return bool(inputs) and isinstance(inputs[0], Item)


def _weight(one: Input) -> int:
    """Return the cost of reading an input in bytes; 0 for a part, whose cost another input has."""
    if one.part_of:
        return 0
    return max(one.n_bytes + sum(part.n_bytes for part in one.parts), MIN_INPUT_BYTES)


def _power_of_two(n: int) -> int:
    """Round down to a power of 2, so that a few new files do not change the unit size."""
    return 1 << n.bit_length() - 1 if n else 0


class InputDone(NamedTuple):
    """The event of a finished input; `position` is the index of the input among all inputs.

    `hash` is the content hash if the input gave samples. `n_bytes` is the size when the input was
    read, because the listing may be hours older. An append compares both.
    """

    unit: int
    position: int
    outcome: Outcome
    n_samples: int
    n_bytes: int
    hash: str = ""


class UnitDone(NamedTuple):
    """The event of a finished unit, whose shards are in its folder under the given names.

    `stopped` is True if the unit ended at a broken input; later inputs were not read.
    """

    unit: int
    stopped: bool
    shards: tuple[ShardSummary, ...]


UnitEvent = InputDone | UnitDone


WORK_FOLDER: Final = ".conversion"
"""The folder in `out` that holds the work of a conversion."""
PLAN_FILE: Final = "plan.json"
PUBLISHED_FILE: Final = "published.json"
"""The plan of a published conversion; all other files in the work folder can be removed."""
RECORD_FILE: Final = "unit.json"
_VERSION: Final = 2


@dataclass(frozen=True, slots=True)
class JournaledPlan:
    """The settings of a conversion and the keys of its units.

    `replaces` is True if a dataset in `out` is to be replaced, `appends` for an append.
    """

    settings: Mapping[str, Any]
    units: tuple[str, ...]
    replaces: bool
    appends: bool


def conversion_settings(
    converter: Mapping[str, Any], libraries: Mapping[str, str]
) -> dict[str, Any]:
    """Return all settings that, together with the source, determine the bytes of the shards."""
    versions = {
        "shardio": __version__,
        "format": f"{MAJOR}.{MINOR}",
        "zstd": ".".join(map(str, zstandard.ZSTD_VERSION)),
        **libraries,
    }
    return {"converter": dict(converter), "versions": versions, "machine": platform.machine()}


def write_plan(folder: Path, plan: JournaledPlan) -> None:
    """Write the plan to the folder of the conversion, durably."""
    content = {"version": _VERSION, **asdict(plan)}
    write_atomic(folder / PLAN_FILE, to_checksummed_json(content), exclusive=False)


def plan_path(folder: Path) -> Path | None:
    """Return the path of an earlier conversion's plan; None if there is none."""
    return next(
        (folder / name for name in (PLAN_FILE, PUBLISHED_FILE) if (folder / name).exists()), None
    )


def read_plan(folder: Path) -> JournaledPlan | None:
    """Read the plan of an earlier conversion; None if there is none."""
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
    """Refuse to resume with other options, versions or machine types; name all of them."""
    if found := different_settings(plan.settings, settings):
        differences = [f"{name} was {before!r}, is {now!r}" for name, before, now in found]
        raise InvalidArgument(
            f"{out}: cannot resume with other settings: {'; '.join(differences)}; use the original "
            f"settings; {hint}"
        )


def different_settings(
    recorded: Mapping[str, Any], current: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    """Return the settings that differ: the dotted name of each, and both values."""
    before, now = dict(_flatten(recorded)), dict(_flatten(current))
    names = sorted({*before, *now})
    differing = [name for name in names if before.get(name) != now.get(name)]
    return [(name, before.get(name), now.get(name)) for name in differing]


def check_same_units(plan: JournaledPlan, units: Sequence[str], out: Path, hint: str) -> None:
    """Refuse to report success for a published dataset whose inputs have changed since."""
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
    """Record durably in a unit's folder that its shards are complete."""
    content = {
        "inputs": [
            {
                "outcome": one.outcome.kind,
                "reason": one.outcome.reason,
                "detail": dict(one.outcome.detail),
                "samples": one.n_samples,
                "bytes": one.n_bytes,
                "hash": one.hash,
            }
            for one in done
        ],
        "shards": [
            {"name": s.name, "samples": s.n_samples, "bytes": s.n_bytes, "id": s.id}
            for s in end.shards
        ],
        "stopped": end.stopped,
    }
    write_atomic(folder / RECORD_FILE, to_checksummed_json(content), exclusive=False)


def has_records(folder: Path) -> bool:
    """Return True if any unit is complete."""
    return next(folder.glob(f"*/{RECORD_FILE}"), None) is not None


def delete_record(folder: Path) -> None:
    """Delete the record of a unit, so that it is converted again."""
    unlink(folder / RECORD_FILE)


def read_record(folder: Path, unit: Unit) -> tuple[list[InputDone], UnitDone] | None:
    """Read the record of a unit and verify its shards in full.

    Return None, so that the unit is converted again, if there is no record, if anything has
    changed, or if the shards were uploaded under other names than those in this plan.
    """
    with contextlib.suppress(DataError, OSError, LookupError, TypeError, ValueError):
        content = read_checksummed_json(folder / RECORD_FILE)
        shards = [
            ShardSummary(one["name"], one["samples"], one["bytes"], one["id"])
            for one in content["shards"]
        ]
        done = [
            InputDone(
                unit.number,
                position,
                Outcome(one["outcome"], one["reason"], one["detail"]),
                one["samples"],
                one["bytes"],
                one["hash"],
            )
            for position, one in enumerate(content["inputs"], unit.first)
        ]
        if all(_is_intact(folder, unit, shard) for shard in shards):
            return done, UnitDone(unit.number, content["stopped"], tuple(shards))
    return None


def _is_intact(folder: Path, unit: Unit, shard: ShardSummary) -> bool:
    if os.path.basename(shard.name) != shard.name:
        return False  # outside of this folder: not written by a conversion
    path = os.path.join(folder, shard.name)
    if (name := uploaded_name(path)) is not None:  # the main process checks the upload
        return name == unit.published_shard(shard).name
    with ShardReader(path, verify="off") as reader:
        found = ShardSummary(shard.name, len(reader), reader.header.file_size, reader.id)
    return found == shard and not verify_shard(path)


def uploaded_name(path: str) -> str | None:
    """Return the name in the store of the shard uploaded from `path`; None if not uploaded."""
    with contextlib.suppress(DataError, OSError):
        return str(read_checksummed_json(_note_path(path)).get("name"))
    return None


def write_upload_note(path: str, name: str) -> None:
    """Record durably that the shard at `path` was uploaded as `name`."""
    write_atomic(_note_path(path), to_checksummed_json({"name": name}), exclusive=False)


def _note_path(path: str) -> Path:
    return Path(f"{path}.sent")
