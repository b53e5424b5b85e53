"""Publish and read the generations of a dataset.

A generation is one state of a dataset, stored in a numbered file in the folder `generations/`. The
file `dataset.json` (the *pointer*) contains the number of the published generation. In a local
folder, a change is committed only by replacing `dataset.json`. A dataset at a URL is committed when
`shardio.conversion.upload` has uploaded `dataset.json`, after all other files.

Writers lock the folder `generations/`. The pointer and the generations are canonical JSON with a
digest, so that a change of any byte is detected. A published generation never changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from shardio._base import __version__
from shardio._base.callers import check_encodable, shown, similar_name
from shardio.dataset.external_lists import (
    InputList,
    ShardList,
    remove_unreferenced,
    write_external_list,
)
from shardio.dataset.generation import (
    ROWS,
    Generation,
    describe_generation,
    is_known_view,
    lineage_of,
    parse_generation,
    view_error,
)
from shardio.errors import (
    DatasetConflict,
    DatasetCorrupt,
    DatasetExists,
    DatasetNotFound,
    InvalidArgument,
    ShardioError,
    ShardUnsupported,
)
from shardio.format.schema import Schema
from shardio.shard.writer import ShardSummary
from shardio.storage.fs import (
    lock_folder,
    make_folder,
    read_checksummed_json,
    refuse_links_outside,
    remove_folder,
    to_checksummed_json,
    unlink,
    write_atomic,
)
from shardio.storage.remote.connection import is_url

POINTER: Final = "dataset.json"
"""The file that points to the published generation. A folder with this file is a dataset."""


def holds_dataset(folder: str | os.PathLike[str]) -> bool:
    """Return True if a dataset is published in `folder`."""
    return (Path(folder) / POINTER).exists()


def check_folder_name(name: str | os.PathLike[str]) -> None:
    """Raise InvalidArgument if the name of a folder is empty, a URL, or not allowed."""
    if not isinstance(name, str | os.PathLike):
        raise InvalidArgument(f"out must be the path of a folder; found {shown(name)}")
    text = os.fsdecode(name)
    if not text:
        raise InvalidArgument(
            "out (OUT) is empty; expected the name of a folder; '.' is the current one"
        )
    if is_url(text):
        raise InvalidArgument(
            f"out (OUT) is {text!r}, a URL: only shardio.convert writes to an object store; write "
            "to a folder, and copy it to the URL, for example with `aws s3 sync`"
        )
    if not isinstance(name, str) and _FLATTENED_URL.match(text):
        raise InvalidArgument(
            f"out (OUT) is {text!r}, a URL without its second slash, as pathlib writes it: pass "
            "the URL as text"
        )
    check_encodable(text, "out (OUT)")
    if b"\0" in os.fsencode(text):
        raise InvalidArgument(f"out (OUT) is {text!r}, not a valid folder name")


STAGING_PREFIX: Final = ".shardio-staging-"
"""The beginning of a staging folder's name. Folders with such names are removed: no other program
may use them."""
WORK_FOLDER: Final = ".conversion"
"""The name of the work folder of a conversion."""


def refuse_existing(
    folder: str | os.PathLike[str], *, exclude: str = "", hint: str = "choose another folder"
) -> None:
    """Raise DatasetExists if `folder` is a file, or has an entry other than `exclude`.

    `hint` says what to do if the folder holds a dataset.
    """
    path = Path(folder)
    if path.is_dir():
        if holds_dataset(path):
            raise DatasetExists(f"{path}: already holds a dataset; {hint}")
        found = sorted({*os.listdir(path)} - {exclude})
        if any(name.startswith(STAGING_PREFIX) for name in found):
            raise DatasetExists(
                f"{path}: another operation is writing here; wait for it, or choose another folder"
            )
        if WORK_FOLDER in found:
            raise DatasetExists(
                f"{path}: holds an interrupted conversion, or one that is running; resume it "
                "(--resume), wait for it, or choose another folder"
            )
        if found:
            raise DatasetExists(
                f"{path}: already holds data ({found[0]}, {len(found)} entries in all); "
                "choose another folder"
            )
    elif os.path.lexists(path):
        raise DatasetExists(f"{path}: is a file; a dataset is a folder")


def refuse_nested(out: str | os.PathLike[str], *sources: str | os.PathLike[str]) -> None:
    """Raise InvalidArgument if a new folder `out` would lie in a dataset, or contain a source.

    An operation on the outer dataset could otherwise remove the inner one, and moving or deleting
    one of them would affect both. Links are followed. Sources at URLs are accepted. The errors of
    `check_folder_name` are raised, too.
    """
    check_folder_name(out)
    target = Path(os.path.realpath(out))
    folders = {
        Path(os.path.realpath(path)): os.fspath(path)
        for path in sources
        if not is_url(os.fspath(path))
    }
    for folder in target.parents:
        if folder in folders or (holds_dataset(folder) and (folder / GENERATIONS).is_dir()):
            raise InvalidArgument(
                f"{os.fspath(out)}: lies in the dataset {folders.get(folder, folder)}; choose a "
                "folder outside of it"
            )
    for folder, given in folders.items():
        if target in folder.parents:
            raise InvalidArgument(
                f"{os.fspath(out)}: contains the source {given}; choose another folder"
            )


GENERATIONS: Final = "generations"
_FORMAT: Final = "shardio dataset"
_FLATTENED_URL: Final = re.compile(r"(?:abfss?|az|azure|file|gs|https?|s3a?):/")
_VERSION: Final = 1
_MAX_NUMBER: Final = 999_999


def check_classes(classes: Sequence[str]) -> tuple[str, ...]:
    """Return class names as a tuple; raise InvalidArgument unless they are distinct strings."""
    if not isinstance(classes, list | tuple) or not all(isinstance(n, str) for n in classes):
        raise InvalidArgument(f"classes must be a list of names; found {classes!r}")
    if twice := [name for name, n in Counter(classes).items() if n > 1]:
        raise InvalidArgument(f"classes must be distinct; repeated: {', '.join(map(repr, twice))}")
    return tuple(classes)


def publish(
    folder: str | os.PathLike[str],
    *,
    schema: Schema,
    shards: Sequence[ShardSummary],
    classes: Sequence[str] = (),
    inputs: Sequence[Mapping[str, Any]] = (),
    versions: Mapping[str, str] | None = None,
    view: Mapping[str, Any] = ROWS,
    **details: Any,
) -> Generation:
    """Publish the first generation of a dataset. All shards must already be complete in `folder`.

    The other arguments are attributes of the Generation. If an error is raised, nothing is
    published.

    Raises:
        DatasetConflict: another writer has published in this folder in the meantime.
        InvalidArgument: the classes are not distinct strings, or `view` does not match the schema.
        SchemaError: a value cannot be represented in JSON.
    """
    if wrong := view_error(view, schema) if is_known_view(view) else "unknown view kind":
        raise InvalidArgument(f"view {dict(view)!r}: {wrong}")
    generation = Generation(
        number=1,
        lineage=lineage_of(schema, shards),
        schema=schema,
        shards=ShardList.of(shards),
        classes=check_classes(classes),
        inputs=inputs if isinstance(inputs, InputList) else tuple(inputs),
        versions={"shardio": __version__, **(versions or {})},
        view=view,
        **details,
    )
    root, external_lists = Path(folder), dict[str, bytes]()
    content = to_checksummed_json(describe_generation(generation, external_lists))
    with _locked(root):
        _publish(root, generation, content, external_lists)
    return generation


def publish_next(
    folder: str | os.PathLike[str], previous: Generation, **changes: Any
) -> Generation:
    """Publish the generation that follows `previous`. Processes may continue to read `previous`.

    `changes` are the attributes of the Generation that differ from `previous`. All shards in
    `changes` must already be complete in `folder`. If an error is raised, nothing is published.

    Raises:
        DatasetConflict: another writer has published a generation since `previous` was read.
        DatasetCorrupt, ShardUnsupported: the published generation cannot be read.
        InvalidArgument: a group of added columns does not match the shards.
        SchemaError: a value cannot be represented in JSON.
    """
    root, number = Path(folder), previous.number + 1
    versions = {**changes.pop("versions", previous.versions), "shardio": __version__}
    changes["shards"] = ShardList.of(changes.get("shards", previous.shards))
    fitting = dataclasses.replace(previous, versions=versions, **changes)
    if lacking := [group.name for group in fitting.column_groups if not group.fits(fitting.shards)]:
        raise InvalidArgument(
            f"{root}: fields {', '.join(lacking)} were added later, and are stored in separate "
            "shards, which do not match these shards; merge them first with shardio compact"
        )
    generation = dataclasses.replace(fitting, number=number, lineage=previous.lineage)
    external_lists = dict[str, bytes]()
    content = to_checksummed_json(describe_generation(generation, external_lists))
    with _locked(root):
        published = _recover(root)
        if (published.number, published.lineage) != (previous.number, previous.lineage):
            raise DatasetConflict(
                f"{root}: generation {published.number} exists: another writer published after "
                f"generation {previous.number} was read; its files are unchanged: repeat the "
                "operation on the published generation"
            )
        _publish(root, generation, content, external_lists)
    return generation


def recover(folder: str | os.PathLike[str]) -> Generation:
    """Undo the unfinished commit of a killed writer; return the published generation.

    The file of the generation that follows the published one is removed, but its shards are not.
    Temporary files and unreferenced external lists are removed, too. Raises the errors of `load`.
    """
    root = Path(folder)
    if not holds_dataset(root):
        raise DatasetNotFound(f"{root}: holds no {POINTER}: not a dataset, or never finished")
    with _locked(root):
        return _recover(root)


def _recover(root: Path) -> Generation:
    published = load(root)
    if (path := _generation_path(root, published.number + 1)).exists():
        unlink(path)  # its writer was killed: a running one would hold the lock
    remove_temporary_files(root)
    remove_unreferenced(root / GENERATIONS)
    return published


def remove_temporary_files(folder: str | os.PathLike[str]) -> None:
    """Remove the temporary files that writers of the manifest left when they were killed."""
    for pattern in (f".{POINTER}.*.tmp", f"{GENERATIONS}/.*.tmp"):
        for half in Path(folder).glob(pattern):
            unlink(half)


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Create the folder of generations if it is missing, and hold its lock in the `with` block."""
    fd = -1
    while fd < 0:
        make_folder(root / GENERATIONS)
        refuse_links_outside(root, root / GENERATIONS)
        with contextlib.suppress(FileNotFoundError):  # another writer failed and removed the folder
            fd = lock_folder((root / GENERATIONS).resolve(), wait=True)  # it may be a link
    try:
        yield
    finally:
        os.close(fd)


