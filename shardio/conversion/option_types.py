"""The options of `convert` for type checkers: one TypedDict for each set of converters' options.

This module is not needed at run time. `tests/typing` compares it with the converters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict

from shardio._workers.ray_cluster import EngineName
from shardio.conversion.append import PathName
from shardio.conversion.report import Progress
from shardio.format.schema import Schema


class CommonOptions(TypedDict, total=False):
    """The parameters of `convert` that do not depend on the converter."""

    samples: Callable[[Any], Any] | None
    names: Sequence[str] | None
    schema: Schema | None
    workers: int | None
    on_error: Literal["skip", "stop"]
    keep_partial: bool
    progress: Callable[[Progress], None] | bool | None
    shard_bytes: int
    resume: bool
    overwrite: bool
    append: bool
    labels: PathName | None
    split: Mapping[str, float] | None
    split_seed: int
    split_folders: bool | None
    storage_options: Mapping[str, Any] | None
    engine: EngineName
    address: str | None


class VideoOptions(CommonOptions, total=False):
    """The options of `convert` for videos."""

    frames: int
    stride: int
    step: int | None
    size: int
    store: str
    disk: int | None
    rate: float | None
    fps: str | int | float | None
    codec: str | None
    gop: int | None
    quality: int | None
    check: bool | None
    audio: bool | None


class ImageOptions(CommonOptions, total=False):
    """The options of `convert` for images."""

    store: str
    size: int | None
    quality: int | None


class FieldOptions(CommonOptions, total=False):
    """The options of `convert` for MDS shards and WebDataset tars."""

    fields: Mapping[str, str] | None


class ArrayOptions(FieldOptions, total=False):
    """The options of `convert` for arrays: files of NumPy and safetensors, HDF5, Zarr."""

    rows: bool | None


class ArrowOptions(FieldOptions, total=False):
    """The options of `convert` for Parquet, Arrow and Feather files."""

    columns: Sequence[str] | None
    units: Mapping[str, str] | None
    classes: Sequence[str] | None


class LeRobotOptions(FieldOptions, total=False):
    """The options of `convert` for LeRobot datasets."""

    columns: Sequence[str] | None
    check: bool | None


class TableOptions(FieldOptions, total=False):
    """The options of `convert` for CSV and JSON Lines files."""

    references: Sequence[str] | None


class RecordOptions(FieldOptions, total=False):
    """The options of `convert` for TFRecord and ArrayRecord files."""

    records: str | None


class TokenOptions(CommonOptions, total=False):
    """The options of `convert` for files of tokens."""

    dtype: str | None
    eot: int | None
    length: int | None


class GuessedOptions(CommonOptions, total=False):
    """The options of `convert` if `kind` is left out: the options of all converters."""

    audio: bool | None
    check: bool | None
    classes: Sequence[str] | None
    codec: str | None
    columns: Sequence[str] | None
    disk: int | None
    dtype: str | None
    eot: int | None
    fields: Mapping[str, str] | None
    fps: str | int | float | None
    frames: int
    gop: int | None
    length: int | None
    quality: int | None
    rate: float | None
    records: str | None
    references: Sequence[str] | None
    rows: bool | None
    size: int | None
    step: int | None
    store: str
    stride: int
    units: Mapping[str, str] | None
