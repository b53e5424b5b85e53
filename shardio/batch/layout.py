"""The layout of a batch in a block of shared memory, which a worker fills.

    block: | origins | presence | by field: extents and shapes, or head | fixed fields | heap |

* *Fixed fields* have the same shape in every sample: one dense array of (rows, *shape).
* The *heap* has the values of varying size. An *extent* has the offset and the size of one such
  value; arrays also have a shape.
* A *whole array* is one array for the whole batch, such as a padded array, whose size is not known
  in advance. Its *head* has its offset in the heap, and its shape.
* An optional field has a *presence* byte for each row: 1 if the row has a value.
* The *origin table* ("origins" above) has the sample and the status of each row. Errors use it to
  name the sample, even after a worker has crashed. It also becomes `batch.indices`,
  `batch.origins` and `batch.valid`.
* A *joined field* consists of arrays of varying shape that a batch joins into one whole array. Its
  *companion* is the field with the mask or the offsets of these arrays (see `collation`).
* The *slot* of a field records the offsets of the field's parts in the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shardio.batch.collation import DEFAULT_COLLATION, Collation, JoinedField
from shardio.errors import InvalidArgument
from shardio.format.schema import Schema
from shardio.format.types import Array, Field

ORIGIN: Final = np.dtype(
    [("position", "<i8"), ("row", "<i8"), ("shard", "<i4"), ("field", "<i2"), ("status", "<i2")]
)
"""An entry of the origin table: the index of the sample in the view (`position`), its row in its
shard, its shard, the field that is being read (-1 for none), and the status of the row."""
EXTENT: Final = np.dtype([("n_bytes", "<u8"), ("offset", "<u8")])
"""The extent of a value: its size in bytes, and its offset in the heap."""

ALIGNMENT: Final = 64
PAGE: Final = 4096
NO_FIELD: Final = -1

EMPTY, CLAIMED, FILLED, PADDED, SKIPPED = 0, 1, 2, 3, 4
"""The status of a row. CLAIMED: a worker is reading its sample. PADDED: a copy of another row, not
counted as a sample. SKIPPED: its sample failed, and another sample replaces it."""


def pack_state(field: int, status: int) -> int:
    """Return an origin entry's last 4 bytes, field and status, as one integer."""
    return field & 0xFFFF | status << 16


@dataclass(frozen=True, slots=True)
class FixedSlot:
    """The array of a fixed field, at `offset` in the block; `shape` is the shape of one value."""

    name: str
    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    row_bytes: int
    logical_dtype: str | None
    """The dtype if NumPy lacks it ("bfloat16", whose bits are uint16), else None."""


@dataclass(frozen=True, slots=True)
class VaryingSlot:
    """A varying field: the offsets of its extents (`offset`) and shapes (`shapes`) in the block.

    `n_dims` is 0 for values that are not arrays. Each value has this `alignment` in bytes.
    """

    name: str
    offset: int
    shapes: int
    n_dims: int
    alignment: int


@dataclass(frozen=True, slots=True)
class PresenceSlot:
    """The presence bytes of an optional field."""

    name: str
    offset: int


@dataclass(frozen=True, slots=True)
class WholeSlot:
    """A whole array, whose head is at `offset`."""

    name: str
    offset: int
    dtype: np.dtype[Any]
    n_dims: int
    logical_dtype: str | None


class JoinSlot(NamedTuple):
    """The slots of a joined field's array and of its companion."""

    join: JoinedField
    values: WholeSlot
    companion: WholeSlot | None


