"""Iterate over an epoch of a loader: turn each block that workers fill into a batch."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, Self, TextIO

import numpy as np
import numpy.typing as npt

from shardio._base.callers import missing_attribute
from shardio._base.classes import Closing
from shardio._base.progress import ProgressLine, ProgressState
from shardio._base.statistics import LoadingStats, now_ns
from shardio._engine.dispatch.engine import Engine
from shardio._engine.dispatch.iterations import DeliveredBlock, EpochIteration
from shardio._engine.filling.batch_spec import batch_source
from shardio._loading.options import LOADER_ADVICE, LoaderKeywords
from shardio._workers.processes.linux import Finalizer
from shardio.batch.batch import Batch, Skipped, Value_co, Wrap
from shardio.batch.layout import BlockLayout, to_channels_first
from shardio.dataset.dataset import Dataset
from shardio.errors import ShardioError
from shardio.outputs import TensorAdapter

_EVERY_BLOCK: Final = -1
"""The key, instead of a block's index, for tensors into which all batches are copied."""


class BatchLoader(Closing):
    """A loader of batches, which gives a hint for each attribute of other libraries' loaders."""

    if not TYPE_CHECKING:  # for type checkers, a loader would have every attribute

        def __getattr__(self, name: str) -> Any:
            return missing_attribute(self, name, LOADER_ADVICE)

        def __setattr__(self, name: str, value: object) -> None:
            if name == "epoch":
                raise AttributeError(
                    "the epoch of a loader cannot be set: every iteration is the next epoch; to "
                    "go on elsewhere, write loader.load_state_dict(state)"
                )
            if name in LoaderKeywords.__annotations__:  # `loader.transform = f` would do nothing
                kind = type(self).__name__
                raise AttributeError(f"options of a {kind} are fixed: pass {name}= to a new one")
            super().__setattr__(name, value)

        def __reduce__(self) -> NoReturn:
            kind = type(self).__name__
            raise TypeError(
                f"a {kind} has workers and open files, so it can be neither pickled nor copied: "
                f"send its arguments, and create the {kind} in the process that uses it"
            )

        def __getitem__(self, index: object) -> NoReturn:
            raise TypeError(
                f"a {type(self).__name__} has no batch by index: write `for batch in loader`, "
                "without a DataLoader of torch around it; shardio.map_view.MapView(dataset) gives "
                "samples by index, also to a DataLoader"
            )


class BatchAssembler:
    """A maker of batches from filled blocks. Borrows `engine`.

    If `reuses` is True, a batch may become invalid when the next one is requested.
    """

    def __init__(
        self,
        engine: Engine,
        adapter: TensorAdapter | None,
        dataset: Dataset,
        *,
        reuses: bool,
        max_skips: int,
    ) -> None:
        self._engine, self._adapter = engine, adapter
        self._uploads = None if adapter is None else adapter.uploads
        has_copies = adapter is not None and not adapter.aliases
        self._make_copier = adapter.make_copier if adapter is not None and has_copies else None
        # Tensors that cannot be overwritten keep their block, as without `reuse`.
        self._reuses = reuses and (self._make_copier is not None or not has_copies)
        self._max_skips = max_skips
        self._source = batch_source(dataset)
        self._wrap_items = None
        if adapter is not None:
            self._wrap_items = _wrap_of_items(adapter, reuses=self._reuses)

    def hand_over(self, delivered: DeliveredBlock, iteration: EpochIteration) -> Batch:
        layout = iteration.layout
        number, step, n_rows, heap_bytes = delivered
        skipped: tuple[Skipped, ...] = ()
        if iteration.skips:
            skipped = iteration.take_skips(step, self._max_skips)
        if heap_bytes:
            iteration.timer.heap_bytes += heap_bytes
        if self._uploads is not None:
            self._uploads.begin_batch()
            self._engine.pool[number].pin(self._uploads.pin)
        if self._reuses:
            block = self._engine.pool[number].bytes
            values = self._reused_values(layout, number, n_rows, block)
        else:
            leased = self._engine.lease(iteration)
            if leased is None:
                iteration.timer.n_copies += 1
                leased = self._private_copy(number, layout.heap + heap_bytes)
            block = leased
            values = self._values(layout, n_rows, block)
        if layout.channels_first:
            values = {
                name: to_channels_first(value) if name in layout.channels_first else value
                for name, value in values.items()
            }
        epoch, source, wrap = iteration.plan.epoch, self._source, self._wrap_items
        batch = Batch.of_block(layout, block, n_rows, values, epoch, step, source, skipped, wrap)
        # Do this last: from now on, the batch counts as consumed.
        iteration.next_loop_step = step + 1
        return batch

    def _values(
        self, layout: BlockLayout, n_rows: int, block: npt.NDArray[np.uint8]
    ) -> dict[str, Any]:
        arrays = layout.arrays(block, n_rows)
        if self._adapter is None:
            return arrays
        wrap = self._adapter.wrap
        slots = layout.fixed + layout.whole
        return {slot.name: wrap(arrays[slot.name], block, slot.logical_dtype) for slot in slots}

    def _reused_values(
        self, layout: BlockLayout, number: int, n_rows: int, block: npt.NDArray[np.uint8]
    ) -> dict[str, Any]:
        """Return the arrays or tensors of a batch for reuse=True; later batches use them again.

        Each block has its own values; but if tensors are copies, one set serves all blocks.
        """
        cache = self._engine.pool.view_cache
        if (make_copier := self._make_copier) is not None:
            arrays = layout.arrays(block, n_rows)
            shapes = [array.shape for array in arrays.values()] if layout.whole else None
            cached = cache.get((_EVERY_BLOCK, n_rows))
            if cached is None or cached[0] != shapes:
                slots = layout.fixed + layout.whole
                copiers = {s.name: make_copier(arrays[s.name], s.logical_dtype) for s in slots}
                cached = cache[_EVERY_BLOCK, n_rows] = shapes, copiers
            return {name: cached[1][name](array) for name, array in arrays.items()}
        heads = layout.heads(block) if layout.whole else None
        cached = cache.get((number, n_rows))
        if cached is None or cached[0] != heads:
            cached = cache[number, n_rows] = heads, self._values(layout, n_rows, block)
        values: dict[str, Any] = cached[1]
        return values

    def _private_copy(self, number: int, n_bytes: int) -> npt.NDArray[np.uint8]:
        pool = self._engine.pool
        copy = pool.copy(number, n_bytes)
        pool.warn_of_copies("batches")
        return copy


