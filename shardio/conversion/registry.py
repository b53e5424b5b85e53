"""Registered converters: look them up by kind, and guess the kind from file names.

Third-party converters are found through the entry-point group `shardio.converters`, which also
has the built-in ones, and are imported on first use. In a checkout that is not installed, the
built-in converters lie beside the package.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path, PurePath
from typing import Any, Final

from shardio.conversion.converter import Converter, Input
from shardio.conversion.report import InputReport
from shardio.errors import InvalidArgument, UnsupportedEnvironment, install_hint
from shardio.media import has_image_suffix, has_media_suffix, has_sound_suffix

ENTRY_POINT_GROUP: Final = "shardio.converters"
_BUILT_IN: Final = {
    "arrayrecord": "shardio_converters.records.arrayrecord:ArrayRecords",
    "arrays": "shardio_converters.arrays.npy:Arrays",
    "arrow": "shardio_converters.tabular.arrow:Arrow",
    "audio": "shardio_converters.media.audio:AudioFiles",
    "hdf5": "shardio_converters.arrays.hdf5:Hdf5",
    "images": "shardio_converters.media.images:Images",
    "lerobot": "shardio_converters.robots.lerobot:LeRobot",
    "mds": "shardio_converters.records.mds:Mds",
    "tables": "shardio_converters.tabular.tables:Tables",
    "tfrecord": "shardio_converters.records.tfrecord:TFRecords",
    "tokens": "shardio_converters.records.tokens:TokenFiles",
    "videos": "shardio_converters.media.videos:Videos",
    "webdataset": "shardio_converters.records.webdataset:WebDataset",
    "zarr": "shardio_converters.arrays.zarr:Zarr",
}
_EXTRAS: Final = {
    "array_record": "arrayrecord",
    "google_crc32c": "tfrecord",
    "h5py": "hdf5",
    "pillow": "images",
    "PIL": "images",
    "pyarrow": "arrow",
    "simplejpeg": "images",
    "zarr": "zarr",
}
"""The extra that installs a package which a built-in converter may need."""


def make_converter(kind: str, options: Mapping[str, Any]) -> Converter:
    """Find the converter for `kind` and create it with `options`.

    Raises:
        InvalidArgument: the kind or an option is unknown, or a value is invalid.
        UnsupportedEnvironment: a package that it needs is missing.
    """
    found = _find_entry(kind)
    try:
        converter = _load_converter(found)
    except ModuleNotFoundError as error:
        raise _missing_package(kind, error) from error
    known = [f.name for f in dataclasses.fields(converter) if f.init]
    if unknown := sorted(options.keys() - known):
        raise InvalidArgument(
            f"{', '.join(unknown)}: not an option of the converter {kind!r}; its options are "
            f"{', '.join(known) or 'none'}"
        )
    source: Converter = converter(**options)
    try:
        source.libraries()  # fail now, and not at the first input
    except ModuleNotFoundError as error:
        raise _missing_package(kind, error) from error
    return source


def fit_converter(source: Converter, inputs: Sequence[Input]) -> Converter:
    """Return the source with options inferred from the inputs, if it has a method `fitted`.

    Raises:
        InvalidArgument: they cannot be inferred.
        UnsupportedEnvironment: a package that is then needed is missing.
    """
    fitted: Callable[[Sequence[Input]], Converter] = getattr(source, "fitted", lambda _: source)
    try:
        found = fitted(inputs)
        found.libraries()
    except ModuleNotFoundError as error:
        raise _missing_package(source.kind, error) from error
    return found


def _missing_package(kind: str, error: ModuleNotFoundError) -> UnsupportedEnvironment:
    package = (error.name or "").partition(".")[0]
    extra = _EXTRAS.get(package)
    return UnsupportedEnvironment(
        f"the converter {kind!r} needs the package {package!r}, which is not installed: "
        f"{install_hint(extra) if extra else f'pip install {package}'}"
    )


def known_kinds() -> list[str]:
    """Return the kinds of all installed converters, sorted."""
    return sorted(_entries())


def _entries() -> dict[str, EntryPoint]:
    """Return the entry points by kind; a third-party converter overrides a built-in one.

    Built-in ones are not read from the installed metadata, which may be older than a checkout.
    """
    built_in = {
        name: EntryPoint(name, target, ENTRY_POINT_GROUP) for name, target in _BUILT_IN.items()
    }
    packages = {_package_of(entry) for entry in built_in.values()}
    installed = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    return built_in | {
        n: entry for n, entry in installed.items() if _package_of(entry) not in packages
    }


def _find_entry(kind: str) -> EntryPoint:
    known = _entries()
    if kind not in known:
        raise InvalidArgument(
            f"{kind!r}: unknown converter; expected one of {', '.join(sorted(known))}"
        )
    return known[kind]


def _package_of(entry: EntryPoint) -> str:
    return entry.module.partition(".")[0]


def _load_converter(entry: EntryPoint) -> Any:
    if entry.value in _BUILT_IN.values():
        _add_checkout_to_path(_package_of(entry))
    return entry.load()


def _add_checkout_to_path(package: str) -> None:
    """Make the built-in converters importable from a checkout that is not installed."""
    try:
        import_module(package)
    except ModuleNotFoundError:
        beside = Path(__file__).resolve().parents[2] / "converters"
        if (beside / package).is_dir():
            sys.path.append(str(beside))


VIDEOS: Final = "videos"
IMAGES: Final = "images"
AUDIO: Final = "audio"
SUFFIXES: Final[dict[str, tuple[str, ...]]] = {
    "zarr": ("zarr.json", ".zgroup", ".zarray", ".zarr.zip"),
    "hdf5": (".h5", ".hdf5", ".he5", ".nxs"),
    "arrays": (".npy", ".npz", ".safetensors"),
    "mds": (".mds", ".mds.zstd"),
    "webdataset": (".tar", ".tar.gz", ".tar.zst", ".tgz"),
    "tfrecord": (
        *(".tfrec", ".tfrecord", ".tfrecords"),
        *(".tfrecord.gz", ".tfrecords.gz", ".tfrecord.zlib", ".tfrecords.zlib"),
    ),
    "arrayrecord": (".array_record", ".arrayrecord"),
    "arrow": (".parquet", ".pq", ".arrow", ".arrows", ".feather", ".ipc"),
    "tables": (".csv", ".jsonl", ".ndjson", ".tsv"),
}
"""Kinds that are not media, with their file suffixes; the first match counts."""
LEROBOT: Final = "lerobot"
HINT_SUFFIXES: Final[dict[str, tuple[str, ...]]] = {
    VIDEOS: (".mp4", ".mkv", ".webm", ".mov"),
    AUDIO: (".wav", ".flac", ".mp3", ".ogg"),
    IMAGES: (".jpg", ".png", ".webp", ".tif"),
    LEROBOT: ("meta/info.json",),
    **SUFFIXES,
}
"""Suffixes listed in the hint when nothing matches; of media only the most frequent ones."""
_SHARD: Final = re.compile(r"-\d+-of-\d+")
"""The part of a file name that numbers it among several files."""
_LEROBOT: Final = (re.compile(r"(?:.*/)?meta/info\.json"), re.compile(r"(?:.*/)?data/.+\.parquet"))
"""Files that every LeRobot data set has; its videos belong to it."""


def guess_kind(inputs: Iterable[Input]) -> str:
    """Return the kind of these files; "videos" if their names do not indicate one."""
    return kind_from_names(one.name for one in inputs) or VIDEOS


def kind_from_names(names: Iterable[str]) -> str | None:
    """Return the kind that file names indicate; None if there is none.

    A LeRobot data set takes precedence over everything. Audio wins over images, which are then
    covers; a GIF counts as neither image nor video. Other kinds come last: such files beside media
    describe the media.
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
    found = (kind for kind, known in SUFFIXES.items() if any(end.endswith(known) for end in ends))
    return next(found, None)


