"""User functions: run the transform of samples, and build batches in several stages.

A batch is built in up to three stages: the rows, arrays of the values of all rows, and the results
of user functions of batches. The last stage writes into the block; each earlier stage writes into a
scratch block, which is private memory and usually reused.

Transforms of torchvision silently return arrays unchanged. This module makes them raise an error if
user functions call them with arrays of pictures. It does not import torch.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Final

import numpy as np

from shardio._base.callers import takes_rng
from shardio._base.classes import cached_property
from shardio._base.statistics import PHASE_TIMES, TRANSFORM, now_ns
from shardio._engine.filling.batch_spec import BatchSpec, Schemas, batch_source
from shardio._engine.filling.collate import (
    DescribeRow,
    Scratch,
    copy_rows,
    join,
    put_value,
    reserve_array,
)
from shardio._workers.processes.global_generators import seed_generators
from shardio._workers.processes.serialization import text_of
from shardio.batch.batch import Batch
from shardio.batch.layout import (
    CLAIMED,
    EMPTY,
    FILLED,
    NO_FIELD,
    BlockLayout,
    layout_for_batches,
    layout_for_samples,
    pack_state,
)
from shardio.batch.schema_inference import check_batch, check_sample, infer_batch
from shardio.dataset.dataset import Dataset
from shardio.errors import SchemaError, TransformError
from shardio.format.schema import Schema
from shardio.format.types.array_values import (
    PLAIN_TYPES,
    as_bfloat16_bits,
    is_of,
    tensors_to_arrays,
)
from shardio.format.types.field import Field
from shardio.order.permutation import OF_BATCHES, OF_COLLATION, SampleGenerators
from shardio.samples.field_sources import BatchRows, IndexChunk, SampleReader, Values
from shardio.samples.view import SampleView

_EMPTY: Final = pack_state(NO_FIELD, EMPTY)
_CLAIMED: Final = pack_state(NO_FIELD, CLAIMED)
_FILLED: Final = pack_state(NO_FIELD, FILLED)
_NAMED_SAMPLES: Final = 3
_DEPTH: Final = 2
"""The maximum nesting of lists: a field of a batch may be a list of lists."""
_V2: Final = "torchvision.transforms.v2"
_TAKE_ARRAYS: Final = ("Lambda", "ToImage", "ToPILImage", "ToTensor")
"""The names of the transforms that do not return arrays unchanged."""


def to_plain(made: Any) -> Any:
    if not isinstance(made, Mapping):
        return made
    changed = dict[str, Any]()
    for name, value in made.items():
        if type(value) not in PLAIN_TYPES and not isinstance(value, np.generic):
            found = tensors_to_arrays(name, value, _DEPTH)
            if found is not value:
                changed[name] = found
    return {**made, **changed} if changed else made


_ENGINE: Final = os.path.dirname(os.path.dirname(__file__))
_PACKAGE: Final = os.path.dirname(_ENGINE)
_TRANSFORM: Final = "the transform"
_BATCH_TRANSFORM: Final = "batch_transform"
_COLLATE: Final = "the collate function"
_IS_GIVEN_A_DICT: Final = (
    "a transform is given a sample, a dict of fields, and returns a dict; for a function f of one "
    "field, write lambda sample: {**sample, 'image': f(sample['image'])}, and pass that to "
    "shardio.transforms.OnTensors if f takes tensors of torch"
)
_IS_GIVEN_ARRAYS: Final = (
    "a transform is given arrays of NumPy; for tensors of torch, pass "
    "shardio.transforms.OnTensors(transform)"
)
_IS_GIVEN_PIXELS: Final = (
    "a transform is given arrays of NumPy; write PIL.Image.fromarray(x) for an image of Pillow, or "
    "pass shardio.transforms.Resize((height, width))"
)
_COLLATES_ARRAYS: Final = "the samples have arrays of NumPy; write torch.from_numpy(x) for a tensor"
_TO_FLOATS: Final = "write v2.ToDtype(torch.float32, scale=True) before it: pictures are uint8"
_TO_ONE_SIZE: Final = (
    "if the pictures of a batch have different sizes, resize them before, for example with "
    "transform=v2.Resize((height, width))"
)
_OF_TORCH: Final = (
    (TypeError, "Input tensor should be a float tensor", _TO_FLOATS),
    (RuntimeError, "cast to the desired output type Byte", _TO_FLOATS),
    (ValueError, "Found multiple HxW dimensions", _TO_ONE_SIZE),
    (ValueError, "Expected a batched input with", _TO_ONE_SIZE),
)
_HINTS: Final[Mapping[str, tuple[tuple[type[Exception], str, str], ...]]] = {
    _TRANSFORM: (
        (
            ValueError,
            "read-only",
            "arrays given to a transform are read-only: write into a copy, x = x.copy()",
        ),
        (ValueError, "cannot resize", _IS_GIVEN_PIXELS),
        (AttributeError, "'numpy.ndarray'", _IS_GIVEN_ARRAYS),
        (TypeError, "numpy.ndarray", _IS_GIVEN_ARRAYS),
        (AttributeError, "'dict'", _IS_GIVEN_A_DICT),
        (TypeError, "'dict'", _IS_GIVEN_A_DICT),
        (TypeError, "(dict, ", _IS_GIVEN_A_DICT),  # a layer of torch
        *_OF_TORCH,
    ),
    _BATCH_TRANSFORM: _OF_TORCH,
    _COLLATE: (
        (AttributeError, "'numpy.ndarray'", _COLLATES_ARRAYS),
        (TypeError, "numpy.ndarray", _COLLATES_ARRAYS),
        (RuntimeError, "stack expects each tensor to be equal size", _TO_ONE_SIZE),
    ),
}
"""For errors of each function: the type, a part of the text, and a hint."""

Call = Callable[[int, Callable[..., Any], tuple[Any, ...]], Any]
"""A function that calls a user function; its parameters are those of `call_seeded`."""


def call_seeded(key: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Seed the global random generators with `key`, and call a user function."""
    seed_generators(key)
    return function(*arguments)


