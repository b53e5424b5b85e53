"""TODO."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Final

from shardio.conversion import source
from shardio.errors import InvalidArgument, UnsupportedEnvironment, install_hint

GROUP: Final = "shardio.converters"


_OURS: Final = {
    "arrayrecord": "shardio_converters.records.arrayrecord:ArrayRecords",
    "arrays": "shardio_converters.arrays.arrays:Arrays",
    "arrow": "shardio_converters.arrow.arrow:Arrow",
    "audio": "shardio_converters.media.audio:Sounds",
    "hdf5": "shardio_converters.arrays.hdf5:Hdf5",
    "images": "shardio_converters.media.images:Images",
    "lerobot": "shardio_converters.robots.lerobot:LeRobot",
    "mds": "shardio_converters.records.mds:Mds",
    "tables": "shardio_converters.tables.tables:Tables",
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
"""Which extra brings a package that a converter of ours may lack."""


def make_source(kind: str, options: Mapping[str, Any]) -> source.Source:
    """Find the converter for `kind` and make it with `options`.

    Raises:
        InvalidArgument: there is none of this kind, or it has no such option.
        UnsupportedEnvironment: it needs a package that is missing.
    """
    found = _entry(kind)
    try:
        maker = _load(found)
    except ModuleNotFoundError as error:
        raise _lacking(kind, error) from error
    known = [f.name for f in dataclasses.fields(maker) if f.init]
    if unknown := sorted(options.keys() - known):
        raise InvalidArgument(
            f"{', '.join(unknown)}: not an option of the converter {kind!r}, which has "
            f"{', '.join(known) or 'none'}"
        )
    source: source.Source = maker(**options)
    try:
        source.libraries()  # now, and not when the first input is read
    except ModuleNotFoundError as error:
        raise _lacking(kind, error) from error
    return source


def fit(source: source.Source, inputs: Sequence[source.Input]) -> source.Source:
    """Have a source set what follows from the inputs, if it has a `fitted`.

    Raises:
        InvalidArgument: nothing follows from them.
        UnsupportedEnvironment: what follows needs a package that is missing.
    """
    fitted: Callable[[Sequence[source.Input]], source.Source] = getattr(
        source, "fitted", lambda _: source
    )
    try:
        found = fitted(inputs)
        found.libraries()
    except ModuleNotFoundError as error:
        raise _lacking(source.kind, error) from error
    return found


def _lacking(kind: str, error: ModuleNotFoundError) -> UnsupportedEnvironment:
    package = (error.name or "").partition(".")[0]
    extra = _EXTRAS.get(package)
    return UnsupportedEnvironment(
        f"the converter {kind!r} needs the package {package!r}, which is not installed: "
        f"{install_hint(extra) if extra else f'pip install {package}'}"
    )


def known_kinds() -> list[str]:
    """The kinds of all converters that are installed, sorted."""
    return sorted(_entries())


def _entries() -> dict[str, EntryPoint]:
    """Give the entry points by kind, of a converter of others before one of ours.

    Ours are not taken from the installation: that of a checkout may be older than the checkout.
    """
    ours = {name: EntryPoint(name, place, GROUP) for name, place in _OURS.items()}
    packages = {_package_of(entry) for entry in ours.values()}
    installed = {entry.name: entry for entry in entry_points(group=GROUP)}
    return ours | {n: entry for n, entry in installed.items() if _package_of(entry) not in packages}


def _entry(kind: str) -> EntryPoint:
    known = _entries()
    if kind not in known:
        raise InvalidArgument(
            f"{kind!r}: there is no such converter; there are {', '.join(sorted(known))}"
        )
    return known[kind]


def _package_of(entry: EntryPoint) -> str:
    return entry.module.partition(".")[0]


def _load(entry: EntryPoint) -> Any:
    if entry.value in _OURS.values():
        _find_checkout(_package_of(entry))
    return entry.load()


def _find_checkout(package: str) -> None:
    """Make our own converters importable where shardio is a checkout that is not installed."""
    try:
        import_module(package)
    except ModuleNotFoundError:
        beside = Path(__file__).resolve().parents[2] / "converters"
        if (beside / package).is_dir():
            sys.path.append(str(beside))
