"""The converter of LeRobot datasets: a sample is an episode, with its rows and camera videos."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from fractions import Fraction
from importlib.metadata import version
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from shardio import EncodedStream, Input, MediaError, Outcome, Text
from shardio.media import SpanReader, library_versions, times_of
from shardio_converters.inference import SchemaInference, infer_fields
from shardio_converters.options import check_flag, column_names
from shardio_converters.robots.lerobot_metadata import (
    INFO,
    META,
    PICTURES,
    VIDEO,
    CameraSpan,
    Episode,
    Numbers,
    RobotSet,
    open_set,
    root_of,
)
from shardio_converters.schema_spec import Field, InferringConverter, fits, parse_field

if TYPE_CHECKING:  # pyarrow is imported on use, so that options can be listed without it
    from shardio_converters.tabular.arrow_columns import ArrowColumn

_HALF: Final = 0.5  # the tolerance of frame times, as a share of the time between two frames


class _Cameras:
    """The open video files, at most one per camera at any time."""

    def __init__(self, paths: Mapping[str, str], fps: Fraction, *, check: bool | None) -> None:
        self._paths, self._fps, self._check = paths, fps, check
        self._open: dict[str, tuple[str, SpanReader]] = {}

    def cut(self, camera: str, span: CameraSpan, times: Numbers) -> EncodedStream:
        """Return the part `span` of a video; check that its frames are at `times` (seconds)."""
        if span.name not in self._paths:
            raise MediaError(f"{span.name} is missing")
        if not np.isfinite(times).all():
            raise MediaError("a timestamp is not a number")
        half = 1 / (2 * self._fps)
        begin = span.begin + Fraction(float(times[0])) - half
        last = span.begin + Fraction(float(times[-1]))
        end = max(last + half, span.end - half)
        stream = self._reader(camera, span.name).cut(begin, end, span.begin)
        self._refuse_other_times(stream, span, times)
        return stream

    def _refuse_other_times(self, stream: EncodedStream, span: CameraSpan, times: Numbers) -> None:
        path, shown = self._paths[span.name], times_of(stream)
        if len(shown) != len(times):
            raise MediaError(
                f"{path}: expected {len(times):,} frames from second {float(span.begin):g} on, "
                f"found {len(shown):,}"
            )
        seconds = shown * float(stream.time_base)
        wrong = np.flatnonzero(np.abs(seconds - times) * float(self._fps) >= _HALF)
        if len(wrong):
            n = int(wrong[0])
            raise MediaError(
                f"{path}: expected frame {n:,} at second {times[n]:g} of the episode, found it at "
                f"{seconds[n]:g}"
            )

    def _reader(self, camera: str, name: str) -> SpanReader:
        known = self._open.get(camera)
        if known is not None and known[0] == name:
            return known[1]
        if known is not None:
            self._open.pop(camera)[1].close()
        reader = SpanReader(self._paths[name], check=self._check)
        self._open[camera] = name, reader
        return reader

    def close(self) -> None:
        for _, reader in self._open.values():
            reader.close()
        self._open.clear()


NUMBER: Final = "episode_index"
_TEXTS: Final = "json"


@dataclass(frozen=True)
class _EpisodeFrames:
    """The rows of an episode: the index of its first row, and the values by column."""

    number: int
    first_row: int
    values: Mapping[str, Any]


def _read_frames(
    path: str, name: str, specs: Mapping[str, str], *, strict: bool = True
) -> Iterator[_EpisodeFrames]:
    """Yield a data file's episodes, with the columns in `specs`; `strict` refuses other columns."""
    from shardio_converters.tabular.arrow_columns import columns_of, values_of
    from shardio_converters.tabular.arrow_files import open_table

    with open_table(path, name) as table:
        if strict and (others := [one for one in table.schema.names if one not in specs]):
            raise MediaError(f"column {others[0]!r}: expected only the features of the data set")
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
                    yield _EpisodeFrames(number, first_row, _join_parts(parts, specs))
                    parts = {}
                if not parts:
                    number, first_row = int(numbers[begin]), row + begin
                    parts = {key: [] for key in specs}
                piece = batch.slice(begin, end - begin)
                for key, field in fields.items():
                    parts[key] += values_of(piece, columns[key], field, row + begin)
            row += batch.num_rows
        if parts:
            yield _EpisodeFrames(number, first_row, _join_parts(parts, specs))


