"""The files in the folder `meta` of a LeRobot data set, read and checked."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardio import MediaError
from shardio_converters.arrow.files import open_table
from shardio_converters.file_names import data_name

INFO: Final = "meta/info.json"
EPISODE: Final = ("episode_index", "length")
"""What is known of every episode; each of the tuples names columns."""
PLACE: Final = ("episode_chunk", "episode_index")
"""What names the files of an episode that has them for itself: of version 2."""
DATA_PLACE: Final = ("data/chunk_index", "data/file_index")
VIDEO_PLACE: Final = ("chunk_index", "file_index", "from_timestamp", "to_timestamp")
ONE_EACH: Final = 2
"""The version in which each episode has files of its own."""

_EPISODES: Final = "meta/episodes"
_EPISODE_LINES: Final = "meta/episodes.jsonl"
_TASKS: Final = "meta/tasks.parquet"
_TASK_LINES: Final = "meta/tasks.jsonl"
_TASK_TEXTS: Final = ("task", "__index_level_0__")
"""The column of texts in the table of tasks; the second is what pandas calls an index."""

_MAX_BYTES: Final = 256 << 20  # of a text
_MAX_NUMBER: Final = 1 << 31
_DAMAGE: Final = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
"""What comes of texts that say something else than they should."""

Columns = dict[str, npt.NDArray[Any]]


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Have what is wrong with a file named with it.

    Raises:
        MediaError: it is damaged.
    """
    try:
        yield
    except MediaError as error:
        raise MediaError(f"{name}: {error}") from error
    except KeyError as error:
        raise MediaError(f"{name}: {error} is missing") from error
    except (*_DAMAGE, RecursionError) as error:
        raise MediaError(f"{name}: damaged: {error}") from error


def read_info(root: str) -> Mapping[str, Any]:
    """What `meta/info.json` says.

    Raises:
        MediaError: it is damaged.
    """
    with naming(INFO):
        info = json.loads(_text(root, INFO))
        if not isinstance(info, dict) or not isinstance(info["features"], dict):
            raise MediaError("expected an object with features")
        return info


def read_episode_tables(root: str, cameras: Sequence[str]) -> tuple[list[str], Columns]:
    """The tables of episodes, of version 3: their names, and their columns that are needed.

    Raises:
        MediaError: one is damaged, or there is none.
    """
    videos = [f"videos/{camera}/{key}" for camera in cameras for key in VIDEO_PLACE]
    wanted = [*EPISODE, *DATA_PLACE, *videos]
    found: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in wanted}
    paths = sorted(Path(root, _EPISODES).rglob("*.parquet"))
    names = [data_name(path.relative_to(root).as_posix()) for path in paths]
    for path, name in zip(paths, names, strict=True):
        with naming(name), open_table(str(path), name) as table:
            if missing := [key for key in wanted if key not in table.schema.names]:
                raise MediaError(f"column {missing[0]!r} is missing")
            for batch in table.batches(wanted):
                for key in wanted:
                    found[key].append(_numbers(key, batch.column(key)))
    with naming(_EPISODES):
        if not names:
            raise MediaError("no table of episodes")
        if not found[wanted[0]]:
            raise MediaError("the tables have no episode")
        columns = {key: np.concatenate(parts) for key, parts in found.items()}
        _check(columns)
    return names, columns


def read_episode_lines(root: str, info: Mapping[str, Any]) -> tuple[list[str], Columns]:
    """The list of episodes, of version 2: its name, and the numbers in it.

    Raises:
        MediaError: it is damaged.
    """
    with naming(_EPISODE_LINES):
        lines = [json.loads(line) for line in _text(root, _EPISODE_LINES).splitlines() if line]
        columns = {key: np.array([int(one[key]) for one in lines], np.int64) for key in EPISODE}
        columns[PLACE[0]] = columns["episode_index"] // max(1, int(info["chunks_size"]))
        _check(columns)
    return [_EPISODE_LINES], columns


def read_tasks(root: str, version: int) -> dict[int, str]:
    """The tasks by number.

    Raises:
        MediaError: they are damaged, or two have one number.
    """
    name = _TASK_LINES if version == ONE_EACH else _TASKS
    with naming(name):
        if version == ONE_EACH:
            lines = [json.loads(line) for line in _text(root, name).splitlines() if line]
            pairs = [(int(one["task_index"]), str(one["task"])) for one in lines]
        else:
            pairs = _task_rows(root)
        if len(dict(pairs)) < len(pairs):
            raise MediaError("two tasks have one number")
    return dict(pairs)


def _task_rows(root: str) -> list[tuple[int, str]]:
    with open_table(os.path.join(root, _TASKS), _TASKS) as table:
        text = next((key for key in _TASK_TEXTS if key in table.schema.names), None)
        if text is None:
            raise MediaError(f"column 'task' is missing, found {', '.join(table.schema.names)}")
        rows = [row for batch in table.batches(["task_index", text]) for row in batch.to_pylist()]
    return [(int(row["task_index"]), str(row[text])) for row in rows]


def _check(columns: Columns) -> None:
    """Make sure that numbers of episodes are what they are called.

    Raises:
        MediaError: they are not.
    """
    for key, values in columns.items():
        least = 1 if key == "length" else 0
        wrong = ~((values >= least) & (values < _MAX_NUMBER))  # NaN is neither
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise MediaError(f"row {row:,}, {key!r}: found {values[row]}, expected {least} or more")
    numbers = columns["episode_index"]
    if len(np.unique(numbers)) < len(numbers):
        raise MediaError("an episode is there twice")


def _numbers(name: str, values: pa.Array) -> npt.NDArray[Any]:
    is_known = pa.types.is_integer(values.type) or pa.types.is_floating(values.type)
    if not is_known or values.null_count:
        what = f"{values.null_count} nulls" if is_known else str(values.type)
        raise MediaError(f"column {name!r}: expected numbers, found {what}")
    return np.asarray(values.to_numpy(zero_copy_only=False))


def _text(root: str, name: str) -> str:
    path = os.path.join(root, name)
    if (n_bytes := os.path.getsize(path)) > _MAX_BYTES:
        raise MediaError(f"expected {_MAX_BYTES:,} bytes at most, found {n_bytes:,}")
    return Path(path).read_text(encoding="utf-8")