def _is_video(name: str) -> bool:
    return has_media_suffix(name) and not (has_sound_suffix(name) or has_image_suffix(name))


_IGNORED_OUTCOMES: Final = ("unsupported", "part")
_MAX_SUFFIXES: Final = 4
_MAX_NAMES: Final = 3


class NoMatchingInputs(InvalidArgument):
    """An error: a source holds no file of the requested kind."""


def check_any_of_kind(
    source: str, kind: str, reports: Sequence[InputReport], *, kind_given: bool, appends: bool
) -> None:
    """Check that at least one file is of the kind, even if it is broken, empty or a duplicate.

    Args:
        source: the source as the caller named it.
        kind: the converter's kind.
        reports: the reports of all files.
        kind_given: True if the caller chose the kind.
        appends: True for an append to a dataset of that kind.

    Raises:
        NoMatchingInputs: there is none; the message lists the files found and the known kinds.
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
    """Return the number of files by suffix, and why the first one was not accepted."""
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
    recognized = [f"{kind} ({_abbreviate(names)})" for kind, names in HINT_SUFFIXES.items()]
    unrecognized = [kind for kind in known_kinds() if kind not in HINT_SUFFIXES]
    return (
        f"kinds recognized by file name: {', '.join(recognized)}; kinds that need --kind: "
        f"{', '.join(unrecognized)}"
    )


def _abbreviate(names: Sequence[str]) -> str:
    return ", ".join([*names[:_MAX_NAMES], *["…"] * (len(names) > _MAX_NAMES)])
