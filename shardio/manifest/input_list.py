"""A long list of inputs: a line of canonical JSON for each, in a part; read when asked for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from shardio._base.cached_property import cached
from shardio.errors import DatasetCorrupt, SchemaError
from shardio.format.schema import canonical_json
from shardio.format.values import check_json
from shardio.manifest.parts import Part

Input = Mapping[str, Any]


class InputList(Sequence[Input]):
    """The inputs in a part: nothing of it is read before one of them is asked for, then all.

    Args:
        part: where they lie.

    Raises:
        DatasetCorrupt: (when they are asked for) the part is missing, damaged, or breaks a rule.
    """

    def __init__(self, part: Part) -> None:
        self.part = part

    def read_bytes(self) -> bytes:
        """The bytes of the part, checked."""
        return self.part.read()

    @cached
    def entries(self) -> tuple[Input, ...]:
        """All of them."""
        path, content = self.part.path, self.read_bytes()
        try:
            found = tuple(json.loads(line) for line in content.splitlines())
            check_json(found)
            is_canonical = _lines(found) == content
        except (ValueError, TypeError, RecursionError, SchemaError) as error:
            raise DatasetCorrupt(f"{path}: not lines of JSON: {error}") from error
        if not is_canonical or len(found) != self.part.count:
            raise DatasetCorrupt(
                f"{path}: expected {self.part.count} lines of canonical JSON, found {len(found)}"
            )
        check_inputs(found, path)
        return found

    def __len__(self) -> int:
        return self.part.count

    @overload
    def __getitem__(self, index: int) -> Input: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Input, ...]: ...
    def __getitem__(self, index: int | slice) -> Input | tuple[Input, ...]:
        return self.entries[index]

    def __iter__(self) -> Iterator[Input]:
        return iter(self.entries)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, InputList):
            return self.part.id == other.part.id
        return isinstance(other, tuple | list) and self.entries == tuple(other)

    def __hash__(self) -> int:
        return hash(self.part.id)

    def __repr__(self) -> str:
        return f"InputList({len(self)} inputs, {self.part.path.name})"


def pack_inputs(inputs: Iterable[Input]) -> bytes:
    """The bytes of a part with these inputs.

    Raises:
        SchemaError: JSON cannot say one of them.
        DatasetCorrupt: those in a part are damaged.
    """
    if isinstance(inputs, InputList):
        return inputs.read_bytes()
    # Keys become strings before they are sorted.
    plain = [json.loads(canonical_json(dict(entry))) for entry in inputs]
    check_json(plain)
    return _lines(plain)


def _lines(inputs: Iterable[object]) -> bytes:
    return b"".join(canonical_json(entry) + b"\n" for entry in inputs)


def check_inputs(inputs: Sequence[Any], place: Path) -> None:
    """Make sure that each is what an input is; `place` is for messages.

    Raises:
        DatasetCorrupt: one is not.
    """
    for i, entry in enumerate(inputs):
        if not isinstance(entry, dict):
            raise DatasetCorrupt(f"{place}: every entry of 'inputs' must be a dict")
        # All but the first two are left out where there is nothing to say.
        texts = [entry.get("path"), entry.get("outcome")]
        texts += [entry.get(key, "") for key in ("reason", "hash")]
        counts = [entry.get(key, 0) for key in ("samples", "bytes")]
        if not (all(type(t) is str for t in texts) and all(type(n) is int for n in counts)):
            raise DatasetCorrupt(
                f"{place}: input {i} must have texts 'path' and 'outcome', and only texts as "
                f"'reason' and 'hash', and counts as 'samples' and 'bytes'; found {entry!r}"
            )