class BlockViews(NamedTuple):
    """Views of one block. Keep them: creating them takes as long as filling a batch.

    `origins` is the origin table as int64 of (n_rows, 3): index in the view, row in the shard, and
    the shard with the result of `pack_state` in the upper 32 bits. `states` has only these upper
    bits. `fixed` has each fixed field as uint8 of (n_rows, bytes per row).
    """

    origins: npt.NDArray[np.int64]
    states: npt.NDArray[np.int32]
    fixed: tuple[npt.NDArray[np.uint8], ...]


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The layout of a batch of up to n_rows samples in a block.

    `schema` is the schema of the batch, `samples` the schema of a single sample. If there is a
    batch function, the worker first writes the samples to memory of its own, with the layout
    `inner`, and then writes the results of the function to the block.
    """

    schema: Schema
    samples: Schema
    n_rows: int
    fixed: tuple[FixedSlot, ...]
    varying: tuple[VaryingSlot, ...]
    presence: tuple[PresenceSlot, ...]
    whole: tuple[WholeSlot, ...]
    joins: tuple[JoinSlot, ...]
    heap: int
    """The offset of the heap in the block."""
    inner: BlockLayout | None = None
    channels_first: frozenset[str] = frozenset()
    """Fields of pictures, (…, height, width, channels) in the block, that a batch delivers as
    (…, channels, height, width)."""

    @property
    def has_heap(self) -> bool:
        """True if some values are in the heap; blocks then grow as needed."""
        return bool(self.varying or self.whole)

    @property
    def delivered_schema(self) -> Schema:
        """The schema of batches as they are delivered: `schema`, with the channels first."""
        fields: dict[str, Field] = dict(self.schema)
        for name in self.channels_first:
            if (array := self.schema[name].array) is not None:
                *outer, height, width, channels = array.shape
                if channels is None or 1 <= channels <= 4:
                    fields[name] = replace(array, shape=(*outer, channels, height, width))
        return Schema(fields)

    def origins(self, block: npt.NDArray[np.uint8]) -> npt.NDArray[np.void]:
        """Return the origin table of a block."""
        return block[: self.n_rows * ORIGIN.itemsize].view(ORIGIN)

    def views(self, block: npt.NDArray[np.uint8]) -> BlockViews:
        """Return views of the parts of a block that are written for every batch."""
        n, data = self.n_rows, block.data
        return BlockViews(
            np.ndarray((n, 3), "<i8", data),
            np.ndarray((n,), "<i4", data, ORIGIN.itemsize - 4, (ORIGIN.itemsize,)),
            tuple(np.ndarray((n, s.row_bytes), np.uint8, data, s.offset) for s in self.fixed),
        )

    def fixed_rows(self, block: npt.NDArray[np.uint8], slot: FixedSlot, n: int) -> npt.NDArray[Any]:
        """Return a view of the first n rows of a fixed field."""
        return np.ndarray((n, *slot.shape), slot.dtype, block.data, slot.offset)

    def arrays(self, block: npt.NDArray[np.uint8], n: int) -> dict[str, npt.NDArray[Any]]:
        """Return views of the first n rows of each fixed field, and of each whole array."""
        found: dict[str, npt.NDArray[Any]] = {
            s.name: np.ndarray((n, *s.shape), s.dtype, block, s.offset) for s in self.fixed
        }
        if self.whole:
            for slot, (offset, *shape) in zip(self.whole, self.heads(block), strict=True):
                found[slot.name] = np.ndarray(shape, slot.dtype, block, self.heap + offset)
        return found

    def heads(self, block: npt.NDArray[np.uint8]) -> list[list[int]]:
        """Return the head of every whole array."""
        return [self.head(block, slot).tolist() for slot in self.whole]

    def head(self, block: npt.NDArray[np.uint8], slot: WholeSlot) -> npt.NDArray[np.int64]:
        """Return a view of the head, [offset in the heap, *shape], of a whole array."""
        return np.ndarray((1 + slot.n_dims,), "<i8", block, slot.offset)

    def present(self, block: npt.NDArray[np.uint8], slot: PresenceSlot) -> npt.NDArray[np.bool_]:
        """Return a view of an optional field's presence bytes, as a mask."""
        return block[slot.offset : slot.offset + self.n_rows].view(np.bool_)

    def extents(self, block: npt.NDArray[np.uint8], slot: VaryingSlot) -> npt.NDArray[np.void]:
        """Return a view of the extents of a varying field, one per row."""
        end = slot.offset + self.n_rows * EXTENT.itemsize
        return block[slot.offset : end].view(EXTENT)

    def shapes(self, block: npt.NDArray[np.uint8], slot: VaryingSlot) -> npt.NDArray[np.uint64]:
        """Return a view of the shapes of a field of varying arrays, (rows, dims)."""
        end = slot.shapes + self.n_rows * slot.n_dims * 8
        return block[slot.shapes : end].view(np.uint64).reshape(self.n_rows, slot.n_dims)

    def pad(self, block: npt.NDArray[np.uint8], n_read: int, n_valid: int) -> None:
        """Fill row `n_read` and all later rows with copies of the first `n_read` rows.

        `n_read` is at least 1. Row `n_valid` and all later rows get the status PADDED. With an
        inner layout, only the origin table is filled, because the results of the batch function
        already include the padding.
        """
        rows = np.arange(self.n_rows - n_read) % n_read
        origins = self.origins(block)
        parts: list[npt.NDArray[Any]] = [origins]
        if self.inner is None:
            parts += self.views(block).fixed
            parts += [self.present(block, slot) for slot in self.presence]
            parts += [self.extents(block, slot) for slot in self.varying]
            parts += [self.shapes(block, slot) for slot in self.varying if slot.n_dims]
        for part in parts:
            part[n_read:] = part[rows]
        origins["status"][n_valid:] = PADDED