class UserCalls:
    """A caller of user functions; the parameter `call` seeds the generators, and calls a function.

    Exceptions become a TransformError, except those of the types `reraise`.
    """

    def __init__(
        self, reraise: tuple[type[BaseException], ...] = (), call: Call = call_seeded
    ) -> None:
        self._reraise, self._call = reraise, call

    def run(
        self,
        what: str,
        function: Any,
        arguments: tuple[Any, ...],
        key: int,
        locate: Callable[[], str],
    ) -> Any:
        """Return the result of `function`.

        Errors call the function `what`, and describe the samples with `locate()`.
        """
        start_ns = now_ns()
        try:
            made = self._call(key, function, arguments)
        except self._reraise:
            raise
        except BaseException as error:  # sys.exit and StopIteration count as failures too
            raise _error_of(what, error, locate()) from error
        PHASE_TIMES.sums_ns[TRANSFORM] += now_ns() - start_ns
        try:
            return to_plain(made)
        except SchemaError as error:
            raise error_at(error, locate()) from None
        except MemoryError:
            raise
        except Exception as error:  # a value of a class of the user may raise anything
            raise _error_of(f"a result of {what}", error, locate()) from error


def error_at(error: SchemaError, location: str) -> TransformError:
    return TransformError(f"{error}\n  at {location}")


def _error_of(what: str, error: BaseException, location: str) -> TransformError:
    frames = _frames_outside(_ENGINE, error.__traceback__)
    frames = _frames_outside(_PACKAGE, frames) or frames
    text = "".join(traceback.format_exception(type(error), error, frames))
    message = f"{what} raised {type(error).__name__}: {text_of(error)}"
    for kind, part, hint in _HINTS.get(what, ()):
        if isinstance(error, kind) and part in message:
            message += f"\n  {hint}"
    return TransformError(f"{message}\n  at {location}\n\n{text}")


