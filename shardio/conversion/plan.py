"""The plan of a conversion: inputs cut into units of work, and the events that report on them.

The plan depends only on the source, not on the number of workers or the machine, so that the
same source gives the same shards everywhere. A unit emits its events in the order of the classes
below; they are sent from the workers to the main process.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from shardio.conversion.source import Input, Item, Outcome
from shardio.format.checksum import hash_bytes
from shardio.shard.writer import ShardSummary

MIN_UNIT_BYTES: Final = 1 << 20  # smaller units would give shards too small to read well
MAX_UNIT_BYTES: Final = 128 << 20  # larger ones would leave workers idle at the end
N_UNITS: Final = 64  # minimum, within these limits: enough for all workers to end together
MIN_INPUT_BYTES: Final = 4096  # minimum weight of an input: opening it takes time, too
MAX_UNIT_ITEMS: Final = 4096  # an unfinished unit is converted again on resume


@dataclass(frozen=True, slots=True)
class Unit:
    """A run of consecutive inputs that one worker converts into shards of its own.

    `number` names the shards; `first` is the position of the first input among all inputs.
    `skipped` lists positions of inputs that crash the processes reading them, each with the reason:
    they are not read again.
    """

    number: int
    first: int
    inputs: tuple[Input, ...]
    skipped: tuple[tuple[int, str], ...] = ()

    @property
    def key(self) -> str:
        """A name derived from the inputs and their state: the same in any plan."""
        content = [
            [one.name, one.label, one.n_bytes, *one.stamp]
            + [[part.name, part.n_bytes, *part.stamp] for part in one.parts]
            for one in self.inputs
        ]
        return f"{hash_bytes(json.dumps(content).encode()):016x}"

    def published_shard(self, shard: ShardSummary) -> ShardSummary:
        """Return a shard of the unit with its name in the dataset."""
        return replace(shard, name=f"{self.number:06d}-{shard.name}")


def cut_units(inputs: Sequence[Input]) -> list[Unit]:
    """Cut inputs into units of about equal cost; items, whose size is unknown, by count.

    `compact_shards` merges the small shards that units of items may give.
    """
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
    """Return True if these are items, whose size does not predict that of their samples."""
    return bool(inputs) and isinstance(inputs[0], Item)


def _weight(one: Input) -> int:
    """Return the cost of reading an input in bytes; a part is read as part of another input."""
    if one.part_of:
        return 0
    return max(one.n_bytes + sum(part.n_bytes for part in one.parts), MIN_INPUT_BYTES)


def _power_of_two(n: int) -> int:
    """Round down to a power of 2, so that a few new files do not move all earlier cuts."""
    return 1 << n.bit_length() - 1 if n else 0


class InputStarted(NamedTuple):
    """An input is about to be read; if the process crashes now, that input is to blame."""

    unit: int
    position: int


class InputDone(NamedTuple):
    """One input is finished; `position` counts all inputs.

    `hash` is the content hash if it gave samples, and `n_bytes` its size when it was read. An
    append compares both. The listing may be hours older.
    """

    unit: int
    position: int
    outcome: Outcome
    n_samples: int
    n_bytes: int
    hash: str = ""


class UnitDone(NamedTuple):
    """A unit is finished: its shards are in its folder, under the names given here.

    `stopped` is True if it ended at a broken input; later inputs were not read.
    """

    unit: int
    stopped: bool
    shards: tuple[ShardSummary, ...]


UnitEvent = InputStarted | InputDone | UnitDone
