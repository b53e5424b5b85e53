"""Metadata of LeRobot datasets: features, tasks and episodes from the folder `meta`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from shardio import Input, InvalidArgument, MediaError
from shardio_converters.files import data_name, named_path
from shardio_converters.schema_spec import parse_field

if TYPE_CHECKING:  # pyarrow is imported on use, so that options can be listed without it
    import pyarrow as pa

INFO: Final = "meta/info.json"
EPISODE: Final = ("episode_index", "length")
DATA_PLACE: Final = ("data/chunk_index", "data/file_index")
VIDEO_PLACE: Final = ("chunk_index", "file_index", "from_timestamp", "to_timestamp")

_EPISODES: Final = "meta/episodes"
_TASKS: Final = "meta/tasks.parquet"
# The possible names of the column with the texts of tasks; the second is that of a pandas index
_TASK_TEXTS: Final = ("task", "__index_level_0__")

_MAX_BYTES: Final = 256 << 20  # the maximum size of a text file
_MAX_NUMBER: Final = 1 << 31
# Raised by unexpected content
_DAMAGE: Final = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)

Columns = dict[str, npt.NDArray[Any]]


@contextmanager
def _damage_in(name: str) -> Iterator[None]:
    """Turn errors from damaged content into MediaErrors that begin with the file's name."""
    try:
        yield
    except MediaError as error:
        raise MediaError(f"{name}: {error}") from error
    except KeyError as error:
        raise MediaError(f"{name}: {error} is missing") from error
    except (*_DAMAGE, RecursionError) as error:
        raise MediaError(f"{name}: damaged: {error}") from error


def _read_episode_tables(root: str, cameras: Sequence[str]) -> tuple[list[str], Columns]:
    """Return the names of the episode tables, and the columns needed from them."""
    from shardio_converters.tabular.arrow_files import open_table

    videos = [f"videos/{camera}/{key}" for camera in cameras for key in VIDEO_PLACE]
    wanted = [*EPISODE, *DATA_PLACE, *videos]
    found: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in wanted}
    paths = sorted(Path(root, _EPISODES).rglob("*.parquet"))
    names = [data_name(path.relative_to(root).as_posix()) for path in paths]
    for path, name in zip(paths, names, strict=True):
        with _damage_in(name), open_table(str(path), name) as table:
            if missing := [key for key in wanted if key not in table.schema.names]:
                raise MediaError(f"column {missing[0]!r} is missing")
            for batch in table.batches(wanted):
                for key in wanted:
                    found[key].append(_numbers(key, batch.column(key)))
    with _damage_in(_EPISODES):
        if not names:
            raise MediaError("there is no table of episodes")
        if not found[wanted[0]]:
            raise MediaError("the tables list no episode")
        columns = {key: np.concatenate(parts) for key, parts in found.items()}
        _check(columns)
    return names, columns


def _read_tasks(root: str) -> dict[int, str]:
    from shardio_converters.tabular.arrow_files import open_table

    with _damage_in(_TASKS), open_table(os.path.join(root, _TASKS), _TASKS) as table:
        names = table.schema.names
        text = next((key for key in _TASK_TEXTS if key in names), "")
        if not text:
            raise MediaError(f"column 'task' is missing, found {', '.join(names)}")
        rows = [row for batch in table.batches() for row in batch.to_pylist()]
        tasks = {int(row["task_index"]): str(row[text]) for row in rows}
        if len(tasks) < len(rows):
            raise MediaError("two tasks have the same number")
    return tasks


def _check(columns: Columns) -> None:
    """Check that all numbers are in range, and that no episode is listed twice."""
    for key, values in columns.items():
        least = 1 if key == "length" else 0
        wrong = ~((values >= least) & (values < _MAX_NUMBER))  # NaN fails both comparisons
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise MediaError(f"row {row:,}, {key!r}: found {values[row]}, expected {least} or more")
    numbers = columns["episode_index"]
    if len(np.unique(numbers)) < len(numbers):
        raise MediaError("an episode is listed twice")