def _wrap_of_items(adapter: TensorAdapter, *, reuses: bool) -> Wrap | None:
    """Return the function that converts the arrays in lists; None if they stay arrays."""
    if not adapter.wraps_items:
        return None
    if adapter.aliases or not reuses:
        return adapter.wrap
    # The framework may share the array's memory even if `aliases` is False: copy the array, because
    # the block will be overwritten.
    return functools.partial(_wrap_copy, adapter.wrap)


def _wrap_copy(wrap: Wrap, array: npt.NDArray[Any], owner: object, dtype: str | None) -> Any:
    return wrap(array.copy(), owner, dtype)


class LoaderIterator:
    """An iterator over one epoch of `loader`; keeps the loader alive.

    When the iterator ends, fails or is garbage-collected, `iteration` is cancelled.
    """

    def __init__(
        self, loader: object, engine: Engine, assembler: BatchAssembler, iteration: EpochIteration
    ) -> None:
        self._loader, self._engine, self._hand_over = loader, engine, assembler.hand_over
        self.iteration = iteration
        self._cancel = Finalizer(self, engine.cancel, iteration)
        self._cancel.atexit = False
        self._is_over = False
        self._timer, self._began_ns = iteration.timer, iteration.timer.began_ns
        iteration.timer.start()
        iteration.is_watched = True

    def __repr__(self) -> str:
        plan, n = self.iteration.plan, self.iteration.next_loop_step
        state = "over" if self._is_over else f"next batch {n} of {plan.partition.stop_step}"
        return f"LoaderIterator(epoch {plan.epoch}: {state})"

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self._is_over:
            raise StopIteration
        timer, began_ns = self._timer, self._began_ns
        timer.entered_ns += now_ns() - began_ns
        try:
            delivered = self._engine.next(self.iteration)
            if delivered is not None:
                batch = self._hand_over(delivered, self.iteration)
                timer.left_ns += now_ns() - began_ns
                return batch
        except BaseException as error:
            # If Ctrl-C interrupted the delivery, the block of the batch may have no owner.
            if not isinstance(error, Exception):
                self._engine.mark_inconsistent()
            self._end()
            if isinstance(error, ShardioError):  # its message says more than frames of the loader
                error.__traceback__ = None
            raise
        self.iteration.is_exhausted = True
        self._end()
        raise StopIteration

    def _end(self) -> None:
        self._is_over = True
        self._cancel()


_LINE_EVERY_S: Final = 10.0


class ProgressBar(Generic[Value_co]):
    """An iterator that yields the batches of another iterator, and shows the progress.

    A terminal or a notebook shows a bar; any other file gets a line from time to time. `n_batches`
    is the number of batches of the whole epoch, of which `n_done` were consumed before.
    """

    def __init__(
        self,
        batches: Iterator[Batch[Value_co]],
        *,
        n_batches: int,
        n_done: int,
        stats: Callable[[], LoadingStats],
        title: str,
        file: TextIO | None,
    ) -> None:
        self._batches, self._stats, self._title = batches, stats, title
        self._n_batches, self._n_done = n_batches, n_done
        self._line, self._is_over = ProgressLine(file, stays=True), False
        self._next_s = time.monotonic() + _LINE_EVERY_S
        if self._line.kind != "plain":
            self._line.show(self._state())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch[Value_co]:
        try:
            batch = next(self._batches)
        except BaseException:
            if not self._is_over:
                self._is_over = True
                self._show(is_last=True)
                self._line.close()
            raise
        self._n_done += 1
        self._show()
        return batch

    def _show(self, *, is_last: bool = False) -> None:
        if self._line.kind != "plain":
            if is_last or self._line.is_due():
                self._line.show(self._state(), is_last=is_last)
        elif is_last or time.monotonic() >= self._next_s:
            self._line.print(self._state())
            self._next_s = time.monotonic() + _LINE_EVERY_S

    def _state(self) -> ProgressState:
        stats = self._stats()
        elapsed_s = stats.elapsed_s or 1.0
        return ProgressState(
            title=self._title,
            done=self._n_done,
            total=self._n_batches,
            unit="batches",
            counts=f"{self._n_done:,} of {self._n_batches:,} batches",
            rate=(
                f"{stats.n_samples / elapsed_s:,.0f} samples/s, "
                f"waiting {stats.waiting_s / elapsed_s:.0%}"
            ),
        )
