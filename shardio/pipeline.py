"""Concurrent processing of a stream of items: `Pipeline`, and `DataLoader` for training.

    source ─▶ preprocess, many at once ─▶ batches ─▶ aggregate ─▶ transfer ─▶ buffer ─▶ the loop

The user's functions run in threads or in processes; async functions run in one event loop.
"""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Literal, Self, get_args

from shardio._base.callers import one_of, refuses
from shardio._base.classes import Closing
from shardio._base.statistics import PipelineStats, StageStats
from shardio._loading.options import OnError, check_seconds, check_skips
from shardio._loading.sources import MapIterator, PipelineSource, ResumePosition
from shardio._workers.processes.linux import Finalizer, interrupts_held
from shardio._workers.processes.serialization import short_repr
from shardio._workers.tasks.pipeline_runner import PipelineRunner
from shardio._workers.tasks.stage import (
    BatchStep,
    PipeStep,
    SourceItem,
    TaskExecutor,
    UserCall,
    check_executor,
    user_call,
)
from shardio.errors import ClosedError, InvalidArgument
from shardio.order.sampling import check_count

__all__ = ["DataLoader", "MapIterator", "Pipeline", "PipelineStats", "StageStats"]

Order = Literal["completion", "input"]
_BUFFER: Final = 3
_BEGINNING: Final = ResumePosition()
_UNUSED: Final = PipelineStats((), 0, (), 0.0, 0.0, 0.0)


class PipelineIterations(Closing):
    """The base class of DataLoader and Pipeline, which starts and ends iterations."""

    def __init__(
        self,
        pipeline_source: PipelineSource,
        n_skips: int | None,
        n_buffered: int,
        timeout_s: float | None,
    ) -> None:
        self._pipeline_source, self._max_skips = pipeline_source, n_skips
        self._n_buffered, self._timeout_s = n_buffered, timeout_s
        self._steps: tuple[PipeStep | BatchStep, ...] = ()
        self._runners: weakref.WeakSet[PipelineRunner] = weakref.WeakSet()
        self._latest: PipelineRunner | None = None
        self._is_closed = False

    def _iterate(
        self,
        source: Any,
        on_result: Callable[[SourceItem | None], None],
        begin: ResumePosition = _BEGINNING,
    ) -> Iterator[Any]:
        """Start an iteration over `source`; `on_result` is as in `_Iteration`."""
        self._check_open()
        with interrupts_held():
            runner = PipelineRunner(
                source,
                self._steps,
                n_buffered=self._n_buffered,
                max_skips=self._max_skips,
                n_items_before=begin.item,
                n_passed_over=begin.n_passed_over,
            )
            found = _Iteration(runner, self._timeout_s, on_result)
        self._runners.add(runner)
        self._latest = runner
        return found

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError(f"this {type(self).__name__} was closed: create another one")

    def stats(self) -> PipelineStats:
        """Return the figures of the latest iteration; before the first, all are 0 or empty."""
        return _UNUSED if self._latest is None else self._latest.stats()

    def close(self) -> None:
        """End all running iterations, and allow no further ones. Idempotent."""
        self._is_closed = True
        for runner in list(self._runners):
            runner.close()


class _Iteration:
    """An iterator over the results of `runner`; closes the runner at the end.

    For each result, it calls `on_result` with the SourceItem of the result; at the end, with None.
    """

    def __init__(
        self,
        runner: PipelineRunner,
        timeout_s: float | None,
        on_result: Callable[[SourceItem | None], None],
    ) -> None:
        self._take, self._timeout_s, self._on_result = runner.take, timeout_s, on_result
        self._close = Finalizer(self, runner.abandon)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if not self._close.alive:
            raise StopIteration
        try:
            entry = self._take(self._timeout_s)
        except BaseException:
            self._close()
            raise
        if entry is None:
            self._close()
            self._on_result(None)
            raise StopIteration
        self._on_result(entry[0])
        return entry[1]


def _make_step(
    argument: str,
    function: Any,
    *,
    concurrency: Any = 1,
    executor: Any = None,
    order: Any = "input",
    name: str | None = None,
    thread_group: str = "threads",
) -> PipeStep:
    """Return a step that calls `function`; check the options. Errors name the `argument`."""
    call = user_call(argument, function)
    if not isinstance(name, str | None):
        raise InvalidArgument(f"name must be a string; found {short_repr(name)}")
    if check_executor(executor) is not None and call.is_async:
        raise InvalidArgument(
            f"{argument} is async and takes no executor, because it runs in an event loop; found "
            f"executor={executor!r}"
        )
    return PipeStep(
        call,
        argument if name is None else name,
        check_count("concurrency", concurrency, 1),
        one_of("order", order, get_args(Order)) == "input",
        thread_group,
        executor,
    )


def _check_one_result(step: PipeStep) -> PipeStep:
    if step.call.yields_many:
        raise InvalidArgument(
            f"{step.name} must return one result; only the preprocessor may be a generator function"
        )
    return step


