"""The files in the folder `meta` of a LeRobot data set, read and checked.

LeRobot data sets: what their folder `meta` says of features, of tasks and of episodes.
"""

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
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardio import Input, InvalidArgument, MediaError
from shardio_converters.file_names import data_name, named_path
from shardio_converters.schema_spec import parse_field
from shardio_converters.tabular.arrow_files import open_table

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


META: Final = "meta/"
VIDEO: Final = "video"
PICTURES: Final = "image"
"""What is said of features that are a video, and that are a picture in each row."""

_MAX_FPS: Final = 1000
_MAX_DIMS: Final = 5
_HOLE: Final = re.compile(r"\{(\w+)(?::0?(\d)d)?\}")
_VERSION: Final = re.compile(r"v([23])\.\d+")

Numbers = npt.NDArray[Any]


@dataclass(frozen=True)
class CameraSpan:
    """Where a camera's view of an episode is: a file, and from which second until which."""

    name: str
    begin: Fraction
    end: Fraction | None
    """None: the end of the file."""


@dataclass(frozen=True)
class Episode:
    """An episode: its number, how many frames it has, and its footage by camera."""

    number: int
    length: int
    footage: Mapping[str, CameraSpan]


@dataclass(frozen=True)
class RobotSet:
    """What a data set says of itself; names are those of files, below its folder.

    Args:
        version: 2 or 3.
        specs: what a sample has of each feature, in a word each; of `video`s the cameras.
        tasks: what is to be done, by number.
        columns: a number of every episode, by what it says.
        rows: by file of data, which episodes it holds, as positions in `columns`.
        video_path: how files of videos are named.
        tables: the files that say which episodes there are.
    """

    version: int
    fps: Fraction
    specs: Mapping[str, str]
    tasks: Mapping[int, str]
    columns: Mapping[str, Numbers]
    rows: Mapping[str, Numbers]
    video_path: str
    tables: Sequence[str]
    n_episodes: int

    def episodes(self, name: str) -> Iterator[Episode]:
        """The episodes of a file of data, in the order in which they are listed."""
        cameras = [camera for camera, spec in self.specs.items() if spec == VIDEO]
        for row in self.rows[name].tolist():
            number, length = (int(self.columns[key][row]) for key in EPISODE)
            yield Episode(
                number, length, {camera: self._footage(camera, row) for camera in cameras}
            )

    def parts(self, name: str, only: Sequence[str] | None = None) -> list[str]:
        """The files that are read together with a file of data; of `only` some cameras."""
        videos = {
            one.name
            for episode in self.episodes(name)
            for camera, one in episode.footage.items()
            if only is None or camera in only
        }
        return sorted({*videos, *self.tables})

    def refuse_missing(self, root: str) -> None:
        """Make sure that there are as many episodes as there should be, and all files of data.

        Raises:
            MediaError: there are not.
        """
        n_found = len(self.columns["length"])
        if n_found != self.n_episodes:
            raise MediaError(f"expected {self.n_episodes:,} episodes in {META}, found {n_found:,}")
        for name, rows in self.rows.items():
            if not os.path.lexists(named_path(root, name)):
                raise MediaError(f"{name}, which has {len(rows):,} of the episodes, is missing")

    def _footage(self, camera: str, row: int) -> CameraSpan:
        if self.version == ONE_EACH:
            numbers = {key: int(self.columns[key][row]) for key in PLACE}
            return CameraSpan(_filled(self.video_path, numbers, camera), Fraction(0), None)
        keys = VIDEO_PLACE
        chunk, file, begin, end = (self.columns[f"videos/{camera}/{key}"][row] for key in keys)
        numbers = {"chunk_index": int(chunk), "file_index": int(file)}
        name = _filled(self.video_path, numbers, camera)
        return CameraSpan(name, Fraction(float(begin)), Fraction(float(end)))


def root_of(source: Input) -> tuple[str, str] | None:
    """The folder of the data set that an input is in: its path, and its name below the source.

    None where no folder above the input, up to the source, has a `meta/info.json`.
    """
    path, name = source.path, source.name
    for _ in range(source.name.count("/") + 1):
        path, name = os.path.dirname(path), name.rpartition("/")[0]
        if os.path.isfile(os.path.join(path, INFO)):
            return path, name
    return None