def _numbers(name: str, values: pa.Array) -> npt.NDArray[Any]:
    from pyarrow import types

    is_known = types.is_integer(values.type) or types.is_floating(values.type)
    if not is_known or values.null_count:
        what = f"{values.null_count} nulls" if is_known else str(values.type)
        raise MediaError(f"column {name!r}: expected numbers, found {what}")
    return np.asarray(values.to_numpy(zero_copy_only=False))


def _text(root: str, name: str) -> str:
    path = os.path.join(root, name)
    if (n_bytes := os.path.getsize(path)) > _MAX_BYTES:
        raise MediaError(f"expected {_MAX_BYTES:,} bytes at most, found {n_bytes:,}")
    return Path(path).read_text(encoding="utf-8")


META: Final = "meta/"
VIDEO: Final = "video"
PICTURES: Final = "image"
"""A feature has the `dtype` VIDEO if its values are in video files, and the `dtype` PICTURES if
there is an image in each row."""

_MAX_FPS: Final = 1000
_MAX_DIMS: Final = 5
_WIDTH: Final = re.compile(r"(0?\dd)?")

Numbers = npt.NDArray[Any]


@dataclass(frozen=True)
class CameraSpan:
    """The part of a video file that belongs to an episode, from `begin` to `end` seconds."""

    name: str
    begin: Fraction
    end: Fraction  # in seconds


@dataclass(frozen=True)
class Episode:
    """An episode: its number, its number of frames, and its video spans by camera."""

    number: int
    length: int
    spans: Mapping[str, CameraSpan]


@dataclass(frozen=True)
class RobotSet:
    """The metadata of a LeRobot dataset of version 3; file names are relative to its folder.

    `specs` maps each feature to its field spec, which is `video` for cameras. The list of episodes
    is a table, stored in the files `tables`: `columns` are its columns, and `rows` maps each data
    file to the indices of its episodes in this table. `video_path` is a template of file names.
    """

    fps: Fraction
    specs: Mapping[str, str]
    tasks: Mapping[int, str]
    columns: Mapping[str, Numbers]
    rows: Mapping[str, Sequence[int]]
    video_path: str
    tables: Sequence[str]
    n_episodes: int

    def episodes(self, name: str) -> Iterator[Episode]:
        """Yield the episodes of a data file in the order of the list of episodes."""
        cameras = [camera for camera, spec in self.specs.items() if spec == VIDEO]
        for row in self.rows[name]:
            number, length = (int(self.columns[key][row]) for key in EPISODE)
            yield Episode(number, length, {camera: self._span(camera, row) for camera in cameras})

    def parts(self, name: str, only: Sequence[str] | None = None) -> list[str]:
        """Return the files that are read with a data file; `only` restricts the cameras."""
        videos = {
            one.name
            for episode in self.episodes(name)
            for camera, one in episode.spans.items()
            if only is None or camera in only
        }
        return sorted({*videos, *self.tables})

    def refuse_missing(self, root: str) -> None:
        """Check that the number of episodes is as declared, and that all data files exist."""
        n_found = len(self.columns["length"])
        if n_found != self.n_episodes:
            raise MediaError(f"expected {self.n_episodes:,} episodes in {META}, found {n_found:,}")
        for name, rows in self.rows.items():
            if not os.path.lexists(named_path(root, name)):
                raise MediaError(f"{name}, which has {len(rows):,} of the episodes, is missing")

    def _span(self, camera: str, row: int) -> CameraSpan:
        chunk, file, begin, end = (
            self.columns[f"videos/{camera}/{key}"][row].item() for key in VIDEO_PLACE
        )
        name = _format_path(self.video_path, chunk, file, camera)
        return CameraSpan(name, Fraction(begin), Fraction(end))


def root_of(source: Input) -> tuple[str, str] | None:
    """Return the dataset folder that contains an input: its path, and its name below the source.

    Return None if no folder above the input, up to the source, has a `meta/info.json`.
    """
    path, name = source.path, source.name
    for _ in range(source.name.count("/") + 1):
        path, name = os.path.dirname(path), name.rpartition("/")[0]
        if os.path.isfile(os.path.join(path, INFO)):
            return path, name
    return None