class Pipeline(PipelineIterations):
    """A source of items and a chain of concurrent steps that process them.

    The methods that add steps return a new Pipeline. Each `for` loop iterates over the source
    again:

        pipeline = Pipeline(paths).pipe(decode, concurrency=4).aggregate(32).pipe(stack).sink(3)
        for batch in pipeline: ...

    Args:
        source: an iterable or async iterable of items.
        on_error: "raise" to raise the exception of a function, with a note that names the item; or
            "skip" to drop the item and list it in `stats()`. Exceptions of the source are always
            raised.
        max_skips: with "skip", the number of calls in one iteration that may fail.

    Raises:
        InvalidArgument: an argument is invalid.
    """

    def __init__(
        self,
        source: Iterable[Any] | AsyncIterable[Any],
        *,
        on_error: OnError = "raise",
        max_skips: int | None = None,
    ) -> None:
        pipeline_source = PipelineSource("source", source)
        super().__init__(pipeline_source, check_skips(on_error, max_skips), _BUFFER, None)

    def pipe(
        self,
        function: Callable[[Any], Any] | Mapping[Any, Any],
        *,
        concurrency: int = 1,
        executor: TaskExecutor = None,
        order: Order = "completion",
        name: str | None = None,
    ) -> Pipeline:
        """Return a pipeline with one more step, which calls a function with every item.

        Args:
            function: a function of an item, sync or async, which returns a result, or None to drop
                the item. Each value that a generator function yields becomes an item. A mapping or
                a sequence may be given instead; the item is then a key or an index.
            concurrency: the maximum number of items that are processed at the same time.
            executor: None for threads; "process" for worker processes, which return arrays through
                shared memory; or an Executor that the caller owns.
            order: the order of the results: "completion" for the order in which they are ready, or
                "input" for the order of the items.
            name: the name of the step in errors and statistics; by default the function's name.
        """
        given = getattr(function, "__name__", None) or type(function).__name__
        return self._with_steps(
            _make_step(
                "function",
                function,
                concurrency=concurrency,
                executor=executor,
                order=order,
                name=given if name is None else name,
                thread_group=f"step {len(self._steps)}",
            )
        )

    def aggregate(self, n: int, *, drop_last: bool = False) -> Pipeline:
        """Return a pipeline with one more step, which collects items into lists of `n`.

        If `drop_last` is True, a last list with fewer than `n` items is dropped.
        """
        drop = one_of("drop_last", drop_last, (True, False))
        return self._with_steps(BatchStep(check_count("n", n, 1), drop))

    def disaggregate(self) -> Pipeline:
        """Return a pipeline with one more step, which replaces each item with its elements."""
        group = f"step {len(self._steps)}"
        call = UserCall(iter, yields_many=True)
        return self._with_steps(
            PipeStep(call, "disaggregate", 1, in_order=True, thread_group=group)
        )

    def sink(self, buffer: int = _BUFFER, *, timeout: float | None = None) -> Pipeline:
        """Return a pipeline that buffers up to `buffer` results for the loop.

        The loop waits at most `timeout` seconds for each result; None sets no limit.
        """
        pipeline = self._with_steps()
        pipeline._n_buffered = check_count("buffer", buffer, 1)
        pipeline._timeout_s = check_seconds("timeout", timeout)
        return pipeline

    def _with_steps(self, *steps: PipeStep | BatchStep) -> Pipeline:
        pipeline = Pipeline.__new__(Pipeline)
        PipelineIterations.__init__(
            pipeline, self._pipeline_source, self._max_skips, self._n_buffered, self._timeout_s
        )
        pipeline._steps = (*self._steps, *steps)
        return pipeline

    def __iter__(self) -> Iterator[Any]:
        """Start an iteration over the source.

        The iterator ends when it raises an exception: that of a function, TooManySkipped,
        BatchTimeout if a result is late, or WorkerDied after crashes.
        """
        return self._iterate(self._pipeline_source.source, lambda origin: None)