def _generation_path(root: Path, number: int) -> Path:
    return root / GENERATIONS / f"{number:06d}.json"


def _write_pointer(root: Path, generation: Generation) -> None:
    pointer = {"generation": generation.number, "lineage": generation.lineage}
    pointer |= {"format": _FORMAT, "version": _VERSION}
    write_atomic(root / POINTER, to_checksummed_json(pointer), exclusive=False)


def _publish(
    root: Path, generation: Generation, content: bytes, external_lists: Mapping[str, bytes]
) -> None:
    """Write the external lists, the generation file and the pointer; the caller holds the lock.

    If an error occurs before the generation is published, these files are removed again.
    """
    number, path = generation.number, _generation_path(root, generation.number)
    try:
        for name, part in external_lists.items():
            write_external_list(path.parent / name, part)
        write_atomic(path, content, exclusive=True)
        _write_pointer(root, generation)
    except FileExistsError as error:
        remove_unreferenced(path.parent)
        raise DatasetConflict(
            f"{root}: generation {number} already exists: another writer published first, and "
            "its files are unchanged; choose another folder"
        ) from error
    except BaseException:
        with contextlib.suppress(OSError):  # if cleaning up fails, raise the original error
            if _published_number(root) != number:
                unlink(path)
                remove_unreferenced(path.parent)
                remove_folder(path.parent)
        raise


