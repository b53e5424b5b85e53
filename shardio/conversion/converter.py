"""The base class of converters, their inputs and outcomes, and the registry of converters by kind.

Built-in converters are listed in `BUILT_IN`; third-party converters are found through the
entry-point group `shardio.converters`. A converter is imported on first use.
"""

from __future__ import annotations

import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, Final, Literal, get_args

from shardio._base.callers import did_you_mean
from shardio.dataset.generation import ROWS
from shardio.errors import InvalidArgument, UnsupportedEnvironment, install_hint
from shardio.format.schema import Schema
from shardio.media import has_image_suffix, has_media_suffix, has_sound_suffix

OutcomeKind = Literal[
    "converted", "empty", "broken", "unsupported", "part", "not_processed", "duplicate", "modified"
]
OUTCOMES: Final = get_args(OutcomeKind)[:5]
"""The outcomes that a converter may return. The conversion itself sets the other outcomes."""


@dataclass(frozen=True, slots=True)
class Input:
    """One file to convert.

    `name` is the path of the file relative to the source, with `/` as separator. `path` is the path
    at which this machine can open the file. `label` is the index of the file's class, or -1.
    `stamp` consists of the file's mtime and ctime in ns. `parts` are other files that the converter
    reads together with this file. If this file is itself a part, `part_of` is the name of the first
    input that has this part; otherwise it is "".
    """

    name: str
    path: str
    n_bytes: int
    label: int
    stamp: tuple[int, int] = (0, 0)
    parts: tuple[Input, ...] = ()
    part_of: str = ""


ITEMS: Final = "items"
"""The name of the converter of items."""