@refuses(
    {"collate_fn": "write aggregator=", "num_workers": "write num_threads="}
    | dict.fromkeys(
        ("dataset", "sampler", "shuffle"),
        "write shardio.ShardLoader(dataset, batch_size, shuffle=True) for batches of a dataset",
    )
)
class DataLoader(PipelineIterations):
    """A loader that preprocesses items, collects them into batches and aggregates each batch.

    Args:
        src: an iterable or async iterable of items, which is iterated anew for every iteration of
            the loader; a generator has no items left after the first iteration.
        preprocessor: a function of an item, sync or async, or a mapping in which the item is looked
            up. The result None drops the item. A generator function yields any number of results.
        batch_size: the number of results that are collected into a list (a batch); None to pass on
            the results one by one.
        drop_last: True to drop the last list if it has fewer than `batch_size` results.
        aggregator: a function of a list or, if `batch_size` is None, of a single result; sync or
            async.
        transfer_fn: a function of a result of the preceding step. All calls are made in one thread.
        buffer_size: the maximum number of finished results that wait for the loop.
        num_threads: the number of threads, which the preprocessor and the aggregator share.
        timeout: the maximum time to wait for a result, in seconds; None for no limit.
        output_order: "completion" for the order in which items are ready, or "input" for the order
            of the source. With "completion", items that are ready together have the order of the
            source.
        executor: the executor that runs the preprocessor, as in `Pipeline.pipe`; up to
            `num_threads` calls run at the same time.
        on_error, max_skips: as in `Pipeline`.

    Raises:
        InvalidArgument: an argument is invalid.
    """

    def __init__(
        self,
        src: Iterable[Any] | AsyncIterable[Any],
        *,
        preprocessor: Callable[[Any], Any] | Mapping[Any, Any] | None = None,
        batch_size: int | None = None,
        drop_last: bool = False,
        aggregator: Callable[[Any], Any] | None = None,
        transfer_fn: Callable[[Any], Any] | None = None,
        buffer_size: int = _BUFFER,
        num_threads: int = 8,
        timeout: float | None = None,
        output_order: str = "completion",
        executor: TaskExecutor = None,
        on_error: OnError = "raise",
        max_skips: int | None = None,
    ) -> None:
        super().__init__(
            PipelineSource("src", src),
            check_skips(on_error, max_skips),
            check_count("buffer_size", buffer_size, 1),
            check_seconds("timeout", timeout),
        )
        self._n_per_result = 1 if batch_size is None else check_count("batch_size", batch_size, 1)
        self._drops_last = one_of("drop_last", drop_last, (True, False))
        self._is_ordered = one_of("output_order", output_order, get_args(Order)) == "input"
        self._yields_many = False
        n, order = check_count("num_threads", num_threads, 1), output_order
        steps: list[PipeStep | BatchStep] = []
        if preprocessor is not None:
            name = "preprocessor"
            step = _make_step(name, preprocessor, concurrency=n, executor=executor, order=order)
            steps.append(step)
            self._yields_many = step.call.yields_many
        elif executor is not None:
            raise InvalidArgument("executor needs a preprocessor, and there is none")
        if batch_size is not None:
            steps.append(BatchStep(self._n_per_result, self._drops_last))
        if aggregator is not None:
            steps.append(
                _check_one_result(_make_step("aggregator", aggregator, concurrency=n, order=order))
            )
        if transfer_fn is not None:
            step = _make_step("transfer_fn", transfer_fn, thread_group="transfer_fn")
            steps.append(_check_one_result(step))
        self._steps = tuple(steps)
        self._position, self._start_position = ResumePosition(), ResumePosition()
        self._current_iteration: object = None  # identifies the iteration whose position counts

    def __iter__(self) -> Iterator[Any]:
        """Start an iteration over `src`, or resume at the position given to `load_state_dict`.

        The iterator raises the exceptions of `Pipeline.__iter__`.
        """
        self._check_open()
        source, begin = self._pipeline_source.begin_at(self._start_position)
        self._start_position, self._position = ResumePosition(), begin
        this = self._current_iteration = object()

        def on_result(origin: SourceItem | None) -> None:
            if self._current_iteration is this:
                self._position = ResumePosition.after(origin)

        return self._iterate(source, on_result, begin)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last result of the latest iteration, for `load_state_dict`.

        Raises:
            InvalidArgument: `output_order` is not "input", or an iteration over the source cannot
                resume in the middle.
        """
        self._check_order()
        return self._pipeline_source.state_of(self._position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration start at the position in `state`, a result of `state_dict`.

        Raises:
            InvalidArgument: as in `state_dict`, or `state` is invalid or belongs to another source.
        """
        self._check_order()
        self._start_position = self._position = self._pipeline_source.position_from_state(state)
        self._current_iteration = None

    def _check_order(self) -> None:
        if not self._is_ordered:
            raise InvalidArgument(
                "results in order of completion have no position to resume from: pass "
                "output_order='input'"
            )

    def __len__(self) -> int:
        """Return the number of results that an iteration has if no item is dropped or skipped.

        Raises:
            TypeError: the source has no length, or the preprocessor is a generator function.
        """
        n_items = self._pipeline_source.n_items
        if n_items is None:
            raise TypeError(f"the source has no length: {short_repr(self._pipeline_source.source)}")
        if self._yields_many:
            raise TypeError(
                "a DataLoader whose preprocessor is a generator function has no length: an item "
                "yields any number of results"
            )
        n_whole, n_left = divmod(n_items, self._n_per_result)
        return n_whole + (n_left > 0 and not self._drops_last)

    # Without this method, Python would call `__len__`, which is 0 for an empty source, and raises
    # an exception for a source without a length.
    def __bool__(self) -> bool:
        return True
