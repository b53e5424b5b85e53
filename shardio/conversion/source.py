"""What a converter offers (`Source`), and how it is found.

Third-party converters are found through the entry-point group `shardio.converters`, in which ours
are as well, and are loaded when they are asked for. In a checkout that is not installed, ours lie
beside the package.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Protocol, get_args

from shardio.errors import InvalidArgument, UnsupportedEnvironment, install_hint
from shardio.format.schema import Schema
from shardio.manifest import ROWS

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

OutcomeKind = Literal[
    "converted", "empty", "broken", "unsupported", "part", "not_processed", "duplicate", "modified"
]
OUTCOMES: Final = get_args(OutcomeKind)[:5]
"""Those that a converter may return."""


@dataclass(frozen=True, slots=True)
class Input:
    """One file to convert.

    `name` is its path below the source, with `/` between the parts: what reports and datasets
    hold. `path` is where it is on this machine, for opening only. `label` is the position of its
    folder among the classes, -1 for a file that lies directly in the source. `stamp` tells this
    state of the file from a later one: when its content and when its entry changed, in ns.
    `parts` are files that are read together with this one; `part_of` names the first input that
    has this one as a part.
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
    """One item of a list that samples are made of, instead of a file.

    `name` says what it is, `path` the same; `hash` tells it from others; `packed` is its pickle,
    for this program's own workers.
    """

    hash: str = ""
    packed: bytes = b""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an input.

    `"converted"`; `"empty"`: fine, but it gives no sample; `"unsupported"`: not of the
    converter's kind; `"broken"`: of its kind and unreadable, which is what exit code 1 means;
    `"part"`: read together with another input, which gives the samples and is named in `reason`.
    The driver adds `"not_processed"` for inputs after the one at which a conversion stopped. When
    it appends, it adds `"duplicate"` for inputs whose samples the dataset has, and `"modified"` for
    inputs that have changed since they were converted: neither is read again.
    `detail` is what is worth recording beside that, in JSON's terms.
    """

    kind: OutcomeKind
    reason: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict)


class Source(Protocol):
    """A converter: a frozen dataclass whose fields are its options.

    The constructor validates them (InvalidArgument); their values are recorded in the dataset, so
    they must be JSON values and name neither machines nor places; None, where it is the default, is
    not recorded. An append makes the converter again from what is recorded. Instances travel to
    the workers.

    A method `error(source, sample)` may compare a sample of an input, the first one, with what it
    was made of: the sum of squared differences of pixels and how many values those are, or None
    where nothing is lost.

    A method `fitted(inputs)` may look at all inputs before the first is read, and give the source
    with those options set that follow from them, as a schema does: they are recorded as any other.

    A method `parts(inputs)` may say which inputs are read together with others: their names, by the
    name of the input that gives the samples. What is in `Input.parts` then counts as its content:
    a change of any of them is a change of the input. Parts are not given to `samples`.

    A method `class_names()` may give the names of the classes where the numbers in `label` are the
    inputs' own: an empty sequence where they have no names. None: those of the folders.

    An attribute `step_s` may say how many seconds of a processor each step of `samples` may take,
    beside one for each MiB of the input. A worker that takes more is ended, twice, and the input is
    broken: for libraries that come to no end over damage. In this process (`workers=0`) none is.

    A method `view()` may say what the samples of a loader are by default, as a generation has it;
    without one they are the rows.
    """

    kind: ClassVar[str]  # the name it is found by
    version: ClassVar[str]  # changes when the same input and options give other samples

    def schema(self) -> Schema:
        """Give the schema of the samples."""
        ...

    def samples(self, source: Input) -> Generator[Mapping[str, Any], None, Outcome]:
        """Yield the samples of one input and return its outcome. Reads only, writes nothing.

        Samples are kept by the driver until the outcome is known: those of a broken input are
        discarded unless the user asked for them.

        Raises:
            MediaError: the input breaks; its text becomes the reason.
        """
        ...

    def libraries(self) -> Mapping[str, str]:
        """Give the versions of the libraries that decide over the samples' bytes."""
        ...


def make_source(kind: str, options: Mapping[str, Any]) -> Source:
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
    source: Source = maker(**options)
    try:
        source.libraries()  # now, and not when the first input is read
    except ModuleNotFoundError as error:
        raise _lacking(kind, error) from error
    return source


def fit(source: Source, inputs: Sequence[Input]) -> Source:
    """Have a source set what follows from the inputs, if it has a `fitted`.

    Raises:
        InvalidArgument: nothing follows from them.
        UnsupportedEnvironment: what follows needs a package that is missing.
    """
    fitted: Callable[[Sequence[Input]], Source] = getattr(source, "fitted", lambda _: source)
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


def options_of(source: Source) -> dict[str, Any]:
    """Give the options of a source as they are recorded: without those that are left open."""
    found = {}
    for known in dataclasses.fields(source):  # type: ignore[arg-type]
        value = getattr(source, known.name)
        if value is not None or known.default is not None:
            found[known.name] = value
    return found


def classes_of(source: Source) -> tuple[str, ...] | None:
    """Give the names of the classes that the inputs themselves have; None where folders say it."""
    names: Callable[[], Sequence[str] | None] = getattr(source, "class_names", lambda: None)
    found = names()
    return None if found is None else tuple(found)


def view_of(source: Source) -> Mapping[str, Any]:
    """Give the default view of the datasets that a source makes: rows, unless it has a `view`."""
    view: Callable[[], Mapping[str, Any]] = getattr(source, "view", lambda: ROWS)
    return view()


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