def withdraw(folder: str | os.PathLike[str], lineage: str) -> None:
    """Remove generation 1 of an unpublished dataset with id `lineage`, and unreferenced lists."""
    root = Path(folder)
    if not (root / GENERATIONS).is_dir():  # on a full disk, `_locked` cannot create this folder
        return
    with _locked(root):
        with contextlib.suppress(DatasetCorrupt, ShardUnsupported):
            if load_generation(root, 1).lineage == lineage:
                unlink(_generation_path(root, 1))
        remove_unreferenced(root / GENERATIONS)
    remove_folder(root / GENERATIONS)  # has no effect unless the folder is empty


def _published_number(root: Path) -> int:
    with contextlib.suppress(DatasetNotFound):
        return read_pointer(root)[0]
    return 0


def load(folder: str | os.PathLike[str]) -> Generation:
    """Read the published generation.

    Raises:
        DatasetNotFound: there is no dataset.
        DatasetCorrupt: a file is damaged or invalid.
        ShardUnsupported: the generation was written by a newer version.
    """
    root = Path(folder)
    number, lineage = read_pointer(root)
    generation = load_generation(root, number)
    if generation.lineage != lineage:
        raise DatasetCorrupt(
            f"{root / POINTER}: expected lineage {generation.lineage} of generation {number}, "
            f"found {lineage!r}"
        )
    return generation


def _convert_hint(path: Path) -> str:
    return f"to load files of other kinds, convert them first: shardio convert {path} OUT"