def to_channels_first(value: Any) -> Any:
    """Return a view of an array or tensor of pictures, with the channels before height and width.

    A value is returned unchanged unless its last axis has one to four channels.
    """
    n = value.ndim
    if n < 3 or not 1 <= value.shape[-1] <= 4:
        return value
    order = *range(n - 3), n - 1, n - 3, n - 2
    return value.permute(*order) if hasattr(value, "permute") else value.transpose(*order)


def is_fixed(schema: Schema, name: str) -> bool:
    """Return True if the field is an array of the same shape in every sample."""
    array = schema[name].array
    return array is not None and array.is_fixed


def layout_for_samples(
    schema: Schema,
    n_rows: int,
    collation: Collation = DEFAULT_COLLATION,
    *,
    stored: Sequence[str] | None = None,
) -> BlockLayout:
    """Return the layout for batches whose samples have `schema`, or raise InvalidArgument.

    `stored` names the dataset's fields, which an error suggests to load; by default, the fields of
    `schema`.
    """
    _check_no_streams(schema, list(schema) if stored is None else stored)
    batch, joins = collation.expand(schema)
    names = [name for join in joins for name in (join.name, join.companion) if name is not None]
    return _assign_offsets(batch, n_rows, frozenset(names), joins, schema)


def _check_no_streams(schema: Schema, stored: Sequence[str]) -> None:
    streams = {name: type(field).__name__ for name, field in schema.items() if field.is_streamed}
    for name, kind in streams.items():
        others = [each for each in stored if each not in streams]
        way_out = f"leave it out (fields={others}), or " if others else ""
        raise InvalidArgument(
            f"field {name!r} is {'an' if kind[0] == 'A' else 'a'} {kind}, whose packets cannot be "
            f"put into a batch: {way_out}have a transform decode it"
        )


def layout_for_batches(schema: Schema, whole: frozenset[str], inner: BlockLayout) -> BlockLayout:
    """Return the layout for results of a batch function; `inner` is the layout of its argument.

    `whole` names the fields that are arrays; the others are lists with one value per sample.
    """
    made = _assign_offsets(schema, inner.n_rows, whole, (), inner.samples)
    return replace(made, inner=inner)


def layout_of_received_batches(schema: Schema, n_rows: int, whole: frozenset[str]) -> BlockLayout:
    """Return the layout of blocks from another machine; `whole` names the whole arrays."""
    return _assign_offsets(schema, n_rows, whole, (), schema)


def _assign_offsets(
    schema: Schema,
    n_rows: int,
    whole: frozenset[str],
    joins: tuple[JoinedField, ...],
    samples: Schema,
) -> BlockLayout:
    """Assign offsets that are multiples of 64 bytes, as tinygrad requires."""
    offset = _align(n_rows * ORIGIN.itemsize)
    presence = []
    for name in schema.optional:
        presence.append(PresenceSlot(name, offset))
        offset = _align(offset + n_rows)
    varying, heads = [], {}
    for name, field in schema.items():
        if name in whole and (array := field.array) is not None:
            n_dims = len(array.shape)
            heads[name] = WholeSlot(name, offset, array.numpy, n_dims, missing_dtype(array))
            offset = _align(offset + (1 + n_dims) * 8)
        elif not is_fixed(schema, name):
            n_dims = 0 if field.array is None else len(field.array.shape)
            shapes = _align(offset + n_rows * EXTENT.itemsize)
            varying.append(VaryingSlot(name, offset, shapes, n_dims, field.alignment))
            offset = _align(shapes + n_rows * n_dims * 8)
    fixed = []
    for name, field in schema.items():
        array = field.array
        if array is not None and array.is_fixed and name not in whole:
            shape = tuple(d for d in array.shape if d is not None)
            row_bytes = array.row_bytes or 0
            logical = missing_dtype(array)
            fixed.append(FixedSlot(name, offset, array.numpy, shape, row_bytes, logical))
            offset = _align(offset + n_rows * row_bytes)
    heap = -(-offset // PAGE) * PAGE
    slots = tuple(
        JoinSlot(join, heads[join.name], None if join.companion is None else heads[join.companion])
        for join in joins
    )
    parts = tuple(fixed), tuple(varying), tuple(presence), tuple(heads.values()), slots
    return BlockLayout(schema, samples, n_rows, *parts, heap)


def missing_dtype(field: Array | None) -> str | None:
    """Return the dtype of a field if NumPy lacks it ("bfloat16"), else None."""
    return field.dtype if field is not None and field.dtype == "bfloat16" else None


def _align(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT
