"""A batch: a mapping from field names to values, with the origin of each row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio.batch.layout import FILLED, BlockLayout, FixedSlot, VaryingSlot, WholeSlot
from shardio.errors import ShardCorrupt

_NONE: Final[Mapping[str, Sequence[str]]] = {}


@dataclass(frozen=True, slots=True)
class Skipped:
    """A failed sample, replaced by another sample in its row of the batch (on_error="skip").

    Attributes:
        row: the row of the batch.
        index: the sample's index in the dataset.
        shard, sample: the index of the shard, and the row in the shard.
        error: the class name of the exception.
        text: the message, and the traceback if a transform raised the exception; a long text is
            shortened in the middle.
    """

    row: int
    index: int
    shard: int
    sample: int
    error: str
    text: str


class Batch(Mapping[str, Any]):
    """The values of one step, by field name, in the order of the schema.

    Fixed numeric fields are arrays or tensors. Text, bytes, JSON, arrays of varying shape and lists
    of arrays are lists, created on first access. A missing value of an optional field is None in a
    list and zeros in an array; `present` distinguishes missing values from real zeros. The name of
    a nested record gives a dict of the record's fields. Values stay valid as long as the values or
    the batch are referenced (with reuse=True: until the next batch).
    """

    __slots__ = (
        "_beside",
        "_block",
        "_layout",
        "_lists",
        "_n_rows",
        "_paths",
        "_values",
        "epoch",
        "skipped",
        "step",
    )

    def __init__(
        self,
        layout: BlockLayout,
        block: npt.NDArray[np.uint8],
        n_rows: int,
        values: dict[str, Any],
        epoch: int,
        step: int,
        paths: Sequence[str] = (),
        beside: Mapping[str, Sequence[str]] = _NONE,
        skipped: tuple[Skipped, ...] = (),
    ) -> None:
        self._layout, self._block, self._n_rows, self._values = layout, block, n_rows, values
        self._lists: dict[str, list[Any]] = {}
        # For messages: the paths of the shards, and the paths of each added column's shards.
        self._paths, self._beside = paths, beside
        self.epoch = epoch
        """The epoch, counted from 0."""
        self.step = step
        """The step within the epoch, counted from 0."""
        self.skipped = skipped
        """The failed samples by row; each of these rows contains another sample instead."""

    def __getitem__(self, name: str) -> Any:
        found = self._values.get(name)
        if found is not None:
            return found
        for slot in self._layout.varying:
            if slot.name == name:
                values = self._lists.get(name)
                if values is None:
                    values = self._lists[name] = self._decode(slot)
                return values
        if name in self._layout.schema.groups:
            inner = [each[len(name) + 1 :] for each in self if each.startswith(f"{name}.")]
            parts = dict.fromkeys(each.partition(".")[0] for each in inner)
            return {part: self[f"{name}.{part}"] for part in parts}
        raise KeyError(f"{name!r}: this batch has {', '.join(self)}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout.schema)

    def __len__(self) -> int:
        return len(self._layout.schema)

    def __repr__(self) -> str:
        return f"Batch(step {self.step} of epoch {self.epoch}: {self.n_rows} × {list(self)})"

    @property
    def n_rows(self) -> int:
        """The number of samples."""
        return self._n_rows

    @property
    def indices(self) -> npt.NDArray[np.int64]:
        """The index in the dataset of each row's sample; a copy."""
        return self._origins()["position"].copy()

    @property
    def origins(self) -> npt.NDArray[np.int64]:
        """The shard index and the row in the shard of each row's sample, (n_rows, 2); a copy."""
        origins = self._origins()
        return np.stack([origins["shard"].astype(np.int64), origins["row"]], axis=1)

    @property
    def valid(self) -> npt.NDArray[np.bool_]:
        """True for each row that has the intended sample, not a substitute; a copy."""
        found: npt.NDArray[np.bool_] = self._origins()["status"] == FILLED
        return found

    def present(self, name: str) -> npt.NDArray[np.bool_]:
        """Return a mask of the rows that have a value of the field; a copy."""
        if name not in self._layout.schema:
            raise KeyError(f"{name!r}: this batch has {', '.join(self)}")
        for slot in self._layout.presence:
            if slot.name == name:
                return self._layout.present(self._block, slot)[: self._n_rows].copy()
        return np.ones(self._n_rows, np.bool_)

    @property
    def filled(self) -> tuple[BlockLayout, npt.NDArray[np.uint8], int]:
        """The block of the batch, the layout of the block, and the number of used rows."""
        return self._layout, self._block, self._n_rows

    def of(self, wrap: Callable[[Any, object, str | None], Any]) -> Batch:
        """Return a copy of the batch with `wrap` applied to its arrays; used by tensor adapters."""
        made, layout = copy(self), self._layout
        slots: tuple[FixedSlot | WholeSlot, ...] = (*layout.fixed, *layout.whole)
        made._values = {
            slot.name: wrap(self._values[slot.name], self._block, slot.logical_dtype)
            for slot in slots
        }
        return made

    def _origins(self) -> npt.NDArray[np.void]:
        return self._layout.origins(self._block)[: self._n_rows]

    def _decode(self, slot: VaryingSlot) -> list[Any]:
        """Return the values of a varying field, None for missing values; arrays are views."""
        values = self._decode_all(slot)
        for i in np.flatnonzero(~self.present(slot.name)).tolist():
            values[i] = None
        return values

    def _decode_all(self, slot: VaryingSlot) -> list[Any]:
        """Return the values of a varying field; missing values are arbitrary."""
        layout, field = self._layout, self._layout.schema[slot.name]
        extents = layout.extents(self._block, slot)[: self._n_rows]
        places, sizes = extents["place"].tolist(), extents["n_bytes"].tolist()
        heap = self._block[layout.heap :]
        if (array := field.array) is not None:
            shapes = layout.shapes(self._block, slot)[: self._n_rows].tolist()
            return [
                heap[p : p + n].view(array.numpy).reshape(shape)
                for p, n, shape in zip(places, sizes, shapes, strict=True)
            ]
        records = [heap[p : p + n].data for p, n in zip(places, sizes, strict=True)]
        try:
            return field.decode_batch(records)
        except (ShardCorrupt, ValueError, RecursionError) as error:
            raise self._refuse(slot.name, records, error) from error

    def _placed(self, what: str, code: str, name: str, i: int) -> ShardCorrupt:
        """Return the error for a value of row i."""
        shard, row = self.origins[i].tolist()
        paths = self._beside.get(name, self._paths)
        path = paths[shard] if paths else f"shard number {shard}"
        return ShardCorrupt(what, code=code, path=path, field=name, sample=row)

    def _refuse(self, name: str, records: list[memoryview], error: Exception) -> ShardCorrupt:
        """Return the error for the first sample whose value is invalid.

        `error` was raised by decoding all values together, so it names no sample.
        """
        field = self._layout.schema[name]
        for i, record in enumerate(records):
            try:
                field.decode_batch([record])
            except ShardCorrupt as found:
                return self._placed(found.what, found.code, name, i)
            except (ValueError, RecursionError):
                return self._placed(f"a record cannot be decoded: {error}", "value", name, i)
        return ShardCorrupt(f"a record cannot be decoded: {error}", code="value", field=name)