def _refuse_subset(path: Path) -> None:
    """Raise DatasetNotFound if a missing path consists of a dataset's path and a subset's name."""
    subsets: Mapping[str, object] = {}
    with contextlib.suppress(ShardioError, OSError):
        subsets = load(path.parent).subsets if holds_dataset(path.parent) else {}
    if path.name in subsets:
        raise DatasetNotFound(
            f"{path}: there is no such folder: write shardio.open({str(path.parent)!r}, "
            f"subset={path.name!r})"
        )


def _check_is_dataset(root: Path) -> None:
    """Raise DatasetNotFound if a folder holds no `dataset.json`; the error tells what to open."""
    if not root.exists():
        _refuse_subset(root)
    if root.is_file() and root.suffix == ".shard":
        raise DatasetNotFound(
            f"{root}: this is a single shard file: read it with shardio.ShardReader, or open its "
            f"dataset, the folder {str(root.parent)!r}"
        )
    if root.name == POINTER and root.is_file():
        raise DatasetNotFound(f"{root}: open its dataset, the folder {str(root.parent)!r}")
    if root.is_file():
        raise DatasetNotFound(f"{root}: this is a file, not a dataset; {_convert_hint(root)}")
    if not root.is_dir():
        here = "" if root.is_absolute() else f" in {os.getcwd()}"
        hint = similar_name(root)
        if any(letter in root.name for letter in "*?[{"):
            hint = (
                f": a dataset is opened by its folder, {str(root.parent)!r}, and not by its files"
                if root.suffix in (".shard", "")
                else f"; {_convert_hint(root.parent)}"
            )
        raise DatasetNotFound(f"{root}: there is no such folder{here}{hint}")
    if not (root / POINTER).exists():
        text = f"{root}: holds no {POINTER}: not a dataset, or never finished"
        names = os.listdir(root)
        if WORK_FOLDER in names:
            raise DatasetNotFound(
                f"{root}: holds a conversion that is running or was interrupted, and no "
                f"{POINTER}; wait for it, or resume it (shardio convert … --resume)"
            )
        if below := [name for name in sorted(names) if holds_dataset(root / name)]:
            raise DatasetNotFound(f"{text}; did you mean {str(root / below[0])!r}?")
        is_ours = any(
            name.endswith((".shard", ".tmp")) or name.startswith(STAGING_PREFIX) for name in names
        )
        raise DatasetNotFound(text if is_ours or not names else f"{text}; {_convert_hint(root)}")


def read_pointer(folder: str | os.PathLike[str]) -> tuple[int, object]:
    """Return the generation number and dataset id in `dataset.json`; raise the errors of `load`."""
    root = Path(folder)
    _check_is_dataset(root)
    pointer_path = root / POINTER
    refuse_links_outside(root, pointer_path)
    pointer = read_checksummed_json(pointer_path)
    if pointer.get("format") != _FORMAT:
        raise DatasetCorrupt(f"{pointer_path}: expected format {_FORMAT!r}")
    version, number = pointer.get("version"), pointer.get("generation")
    if type(version) is not int:
        raise DatasetCorrupt(f"{pointer_path}: expected a version, found {version!r}")
    if version != _VERSION:
        raise ShardUnsupported(
            f"{pointer_path}: version {version}, this shardio reads {_VERSION}; read it with a "
            "newer shardio"
        )
    if type(number) is not int or not 1 <= number <= _MAX_NUMBER:
        raise DatasetCorrupt(
            f"{pointer_path}: expected a generation from 1 to {_MAX_NUMBER}, found {number!r}"
        )
    return number, pointer.get("lineage")


def generation_numbers(folder: str | os.PathLike[str]) -> list[int]:
    """Return the numbers of all generation files, published or not, in ascending order."""
    return sorted(int(path.stem) for path in Path(folder, GENERATIONS).glob("[0-9]" * 6 + ".json"))


def load_generation(folder: str | os.PathLike[str], number: int) -> Generation:
    """Read the generation with this number, which need not be published.

    Raises:
        DatasetCorrupt: the generation is missing, damaged or invalid.
        ShardUnsupported: the generation was written by a newer version.
    """
    path = _generation_path(Path(folder), number)
    if not path.exists():
        raise DatasetCorrupt(f"{path}: generation {number} is missing")
    refuse_links_outside(Path(folder), path.parent, path)
    generation = parse_generation(read_checksummed_json(path), path)
    if generation.number != number:
        raise DatasetCorrupt(f"{path}: says that it is generation {generation.number}")
    return generation
