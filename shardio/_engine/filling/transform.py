"""Run the user's transform sample by sample, and convert what it returns to arrays."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio._base.classes import cached_property
from shardio._base.statistics import PHASE_TIMES, TRANSFORM, now_ns
from shardio._engine.filling.batch_spec import BatchSpec, IndexChunk
from shardio._engine.filling.collate import put_value
from shardio._workers.processes.blocks import BlockMap
from shardio._workers.processes.global_generators import seed_generators
from shardio.batch.layout import CLAIMED, EMPTY, FILLED, NO_FIELD, BlockLayout, pack_state
from shardio.batch.schema_inference import check_sample
from shardio.dataset.dataset import Dataset
from shardio.errors import SchemaError, TransformError
from shardio.format.types.array_values import PLAIN_TYPES, tensors_to_arrays
from shardio.order.permutation import SampleGenerators
from shardio.samples.decoding import AudioReader, ClipReader, ImageReader
from shardio.samples.token_reader import TokenReader

_DEPTH: Final = 2
"""Levels of lists: those of a batch have a value for each sample, which may be a list of arrays."""


def plain(made: Any) -> Any:
    """Return a sample or a batch of user code with tensors of torch as arrays.

    All other values are left as they are, for `inference` to judge, and `made` is not changed.

    Raises:
        SchemaError: a value is a masked array or a tensor that cannot become an array. The message
            names the field.
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
"""Calls a user function: the key of its draws, the function, and its arguments."""