def open_set(root: str) -> RobotSet:
    """Read what the data set in a folder says of itself.

    Raises:
        MediaError: it is damaged, or of a version that is not known; it names the file.
        OSError: a file cannot be read.
    """
    stat = os.stat(os.path.join(root, INFO))
    return _open_set(root, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=4)  # the inputs of a data set come one after the other
def _open_set(root: str, changed_ns: int, n_bytes: int) -> RobotSet:
    info = read_info(root)
    with naming(INFO):
        version = _version(str(info["codebase_version"]))
        fps = _rate(info["fps"])
        specs = {str(name): _spec(str(name), one) for name, one in info["features"].items()}
        cameras = [name for name, spec in specs.items() if spec == VIDEO]
        data_path, video_path = str(info["data_path"]), str(info["video_path"] if cameras else "")
        n_episodes = int(info["total_episodes"])
    if version == ONE_EACH:
        tables, columns = read_episode_lines(root, info)
        places = {key: columns[key] for key in PLACE}
    else:
        tables, columns = read_episode_tables(root, cameras)
        places = {key: columns[f"data/{key}"] for key in ("chunk_index", "file_index")}
    tasks = read_tasks(root, version)
    with naming(INFO):
        rows = _rows_of(data_path, places)
        for camera in cameras:
            _filled(video_path, dict.fromkeys(places, 0), camera)
    return RobotSet(version, fps, specs, tasks, columns, rows, video_path, tables, n_episodes)


def _version(said: str) -> int:
    found = _VERSION.fullmatch(said)
    if found is None:
        raise MediaError(
            f"codebase_version: expected v2.0 to v3.x, found {said!r}; have LeRobot convert it"
        )
    return int(found[1])


def _rate(fps: Any) -> Fraction:
    rate = Fraction(str(fps))
    if not 0 < rate <= _MAX_FPS:
        raise MediaError(f"fps: expected up to {_MAX_FPS}, found {fps!r}")
    return rate


def _spec(name: str, feature: Mapping[str, Any]) -> str:
    """What a sample has of a feature: a video, text of each frame, or numbers of each frame."""
    dtype, shape = str(feature["dtype"]), list(feature["shape"])
    if dtype in (VIDEO, PICTURES):
        return dtype
    if dtype == "string":
        return "json"
    if len(shape) > _MAX_DIMS or not all(type(n) is int and n > 0 for n in shape):
        raise MediaError(f"feature {name!r}: found the shape {shape}")
    dims = [] if shape == [1] else shape  # numbers that stand alone are stored so
    spec = f"{dtype}[{','.join(map(str, ['*', *dims]))}]"
    try:
        parse_field(name, spec)
    except InvalidArgument as error:
        raise MediaError(f"feature {name!r}: found the dtype {dtype!r}, which is none") from error
    return spec


def _rows_of(template: str, places: Mapping[str, Numbers]) -> dict[str, Numbers]:
    """By file of data, the positions of the episodes in it."""
    distinct, which = np.unique(np.stack([*places.values()], 1), axis=0, return_inverse=True)
    order = np.argsort(which.ravel(), kind="stable")
    groups = np.split(order, np.cumsum(np.bincount(which.ravel()))[:-1])
    found: dict[str, Numbers] = {}
    for place, rows in zip(distinct.tolist(), groups, strict=True):
        name = _filled(template, dict(zip(places, place, strict=True)))
        found[name] = np.concatenate([found[name], rows]) if name in found else rows
    return found


def _filled(template: str, numbers: Mapping[str, int], camera: str | None = None) -> str:
    """The name of a file by a template like `file-{file_index:03d}`, of which nothing is run.

    Raises:
        MediaError: something else is to be filled in.
    """

    def fill(hole: re.Match[str]) -> str:
        if hole[1] == "video_key" and camera is not None and hole[2] is None:
            return camera
        if hole[1] not in numbers:
            raise MediaError(f"{template!r}: found {hole[0]}, expected {', '.join(numbers)}")
        return f"{numbers[hole[1]]:0{hole[2] or 1}d}"

    if "{" in _HOLE.sub("", template) or "}" in _HOLE.sub("", template):
        raise MediaError(f"{template!r}: expected names and numbers in braces alone")
    name = _HOLE.sub(fill, template)
    if os.path.isabs(name) or os.path.normpath(name) != name or name.startswith(".."):
        raise MediaError(f"{template!r}: {name!r} is no path below the folder of the data set")
    return name
