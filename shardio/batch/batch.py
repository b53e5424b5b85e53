"""A batch: a mapping from field names to values, with the origin of each row."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable, Iterator, KeysView, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from shardio._base.callers import did_you_mean, missing_attribute
from shardio._base.classes import Listed, listed
from shardio._base.html import format_shape, fragment, pictures, table
from shardio._base.progress import counted
from shardio.batch.layout import (
    FILLED,
    BlockLayout,
    FixedSlot,
    VaryingSlot,
    WholeSlot,
    missing_dtype,
    to_channels_first,
)
from shardio.errors import ShardCorrupt
from shardio.format.schema import group_parts
from shardio.format.types.array_values import is_of
from shardio.media.values import describe, thumbnail

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # type checkers bundle stubs for this module

    Value_co = TypeVar("Value_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    Value_co = TypeVar("Value_co", covariant=True)

_UNPACK: Final = dis.opmap["UNPACK_SEQUENCE"]
_N_PICTURES: Final = 5
"""The number of rows of which a notebook shows thumbnails."""
_ADVICE: Final = {
    **dict.fromkeys(
        ("batch_size", "shape", "size"), "write batch.n_rows, or batch[name].shape of a field"
    ),
    **dict.fromkeys(
        ("clear", "copy", "pop", "update"),
        "a batch is read-only: write dict(batch), and change that",
    ),
    "cpu": 'write batch.to("cpu")',
    "cuda": 'write batch.to("cuda"), or pass device="cuda" to the loader',
    "device": "write batch[name].device",
    **dict.fromkeys(("ids", "idx", "index"), "write batch.indices"),
    **dict.fromkeys(("mask", "is_valid"), "write batch.valid"),
    "numpy": 'pass output="numpy" to the loader',
    "pin_memory": 'pass device="cuda" to the loader, which copies batches from pinned memory',
}
"""Attributes of tensors and dicts, and what to write instead."""
Wrap = Callable[[Any, object, str | None], Any]
"""The method `wrap` of a TensorAdapter."""


class BatchSource(NamedTuple):
    """The dataset of a batch, for errors and notebooks.

    Attributes:
        shard_paths: the paths of its shards.
        column_paths: for each column that was added later, the paths of the shards of the column.
        classes: the names of its classes.
    """

    shard_paths: Sequence[str] = ()
    column_paths: Mapping[str, Sequence[str]] = {}
    classes: Sequence[str] = ()


_UNKNOWN: Final = BatchSource()


@dataclass(frozen=True, slots=True)
class Skipped:
    """A failed sample that another sample replaces in the batch, because of on_error="skip".

    Attributes:
        row: the row of the batch.
        index: the index of the failed sample in the dataset or view of the loader.
        shard, sample: the index of its shard, and its row in that shard.
        error: the class name of the exception.
        text: the message, followed by the traceback if a transform raised it; shortened.
    """

    row: int
    index: int
    shard: int
    sample: int
    error: str
    text: str


class Batch(Mapping[str, Value_co], Listed):
    """A mapping from field names to the values of a batch, in the order of the schema.

    A numeric field of fixed shape is one array or tensor for all rows. Any other field (text,
    bytes, JSON, arrays of varying shape, lists of arrays) is a list with an item per row, created
    on first access. A missing value is None in a list and zeros in an array; `present`
    distinguishes missing values from real zeros. The name of a nested record gives a dict of its
    fields. A value stays valid as long as it or the batch is referenced; with reuse=True, only
    until the next batch.
    """

    _public = "epoch get indices items keys n_rows origins present skipped step to valid values"
    __slots__ = (
        "_block",
        "_layout",
        "_lists",
        "_source",
        "_values",
        "_wrap",
        "epoch",
        "n_rows",
        "skipped",
        "step",
    )

    if not TYPE_CHECKING:  # type checkers would accept any attribute

        def __getattr__(self, name: str) -> Any:
            # The module `copy` looks up special methods before the batch has a layout.
            fields = () if name[:1] == "_" else self._layout.schema
            advice = {name: f"write batch[{name!r}]"} if name in fields else {}
            return missing_attribute(self, name, _ADVICE | advice)

        def _refuse_change(self, *_: object) -> NoReturn:
            raise TypeError(
                "a batch is read-only: write {**batch, name: value}, or pass batch_transform= to "
                "the loader"
            )

        __or__ = __ror__ = __delitem__ = _refuse_change

        def __setitem__(self, name: str, value: object) -> None:
            if name not in self or value is not self[name]:  # unlike after `batch[name] += 1`
                self._refuse_change()

        def __array_ufunc__(self, ufunc: np.ufunc, *_: object, **__: object) -> bool:
            if ufunc not in (np.equal, np.not_equal):
                self.__array__()  # raises the error
            return ufunc is np.not_equal  # for `batch == array` and `batch != array`

        def __array__(self, *_: object, **__: object) -> NoReturn:
            # NumPy and pandas would make an array or a data frame of the names.
            raise TypeError(
                "a batch is a mapping of names, not an array: write batch[name], or "
                "pandas.DataFrame(dict(batch)) for a data frame"
            )

    n_rows: int
    """The number of rows, including padding."""
    epoch: int
    """The epoch, counted from 0."""
    step: int
    """The index of the batch in the epoch."""
    skipped: tuple[Skipped, ...]
    """The failed samples, which other samples replace in the batch."""

    _layout: BlockLayout
    _block: npt.NDArray[np.uint8]
    _values: dict[str, Any]
    _lists: dict[str, Any]
    _wrap: Wrap | None
    """The function that converts the arrays in lists to tensors; None if they stay arrays."""
    _source: BatchSource

    def __new__(cls, values: Mapping[str, Any] | None = None) -> Any:
        """Return `values` as a dict, for libraries that rebuild a mapping as type(batch)(values).

        Batches are made by `of_block`.
        """
        return object.__new__(cls) if values is None else dict(values)

    @classmethod
    def of_block(
        cls,
        layout: BlockLayout,
        block: npt.NDArray[np.uint8],
        n_rows: int,
        values: dict[str, Any],
        epoch: int,
        step: int,
        source: BatchSource = _UNKNOWN,
        skipped: tuple[Skipped, ...] = (),
        wrap: Wrap | None = None,
    ) -> Batch:
        """Return a batch of the first `n_rows` rows of a block."""
        self: Batch = object.__new__(cls)
        self._layout, self._block, self._values, self._lists = layout, block, values, {}
        self._source, self._wrap = source, wrap
        self.n_rows, self.epoch, self.step, self.skipped = n_rows, epoch, step, skipped
        return self

    def __getitem__(self, name: str) -> Value_co:
        if not isinstance(name, str):  # a TypeError, because `get` and `in` would hide a KeyError
            raise self._unknown(name)
        found: Value_co | None = self._values.get(name)
        if found is not None:
            return found
        for slot in self._layout.varying:
            if slot.name == name:
                if name not in self._lists:
                    self._lists[name] = self._decode(slot)
                items: Value_co = self._lists[name]
                return items
        if name in self._layout.schema.groups:
            group: Any = {part: self[f"{name}.{part}"] for part in group_parts(self, name)}
            nested: Value_co = group
            return nested
        raise self._unknown(name)

    def _unknown(self, name: object) -> KeyError | TypeError:
        known = f"{name!r:.200}: this batch has {', '.join(self)}"
        if not isinstance(name, str):
            return TypeError(f"{known}; for row i, write batch[name][i]")
        hint = did_you_mean(name, list(self))
        return KeyError(f"{known}{'; ' * bool(hint)}{hint}")

    def __iter__(self) -> Iterator[str]:
        # `images, labels = batch` would silently give names. Only the bytecode of the caller
        # distinguishes this from a loop over the names.
        caller = sys._getframe(1)
        code, i = caller.f_code.co_code, max(caller.f_lasti, 0)
        if code[i] == _UNPACK and code[i + 1] > 1:
            raise TypeError(
                "a batch is a mapping of names, so it does not unpack to values: write batch[name] "
                f"for each of {', '.join(map(repr, self._layout.schema))}, or unpack batch.values()"
            )
        return iter(self._layout.schema)

    def keys(self) -> KeysView[str]:
        """Return the names of the fields as a dict's view, whose repr lists only the names."""
        return self._layout.schema.keys()

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)

    def __len__(self) -> int:
        return len(self._layout.schema)

    def __repr__(self) -> str:
        step = f"step {self.step} of epoch {self.epoch}: {counted(self.n_rows, 'rows')}"
        kinds = {slot.name: self._described(slot) for slot in self._layout.varying}
        kinds |= {name: f"{v.dtype} {tuple(v.shape)}" for name, v in self._values.items()}
        kinds = {name: kinds[name] for name in self if name in kinds}
        shown = (f"{name} {kind}" for name, kind in kinds.items())
        return f"Batch({listed((step, *shown), 193)})"

    def _described(self, slot: VaryingSlot) -> str:
        """Return a description of the values of a list, such as "3 texts"."""
        n, field = self.n_rows, self._layout.schema[slot.name]
        if field.array is not None:
            return f"{counted(n, 'arrays')} of {field.array.dtype} {self._sizes(slot)}"
        if field.item is not None:
            shape = _shown(["any" if n is None else f"{n}" for n in field.item.shape])
            return f"{counted(n, 'lists')} of arrays of {field.item.dtype} {shape}"
        return counted(n, field.things)

    def _sizes(self, slot: VaryingSlot) -> str:
        """Return the smallest and the largest size of each dimension of the arrays of a list."""
        sizes = self._layout.shapes(self._block, slot)[: self.n_rows][self.present(slot.name)]
        if not len(sizes):
            return _shown(["any"] * slot.n_dims)
        low, high = sizes.min(0).tolist(), sizes.max(0).tolist()
        shown = [f"{a}" if a == b else f"{a}–{b}" for a, b in zip(low, high, strict=True)]
        if slot.name in self._layout.channels_first and slot.n_dims >= 3 and high[-1] <= 4:
            shown.insert(-2, shown.pop())  # as `to_channels_first` does
        return _shown(shown)

    def _repr_html_(self) -> str:
        facts = f"step {self.step} of epoch {self.epoch}", f"{self.n_rows:,} rows"
        rows = (self._html_cells(name) for name in self)
        header = ("field", "type", "dtype", "shape", "first row")
        return fragment("Batch", "", facts, table(header, rows, len(self)), self._thumbnails())

    def _html_cells(self, name: str) -> tuple[object, ...]:
        value = self._values.get(name)
        if value is not None:
            shape = format_shape(value.shape)
            return name, type(value).__name__, value.dtype, shape, self._first_number(name)
        try:
            first = describe(self._with_arrays(self._layout)[name][0]) if self.n_rows else ""
        except ShardCorrupt:
            first = "cannot be read"
        kind = f"list of {type(self._layout.schema[name]).__name__}"
        return name, kind, "", f"{self.n_rows}", first

    def _first_number(self, name: str) -> str:
        """Return the number of the first row, with the name of its class; "" for other arrays."""
        array = self._layout.arrays(self._block, self.n_rows).get(name)
        if array is None or array.ndim != 1 or not len(array) or len(array) != self.n_rows:
            return ""
        if not self.present(name)[0]:
            return describe(None)
        number, classes = describe(array[0]), self._source.classes
        is_label = name == "label" and array.dtype.kind in "iu" and 0 <= array[0] < len(classes)
        return f"{number} {classes[int(array[0])]}" if is_label else number

    def _thumbnails(self) -> str:
        """Return thumbnails of the first field that has pictures."""
        arrays = self._layout.arrays(self._block, self.n_rows)
        stored = self._with_arrays(replace(self._layout, channels_first=frozenset()))
        for name in sorted(self._layout.schema, key=self._is_of_floats):  # first those of uint8
            array, is_float = self._layout.schema[name].array, self._is_of_floats(name)
            kinds = ("uint8", "float16", "float32", "float64")
            if array is None or array.dtype not in kinds or len(array.shape) < 2 + is_float:
                continue
            values = (arrays[name] if name in arrays else stored[name])[:_N_PICTURES]
            if found := pictures(zip(map(thumbnail, values), self._captions(), strict=True)):
                return found
        return ""

    def _captions(self) -> list[str]:
        """Return the index of each pictured row, with the name of its class."""
        found = list(map(str, self.indices[:_N_PICTURES]))
        labels = self._layout.arrays(self._block, self.n_rows).get("label")
        if labels is None or labels.shape != (self.n_rows,) or labels.dtype.kind not in "iu":
            return found
        classes, is_present = self._source.classes, self.present("label")
        for i, label in enumerate(labels[:_N_PICTURES].tolist()):
            if is_present[i] and 0 <= label < len(classes):
                found[i] += f" {classes[label]}"
        return found

    def _is_of_floats(self, name: str) -> bool:
        array = self._layout.schema[name].array
        return array is not None and array.dtype != "uint8"

    def _with_arrays(self, layout: BlockLayout) -> Batch[Any]:
        """Return a copy with NumPy arrays in lists, in the order of the axes in `layout`."""
        made = copy(self)
        made._layout, made._wrap, made._lists = layout, None, {}
        return made

    @property
    def indices(self) -> npt.NDArray[np.int64]:
        """For each row, the index of its sample in the loader's dataset or view; a copy."""
        return self._origins()["position"].copy()

    @property
    def origins(self) -> npt.NDArray[np.int64]:
        """For each row, its sample's shard and row in that shard; a copy of (n_rows, 2)."""
        origins = self._origins()
        return np.stack([origins["shard"].astype(np.int64), origins["row"]], axis=1)

    @property
    def valid(self) -> npt.NDArray[np.bool_]:
        """For each row, True unless the row is padding or replaces a failed sample; a copy."""
        found: npt.NDArray[np.bool_] = self._origins()["status"] == FILLED
        return found

    def present(self, name: str) -> npt.NDArray[np.bool_]:
        """Return, for each row, True if its sample has a value of the field; a copy."""
        if name not in list(self._layout.schema):  # the name may be a list by mistake
            raise self._unknown(name)
        for slot in self._layout.presence:
            if slot.name == name:
                return self._layout.present(self._block, slot)[: self.n_rows].copy()
        return np.ones(self.n_rows, np.bool_)

    def to(self, device: Any, *, non_blocking: bool = False) -> Batch:
        """Return a copy of the batch with its torch tensors on `device`, including those in lists.

        Values that are not tensors stay as they are. `non_blocking` is passed to `Tensor.to`.

        Raises:
            TypeError: `device` is not a device; or the arrays of the batch are not torch tensors.
        """
        # Tensor.to also accepts dtypes and other tensors, and would then convert labels, too.
        is_known = isinstance(device, str | int) and not isinstance(device, bool)
        if not is_known and not is_of(device, "torch", "device"):
            raise TypeError(
                f'batch.to takes a device, such as "cpu" or "cuda:0"; found {device!r}: '
                "convert single fields to another dtype: batch[name].to(dtype)"
            )
        made = copy(self)
        move = functools.partial(_moved, device=device, non_blocking=non_blocking)
        made._values = {name: move(value) for name, value in self._values.items()}
        schema = self._layout.schema
        lists = (slot.name for slot in self._layout.varying)
        arrays = (name for name in lists if schema[name].array or schema[name].item)
        made._lists = {name: move(self[name]) for name in arrays}
        return made

    @property
    def filled_block(self) -> tuple[BlockLayout, npt.NDArray[np.uint8], int]:
        """The layout of the block, the block of the batch, and the number of used rows."""
        return self._layout, self._block, self.n_rows

    def map_arrays(self, wrap: Wrap, wrap_items: Wrap | None) -> Batch:
        """Return a copy of the batch with `wrap` applied to each array; see `TensorAdapter`.

        `wrap_items` is applied to the arrays in lists.
        """
        made, layout = copy(self), self._layout
        made._wrap, made._lists = wrap_items, {}
        slots: tuple[FixedSlot | WholeSlot, ...] = (*layout.fixed, *layout.whole)
        made._values = {
            slot.name: wrap(self._values[slot.name], self._block, slot.logical_dtype)
            for slot in slots
        }
        return made

    def _origins(self) -> npt.NDArray[np.void]:
        return self._layout.origins(self._block)[: self.n_rows]

    def _decode(self, slot: VaryingSlot) -> list[Any]:
        layout, field = self._layout, self._layout.schema[slot.name]
        extents = layout.extents(self._block, slot)[: self.n_rows]
        offsets, sizes = extents["offset"].tolist(), extents["n_bytes"].tolist()
        heap = self._block[layout.heap :]
        if (array := field.array) is not None:
            shapes = layout.shapes(self._block, slot)[: self.n_rows].tolist()
            values: list[Any] = [
                heap[i : i + n].view(array.numpy).reshape(shape)
                for i, n, shape in zip(offsets, sizes, shapes, strict=True)
            ]
        else:
            records = [heap[i : i + n].data for i, n in zip(offsets, sizes, strict=True)]
            try:
                values = field.decode_batch(records)
            except (ShardCorrupt, ValueError, RecursionError) as error:
                raise self._record_error(slot.name, records, error) from error
        is_array = array is not None or field.item is not None
        if is_array and (self._wrap is not None or slot.name in layout.channels_first):
            values = [self._delivered(slot.name, value) for value in values]
        for i in np.flatnonzero(~self.present(slot.name)).tolist():
            values[i] = None
        return values

    def _delivered(self, name: str, value: Any) -> Any:
        """Convert an array, or each array of a list, to the loader's output and order of axes."""
        if isinstance(value, list):
            return [self._delivered(name, each) for each in value]
        if self._wrap is not None:
            field = self._layout.schema[name]
            value = self._wrap(value, self._block, missing_dtype(field.array or field.item))
        return to_channels_first(value) if name in self._layout.channels_first else value

    def _record_error(self, name: str, records: list[memoryview], error: Exception) -> ShardCorrupt:
        """Return the error for the first row with an invalid value; decoding raised `error`."""
        found = ShardCorrupt(f"a record cannot be decoded: {error}", code="value")
        for i, record in enumerate(records):
            try:
                self._layout.schema[name].decode_batch([record])
                continue
            except ShardCorrupt as one:
                found = one
            except (ValueError, RecursionError):
                pass
            shard, row = self.origins[i].tolist()
            paths = self._source.column_paths.get(name, self._source.shard_paths)
            path = paths[shard] if paths else f"shard number {shard}"
            return found.at(path=path, field=name, sample=row)
        return found.at(field=name)


def _shown(shape: list[str]) -> str:
    return f"({', '.join(shape)}{',' * (len(shape) == 1)})"


def _moved(value: Any, device: Any, *, non_blocking: bool) -> Any:
    """Return a value with its torch tensors, including those in lists, on another device."""
    if isinstance(value, list):
        return [_moved(each, device, non_blocking=non_blocking) for each in value]
    if is_of(value, "torch", "Tensor"):
        return value.to(device, non_blocking=non_blocking)
    if hasattr(value, "shape"):
        raise TypeError(
            f"batch.to moves tensors of torch, and this batch has a {type(value).__name__}: pass "
            'output="torch" to the loader'
        )
    return value