def _field_of(column: ArrowColumn, spec: str) -> Field:
    """Return the schema field for a single row of a column; `spec` is for a whole episode."""
    from shardio_converters.tabular.arrow_inference import refuse_other_type

    if spec == _TEXTS:
        if column.spec != "text":
            raise MediaError(f"column {column.name!r}: expected text, found {column.spec}")
        return Text()
    word = spec.replace("[*,", "[").replace("[*]", "")
    field = parse_field(column.name, word)
    refuse_other_type(column, field, word)
    return field


def _join_parts(parts: Mapping[str, list[Any]], specs: Mapping[str, str]) -> dict[str, Any]:
    return {key: one if specs[key] == _TEXTS else np.array(one) for key, one in parts.items()}


def _refuse_other_frames(frames: _EpisodeFrames, length: int, tasks: Mapping[int, str]) -> None:
    """Check that an episode has all its frames, and only known tasks."""
    numbers = frames.values["frame_index"]
    if len(numbers) != length:
        raise MediaError(f"expected {length:,} frames, found {len(numbers):,}")
    wrong = np.flatnonzero(numbers != np.arange(length))
    if len(wrong):
        n = int(wrong[0])
        raise MediaError(f"row {frames.first_row + n:,}: expected frame {n:,}, found {numbers[n]}")
    if unknown := sorted({*frames.values["task_index"].tolist()} - tasks.keys()):
        raise MediaError(f"task {unknown[0]} is not one of the {len(tasks)} tasks")


_REQUIRED: Final = ("timestamp", "frame_index", NUMBER, "index", "task_index")
"""The features that every dataset has, and that identify the frames of an episode."""
_MAX_NAMED: Final = 5  # the maximum number of broken episodes to name in an outcome


