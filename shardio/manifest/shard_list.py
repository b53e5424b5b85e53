"""A long list of shards as columns: as it lies in a part, and in memory.

Little-endian: of every shard in order its samples (u64), then of every shard its bytes (u64), then
the ids (16 bytes each), then the names, each in UTF-8 with a zero byte behind it. 10^5 shards take
some 5 MB, in memory as well: what describes one is made when it is asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, overload

import numpy as np
import numpy.typing as npt

from shardio.errors import DatasetCorrupt, SchemaError
from shardio.format.schema import Schema
from shardio.manifest.parts import Part
from shardio.shard.writer import ShardSummary

_Numbers = npt.NDArray[np.int64]
_COLUMNS_BYTES: Final = 8 + 8 + 16
_SUFFIX: Final = b".shard\0"
MAX_NAME_BYTES: Final = 255
"""What the file systems of Linux and macOS allow."""


class ShardList(Sequence[ShardSummary]):
    """The shards in a part. Immutable.

    Args:
        part: where it lies.
        content: its bytes.

    Raises:
        DatasetCorrupt: it breaks a rule.
    """

    def __init__(self, part: Part, content: bytes) -> None:
        self.part, self.content, n = part, content, part.count
        if len(content) < n * _COLUMNS_BYTES:
            raise DatasetCorrupt(f"{part.path}: too short for {n} shards")
        numbers = np.frombuffer(content, "<i8", 2 * n)
        self.samples, self.sizes = numbers[:n], numbers[n:]
        self.ids = content[16 * n : 32 * n]
        self._names = content[32 * n :]
        self._ends: _Numbers = np.flatnonzero(np.frombuffer(self._names, np.uint8) == 0)
        self._check()

    def _check(self) -> None:
        path, n = self.part.path, len(self)
        if (self.samples < 0).any() or (self.sizes < 0).any():
            raise DatasetCorrupt(f"{path}: samples and bytes must be counts below 2^63")
        is_named = len(self._ends) == n == self._names.count(_SUFFIX) and not self._names[-1]
        if not is_named or b"/" in self._names:
            raise DatasetCorrupt(f"{path}: expected {n} names of shards in the dataset's folder")
        if np.diff(self._ends, prepend=-1).max() - 1 > MAX_NAME_BYTES:
            raise DatasetCorrupt(f"{path}: a name has more than {MAX_NAME_BYTES} bytes")
        try:
            self._names.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DatasetCorrupt(f"{path}: a name is not UTF-8: {error}") from error

    def __len__(self) -> int:
        return self.part.count

    @overload
    def __getitem__(self, index: int) -> ShardSummary: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[ShardSummary, ...]: ...
    def __getitem__(self, index: int | slice) -> ShardSummary | tuple[ShardSummary, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        i = range(len(self))[index]
        start = int(self._ends[i - 1]) + 1 if i else 0
        name = self._names[start : int(self._ends[i])].decode("utf-8")
        id = self.ids[16 * i : 16 * i + 16].hex()
        return ShardSummary(name, int(self.samples[i]), int(self.sizes[i]), id)

    def __iter__(self) -> Iterator[ShardSummary]:
        ids = (self.ids[at : at + 16].hex() for at in range(0, len(self.ids), 16))
        columns = self.names(), self.samples.tolist(), self.sizes.tolist(), ids
        return itertools.starmap(ShardSummary, zip(*columns, strict=True))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ShardList):
            return self.content == other.content
        return isinstance(other, tuple | list) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(self.part.id)

    def __repr__(self) -> str:
        return f"ShardList({len(self)} shards, {self.part.path.name})"

    def names(self) -> list[str]:
        """The names of all."""
        return self._names.decode("utf-8").split("\0")[:-1]


def pack_shards(shards: Sequence[ShardSummary]) -> bytes:
    """The bytes of a part with these shards.

    Raises:
        SchemaError: one has a name that is none.
    """
    if isinstance(shards, ShardList):
        return shards.content
    try:
        names = b"".join(shard.name.encode("utf-8") + b"\0" for shard in shards)
    except UnicodeEncodeError as error:
        raise SchemaError(f"a generation cannot be written: {error}") from error
    columns = (_column(s.n_samples for s in shards), _column(s.n_bytes for s in shards))
    return b"".join((*columns, ids_of(shards), names))


def ids_of(shards: Sequence[ShardSummary]) -> bytes:
    """The ids of all, 16 bytes each."""
    if isinstance(shards, ShardList):
        return shards.ids
    return b"".join(bytes.fromhex(shard.id) for shard in shards)


def _column(numbers: Iterable[int]) -> bytes:
    return np.fromiter(numbers, "<i8").tobytes()


def samples_of(shards: Sequence[ShardSummary]) -> _Numbers:
    """How many samples each has; not to be written to."""
    if isinstance(shards, ShardList):
        return shards.samples
    return np.fromiter((shard.n_samples for shard in shards), np.int64, len(shards))


def sizes_of(shards: Sequence[ShardSummary]) -> _Numbers:
    """How many bytes each has; not to be written to."""
    if isinstance(shards, ShardList):
        return shards.sizes
    return np.fromiter((shard.n_bytes for shard in shards), np.int64, len(shards))


def bytes_of(shards: Sequence[ShardSummary]) -> int:
    """How many bytes all have together."""
    return sum(sizes_of(shards).tolist())


def names_of(shards: Sequence[ShardSummary]) -> list[str]:
    """The names of all."""
    if isinstance(shards, ShardList):
        return shards.names()
    return [shard.name for shard in shards]


class Files(Sequence[tuple[ShardSummary, Schema]]):
    """Every shard with its schema: those of each group, one group behind the other.

    Args:
        groups: shards that have one schema; all groups have as many.
    """

    def __init__(self, groups: Sequence[tuple[Schema, Sequence[ShardSummary]]]) -> None:
        self._groups, self._n = groups, len(groups[0][1])

    def __len__(self) -> int:
        return self._n * len(self._groups)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        group, shard = divmod(range(len(self))[index], self._n)
        schema, shards = self._groups[group]
        return shards[shard], schema

    def __iter__(self) -> Iterator[tuple[ShardSummary, Schema]]:
        return ((shard, schema) for schema, shards in self._groups for shard in shards)