def call_keyed(key: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Call the user's function with the global generators keyed: it may draw from them."""
    seed_generators(key)
    return function(*arguments)


class TransformRunner:
    """A runner of the user's transform on samples of a dataset, which it borrows.

    `passes` are exception types of user code that are re-raised as they are; `call` calls it.
    """

    def __init__(
        self,
        batch_spec: BatchSpec,
        dataset: Dataset,
        pictures: ImageReader,
        clips: ClipReader | None = None,
        sounds: AudioReader | None = None,
        packed: TokenReader | None = None,
        passes: tuple[type[BaseException], ...] = (),
        call: Call = call_keyed,
    ) -> None:
        self._batch_spec, self._dataset, self._passes = batch_spec, dataset, passes
        self._pictures = pictures if batch_spec.pictures else None
        self._call, self._takes_rng = call, batch_spec.takes_rng
        self._transform: Any = batch_spec.transform
        self._generators = SampleGenerators(batch_spec.seed)
        self._clips, self._sounds, self._packed = clips, sounds, packed
        decoded = {
            *(() if clips is None else (clips.name,)),
            *(() if sounds is None else sounds.names),
            *(() if packed is None else (packed.name,)),
        }
        self._stored = [name for name in batch_spec.fields if name not in decoded]
        made: dict[str, tuple[str, ...]] = {f.name: (f.name, f.span) for f in batch_spec.heard}
        if clips is not None:
            made[clips.name] = clips.names
        if packed is not None:
            made[packed.name] = packed.names
        self._names = [each for name in batch_spec.fields for each in made.get(name, (name,))]

    def fill(
        self,
        layout: BlockLayout,
        memory: BlockMap,
        index_chunk: IndexChunk,
        part: slice,
        states: npt.NDArray[np.int32],
        epoch: int,
        start: int,
    ) -> int:
        """Fill the rows of a batch; returns how much of the heap is used.

        Args:
            layout, memory: of the block.
            index_chunk, part: where the samples lie.
            states: of their rows in the origin table.
            epoch, start: the position of the first, which keys its generators.

        Raises:
            ShardCorrupt, TransformError, InsufficientMemory: naming the sample.
        """
        # They stay valid when the block grows: the pages are the same.
        n = part.stop - part.start
        arrays = [(s.name, layout.fixed_rows(memory.bytes, s, n)) for s in layout.fixed]
        presence = [(p.name, layout.present(memory.bytes, p)) for p in layout.presence]
        states[:] = _EMPTY
        used = 0
        samples, first = layout.samples, self._first
        for i, k in enumerate(range(part.start, part.stop)):
            states[i] = _CLAIMED
            sample = self.sample(index_chunk, k, epoch=epoch, position=start + i)
            try:
                check_sample(sample, samples, first)
                for name, is_present in presence:
                    is_present[i] = sample[name] is not None
                for name, array in arrays:
                    value = sample[name]
                    array[i] = 0 if value is None else value
                for varying in layout.varying:
                    used = put_value(layout, memory, varying, i, sample[varying.name], used)
            except SchemaError as error:
                row, shard = int(index_chunk.rows[k]), int(index_chunk.shards[k])
                raise self.placed(str(error), row, shard, start + i) from None
            states[i] = _FILLED
        return used

    @cached_property
    def _first(self) -> str:
        """Describe the sample that batches are laid out by."""
        rows = self._dataset.rows.at(np.zeros(1, np.int64))
        place = named(self._dataset, int(rows[0]), int(self._dataset.locate(rows)[0]))
        return f"the first sample ({place})"

    def sample(self, index_chunk: IndexChunk, k: int, *, epoch: int, position: int) -> Any:
        """Return the transform of sample k of a chunk, with every generator keyed for it."""
        dataset, generators = self._dataset, self._generators
        row, shard = int(index_chunk.rows[k]), int(index_chunk.shards[k])
        # Truncated files are detected once per batch, where reading must not kill (`Filler`).
        local = row - int(dataset.starts[shard])
        sample = dataset.sample(shard, local, self._stored, check_truncated=False)
        if self._clips is not None:
            start, place = int(index_chunk.cuts.starts[k]), index_chunk.cuts.place(k)
            sample[self._clips.name] = self._clips.of_sample(shard, local, start, place)
            sample |= self._clips.times_of_sample(shard, local, start)
        if self._packed is not None:
            sample |= self._packed.of_sample(int(index_chunk.origins[k, 0]), index_chunk.tokens)
        if self._sounds is not None:
            within, is_drawn = slice(k, k + 1), self._sounds.is_drawn
            (start,) = index_chunk.sound_starts(within, is_drawn=is_drawn)
            sample |= self._sounds.fields_of(shard, local, start)
        if len(sample) > len(self._stored):
            sample = {name: sample[name] for name in self._names}  # in the requested order
        if self._pictures is not None:
            sample = self._pictures.of_sample(sample, shard, local)
        _make_read_only(sample)
        key = generators.key(epoch, position)
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
            raise self.placed(what, row, shard, position, text) from error
        PHASE_TIMES.sums_ns[TRANSFORM] += now_ns() - start_ns
        try:
            return plain(made)
        except SchemaError as error:
            raise self.placed(str(error), row, shard, position) from None

    def placed(
        self, what: str, row: int, shard: int, position: int, text: str = ""
    ) -> TransformError:
        """Return the error of a sample, naming it."""
        place = (
            f"{named(self._dataset, row, shard)} of {self._batch_spec.path} (position {position})"
        )
        return TransformError(f"{what}\n  at {place}" + (f"\n\n{text}" if text else ""))


def _make_read_only(sample: Mapping[str, Any]) -> None:
    """Clear the writable flag of a sample's arrays.

    Stored arrays lie in a mapped file, which must not be written to. Decoded ones own their memory,
    but a transform that writes into them would fail on a dataset that has the same values stored.
    """
    for value in sample.values():
        if isinstance(value, np.ndarray):
            value.flags.writeable = False


def named(dataset: Dataset, row: int, shard: int) -> str:
    """Describe the sample at a row of all shards."""
    local = row - int(dataset.starts[shard])
    return f"sample {local} of shard {dataset.shards[shard].name}"


def describe_error(what: str, error: BaseException) -> tuple[str, str]:
    """Return the error text of a user function, and its traceback without our frames."""
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