@dataclass(frozen=True, slots=True)
class Item(Input):
    """One item of a Python iterable, which is converted like a file.

    `name` and `path` are the same text, `hash` is a hash of the item, and `packed` its pickle.
    """

    hash: str = ""
    packed: bytes = b""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of converting one input.

    `reason` explains the outcome. `detail` contains further facts, which the dataset records; they
    must be JSON values. A converter returns one of these kinds:

    * `"converted"`: the input gave samples.
    * `"empty"`: the input is readable, but has no samples.
    * `"broken"`: the input is of the converter's kind, but cannot be read. The exit code of
      `shardio convert` is then 1.
    * `"unsupported"`: the input is not of the converter's kind.
    * `"part"`: the input is read together with another input, which is named in `reason`.

    The conversion itself sets three kinds, for inputs that are not converted:

    * `"not_processed"`: the conversion stopped at an earlier input.
    * `"duplicate"`: in an append, the dataset already has the samples of the input.
    * `"modified"`: in an append, the dataset has samples of an earlier state of the input.
    """

    kind: OutcomeKind
    reason: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict)


class Converter(ABC):
    """A converter of one kind of input: a frozen dataclass whose fields are its options.

    The constructor raises InvalidArgument for an invalid option. Options are recorded in the
    dataset, and an append creates the converter again from them: their values must be JSON values,
    and must not contain machine names or absolute paths. An option whose default is None is
    recorded only if it is not None. No option may have the name of a parameter of
    `shardio.convert`. Instances are pickled and sent to the workers.

    Attributes:
        kind: the name of the converter in the registry.
        version: a text that must change whenever the converter starts to make different samples
            from the same inputs and options.
        step_s: a limit on the CPU time in seconds, because some libraries loop forever on damaged
            files; None means no limit. Each step of the generator `samples` may take this time,
            plus one second per MiB of the input. A worker that takes longer is killed, and the
            input is read again in a new worker. If that worker is killed too, the input is reported
            as broken. With `workers=0`, there is no limit.
        splits_by_file_name: True if files named like splits, such as `train.csv` and `test.csv`,
            become subsets when no folders do. This suits inputs that contain many samples each.
        store_choice: in the result of `fitted`, the `StoreChoice` that it has made; None if it has
            not chosen a store.
    """

    kind: ClassVar[str]
    version: ClassVar[str]
    step_s: ClassVar[float | None] = None
    splits_by_file_name: ClassVar[bool] = False
    store_choice: ClassVar[Any] = None

    @abstractmethod
    def schema(self) -> Schema:
        """Return the schema of the samples."""

    @abstractmethod
    def samples(self, source: Input) -> Generator[Mapping[str, Any], None, Outcome]:
        """Yield the samples of one input, and return the outcome of the input.

        The method must not write files. The samples of a broken input are discarded, unless
        `keep_partial` is set.

        Raises:
            MediaError: the input is broken. The message becomes the reason in the report.
        """

    def libraries(self) -> Mapping[str, str]:
        """Return the versions of the libraries that determine the bytes of the samples."""
        return {}

    def fitted(self, inputs: Sequence[Input]) -> Converter:
        """Return a converter in which missing options are inferred from the inputs.

        The method is called once, before the samples of the first input are read. Inferred options
        are recorded like the options of the caller.
        """
        return self

    def inherited(self, recorded: Mapping[str, Any]) -> Converter:
        """Return a converter with the recorded values of options that `fitted` would measure.

        The method is called before `fitted`: in an append with the options that the dataset
        records, and in a resumed conversion with those of the interrupted conversion.
        """
        return self

    def parts(self, inputs: Sequence[Input]) -> Mapping[str, Sequence[str]]:
        """Return a dict from the names of inputs to the names of their parts.

        A part is an input that is read together with another input. `samples` is not called for a
        part. If a part changes, the input that has this part counts as changed.
        """
        return {}

    def subset_folders(self, inputs: Sequence[Input]) -> Mapping[str, str]:
        """Return a dict from the paths of folders or inputs to the names of their subsets.

        The paths are relative to the source.

        If the dict is empty, folders or files are recognized as subsets by their names.
        """
        return {}

    def label_is_class(self) -> bool:
        """Return True if the field `label` of a sample is always the label of its input.

        A dataset without classes then has no field `label`.
        """
        return False

    def class_names(self) -> Sequence[str] | None:
        """Return the names of the classes if the labels come from the content of the inputs.

        The sequence is empty if these classes have no names. Return None if folders are classes.
        """
        return None

    def view(self) -> Mapping[str, Any]:
        """Return the default view of the dataset, in the form in which a generation records it."""
        return ROWS

    def error(self, source: Input, sample: Mapping[str, Any]) -> tuple[float, int] | None:
        """Compare the pixels of an input with those stored in its first sample.

        Return the sum of the squared differences, and the number of compared values; None if the
        converter stores the input without loss.
        """
        return None


def options_of(converter: Converter) -> dict[str, Any]:
    """Return the options of a converter that a dataset records."""
    found = {}
    for known in fields(converter):  # type: ignore[arg-type]
        value = getattr(converter, known.name)
        if value is not None or known.default is not None:
            found[known.name] = value
    return found


ENTRY_POINT_GROUP: Final = "shardio.converters"
PARAMETERS: Final = frozenset(
    (
        *("src", "out", "kind", "samples", "names", "schema", "workers", "on_error"),
        *("keep_partial", "progress", "shard_bytes", "resume", "overwrite", "append", "labels"),
        *("storage_options", "engine", "address", "split", "split_seed", "split_folders"),
    )
)
"""The parameters of `convert`. No option of a converter may have the same name."""


@dataclass(frozen=True)
class BuiltIn:
    """A built-in converter.

    `target` is its module and class. `unsupported` is the reason that is reported for files of
    other kinds. `suffixes` are the endings of file names from which the kind is guessed. `packages`
    are the packages and modules that `pip install '.[KIND]'` installs.
    """

    target: str
    unsupported: str
    suffixes: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()


BUILT_IN: Final[Mapping[str, BuiltIn]] = {
    "videos": BuiltIn("shardio_converters.media.videos:Videos", "not a video"),
    "images": BuiltIn(
        "shardio_converters.media.images:Images",
        "not a picture",
        packages=("pillow", "PIL", "simplejpeg"),
    ),
    "audio": BuiltIn("shardio_converters.media.audio:AudioFiles", "no sound"),
    "lerobot": BuiltIn(
        "shardio_converters.robots.lerobot:LeRobot", "not part of a LeRobot dataset"
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
"""The built-in converters by kind. If suffixes of several kinds match, the first kind is used."""


def converter_class(kind: str) -> type[Converter]:
    """Import the converter of a kind, and return its class."""
    return _import_class(kind, _entries())


def converter_classes(kinds: Iterable[str]) -> list[type[Converter]]:
    """Import the converters of several kinds; the installed packages are searched only once."""
    known = _entries()
    return [_import_class(kind, known) for kind in kinds]


def _import_class(kind: str, known: Mapping[str, EntryPoint]) -> type[Converter]:
    if kind not in known:
        question = did_you_mean(kind.casefold(), known)
        raise InvalidArgument(
            f"{kind!r}: unknown converter; expected one of {', '.join(sorted(known))}"
            f"{question and f'; {question}'}"
        )
    entry = known[kind]
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
    if taken := sorted(PARAMETERS.intersection(each.name for each in fields(found) if each.init)):
        raise InvalidArgument(
            f"{entry.value}: the field {taken[0]!r} is named like a parameter of shardio.convert, "
            "so that no call could set it; rename the field"
        )
    return found


def kind_of(converter: str | type[Converter] | None) -> str | None:
    """Return the kind of a converter; if a class is given, check that it is installed."""
    if not isinstance(converter, type):
        return converter
    kind = getattr(converter, "kind", None)
    if not isinstance(kind, str) or converter_class(kind) is not converter:
        raise InvalidArgument(
            f"kind: {converter.__module__}.{converter.__qualname__} is not an installed converter: "
            f"its package needs an entry point in the group {ENTRY_POINT_GROUP!r}"
        )
    return kind


OPTION_ADVICE: Final = {
    "compression": "write it as codec= of a field in schema=",
    "features": "write schema=shardio.Schema({…})",
    "shuffle": "pass it to shardio.ShardLoader",
    **dict.fromkeys(("exist_ok", "force", "replace"), "write overwrite=True, or append=True"),
    **dict.fromkeys(
        ("max_shard_size", "maxsize", "shard_size", "size_limit"), "write shard_bytes="
    ),
    **dict.fromkeys(("n_jobs", "num_proc"), "write workers="),
    "recursive": "all folders below are read",
    "transform": "files are stored as they are; pass transform= to shardio.ShardLoader",
}
"""Options of other libraries, and what to write instead."""


def _option_text(option: Field[Any]) -> str:
    """Return an option's name, with its flag on the command line if that has another name."""
    same = f"--{option.name.replace('_', '-')}"
    flag = option.metadata.get("flag", same)
    return option.name if flag in (None, same) else f"{option.name} ({flag})"


