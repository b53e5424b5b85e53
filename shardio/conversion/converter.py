"""The base class of converters, their inputs and outcomes, and the registry of converters.

Built-in converters are listed in `BUILT_IN`; third-party converters are found through the
entry-point group `shardio.converters`. All are imported on first use. In a checkout that is not
installed, the built-in converters are in a folder beside the package.
"""

from __future__ import annotations

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, get_args

from shardio.dataset.generation import ROWS
from shardio.errors import InvalidArgument, UnsupportedEnvironment, install_hint
from shardio.format.schema import Schema
from shardio.media import has_image_suffix, has_media_suffix, has_sound_suffix

OutcomeKind = Literal[
    "converted", "empty", "broken", "unsupported", "part", "not_processed", "duplicate", "modified"
]
OUTCOMES: Final = get_args(OutcomeKind)[:5]
"""The outcomes that a converter may return."""


@dataclass(frozen=True, slots=True)
class Input:
    """One file to convert.

    `name` is the path below the source, with `/` as separator; reports and datasets use it. `path`
    is the file on this machine, for opening only. `label` is the index of the class, -1 if there is
    none. `stamp` identifies the state of the file: its mtime and ctime in ns. `parts` are files
    that are read together with this file. If this file is itself a part, `part_of` is the name of
    the first input that has this part.
    """

    name: str
    path: str
    n_bytes: int
    label: int
    stamp: tuple[int, int] = (0, 0)
    parts: tuple[Input, ...] = ()
    part_of: str = ""


@dataclass(frozen=True, slots=True)
class Item(Input):
    """One item of a Python iterable, in place of a file.

    `name` and `path` describe the item, `hash` identifies it, and `packed` is its pickle for the
    workers.
    """

    hash: str = ""
    packed: bytes = b""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an input.

    `"converted"`; `"empty"`: readable, but without samples; `"unsupported"`: not of the converter's
    kind; `"broken"`: of this kind but unreadable, which makes the exit code 1; `"part"`: read
    together with the input named in `reason`, which gives the samples. Three outcomes are set
    by the conversion, for inputs that are not converted: `"not_processed"` after the input at which
    the conversion stopped and, in an append, `"duplicate"` if the dataset has the samples and
    `"modified"` if the input has changed since it was converted. `detail` is extra information to
    record, as JSON values.
    """

    kind: OutcomeKind
    reason: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict)


class Converter(ABC):
    """A converter of one kind of input: a frozen dataclass whose fields are its options.

    The constructor validates the options (InvalidArgument). The values of the options are recorded
    in the dataset. They must therefore be JSON values without machine names or absolute paths; an
    option that is None by default is recorded only if it is set. An append recreates the converter
    from the recorded options. No option may be named like a parameter of `convert`. Instances are
    pickled and sent to the workers.

    Attributes:
        kind: the name of the converter in the registry.
        version: a text that changes when the same input and options give other samples.
        step_s: the CPU time in seconds that each step of `samples` may take, plus one second per
            MiB of the input; None for no limit. A worker that takes longer is killed; the second
            time, the input is reported as broken. This protects against libraries that loop
            forever on damaged files. Not enforced with `workers=0`.
    """

    kind: ClassVar[str]
    version: ClassVar[str]
    step_s: ClassVar[float | None] = None

    @abstractmethod
    def schema(self) -> Schema:
        """Return the schema of the samples."""

    @abstractmethod
    def samples(self, source: Input) -> Generator[Mapping[str, Any], None, Outcome]:
        """Yield the samples of one input and return its outcome. Must not write files.

        Samples are buffered until the outcome is known. The samples of a broken input are
        discarded, unless the user asked to keep them.

        Raises:
            MediaError: the input is broken; the message becomes the reason.
        """

    def libraries(self) -> Mapping[str, str]:
        """Return the versions of the libraries that determine the bytes of the samples."""
        return {}

    def fitted(self, inputs: Sequence[Input]) -> Converter:
        """Return the converter with options inferred from the inputs, such as a schema.

        Called before the first input is read; the options are recorded like other options.
        """
        return self

    def parts(self, inputs: Sequence[Input]) -> Mapping[str, Sequence[str]]:
        """Map names of inputs to the names of their parts.

        Parts are inputs that are read together with another input. Parts give no samples and are
        not passed to `samples`. If a part changes, the input that it belongs to has changed.
        """
        return {}

    def class_names(self) -> Sequence[str] | None:
        """Return the class names if the inputs have their own labels, None if folders are classes.

        The sequence is empty if the classes have no names.
        """
        return None

    def view(self) -> Mapping[str, Any]:
        """Return the default view of a loader, as a generation stores it; by default rows."""
        return ROWS

    def error(
        self,
        source: Input,
        sample: Mapping[str, Any],
    ) -> tuple[float, int] | None:
        """Compare the first sample of an input with its original.

        Return the sum of squared pixel differences and the number of values; None if nothing is
        lost.
        """
        return None


def options_of(converter: Converter) -> dict[str, Any]:
    """Return the options to record: all except those that are None by default and not set."""
    found = {}
    for known in fields(converter):  # type: ignore[arg-type]
        value = getattr(converter, known.name)
        if value is not None or known.default is not None:
            found[known.name] = value
    return found


ENTRY_POINT_GROUP: Final = "shardio.converters"
_PARAMETERS: Final = frozenset(
    (
        *("src", "out", "kind", "samples", "names", "schema", "workers", "on_error"),
        *("keep_partial", "progress", "shard_bytes", "resume", "overwrite", "append", "labels"),
        *("storage_options", "engine", "address"),
    )
)
"""The parameters of `convert`, which cannot be the names of a converter's options."""