def _frames_outside(folder: str, frames: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that starts at the first frame with code outside a folder."""
    while frames and frames.tb_frame.f_code.co_filename.startswith(f"{folder}/"):
        frames = frames.tb_next
    return frames


class TransformRunner:
    def __init__(
        self, batch_spec: BatchSpec, view: SampleView, reader: SampleReader, calls: UserCalls
    ) -> None:
        self._batch_spec, self._view, self._calls = batch_spec, view, calls
        self._dataset, self._reader = view.dataset, reader
        self._transform: Any = (function := batch_spec.transform)
        self._takes_rng = function is not None and takes_rng("transform", "sample", function)
        self._takes_writable = getattr(function, "takes_writable", False)
        self._generators = SampleGenerators(batch_spec.seed)
        schema = view.dataset.schema
        self._bfloat16 = _bfloat16_fields({name: schema[name] for name in batch_spec.fields})

    def fill(self, batch: BatchRows) -> int:
        # These arrays stay valid when the block grows; see `collate`.
        layout, memory, states, part = batch.layout, batch.memory, batch.states, batch.part
        arrays = [(s.name, layout.fixed_rows(memory.bytes, s, batch.n_read)) for s in layout.fixed]
        presence = [(p.name, layout.present(memory.bytes, p)) for p in layout.presence]
        states[:] = _EMPTY
        used = 0
        samples, first = layout.samples, self._first
        for i, k in enumerate(range(part.start, part.stop)):
            states[i] = _CLAIMED
            sample = self.sample(batch.chunk, k)
            try:
                check_sample(sample, samples, first)
                for name, is_present in presence:
                    is_present[i] = sample[name] is not None
                for name, array in arrays:
                    value = sample[name]
                    array[i] = 0 if value is None else value
                for varying in layout.varying:
                    used = put_value(batch, varying, i, sample[varying.name], used)
            except SchemaError as error:
                raise error_at(error, self.location(batch.chunk, k)) from None
            states[i] = _FILLED
        return used

    @cached_property
    def _first(self) -> str:
        """The name, in messages, of sample 0, whose result usually determines the layout."""
        row = int(self._view.at(np.zeros(1, np.int64))[0])
        shard = int(self._dataset.locate(np.array([row]))[0])
        local = row - self._dataset.shard_starts[shard]
        return f"the first sample ({sample_name(self._dataset, shard, local)})"

    def sample(self, chunk: IndexChunk, k: int) -> Any:
        """Run the transform on sample k of a chunk, with generators seeded for the sample."""
        sample, generators = self._reader.read(chunk, k), self._generators
        if not self._takes_writable:
            _make_read_only(sample)
        for name in self._bfloat16:
            sample[name] = as_bfloat16_bits(sample[name])
        key = generators.key(chunk.keys.epoch, chunk.positions[k])
        arguments = (sample, generators.from_key(key)) if self._takes_rng else (sample,)
        locate = functools.partial(self.location, chunk, k)
        return self._calls.run(_TRANSFORM, self._transform, arguments, key, locate)

    def location(self, chunk: IndexChunk, k: int) -> str:
        name = sample_name(self._dataset, *chunk.shard_rows[k])
        return f"{name} of {self._batch_spec.path} (position {chunk.positions[k]})"


def _bfloat16_fields(schema: Mapping[str, Field]) -> list[str]:
    arrays = {name: field.array or field.item for name, field in schema.items()}
    return [name for name, array in arrays.items() if array and array.dtype == "bfloat16"]


def _make_read_only(sample: Mapping[str, Any]) -> None:
    """Make all arrays of a sample read-only, like arrays that are views of a mapped file."""
    for value in sample.values():
        if isinstance(value, np.ndarray):
            value.flags.writeable = False


def sample_name(dataset: Dataset, shard: int, row: int) -> str:
    return f"sample {row} of shard {dataset.shards[shard].name}"


FillRows = Callable[[BatchRows], int]
"""A function that writes the samples of a batch; it returns the used bytes of the heap."""


class BatchBuilder:
    """A builder of batches in stages. Borrows `reader`; owns the scratch blocks."""

    def __init__(
        self, batch_spec: BatchSpec, dataset: Dataset, reader: SampleReader, calls: UserCalls
    ) -> None:
        self._batch_spec, self._dataset, self._calls = batch_spec, dataset, calls
        self._reader = reader
        function = batch_spec.batch_transform
        self._takes_rng = function is not None and takes_rng("batch_transform", "batch", function)
        self._generators = SampleGenerators(batch_spec.seed, OF_BATCHES)
        self._collation_keys = SampleGenerators(batch_spec.seed, OF_COLLATION)
        self._scratches: list[Scratch] = []
        self._source = batch_source(dataset)

    def fill(self, batch: BatchRows, fill_rows: FillRows, *, by_row: bool = False) -> int:
        """Fill a block or a scratch block; return the bytes used in its heap.

        If `by_row` is True, `fill_rows` may replace failing samples. The values to collate are then
        read back from the rows that were written, and not from the dataset.
        """
        layout = batch.layout
        if layout.inner is not None:
            below = replace(batch, layout=layout.inner, memory=self._scratch(layout.inner))
            self.fill(below, fill_rows, by_row=by_row)
        elif layout.joins and by_row:
            plain = layout_for_samples(layout.samples, layout.n_rows)
            below = replace(batch, layout=plain, memory=Scratch(plain))
            self.fill(below, fill_rows)
        else:
            values_of = functools.partial(self._reader.values, batch)
            used = self._join(batch, values_of, fill_rows(batch))
            if batch.n_rows > batch.n_read:
                layout.pad(batch.memory.bytes, batch.n_read, batch.n_read)
            return used
        # The following stages work on the whole batch. Claim all rows, without naming a field: if
        # the worker crashes now, every sample of the batch may be the cause.
        batch.states[:] = _CLAIMED
        if not layout.joins:
            return self._write(batch, self._make(below))
        rows = Batch.of_block(below.layout, below.memory.bytes, batch.n_rows, {}, 0, 0)
        return self._join(batch, rows.__getitem__, copy_rows(below, batch))

    def _scratch(self, layout: BlockLayout) -> Scratch:
        for found in self._scratches:
            if found.layout is layout:
                return found
        self._scratches.append(Scratch(layout))
        return self._scratches[-1]

    def _join(self, batch: BatchRows, values_of: Callable[[str], Values], used: int) -> int:
        try:
            for slot in batch.layout.joins:
                values = values_of(slot.join.name)
                used = join(batch, slot, values, used, self._row_describer(batch))
        except SchemaError as error:
            kind = SchemaError if self._batch_spec.transform is None else TransformError
            raise kind(f"{error}\n  at {self._batch_location(batch)}") from None
        return used

    def _make(self, rows: BatchRows) -> Any:
        batch_spec, block = self._batch_spec, rows.memory.bytes
        epoch, start = rows.chunk.keys.epoch, rows.chunk.positions[rows.part.start]
        arrays = rows.layout.arrays(block, rows.n_rows)
        locate = functools.partial(self._batch_location, rows)
        # Functions are given pictures in (height, width, 3), and only the results are permuted.
        layout = replace(rows.layout, channels_first=frozenset())
        batch = Batch.of_block(layout, block, rows.n_rows, arrays, epoch, 0, self._source)
        made: Any = dict(batch)
        for name in _bfloat16_fields(layout.schema):
            made[name] = as_bfloat16_bits(made[name])
        if (collate := batch_spec.collation.function) is not None:
            key = self._collation_keys.key(epoch, start)
            samples = (_samples(batch, made),)
            made = self._calls.run(_COLLATE, collate, samples, key, locate)
        if (function := batch_spec.batch_transform) is not None:
            key = self._generators.key(epoch, start)
            arguments: tuple[Any, ...] = (made,)
            if self._takes_rng:
                arguments += (self._generators.at(epoch, start),)
            made = self._calls.run(_BATCH_TRANSFORM, function, arguments, key, locate)
        return made

    def first(self, samples: Schema, rows: BatchRows, fill_rows: FillRows) -> Schemas:
        """Build a batch; return the schemas of samples, and of the batch functions' results."""
        self.fill(rows, fill_rows)
        made = self._make(rows)
        try:
            schema, whole = infer_batch(made, rows.n_rows, rows.layout.schema)
        except SchemaError as error:
            raise error_at(error, self._batch_location(rows)) from None
        layout = layout_for_batches(schema, whole, rows.layout)
        heap_bytes = self._write(replace(rows, layout=layout, memory=Scratch(layout)), made)
        self._scratches.clear()  # these scratch blocks do not fit the layouts of later batches
        return Schemas(samples, schema, whole, heap_bytes)

    def _write(self, batch: BatchRows, made: Any) -> int:
        layout, used = batch.layout, 0
        try:
            check_batch(made, batch.n_rows, layout.schema, [slot.name for slot in layout.whole])
            for slot in layout.whole:
                value = np.asarray(made[slot.name])
                out, used = reserve_array(batch, slot, value.shape, used)
                out[...] = value
            for presence in layout.presence:
                there = [value is not None for value in made[presence.name]]
                layout.present(batch.memory.bytes, presence)[: batch.n_rows] = there
            for varying in layout.varying:
                for i, value in enumerate(made[varying.name]):
                    used = put_value(batch, varying, i, value, used)
        except SchemaError as error:
            raise error_at(error, self._batch_location(batch)) from None
        return used

    def _row_describer(self, batch: BatchRows) -> DescribeRow:
        def describe(i: int) -> str:
            chunk, k = batch.chunk, batch.part.start + i % batch.n_read
            name = sample_name(self._dataset, *chunk.shard_rows[k])
            return f"{name} (position {chunk.positions[k]})"

        return describe

    def _batch_location(self, batch: BatchRows) -> str:
        samples = list(map(self._row_describer(batch), range(min(batch.n_read, _NAMED_SAMPLES))))
        more = ", …" if batch.n_read > _NAMED_SAMPLES else ""
        return f"the batch of {', '.join(samples)}{more} of {self._batch_spec.path}"


def _samples(batch: Batch, columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    present = {name: batch.present(name) for name in batch}
    return [
        {name: columns[name][i] if present[name][i] else None for name in columns}
        for i in range(batch.n_rows)
    ]


@contextlib.contextmanager
def refuse_pictures_as_arrays() -> Iterator[None]:
    """Make transforms of torchvision raise TypeError if they are called with arrays of pictures.

    Otherwise, these transforms would return the arrays unchanged.
    """
    if _V2 not in sys.modules:
        yield
        return
    hook = sys.modules["torch.nn.modules.module"].register_module_forward_pre_hook(_refuse_array)
    try:
        yield
    finally:
        hook.remove()


def _refuse_array(module: Any, given: Any) -> None:
    kind = type(module)
    is_chain = kind.__module__ == f"{_V2}._container"
    if not kind.__module__.startswith(f"{_V2}.") or is_chain or kind.__name__ in _TAKE_ARRAYS:
        return
    values = list(_values_in(given))
    is_converted = any(is_of(v, "torch", "Tensor") or is_of(v, "PIL", "Image") for v in values)
    if not is_converted and any(_is_pixels(value) for value in values):
        raise TypeError(
            f"v2.{kind.__name__} returns arrays of NumPy unchanged, and is called with a picture "
            "as an array: pass transform=shardio.transforms.OnTensors(f); it calls f with tensors"
        )


def _values_in(given: Any) -> Iterator[Any]:
    for value in given.values() if isinstance(given, Mapping) else given:
        if isinstance(value, Mapping | list | tuple):
            yield from _values_in(value)
        else:
            yield value


def _is_pixels(value: Any) -> bool:
    is_levels = isinstance(value, np.ndarray) and value.dtype == np.uint8
    return is_levels and value.ndim in (3, 4) and value.shape[-1] == 3
