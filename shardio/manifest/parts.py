"""Parts: files beside a generation that hold its long lists, so that it is opened fast.

A part lies in `generations/` and is named for its content; the generation says its id, its size and
how many entries it has. Generations whose lists are the same share one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shardio.errors import DatasetCorrupt
from shardio.format.checksum import content_id
from shardio.storage.checksummed_json import read_file, read_sealed, write_sealed
from shardio.storage.fs import refuse_links_outside, unlink

LISTED_MAX: Final = 4096
"""Entries that a list may have in the JSON of a generation; one that is longer lies in a part."""

SHARDS: Final = "shards"
INPUTS: Final = "inputs"
_WAY_OUT: Final = "shardio repair saves the samples"
_MAX_COUNT: Final = 1 << 40
_MAX_BYTES: Final = 1 << 48


@dataclass(frozen=True, slots=True)
class Part:
    """A file with a long list, as a generation names it. Immutable.

    Args:
        path: where it lies.
        id: xxh3-128 of its bytes, as hex digits.
        n_bytes: its size.
        count: how many entries the list has.
    """

    path: Path
    id: str
    n_bytes: int
    count: int

    def describe(self) -> dict[str, Any]:
        """Itself as the JSON of a generation says it."""
        return {"bytes": self.n_bytes, "count": self.count, "id": self.id}

    def read(self) -> bytes:
        """Its bytes, checked.

        Raises:
            DatasetCorrupt: it is missing, or changed since it was written.
            OSError: the system refuses to read it.
        """
        refuse_links_outside(self.path.parent.parent, self.path)
        try:
            content = read_file(self.path)
        except FileNotFoundError as error:
            raise DatasetCorrupt(
                f"{self.path}: is missing; a generation keeps a list of {self.count} there; "
                f"{_WAY_OUT}"
            ) from error
        found = content_id(content).hex()
        if (len(content), found) != (self.n_bytes, self.id):
            raise DatasetCorrupt(
                f"{self.path}: changed since it was written: expected {self.n_bytes} bytes of id "
                f"{self.id}, found {len(content)} of {found}; {_WAY_OUT}"
            )
        return content


def is_long(entries: Sized) -> bool:
    """Whether a list lies in a part."""
    return len(entries) > LISTED_MAX


def name_of(id: str, kind: str) -> str:
    """The name of a part: of a list of `SHARDS`, or of `INPUTS`."""
    return f"{id}.{kind}"


def put_aside(parts: dict[str, bytes], kind: str, content: bytes, count: int) -> dict[str, Any]:
    """Add the content of a part to those that are to be written; returns what names it."""
    id = content_id(content).hex()
    parts[name_of(id, kind)] = content
    return Part(Path(), id, len(content), count).describe()


def parse_part(content: Mapping[str, Any], kind: str, place: Path) -> Part:
    """The part that a generation in `place` names.

    Raises:
        DatasetCorrupt: it breaks a rule.
    """
    id, n_bytes, count = (content.get(key) for key in ("id", "bytes", "count"))
    is_id = isinstance(id, str) and len(id) == 32 and not id.strip("0123456789abcdef")
    if (
        not is_id
        or type(n_bytes) is not int
        or type(count) is not int
        or not (0 < n_bytes <= _MAX_BYTES and 0 < count <= _MAX_COUNT)
    ):
        raise DatasetCorrupt(
            f"{place}: {kind} must be listed, or name a part by an 'id' of 32 hex digits, 'bytes' "
            f"and 'count'; found {dict(content)!r}"
        )
    return Part(place.parent / name_of(str(id), kind), str(id), n_bytes, count)


def has_parts(content: Mapping[str, Any]) -> bool:
    """Whether a generation, as its JSON says it, keeps any list in a part."""
    return next(_named(content), None) is not None


def _named(content: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The kind of each part that a generation names, and what names it; of any JSON."""
    sides = content.get("column_groups")
    lists = [(SHARDS, content.get("shards")), (INPUTS, content.get("inputs"))]
    if isinstance(sides, list):
        lists += [(SHARDS, side.get("shards")) for side in sides if isinstance(side, dict)]
    return ((kind, found) for kind, found in lists if isinstance(found, dict))


def names_of_parts(content: Mapping[str, Any]) -> set[str]:
    """The names of the parts that a generation names, as its JSON says it."""
    return {name_of(str(entry.get("id")), kind) for kind, entry in _named(content)}


def write_part(path: Path, content: bytes) -> None:
    """Write a part, durably; one that is there whole stays.

    Raises:
        OSError: the disk refuses.
    """
    with contextlib.suppress(OSError, DatasetCorrupt):
        if read_file(path) == content:
            return
    write_sealed(path, content, exclusive=False)


def remove_unnamed(folder: Path, among: Collection[str] | None = None) -> None:
    """Remove the parts in `folder` that no generation there names: all, or those `among` some.

    All are for who holds the folder's lock: another writer's may be about to be named. Where a
    generation cannot be read they stay: it may name them.
    """
    found = {path.name for kind in (SHARDS, INPUTS) for path in folder.glob(f"*.{kind}")}
    found = found if among is None else found & {*among}
    if not found:
        return
    named = set[str]()
    for place in folder.glob("[0-9]*.json"):
        try:
            named |= names_of_parts(read_sealed(place))
        except (DatasetCorrupt, OSError):
            return
    for name in sorted(found - named):
        unlink(folder / name)
