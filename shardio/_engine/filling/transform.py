"""Run the user's transform sample by sample, and convert its results to arrays."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from shardio._base.callers import takes_rng
from shardio._base.classes import cached_property
from shardio._base.statistics import PHASE_TIMES, TRANSFORM, now_ns
from shardio._engine.filling.batch_spec import BatchSpec
from shardio._engine.filling.collate import put_value
from shardio._workers.processes.global_generators import seed_generators
from shardio.batch.layout import CLAIMED, EMPTY, FILLED, NO_FIELD, pack_state
from shardio.batch.schema_inference import check_sample
from shardio.dataset.dataset import Dataset
from shardio.errors import SchemaError, TransformError
from shardio.format.types.array_values import PLAIN_TYPES, tensors_to_arrays
from shardio.order.permutation import SampleGenerators
from shardio.samples.field_sources import BatchRows, IndexChunk, SampleReader
from shardio.samples.view import SampleView

_DEPTH: Final = 2
"""The maximum nesting of lists: a batch has a list of values, each of which may be a list."""


def plain(made: Any) -> Any:
    """Return a sample or a batch of user code with torch tensors converted to arrays.

    Raises:
        SchemaError: a value is a masked array, or a tensor that cannot be converted.
    """
    if not isinstance(made, Mapping):
        return made
    changed = dict[str, Any]()
    for name, value in made.items():
        if type(value) not in PLAIN_TYPES and not isinstance(value, np.generic):
            found = tensors_to_arrays(name, value, _DEPTH)
            if found is not value:
                changed[name] = found
    return {**made, **changed} if changed else made


_EMPTY: Final = pack_state(NO_FIELD, EMPTY)
_CLAIMED: Final = pack_state(NO_FIELD, CLAIMED)
_FILLED: Final = pack_state(NO_FIELD, FILLED)
_HERE: Final = os.path.dirname(os.path.dirname(__file__))
_READ_ONLY: Final = "\n  arrays given to a transform are read-only: write into a copy, x = x.copy()"

Call = Callable[[int, Callable[..., Any], tuple[Any, ...]], Any]
"""A function that calls a user function; its arguments are (random seed, function, arguments)."""


def call_keyed(key: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Call a user function after seeding the global generators with `key`."""
    seed_generators(key)
    return function(*arguments)


class TransformRunner:
    """A runner of the user's transform on samples of a view; `passes` and `call` as in `Filler`."""

    def __init__(
        self,
        batch_spec: BatchSpec,
        view: SampleView,
        reader: SampleReader,
        passes: tuple[type[BaseException], ...] = (),
        call: Call = call_keyed,
    ) -> None:
        self._batch_spec, self._view, self._passes = batch_spec, view, passes
        self._dataset, self._reader = view.dataset, reader
        self._call = call
        self._transform: Any = (function := batch_spec.transform)
        self._takes_rng = function is not None and takes_rng("transform", "sample", function)
        self._generators = SampleGenerators(batch_spec.seed)

    def fill(self, batch: BatchRows) -> int:
        """Write the transform's results for all samples; return the used bytes of the heap."""
        # The arrays stay valid when the block grows, because growing does not replace its pages.
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
                raise self.placed(str(error), batch.chunk, k) from None
            states[i] = _FILLED
        return used

    @cached_property
    def _first(self) -> str:
        """Describe the sample that determines the layout of batches."""
        row = int(self._view.at(np.zeros(1, np.int64))[0])
        shard = int(self._dataset.locate(np.array([row]))[0])
        return (
            f"the first sample ({named(self._dataset, shard, row - self._dataset.starts[shard])})"
        )

    def sample(self, chunk: IndexChunk, k: int) -> Any:
        """Return the transform's result for sample k of a chunk; its generators are seeded."""
        sample, generators = self._reader.read(chunk, k), self._generators
        _make_read_only(sample)
        key = generators.key(chunk.keys.epoch, chunk.positions[k])
        arguments = (sample, generators.keyed(key)) if self._takes_rng else (sample,)
        start_ns = now_ns()
        try:
            made = self._call(key, self._transform, arguments)
        except self._passes:
            raise
        except BaseException as error:  # sys.exit and StopIteration count as failures too
            what, text = describe_error("the transform", error)
            if isinstance(error, ValueError) and "read-only" in what:
                what += _READ_ONLY
            raise self.placed(what, chunk, k, text) from error
        PHASE_TIMES.sums_ns[TRANSFORM] += now_ns() - start_ns
        try:
            return plain(made)
        except SchemaError as error:
            raise self.placed(str(error), chunk, k) from None

    def placed(self, what: str, chunk: IndexChunk, k: int, text: str = "") -> TransformError:
        """Return an error that names sample k of a chunk."""
        name = named(self._dataset, *chunk.places[k])
        place = f"{name} of {self._batch_spec.path} (position {chunk.positions[k]})"
        return TransformError(f"{what}\n  at {place}" + (f"\n\n{text}" if text else ""))


def _make_read_only(sample: Mapping[str, Any]) -> None:
    """Clear the writable flag of a sample's arrays.

    Stored arrays are views of a mapped file. A transform that writes to decoded arrays would fail
    on a dataset that stores the values.
    """
    for value in sample.values():
        if isinstance(value, np.ndarray):
            value.flags.writeable = False


def named(dataset: Dataset, shard: int, row: int) -> str:
    """Describe the sample at a row of a shard."""
    return f"sample {row} of shard {dataset.shards[shard].name}"


def describe_error(what: str, error: BaseException) -> tuple[str, str]:
    """Return a line about a user function's error, and the traceback without shardio's frames.

    The line calls the function `what`.
    """
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename.startswith(_HERE):
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    return f"{what} raised {type(error).__name__}: {_text_of(error)}", text


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failure:  # noqa: BLE001  # user classes may raise anything
        return f"(its __str__ raised {type(failure).__name__})"