def open_set(root: str) -> RobotSet:
    """Read the metadata of the dataset in a folder."""
    stat = os.stat(os.path.join(root, INFO))
    return _open_set(root, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=4)  # a small cache is enough, as inputs of a dataset are consecutive
def _open_set(root: str, changed_ns: int, n_bytes: int) -> RobotSet:
    with _damage_in(INFO):
        info = json.loads(_text(root, INFO))
        if not isinstance(info, dict) or not isinstance(info["features"], dict):
            raise MediaError("expected an object with features")
        _refuse_other_version(str(info["codebase_version"]))
        fps = Fraction(str(info["fps"]))
        if not 0 < fps <= _MAX_FPS:
            raise MediaError(f"fps: expected up to {_MAX_FPS}, found {info['fps']!r}")
        specs = {str(name): _spec(str(name), one) for name, one in info["features"].items()}
        cameras = [name for name, spec in specs.items() if spec == VIDEO]
        data_path, video_path = str(info["data_path"]), str(info["video_path"] if cameras else "")
        n_episodes = int(info["total_episodes"])
    tables, columns = _read_episode_tables(root, cameras)
    tasks = _read_tasks(root)
    with _damage_in(INFO):
        rows = _rows_of(data_path, columns)
        for camera in cameras:
            _format_path(video_path, 0, 0, camera)
    return RobotSet(fps, specs, tasks, columns, rows, video_path, tables, n_episodes)


def _refuse_other_version(text: str) -> None:
    if not text.startswith("v3."):
        raise MediaError(
            f"codebase_version: expected v3.x, found {text!r}: convert it with LeRobot: "
            "python -m lerobot.datasets.v30.convert_dataset_v21_to_v30 --repo-id=…"
        )


def _spec(name: str, feature: Mapping[str, Any]) -> str:
    dtype, shape = str(feature["dtype"]), list(feature["shape"])
    if dtype in (VIDEO, PICTURES):
        return dtype
    if dtype == "string":
        return "json"
    if len(shape) > _MAX_DIMS or not all(type(n) is int and n > 0 for n in shape):
        raise MediaError(f"feature {name!r}: found the shape {shape}")
    dims = [] if shape == [1] else shape  # single numbers are stored with shape [1]
    spec = f"{dtype}[{','.join(map(str, ['*', *dims]))}]"
    try:
        parse_field(name, spec)
    except InvalidArgument as error:
        raise MediaError(f"feature {name!r}: unknown dtype {dtype!r}") from error
    return spec


def _rows_of(template: str, columns: Columns) -> dict[str, list[int]]:
    """Return the indices of episodes by the name of the data file that contains them."""
    found: dict[str, list[int]] = {}
    for row, place in enumerate(zip(*(columns[key].tolist() for key in DATA_PLACE), strict=True)):
        found.setdefault(_format_path(template, *place), []).append(row)
    return found


@lru_cache(maxsize=64)  # consecutive episodes are in the same files
def _format_path(template: str, chunk: int, file: int, camera: str | None = None) -> str:
    """Fill in a file name template such as `file-{file_index:03d}`; reject other templates."""
    values: dict[str, Any] = {"chunk_index": int(chunk), "file_index": int(file)}
    if camera is not None:
        values["video_key"] = camera
    try:
        parts = [*Formatter().parse(template)]
    except ValueError as error:
        raise MediaError(f"{template!r}: {error}") from error
    for _, hole, width, conversion in parts:
        if hole is None:
            continue
        if hole not in values or conversion or not _WIDTH.fullmatch(width or ""):
            raise MediaError(
                f"{template!r}: found {hole!r}, expected {', '.join(values)}, with up to 9 digits"
            )
    name = template.format(**values)
    if os.path.isabs(name) or os.path.normpath(name) != name or name.startswith(".."):
        raise MediaError(f"{template!r}: {name!r} is not a path below the folder of the dataset")
    return name