@dataclass(frozen=True)
class BuiltIn:
    """A built-in converter, as listed in the table of kinds.

    Attributes:
        target: the module and the class.
        unsupported: the reason to report for files of other kinds.
        suffixes: the file name suffixes that select the kind.
        hints: the suffixes to name in messages if files are not recognized by suffix.
        packages: the packages that the extra named like the kind installs.
    """

    target: str
    unsupported: str
    suffixes: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()

    def matches(self, name: str) -> bool:
        """Return True if the suffix of a file name selects the kind."""
        return name.endswith(self.suffixes)


VIDEOS: Final = "videos"
IMAGES: Final = "images"
AUDIO: Final = "audio"
LEROBOT: Final = "lerobot"
BUILT_IN: Final[Mapping[str, BuiltIn]] = {
    VIDEOS: BuiltIn(
        "shardio_converters.media.videos:Videos",
        "not a video",
        hints=(".mp4", ".mkv", ".webm", ".mov"),
    ),
    IMAGES: BuiltIn(
        "shardio_converters.media.images:Images",
        "not a picture",
        hints=(".jpg", ".png", ".webp", ".tif"),
        packages=("pillow", "PIL", "simplejpeg"),
    ),
    AUDIO: BuiltIn(
        "shardio_converters.media.audio:AudioFiles",
        "no sound",
        hints=(".wav", ".flac", ".mp3", ".ogg"),
    ),
    LEROBOT: BuiltIn(
        "shardio_converters.robots.lerobot:LeRobot",
        "not part of a LeRobot dataset",
        hints=("meta/info.json",),
    ),
    "zarr": BuiltIn(
        "shardio_converters.arrays.zarr:Zarr",
        "not part of a Zarr store",
        ("zarr.json", ".zgroup", ".zarray", ".zarr.zip"),
        packages=("zarr",),
    ),
    "hdf5": BuiltIn(
        "shardio_converters.arrays.hdf5:Hdf5",
        "no HDF5",
        (".h5", ".hdf5", ".he5", ".nxs"),
        packages=("h5py",),
    ),
    "arrays": BuiltIn(
        "shardio_converters.arrays.npy:Arrays", "no arrays", (".npy", ".npz", ".safetensors")
    ),
    "mds": BuiltIn("shardio_converters.records.mds:Mds", "not an MDS shard", (".mds", ".mds.zstd")),
    "webdataset": BuiltIn(
        "shardio_converters.records.webdataset:WebDataset",
        "not a tar",
        (".tar", ".tar.gz", ".tar.zst", ".tgz"),
    ),
    "tfrecord": BuiltIn(
        "shardio_converters.records.tfrecord:TFRecords",
        "no records",
        (
            *(".tfrec", ".tfrecord", ".tfrecords"),
            *(".tfrecord.gz", ".tfrecords.gz", ".tfrecord.zlib", ".tfrecords.zlib"),
        ),
        packages=("google_crc32c",),
    ),
    "arrayrecord": BuiltIn(
        "shardio_converters.records.arrayrecord:ArrayRecords",
        "no records",
        (".array_record", ".arrayrecord"),
        packages=("array_record",),
    ),
    "arrow": BuiltIn(
        "shardio_converters.tabular.arrow:Arrow",
        "no table",
        (".parquet", ".pq", ".arrow", ".arrows", ".feather", ".ipc"),
        packages=("pyarrow",),
    ),
    "tables": BuiltIn(
        "shardio_converters.tabular.tables:Tables",
        "no table",
        (".csv", ".jsonl", ".ndjson", ".tsv"),
    ),
    "tokens": BuiltIn("shardio_converters.records.tokens:TokenFiles", "no tokens"),
}
"""The built-in converters. The first kind with a matching suffix is used."""


