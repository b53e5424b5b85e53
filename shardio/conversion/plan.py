"""Which inputs there are, their classes, and the units into which they are cut.

The plan follows from the source alone: neither the number of workers nor the machine has a part
in it, so that the same source gives the same shards anywhere.

What a unit says while it is converted, in this order; it travels from the workers to main.
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
N_UNITS: Final = 64  # at least, between the two: enough for the last units to end together
MIN_INPUT_BYTES: Final = 4096  # what an input counts for at least: opening it takes its time, too
MAX_UNIT_ITEMS: Final = 4096  # what is not finished is done anew by a conversion that goes on


@dataclass(frozen=True, slots=True)
class Unit:
    """A run of inputs that one worker converts into shards of its own.

    `number` names the shards; `first` is the position of its first input among all. `skipped` are
    positions of inputs that end every process which reads them, each with the reason: they are
    not read again.
    """

    number: int
    first: int
    inputs: tuple[Input, ...]
    skipped: tuple[tuple[int, str], ...] = ()

    @property
    def key(self) -> str:
        """Name the unit by its inputs and the state they are in: the same in any plan."""
        content = [
            [one.name, one.label, one.n_bytes, *one.stamp]
            + [[part.name, part.n_bytes, *part.stamp] for part in one.parts]
            for one in self.inputs
        ]
        return f"{hash_bytes(json.dumps(content).encode()):016x}"

    def published_shard(self, shard: ShardSummary) -> ShardSummary:
        """A shard of the unit, by the name that it has in the dataset."""
        return replace(shard, name=f"{self.number:06d}-{shard.name}")


def cut_units(inputs: Sequence[Input]) -> list[Unit]:
    """Cut inputs into units of about equal cost; items, whose bytes say nothing, evenly.

    The small shards that units of items may give are put together by `compact`.
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
    """Return whether these are items, whose own bytes do not tell how many bytes they give."""
    return bool(inputs) and isinstance(inputs[0], Item)


def _weight(one: Input) -> int:
    """What reading an input costs, in bytes; the bytes of a part are read for another input."""
    if one.part_of:
        return 0
    return max(one.n_bytes + sum(part.n_bytes for part in one.parts), MIN_INPUT_BYTES)


def _power_of_two(n: int) -> int:
    """Round down: so that a few files more or less leave the cuts before them where they are."""
    return 1 << n.bit_length() - 1 if n else 0


class InputStarted(NamedTuple):
    """An input is about to be read: should the process end now, that input is to blame."""

    unit: int
    position: int


class InputDone(NamedTuple):
    """One input is finished: `position` among all inputs.

    `hash` is that of its content where it gave samples, and `n_bytes` its size when it was read:
    what an append knows it by. The listing may be hours older.
    """

    unit: int
    position: int
    outcome: Outcome
    n_samples: int
    n_bytes: int
    hash: str = ""


class UnitDone(NamedTuple):
    """A unit is finished: its shards lie in its folder, under the names they have there.

    `stopped`: at a broken input, the ones after it were not looked at.
    """

    unit: int
    stopped: bool
    shards: tuple[ShardSummary, ...]


UnitEvent = InputStarted | InputDone | UnitDone
