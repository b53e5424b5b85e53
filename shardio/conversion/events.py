"""What a unit says while it is converted, in this order; it travels from the workers to main."""

from __future__ import annotations

from typing import NamedTuple

from shardio.conversion.source import Outcome
from shardio.shard.writer import ShardSummary


class InputBegun(NamedTuple):
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


UnitEvent = InputBegun | InputDone | UnitDone