def converter_class(kind: str) -> type[Converter]:
    """Import the converter of a kind.

    Raises:
        InvalidArgument: the kind is unknown, or its class is not a valid converter.
        UnsupportedEnvironment: the converter, or a package that it needs, cannot be imported.
    """
    known = _entries()
    if kind not in known:
        raise InvalidArgument(
            f"{kind!r}: unknown converter; expected one of {', '.join(sorted(known))}"
        )
    entry = known[kind]
    if any(entry.value == one.target for one in BUILT_IN.values()):
        _add_checkout_to_path(_package_of(entry))
    try:
        found = entry.load()
    except ModuleNotFoundError as error:
        raise missing_package(kind, error) from error
    except Exception as error:  # the module may raise anything while it is imported
        package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else _package_of(entry)
        raise UnsupportedEnvironment(
            f"the converter {kind!r} ({entry.value}, of the package {package}) cannot be imported: "
            f"{type(error).__name__}: {error}; update or repair this package, or choose another "
            "kind (--kind KIND, or kind=)"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Converter) and is_dataclass(found)):
        raise InvalidArgument(f"{entry.value}: expected a dataclass derived from shardio.Converter")
    if taken := sorted(_PARAMETERS.intersection(each.name for each in fields(found) if each.init)):
        raise InvalidArgument(
            f"{entry.value}: the field {taken[0]!r} is named like a parameter of shardio.convert, "
            "so that no call could set it; rename the field"
        )
    return found


def make_converter(kind: str, options: Mapping[str, Any]) -> Converter:
    """Find the converter for `kind` as `converter_class` does, and create it with `options`."""
    found = converter_class(kind)
    known = [f.name for f in fields(found) if f.init]  # type: ignore[arg-type]
    if unknown := sorted(options.keys() - known):
        raise InvalidArgument(
            f"{', '.join(unknown)}: not an option of the converter {kind!r}; its options are "
            f"{', '.join(known) or 'none'}"
        )
    converter = found(**options)
    try:
        converter.libraries()  # so that a missing package raises here, not at the first input
    except ModuleNotFoundError as error:
        raise missing_package(kind, error) from error
    return converter


def fit_converter(converter: Converter, inputs: Sequence[Input]) -> Converter:
    """Return the converter with options inferred from the inputs."""
    try:
        found = converter.fitted(inputs)
        found.libraries()
    except ModuleNotFoundError as error:
        raise missing_package(converter.kind, error) from error
    return found


def missing_package(kind: str, error: ModuleNotFoundError) -> UnsupportedEnvironment:
    """Return the error for a missing package of a kind's converter; the message names the extra."""
    package = (error.name or "").partition(".")[0]
    extra = next((kind for kind, known in BUILT_IN.items() if package in known.packages), None)
    return UnsupportedEnvironment(
        f"the converter {kind!r} needs the package {package!r}, which is not installed: "
        f"{install_hint(extra) if extra else f'pip install {package}'}"
    )


def known_kinds() -> list[str]:
    """Return the kinds of all installed converters, sorted."""
    return sorted(_entries())


def _entries() -> dict[str, EntryPoint]:
    """Return the entry points by kind; a third-party converter overrides a built-in one.

    Entries of our own package are ignored: the installed metadata may be older than a checkout.
    """
    found = {
        kind: EntryPoint(kind, known.target, ENTRY_POINT_GROUP) for kind, known in BUILT_IN.items()
    }
    ours = {_package_of(entry) for entry in found.values()}
    installed = entry_points(group=ENTRY_POINT_GROUP)
    return found | {entry.name: entry for entry in installed if _package_of(entry) not in ours}


def _package_of(entry: EntryPoint) -> str:
    return entry.module.partition(".")[0]


def _add_checkout_to_path(package: str) -> None:
    """Make the built-in converters importable from a checkout that is not installed."""
    try:
        import_module(package)
    except ModuleNotFoundError:
        beside = Path(__file__).resolve().parents[2] / "converters"
        if (beside / package).is_dir():
            sys.path.append(str(beside))


_SHARD: Final = re.compile(r"-\d+-of-\d+")
"""Matches the shard number in a file name, such as -00001-of-00064."""
_LEROBOT: Final = (re.compile(r"(?:.*/)?meta/info\.json"), re.compile(r"(?:.*/)?data/.+\.parquet"))
"""Patterns for the files that every LeRobot data set has."""


def guess_kind(inputs: Iterable[Input]) -> str:
    """Return the kind of these files; "videos" if their names do not indicate any."""
    return kind_from_names(one.name for one in inputs) or VIDEOS


def kind_from_names(names: Iterable[str]) -> str | None:
    """Return the kind that file names indicate; None if they indicate none.

    A LeRobot data set takes precedence over everything, because its videos are part of it. Audio
    takes precedence over images, which are then covers; a GIF counts as neither image nor video.
    Other kinds come last: if there are also media files, files of other kinds describe the media.
    """
    names = list(names)
    if all(any(map(known.fullmatch, names)) for known in _LEROBOT):
        return LEROBOT
    is_image = any(has_image_suffix(name) and not has_media_suffix(name) for name in names)
    if any(map(_is_video, names)):
        return VIDEOS
    if any(map(has_sound_suffix, names)):
        return AUDIO
    if is_image:
        return IMAGES
    if any(map(has_media_suffix, names)):  # a GIF
        return VIDEOS
    ends = [_SHARD.sub("", name).lower() for name in names]
    found = (kind for kind, known in BUILT_IN.items() if any(map(known.matches, ends)))
    return next(found, None)


def _is_video(name: str) -> bool:
    return has_media_suffix(name) and not (has_sound_suffix(name) or has_image_suffix(name))
