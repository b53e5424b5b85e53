"""The events of videos: read from the field of a shard that names them, and checked."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio.errors import InvalidArgument
from shardio.format.fields import Array, List
from shardio.format.schema import Schema
from shardio.format.streams import Streams
from shardio.shard.reader import ShardReader
from shardio.shard.verification import Rows

Values = npt.NDArray[Any]

_NEARLY: Final = 1 - 1e-9
"""What is below a product by so much is below it, however floats have rounded it."""


def kind_of_events(schema: Schema, name: str) -> np.dtype[Any]:
    """What the events of a field are kept as: float64, seconds, or int64, numbers of frames.

    Raises:
        InvalidArgument: there is no such field, or it has no numbers, or tables of them.
    """
    field = schema.get(name)
    array = field.element if isinstance(field, List) else field
    if isinstance(array, Array) and len(array.shape) <= 1:
        if array.dtype.startswith("float"):
            return np.dtype(np.float64)
        if array.dtype.startswith(("int", "uint")):
            return np.dtype(np.int64)
    what = "there is none of that name" if field is None else f"found {field!r}"
    raise InvalidArgument(
        f"around={name!r} must be a field of numbers, floats in seconds or integers that are "
        f"numbers of frames: one for each sample, or a list or an array of one dimension; {what}"
    )


def read_events(reader: ShardReader, name: str, rows: Rows) -> tuple[Rows, Values]:
    """How many events each of some rows of a shard has, and all of them, those of the first first.

    A sample that lacks the field has none.

    Raises:
        ShardCorrupt: the field is damaged.
    """
    if name in reader.schema.columns:
        every = reader.column(name, rows).reshape(len(rows), -1)
        is_there = reader.present(name, rows)
        return np.where(is_there, every.shape[1], 0), every[is_there].reshape(-1)
    field = reader.schema[name]
    array = field.element if isinstance(field, List) else field
    none = np.zeros(0, array.numpy if isinstance(array, Array) else np.int64)
    found: list[Values] = []
    for value in reader.records.values(name, rows):
        parts = value if isinstance(value, list) else [] if value is None else [value]
        found.append(np.concatenate([none, *map(np.ravel, parts)]))
    return np.array([len(each) for each in found], np.int64), np.concatenate([none, *found])


def check_inside(
    reader: ShardReader,
    name: str,
    rows: Rows,
    events: tuple[Rows, Values],
    lines: Streams,
    lengths: npt.NDArray[np.uint64],
) -> None:
    """Make sure that what `read_events` gave is inside of the videos; of absent ones anything is.

    Args:
        reader, name, rows: as `read_events` was given them.
        events: what it gave.
        lines, lengths: of the videos of these rows, and how many ticks each has.

    Raises:
        InvalidArgument: naming the sample, the event, and how long its video is.
    """
    counts, values = events
    owners = np.repeat(np.arange(len(rows)), counts)
    if values.dtype.kind == "f":
        wrong = _outside(values, owners, lines, lengths)
    else:
        wrong = np.flatnonzero(
            (values < 0) | (values >= lines["n_frames"].astype(np.int64)[owners])
        )
    for i in wrong.tolist():
        line, value = lines[owners[i]], values[i].item()
        if not line["n_frames"]:
            continue
        if values.dtype.kind == "f":
            seconds = float(_seconds(line, lengths[owners[i]]))
            event, length = f"at {value} s", f"{seconds:.6g} s from its first frame on"
        else:
            event, length = f"at frame {value}", f"{int(line['n_frames'])} frames"
        raise InvalidArgument(
            f"{reader.path}, field {name!r}, sample {int(rows[owners[i]])}: an event {event} is "
            f"outside of the video, which has {length}; correct it, or leave the sample out with "
            "dataset.select"
        )


def _outside(values: Values, owners: Rows, lines: Streams, lengths: npt.NDArray[np.uint64]) -> Rows:
    """Which events, in seconds, are not inside of their videos: exactly, where it is close."""
    ticks = lines["numerator"] / np.maximum(lines["denominator"], 1)
    is_clear = (values >= 0) & (values < (lengths * ticks)[owners] * _NEARLY)
    wrong = [
        i
        for i in np.flatnonzero(~is_clear).tolist()
        if not np.isfinite(values[i])
        or not 0 <= Fraction(float(values[i])) < _seconds(lines[owners[i]], lengths[owners[i]])
    ]
    return np.array(wrong, np.int64)


def _seconds(line: np.void, length: np.uint64) -> Fraction:
    return Fraction(int(length) * int(line["numerator"]), max(1, int(line["denominator"])))
