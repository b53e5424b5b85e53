"""Store long lists of shards or inputs in files beside the generation that refers to them.

A list with more than MAX_INLINE_ENTRIES entries is *external*: it is stored in its own file in the
folder `generations/`, so that opening a dataset stays fast. The file's name is a hash of the file's
content, so generations with equal lists share one file. The JSON of a generation refers to the file
by the hash, the size in bytes and the number of entries.

An external list of shards is binary and little-endian. It has four columns, one after another: the
number of samples of each shard (u64), the size of each shard in bytes (u64), the id of each shard
(16 bytes), and the name of each shard in UTF-8, followed by a zero byte. A list of 10^5 shards
takes about 5 MB on disk and in memory.

An external list of inputs has one line of canonical JSON per input, and is read on first use.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio._base.classes import cached_property
from shardio.errors import DatasetCorrupt, SchemaError
from shardio.format.checksum import content_id
from shardio.format.types.text import canonical_json, check_json
from shardio.shard.writer import ShardSummary
from shardio.storage.fs import (
    read_checksummed_json,
    read_file,
    refuse_links_outside,
    unlink,
    write_atomic,
)

MAX_INLINE_ENTRIES: Final = 4096
"""The maximum length of a list in the JSON of a generation; longer lists are external."""

SHARDS: Final = "shards"
INPUTS: Final = "inputs"
_HINT: Final = "shardio repair recovers the samples"
_MAX_COUNT: Final = 1 << 40
_MAX_BYTES: Final = 1 << 48


@dataclass(frozen=True, slots=True)
class ExternalList:
    """A reference to an external list in `path`. Immutable.

    `id` is the xxh3-128 hash of the file's content in hex. `n_bytes` is the size of the file, and
    `count` is the number of entries.
    """

    path: Path
    id: str
    n_bytes: int
    count: int

    def read(self) -> bytes:
        """Read the file; raise DatasetCorrupt if it is missing or was changed."""
        refuse_links_outside(self.path.parent.parent, self.path)
        try:
            content = read_file(self.path)
        except FileNotFoundError as error:
            raise DatasetCorrupt(
                f"{self.path}: is missing; a generation keeps a list of {self.count} there; {_HINT}"
            ) from error
        found = content_id(content).hex()
        if (len(content), found) != (self.n_bytes, self.id):
            raise DatasetCorrupt(
                f"{self.path}: changed since it was written: expected {self.n_bytes} bytes with id "
                f"{self.id}, found {len(content)} bytes with id {found}; {_HINT}"
            )
        return content


def is_hex(value: object, n_digits: int) -> bool:
    """Return True if `value` is a string of `n_digits` lower-case hex digits."""
    return isinstance(value, str) and len(value) == n_digits and not value.strip("0123456789abcdef")


def is_long(entries: Sized) -> bool:
    """Return True if a list with these entries must be an external list."""
    return len(entries) > MAX_INLINE_ENTRIES


def add_external_list(
    external_lists: dict[str, bytes], kind: str, content: bytes, count: int
) -> dict[str, Any]:
    """Add a list to `external_lists`, which maps file names to contents.

    Return a reference to the list as JSON.
    """
    id = content_id(content).hex()
    external_lists[f"{id}.{kind}"] = content
    return {"bytes": len(content), "count": count, "id": id}


def parse_external_list(content: Mapping[str, Any], kind: str, path: Path) -> ExternalList:
    """Parse a reference to an external list; `path` is the generation file that contains it."""
    id, n_bytes, count = (content.get(key) for key in ("id", "bytes", "count"))
    if (
        not is_hex(id, 32)
        or type(n_bytes) is not int
        or type(count) is not int
        or not (0 < n_bytes <= _MAX_BYTES and 0 < count <= _MAX_COUNT)
    ):
        raise DatasetCorrupt(
            f"{path}: {kind} must be a list, or refer to an external list with an 'id' of 32 hex "
            f"digits, 'bytes' and 'count'; found {dict(content)!r}"
        )
    return ExternalList(path.parent / f"{id}.{kind}", str(id), n_bytes, count)


def external_list_names(content: Mapping[str, Any]) -> set[str]:
    """Return the file names in all references to external lists, including invalid references."""
    groups = content.get("column_groups")
    lists = [(SHARDS, content.get("shards")), (INPUTS, content.get("inputs"))]
    if isinstance(groups, list):
        lists += [(SHARDS, group.get("shards")) for group in groups if isinstance(group, dict)]
    return {f"{found.get('id')}.{kind}" for kind, found in lists if isinstance(found, dict)}


def write_external_list(path: Path, content: bytes) -> None:
    """Write an external list durably. Do nothing if the file already has this content."""
    with contextlib.suppress(OSError, DatasetCorrupt):
        if read_file(path) == content:
            return
    write_atomic(path, content, exclusive=False)


def remove_unreferenced(folder: Path) -> None:
    """Remove external lists that no generation in `folder` refers to. The caller locks `folder`.

    If a generation cannot be read, no list is removed: that generation may refer to any list.
    """
    found = {path.name for kind in (SHARDS, INPUTS) for path in folder.glob(f"*.{kind}")}
    if not found:
        return
    named = set[str]()
    for path in folder.glob("[0-9]*.json"):
        try:
            named |= external_list_names(read_checksummed_json(path))
        except (DatasetCorrupt, OSError):
            return
    for name in sorted(found - named):
        unlink(folder / name)


_Numbers = npt.NDArray[np.int64]
_COLUMNS_BYTES: Final = 8 + 8 + 16
_SUFFIX: Final = b".shard\0"
_PATH_BYTES: Final = "surrogateescape"
MAX_NAME_BYTES: Final = 255
"""The maximum length of a file name on Linux and macOS."""


class ShardList(Sequence[ShardSummary]):
    """The shards of a generation, or of an added column. Immutable.

    `content` contains the columns of an external list of `n` shards; `file` is the file that was
    read, or None. `samples`, `sizes` and `ids` contain the number of samples, the size in bytes and
    the id (16 bytes) of each shard; do not modify the arrays. A ShardList is equal to a tuple or
    list of the same shards.
    """

    def __init__(self, content: bytes, n: int, file: ExternalList | None = None) -> None:
        self.content, self.file = content, file
        numbers = np.frombuffer(content, "<i8", 2 * n)
        self.samples, self.sizes = numbers[:n], numbers[n:]
        self.ids = content[16 * n : 32 * n]
        self._names = content[32 * n :]
        self._ends: _Numbers = np.flatnonzero(np.frombuffer(self._names, np.uint8) == 0)

    @classmethod
    def of(cls, shards: Iterable[ShardSummary]) -> ShardList:
        """Return `shards` as a ShardList; raise SchemaError if a name cannot be encoded."""
        if isinstance(shards, ShardList):
            return shards
        shards = tuple(shards)
        numbers = [[shard.n_samples for shard in shards], [shard.n_bytes for shard in shards]]
        ids = b"".join(bytes.fromhex(shard.id) for shard in shards)
        try:
            # In a mixture, the names are paths, which may contain any bytes.
            names = "".join(f"{shard.name}\0" for shard in shards).encode(errors=_PATH_BYTES)
        except UnicodeEncodeError as error:
            raise SchemaError(f"a generation cannot be written: {error}") from error
        return cls(np.array(numbers, "<i8").tobytes() + ids + names, len(shards))

    @classmethod
    def parse(cls, file: ExternalList, content: bytes) -> ShardList:
        """Parse `content`, which `file` refers to; raise DatasetCorrupt if that fails."""
        path, n = file.path, file.count
        if len(content) < n * _COLUMNS_BYTES:
            raise DatasetCorrupt(f"{path}: too short for {n} shards")
        found = cls(content, n, file)
        names, ends = found._names, found._ends
        if (found.samples < 0).any() or (found.sizes < 0).any():
            raise DatasetCorrupt(f"{path}: samples and bytes must be counts below 2^63")
        is_named = len(ends) == n == names.count(_SUFFIX) and not names[-1]
        if not is_named or b"/" in names:
            raise DatasetCorrupt(f"{path}: expected {n} names of shards in the dataset's folder")
        if np.diff(ends, prepend=-1).max() - 1 > MAX_NAME_BYTES:
            raise DatasetCorrupt(f"{path}: a name has more than {MAX_NAME_BYTES} bytes")
        try:
            names.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DatasetCorrupt(f"{path}: a name is not UTF-8: {error}") from error
        return found

    def __len__(self) -> int:
        return len(self.samples)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ShardList):
            return self.content == other.content
        return isinstance(other, tuple | list) and tuple(self) == tuple(other)

    def __repr__(self) -> str:
        return f"ShardList({len(self)} shards)"

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        i = range(len(self))[index]
        start = int(self._ends[i - 1]) + 1 if i else 0
        name = self._names[start : int(self._ends[i])].decode(errors=_PATH_BYTES)
        id = self.ids[16 * i : 16 * i + 16].hex()
        return ShardSummary(name, int(self.samples[i]), int(self.sizes[i]), id)

    def __iter__(self) -> Iterator[ShardSummary]:
        ids = (self.ids[at : at + 16].hex() for at in range(0, len(self.ids), 16))
        columns = self.names(), self.samples.tolist(), self.sizes.tolist(), ids
        return itertools.starmap(ShardSummary, zip(*columns, strict=True))

    def names(self) -> list[str]:
        """Return the names of all shards."""
        return self._names.decode(errors=_PATH_BYTES).split("\0")[:-1]

    @property
    def n_samples(self) -> int:
        """The total number of samples."""
        return sum(self.samples.tolist())

    @property
    def n_bytes(self) -> int:
        """The total size of all shards in bytes."""
        return sum(self.sizes.tolist())


Input = Mapping[str, Any]


class InputList(Sequence[Input]):
    """The inputs in the external list `file`. The first access reads and checks the list."""

    def __init__(self, file: ExternalList) -> None:
        self.file = file

    def __len__(self) -> int:
        return self.file.count

    def __eq__(self, other: object) -> bool:
        if isinstance(other, InputList):
            return self.file.id == other.file.id
        return isinstance(other, tuple | list) and tuple(self) == tuple(other)

    def __repr__(self) -> str:
        return f"InputList({len(self)} entries, {self.file.path.name})"

    @cached_property
    def entries(self) -> tuple[Input, ...]:
        """All inputs."""
        path, content = self.file.path, self.file.read()
        try:
            found = tuple(json.loads(line) for line in content.splitlines())
            check_json(found)
            is_canonical = _lines(found) == content
        except (ValueError, TypeError, RecursionError, SchemaError) as error:
            raise DatasetCorrupt(f"{path}: not lines of JSON: {error}") from error
        if not is_canonical or len(found) != self.file.count:
            raise DatasetCorrupt(
                f"{path}: expected {self.file.count} lines of canonical JSON, found {len(found)}"
            )
        check_inputs(found, path)
        return found

    def __getitem__(self, index: Any) -> Any:
        return self.entries[index]

    def __iter__(self) -> Iterator[Input]:
        return iter(self.entries)


def pack_inputs(inputs: Iterable[Input]) -> bytes:
    """Return the content of an external list; raise SchemaError if an input is not JSON."""
    if isinstance(inputs, InputList):
        return inputs.file.read()
    # Convert each entry to JSON twice. The first conversion turns all keys into strings. The
    # second conversion, in `_lines`, can then sort the keys as strings.
    plain = [json.loads(canonical_json(dict(entry))) for entry in inputs]
    check_json(plain)
    return _lines(plain)


def _lines(inputs: Iterable[object]) -> bytes:
    return b"".join(canonical_json(entry) + b"\n" for entry in inputs)


def check_inputs(inputs: Sequence[Any], path: Path) -> None:
    """Raise DatasetCorrupt if an input is invalid; the message names the file `path`."""
    for i, entry in enumerate(inputs):
        if not isinstance(entry, dict):
            raise DatasetCorrupt(f"{path}: every entry of 'inputs' must be a dict")
        # Only `path` and `outcome` are required. A writer omits any other key with an empty value.
        texts = [entry.get("path"), entry.get("outcome")]
        texts += [entry.get(key, "") for key in ("reason", "hash")]
        counts = [entry.get(key, 0) for key in ("samples", "bytes")]
        if not (all(type(t) is str for t in texts) and all(type(n) is int for n in counts)):
            raise DatasetCorrupt(
                f"{path}: input {i}: 'path' and 'outcome' must be texts; if present, 'reason' and "
                f"'hash' must be texts, 'samples' and 'bytes' must be counts; found {entry!r}"
            )
