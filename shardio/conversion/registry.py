"""The registered converters: look them up by kind, and guess the kind from file names.

Built-in converters are listed in `BUILT_IN`; third-party converters are found through the
entry-point group `shardio.converters`. All are imported on first use. In a checkout that is not
installed, the built-in converters are in a folder beside the package.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path, PurePath
from typing import Any, Final

from shardio.conversion.converter import Converter, Input
from shardio.conversion.report import InputReport
from shardio.errors import InvalidArgument, UnsupportedEnvironment, install_hint
from shardio.media import has_image_suffix, has_media_suffix, has_sound_suffix

ENTRY_POINT_GROUP: Final = "shardio.converters"


@dataclass(frozen=True)
class BuiltIn:
    """A built-in converter, as listed in the table of kinds.

    Attributes:
        target: the module and the class.
        unsupported: the reason to report for files of other kinds.
        suffixes: the file name suffixes that select the kind.
        hints: the suffixes to name in messages if files are not recognized by suffix.
        packages: the packages that the extra with the same name as the kind installs.
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
        InvalidArgument: the kind is unknown, or its class is not a `Converter`.
        UnsupportedEnvironment: a package that the converter needs is missing.
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
    if not (isinstance(found, type) and issubclass(found, Converter)):
        raise InvalidArgument(f"{entry.value}: expected a subclass of shardio.Converter")
    return found


def make_converter(kind: str, options: Mapping[str, Any]) -> Converter:
    """Find the converter for `kind` and create it with `options`.

    Raises:
        InvalidArgument: the kind or an option is unknown, or a value is invalid.
        UnsupportedEnvironment: a package that the converter needs is missing.
    """
    found = converter_class(kind)
    known = [f.name for f in dataclasses.fields(found) if f.init]  # type: ignore[arg-type]
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
    """Return the converter with options inferred from the inputs.

    Raises:
        InvalidArgument: the options cannot be inferred.
        UnsupportedEnvironment: a package that the options need is missing.
    """
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


_IGNORED_OUTCOMES: Final = ("unsupported", "part")
_MAX_SUFFIXES: Final = 4
_MAX_NAMES: Final = 3


class NoMatchingInputs(InvalidArgument):
    """Raised if a source contains no file of the requested kind."""


def check_any_of_kind(
    source: str, kind: str, reports: Sequence[InputReport], *, kind_given: bool, appends: bool
) -> None:
    """Check that at least one file is of the kind, even if it is broken, empty or a duplicate.

    Args:
        source: the source, as the caller named it.
        kind: the kind of the converter.
        reports: the reports of all files.
        kind_given: True if the caller chose the kind.
        appends: True for an append to a dataset of that kind.

    Raises:
        NoMatchingInputs: there is no such file; the message lists the files found and the known
            kinds.
    """
    if not reports or any(report.outcome not in _IGNORED_OUTCOMES for report in reports):
        return
    suggested = kind_from_names(report.name for report in reports)
    if kind_given or suggested:
        what = f"no file of the kind {kind!r}"
    else:
        what = "no file of a kind recognized by name, and no video"
    hint = "pass its kind (--kind KIND, or kind=)"
    if appends:
        hint = "an append needs files of the same kind as the dataset"
    elif suggested and suggested != kind:
        hint = f"the file names suggest {suggested!r} (--kind {suggested}, or kind={suggested!r})"
    error = NoMatchingInputs(f"{source}: holds {what}: {_describe_files(reports)}; {hint}")
    error.add_note(_list_kinds())
    raise error


def _describe_files(reports: Sequence[InputReport]) -> str:
    """Return the number of files by suffix, and the reason of the first rejection."""
    suffixes = Counter(PurePath(report.name).suffix.lower() or "no suffix" for report in reports)
    most = sorted(suffixes.items(), key=lambda each: (-each[1], each[0]))[:_MAX_SUFFIXES]
    named = [f"{suffix} ({n:,})" for suffix, n in most]
    if n_others := len(reports) - sum(n for _, n in most):
        named.append(f"others ({n_others:,})")
    first = next((f"; {each.name}: {each.reason}" for each in reports if each.reason), "")
    n_files = f"{len(reports):,} file{'s' * (len(reports) > 1)}"
    return f"{n_files}, {', '.join(named)}{first}"


def _list_kinds() -> str:
    """Return the known kinds, with the file names that indicate them."""
    hints = {kind: known.suffixes or known.hints for kind, known in BUILT_IN.items()}
    recognized = [f"{kind} ({_abbreviate(names)})" for kind, names in hints.items() if names]
    unrecognized = [kind for kind in known_kinds() if not hints.get(kind)]
    return (
        f"kinds recognized by file name: {', '.join(recognized)}; kinds that need --kind: "
        f"{', '.join(unrecognized)}"
    )


def _abbreviate(names: Sequence[str]) -> str:
    return ", ".join([*names[:_MAX_NAMES], *["…"] * (len(names) > _MAX_NAMES)])
