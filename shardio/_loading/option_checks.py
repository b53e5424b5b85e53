"""What a loader's options may be, one by one: each is given back as it is kept, or refused."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from typing import Any, Final, Literal, get_args

import numpy as np

from shardio._base.stack_level import level_of_caller
from shardio.batch.collation import Collation
from shardio.errors import InvalidArgument
from shardio.format.schema import Schema
from shardio.order.partition import told_by_launcher

OnError = Literal["raise", "skip"]
_ON_ERROR: Final = get_args(OnError)
_MOST_RANKS: Final = 1 << 24
_LONGEST_S: Final = 1_000_000
"""The kernel counts milliseconds in 31 bits."""


def one_of(name: str, value: Any, known: tuple[Any, ...]) -> Any:
    """A value that is one of those known."""
    if not any(value is k or (isinstance(value, str) and value == k) for k in known):
        raise InvalidArgument(
            f"{name} must be one of {', '.join(map(repr, known))}; found {value!r}"
        )
    return value


def count(name: str, value: Any, least: int, most: int | None = None) -> int:
    """An integer within bounds."""
    is_count = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_count or value < least or (most is not None and value > most):
        limit = "up" if most is None else f"to {most}"
        raise InvalidArgument(f"{name} must be an integer from {least} {limit}; found {value!r}")
    return int(value)


def refuse_path(name: str, value: Any) -> None:
    """Refuse a path or text where items are expected: its characters would be the items.

    Raises:
        InvalidArgument: naming what loads a dataset at a path.
    """
    if not isinstance(value, str | bytes | bytearray | os.PathLike):
        return
    path = os.fsdecode(bytes(value)) if isinstance(value, bytes | bytearray) else os.fspath(value)
    raise InvalidArgument(
        f"{name} must be an iterable of items, and not a path or text; found {value!r}: "
        f"shardio.ShardLoader({path!r}, batch_size) loads the shards at a path, shardio.open() "
        "gives their samples one by one, and list() the characters of a text"
    )


def place_among_ranks(rank: Any, world_size: Any) -> tuple[int, int]:
    """Which of how many ranks this process is: as it was told, or as its launcher says."""
    if (rank is None) != (world_size is None):
        raise InvalidArgument(
            f"rank and world_size belong together; found rank={rank!r}, world_size={world_size!r}"
        )
    where = "rank"
    if rank is None:
        where, rank, world_size = told_by_launcher()
    n = count("world_size", world_size, 1, _MOST_RANKS)
    if count("rank", rank, 0) >= n:
        raise InvalidArgument(f"{where} must be below world_size, which is {n}; found {rank}")
    return int(rank), n


def warn_of_no_batch(epoch: int, n_samples: int, batch_size: int, world_size: int) -> None:
    """Warn that tail="drop" leaves an epoch with samples but without a batch."""
    step = f"{batch_size * world_size} of a step" + f" of {world_size} ranks" * (world_size > 1)
    warnings.warn(
        f"epoch {epoch} has no batch: tail='drop' leaves out all of its {n_samples} samples, which "
        f"are fewer than the {step}: pass a smaller batch_size than {batch_size}, or tail='short' "
        "or 'pad'",
        RuntimeWarning,
        stacklevel=level_of_caller(),
    )


def most_skips(on_error: Any, max_skips: Any) -> int | None:
    """How many samples of an epoch may be skipped; None for those who skip none."""
    skips = one_of("on_error", on_error, _ON_ERROR) == "skip"
    if max_skips is None:
        if skips:
            raise InvalidArgument(
                "on_error='skip' needs max_skips: how many samples of an epoch may fail before it "
                "is an error, from 0 up"
            )
        return None
    if not skips:
        raise InvalidArgument(
            f"max_skips is for on_error='skip'; found max_skips={max_skips!r} with "
            f"on_error={on_error!r}"
        )
    return count("max_skips", max_skips, 0)


def seconds(name: str, value: Any) -> float | None:
    """A span of time, or None for ever."""
    if value is None:
        return None
    is_number = isinstance(value, int | float | np.integer | np.floating)
    if not is_number or isinstance(value, bool) or not 0 < value <= _LONGEST_S:
        raise InvalidArgument(
            f"{name} must be a number of seconds above 0 and up to {_LONGEST_S}; found {value!r}"
        )
    return float(value)


def known_fields(fields: Any, schema: Schema) -> tuple[str, ...]:
    """The names of fields, those of nested records spelled out; None is all."""
    if fields is None:
        return tuple(schema)
    if isinstance(fields, str):
        raise InvalidArgument(f"fields must be a list of names; found the string {fields!r}")
    if not isinstance(fields, Iterable):
        raise InvalidArgument(f"fields must be a list of names; found {fields!r}")
    wanted = tuple(each for name in fields for each in _below(name, schema))
    is_known = all(isinstance(name, str) and name in schema for name in wanted)
    if not is_known or not wanted or len(set(wanted)) < len(wanted):
        known = ", ".join(schema)
        raise InvalidArgument(f"fields must be different ones of {known}; found {wanted!r}")
    return wanted


def _below(name: Any, schema: Schema) -> list[Any]:
    """The fields of a nested record, or else the name itself."""
    if not isinstance(name, str) or name not in schema.groups:
        return [name]
    return [each for each in schema if each.startswith(f"{name}.")]


def callable_or_none(name: str, function: Any) -> Any:
    """A function, or None."""
    if function is not None and not callable(function):
        raise InvalidArgument(f"{name} must be callable; found {function!r}")
    return function


def collation_for(collation: Collation, device: Any) -> Collation:
    """A collation that goes with the device."""
    rules = collation.others, *collation.named.values()
    if isinstance(device, tuple | list) and any(rule.kind == "ragged" for rule in rules):
        raise InvalidArgument(
            "collate='ragged' makes arrays that are not as long as the batch and cannot be cut "
            f"along it over the devices {tuple(device)!r}: ask for 'pad', or for one device"
        )
    return collation


def device_or_none(device: Any, output: str) -> Any:
    """The name of a device or several, or None for the default."""
    if device is None:
        return None
    if output == "numpy":
        raise InvalidArgument("device is for tensors; output is 'numpy'")
    if output != "tinygrad" and not isinstance(device, str):
        raise InvalidArgument(f"device must be a name with output={output!r}; found {device!r}")
    names = device if isinstance(device, tuple | list) else (device,)
    if not names or not all(isinstance(name, str) for name in names):
        raise InvalidArgument(f"device must be a name or a tuple of names; found {device!r}")
    return device if isinstance(device, str) else tuple(device)