@dataclass(frozen=True, kw_only=True)
class LeRobot(InferringConverter):
    """A converter that makes one sample per episode; each data file of a dataset is an input.

    The features that every dataset has are always converted. Numeric fields have one value per
    frame, except `episode_index`. The field of a camera is a video with the unchanged packets of
    the episode's frames; times in the video and in `timestamp` have the same zero. `task` is the
    text of the first frame's task, and `tasks` maps the numbers in `task_index` to texts.
    """

    kind: ClassVar[str] = "lerobot"
    version: ClassVar[str] = "1"

    columns: Sequence[str] | None = field(
        default=None, metadata={"flag": "--column", "metavar": "COLUMN"}
    )
    """Convert this column or feature; repeatable (default: all)."""
    check: bool | None = None
    """Decode every frame once to find damage (kind videos: only with --store packets)."""

    def __post_init__(self) -> None:
        check_flag("check", self.check)
        object.__setattr__(self, "columns", column_names(self.columns, "features"))
        super().__post_init__()

    def parts(self, inputs: Sequence[Input]) -> Mapping[str, Sequence[str]]:
        """Map each data file to the videos and episode tables that are read with it."""
        known = {one.name for one in inputs}
        found: dict[str, list[str]] = {}
        for one in inputs:
            if not _is_info(one) or (place := root_of(one)) is None:
                continue
            try:
                robot_set = open_set(place[0])
            except (MediaError, OSError):
                continue  # reported when the file is read
            below = f"{place[1]}/" if place[1] else ""
            for name in robot_set.rows:
                if below + name in known:
                    parts = (below + part for part in robot_set.parts(name, self.columns))
                    found[below + name] = [part for part in parts if part in known]
        return found

    def fitted(self, inputs: Sequence[Input]) -> LeRobot:
        """Return the converter with `fields` inferred from the datasets."""
        if self.fields is not None:
            return self
        what = f"LeRobot data set, with its {INFO}, that can be read"
        return replace(self, fields=infer_fields(inputs, self._fields_of, what))

    def _fields_of(self, one: Input) -> SchemaInference:
        found = SchemaInference()
        if _is_info(one) and (place := root_of(one)) is not None:
            specs = self._selected_fields(open_set(place[0]))
            found.add({name: (spec, ()) for name, spec in specs.items()})
        return found

    def class_names(self) -> Sequence[str]:
        """Return no names: folders of a LeRobot dataset are not classes."""
        return ()

    def libraries(self) -> Mapping[str, str]:
        """Return the versions of the readers of tables and videos."""
        return {"pyarrow": version("pyarrow"), **library_versions()}

    def samples(self, source: Input) -> Generator[Mapping[str, Any], None, Outcome]:
        """Yield the episodes of a data file; a broken episode does not affect the others."""
        place = root_of(source)
        if place is None:
            return Outcome("unsupported", f"no {INFO} in a folder above it, up to the source")
        robot_set, name = open_set(place[0]), source.name[len(place[1]) :].lstrip("/")
        if name == INFO:
            robot_set.refuse_missing(place[0])
        if name.startswith(META):
            return Outcome("part", "describes the episodes of its data set")
        if name not in robot_set.rows:
            return Outcome("unsupported", "not a file with the rows of an episode")
        taken = self._selected_fields(robot_set)
        self._refuse_others(taken)
        reasons: list[str] = []
        n_samples = n_frames = 0
        for number, found in self._episodes(source, place[1], robot_set, taken):
            if isinstance(found, MediaError):
                reasons.append(f"episode {number}: {found}")
                continue
            n_samples, n_frames = n_samples + 1, n_frames + len(found["timestamp"])
            yield found
        detail = {"episodes": n_samples, "frames": n_frames}
        if reasons:
            more = f"; and {len(reasons) - _MAX_NAMED:,} more" if len(reasons) > _MAX_NAMED else ""
            return Outcome("broken", "; ".join(reasons[:_MAX_NAMED]) + more, detail)
        return Outcome("converted", detail=detail)

    def _episodes(
        self, source: Input, below: str, robot_set: RobotSet, taken: Mapping[str, str]
    ) -> Iterator[tuple[int, dict[str, Any] | MediaError]]:
        """Yield (number, sample or error) for each episode that is expected or found."""
        n_below = len(below) + 1 if below else 0
        expected = {one.number: one for one in robot_set.episodes(source.name[n_below:])}
        paths = {part.name[n_below:]: part.path for part in source.parts}
        read = {name: spec for name, spec in taken.items() if spec != VIDEO}
        with closing(_Cameras(paths, robot_set.fps, check=self.check)) as cameras:
            for frames in _read_frames(source.path, source.name, read, strict=self.columns is None):
                try:
                    episode = expected.pop(frames.number, None)
                    if episode is None:
                        raise MediaError(
                            f"unexpected at row {frames.first_row:,}: the episode has earlier "
                            "rows, or the list of episodes places it in another file or in none"
                        )
                    _refuse_other_frames(frames, episode.length, robot_set.tasks)
                    yield frames.number, self._sample(source, robot_set, frames, episode, cameras)
                except MediaError as error:
                    yield frames.number, error
        for number, episode in expected.items():
            yield number, MediaError(f"expected {episode.length:,} frames, found none")

    def _sample(
        self,
        source: Input,
        robot_set: RobotSet,
        frames: _EpisodeFrames,
        episode: Episode,
        cameras: _Cameras,
    ) -> dict[str, Any]:
        numbers, tasks = frames.values["task_index"].tolist(), robot_set.tasks
        about = self.additional_values(
            source,
            task=tasks[numbers[0]],
            tasks={str(number): tasks[number] for number in sorted({*numbers})},
        )
        sample = {**about, **frames.values, NUMBER: np.int64(frames.number)}
        for camera, span in episode.spans.items():
            if camera in (self.fields or ()):
                sample[camera] = cameras.cut(camera, span, frames.values["timestamp"])
        return sample

    def all_additional_fields(self) -> Mapping[str, str]:
        """Return the specs of the fields that a sample has in addition to the features."""
        return {**super().all_additional_fields(), "task": "text", "tasks": "json"}

    def _selected_fields(self, robot_set: RobotSet) -> dict[str, str]:
        specs = dict(robot_set.specs)
        if missing := [name for name in (*_REQUIRED, *(self.columns or ())) if name not in specs]:
            raise MediaError(f"{INFO}: feature {missing[0]!r} is missing")
        if self.columns is not None:
            specs = {name: specs[name] for name in dict.fromkeys((*self.columns, *_REQUIRED))}
        if PICTURES in specs.values():
            name = next(name for name, spec in specs.items() if spec == PICTURES)
            raise MediaError(
                f"{INFO}: feature {name!r}: found an image per row, expected a video: let "
                "LeRobot encode videos of them, or select other features (columns)"
            )
        specs[NUMBER] = specs[NUMBER].replace("[*]", "")
        return specs

    def _refuse_others(self, taken: Mapping[str, str]) -> None:
        fields = self.fields or {}
        schema = self.schema()
        for name, spec in taken.items():
            if name not in fields:
                raise MediaError(f"{INFO}: unexpected feature {name!r}: found {spec}")
            found, known = parse_field(name, spec), schema[name]
            is_same = type(found) is type(known)
            if (one := found.array) and (other := known.array):
                is_same = one.dtype == other.dtype and fits(one.shape, other.shape)
            if not is_same:
                raise MediaError(f"{INFO}: feature {name!r}: expected {fields[name]}, found {spec}")
        self.refuse_missing(taken, f"{INFO}: feature")


def _is_info(source: Input) -> bool:
    return source.name == INFO or source.name.endswith(f"/{INFO}")
