"""The frames of a LeRobot data set: rows of a table, gathered into episodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np

from shardio import MediaError, Text
from shardio_converters.arrow.fields import refuse_other_type
from shardio_converters.arrow.files import open_table
from shardio_converters.arrow.types import Column, columns_of
from shardio_converters.arrow.values import values_of
from shardio_converters.field_specs import Field, make_field

NUMBER: Final = "episode_index"
_TEXTS: Final = "json"


@dataclass(frozen=True)
class Frames:
    """The rows of an episode: the first one's position in the file, values by column."""

    number: int
    first_row: int
    values: Mapping[str, Any]


def read_frames(
    path: str, name: str, specs: Mapping[str, str], *, all_of: bool = True
) -> Iterator[Frames]:
    """Read a file of data, episode by episode; `specs` say what becomes of its columns.

    Args:
        all_of: whether it may have no other columns.

    Raises:
        MediaError: it is damaged, or a column is not what it should be, or is missing.
    """
    with open_table(path, name) as table:
        if all_of and (others := [one for one in table.schema.names if one not in specs]):
            raise MediaError(f"column {others[0]!r}: expected no such column, which is no feature")
        columns = {one.name: one for one in columns_of(table.schema, [*specs])}
        fields = {key: _field_of(columns[key], spec) for key, spec in specs.items()}
        row, first_row, number = 0, 0, -1
        parts: dict[str, list[Any]] = {}
        for batch in table.batches([*specs]):
            numbers = np.asarray(values_of(batch, columns[NUMBER], fields[NUMBER], row))
            cuts = (np.flatnonzero(np.diff(numbers)) + 1).tolist()
            for begin, end in pairwise([0, *cuts, len(numbers)]):
                if begin == end:
                    continue
                if parts and numbers[begin] != number:
                    yield Frames(number, first_row, _gathered(parts, specs))
                    parts = {}
                if not parts:
                    number, first_row = int(numbers[begin]), row + begin
                    parts = {key: [] for key in specs}
                piece = batch.slice(begin, end - begin)
                for key, field in fields.items():
                    parts[key] += values_of(piece, columns[key], field, row + begin)
            row += batch.num_rows
        if parts:
            yield Frames(number, first_row, _gathered(parts, specs))


def _field_of(column: Column, spec: str) -> Field:
    """What a row has in a column.

    Raises:
        MediaError: the column is another one.
    """
    if spec == _TEXTS:
        if column.word != "text":
            raise MediaError(f"column {column.name!r}: expected text, found {column.word}")
        return Text()
    word = spec.replace("[*,", "[").replace("[*]", "")
    field = make_field(column.name, word)
    refuse_other_type(column, field, word)
    return field


def _gathered(parts: Mapping[str, list[Any]], specs: Mapping[str, str]) -> dict[str, Any]:
    return {key: one if specs[key] == _TEXTS else np.array(one) for key, one in parts.items()}


def refuse_other_frames(frames: Frames, length: int, tasks: Mapping[int, str]) -> None:
    """Make sure that an episode has all its frames, and that its tasks are known.

    Raises:
        MediaError: it has not, or they are not.
    """
    numbers = frames.values["frame_index"]
    if len(numbers) != length:
        raise MediaError(f"expected {length:,} frames, found {len(numbers):,}")
    wrong = np.flatnonzero(numbers != np.arange(length))
    if len(wrong):
        n = int(wrong[0])
        raise MediaError(f"row {frames.first_row + n:,}: expected frame {n:,}, found {numbers[n]}")
    if unknown := sorted({*frames.values["task_index"].tolist()} - tasks.keys()):
        raise MediaError(
            f"task {unknown[0]} is not among the tasks, of which there are {len(tasks)}"
        )