def make_converter(kind: str, options: Mapping[str, Any]) -> Converter:
    """Return a new converter of a kind; raise InvalidArgument if an option is not valid."""
    found = converter_class(kind)
    given = [each for each in fields(found) if each.init]  # type: ignore[arg-type]
    known = [each.name for each in given]
    listed = ", ".join(map(_option_text, given)) or "none"
    if unknown := sorted(options.keys() - known):
        raise InvalidArgument(
            f"{', '.join(unknown)}: not an option of the converter {kind!r}; "
            + (
                OPTION_ADVICE.get(unknown[0])
                or did_you_mean(unknown[0], (*known, *PARAMETERS))
                or f"its options are {listed}"
            )
        )
    converter = found(**options)
    try:
        # `libraries` imports the packages that the converter needs. Call it now, so that an error
        # about a missing package is raised before the first input is read.
        converter.libraries()
    except ModuleNotFoundError as error:
        raise missing_package(kind, error) from error
    return converter


def fit_converter(converter: Converter, inputs: Sequence[Input]) -> Converter:
    """Return a converter in which missing options are inferred from the inputs."""
    try:
        found = converter.fitted(inputs)
        found.libraries()
    except ModuleNotFoundError as error:
        raise missing_package(converter.kind, error) from error
    return found


def missing_package(kind: str, error: ModuleNotFoundError) -> UnsupportedEnvironment:
    """Return the exception for a package that the converter of a kind cannot import."""
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
    """Return the entry points of all converters by kind; third-party ones replace built-in ones.

    Built-in ones are not taken from the metadata of the installed package, which may be outdated.
    """
    found = {
        kind: EntryPoint(kind, known.target, ENTRY_POINT_GROUP) for kind, known in BUILT_IN.items()
    }
    ours = {_package_of(entry) for entry in found.values()}
    installed = _installed(tuple((path, _changed_ns(path)) for path in sys.path))
    return found | {entry.name: entry for entry in installed if _package_of(entry) not in ours}


@lru_cache(maxsize=1)
def _installed(folders: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    """Return the entry points of installed converters; reading those of 150 packages takes 8 ms.

    `folders` is the key of the cache: each folder of packages, and the time of its last change,
    which a newly installed package changes.
    """
    return tuple(entry_points(group=ENTRY_POINT_GROUP))


def _changed_ns(folder: str) -> int:
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return 0


def _package_of(entry: EntryPoint) -> str:
    return entry.module.partition(".")[0]


SHARD_NUMBER: Final = re.compile(r"-\d+-of-\d+")
"""Matches the index and the number of shards in a file name, such as -00001-of-00064."""
_LEROBOT: Final = (re.compile(r"(?:.*/)?meta/info\.json"), re.compile(r"(?:.*/)?data/.+\.parquet"))
"""Patterns of file names. In every LeRobot data set, each pattern matches at least one file."""


def is_media_name(name: str) -> bool:
    """Return True if the name of a file has a suffix of videos, sound or images."""
    return has_media_suffix(name) or has_image_suffix(name)


def guess_kind(inputs: Iterable[Input]) -> str:
    """Return the kind that the names of files indicate, or "videos" if they indicate none."""
    return kind_from_names(one.name for one in inputs) or "videos"


def kind_from_names(names: Iterable[str]) -> str | None:
    """Return the kind that the names of files indicate, or None if they indicate none.

    The kinds are tried in this order: LeRobot, whose files include videos; videos; audio, because
    images among audio files are usually covers; images; GIFs, as videos; all other kinds, because
    tables among media files usually describe the media.
    """
    names = list(names)
    if all(any(map(known.fullmatch, names)) for known in _LEROBOT):
        return "lerobot"
    if any(has_media_suffix(n) and not (has_sound_suffix(n) or has_image_suffix(n)) for n in names):
        return "videos"
    if any(map(has_sound_suffix, names)):
        return "audio"
    if any(has_image_suffix(name) and not has_media_suffix(name) for name in names):
        return "images"
    # The only files with a media suffix that are left here are GIFs.
    if any(map(has_media_suffix, names)):
        return "videos"
    ends = [SHARD_NUMBER.sub("", name).lower() for name in names]
    found = (kind for kind, one in BUILT_IN.items() if any(e.endswith(one.suffixes) for e in ends))
    return next(found, None)
