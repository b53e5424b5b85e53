"""Load arbitrary items in worker processes, with the interface of the package tinyloader.

Users implement `Loader`, which loads one item at a time. `load` uses the loader in this process;
`load_with_workers` uses it in worker processes, which send arrays through shared memory.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, Literal, Self, get_args

from shardio._base.callers import one_of, refuses
from shardio._base.classes import Closing
from shardio._base.statistics import ItemStats, SkippedItem
from shardio._loading.options import OnError, check_seconds, check_skips, refuse_path
from shardio._workers.processes.limits import usable_cpus
from shardio._workers.processes.linux import Finalizer
from shardio._workers.processes.serialization import add_note, short_repr
from shardio._workers.processes.worker_main import Start
from shardio._workers.tasks.calls import InlinePool, SingleCaller
from shardio._workers.tasks.schedule import DEPTH
from shardio._workers.tasks.task_pool import TaskPool
from shardio.errors import ClosedError, InvalidArgument, TransformError
from shardio.order.sampling import check_count

__all__ = ["ItemIteration", "Loader", "SharedMemoryShim", "load", "load_with_workers"]

_EXPECTED: Final = "an instance of a class derived from shardio.Loader"


class Loader(ABC):
    """An interface for loading items in three steps: make a request, load it, finish the result.

    `make_request` and `post_process` run in the thread that iterates over the items. If there are
    workers, `load` runs in a worker, on a copy of the loader that is made when the worker starts.
    """

    if not TYPE_CHECKING:

        def __new__(cls, *args: Any, **options: Any) -> Self:
            """Create a loader; raise InvalidArgument if `Loader` itself is called with a path."""
            if cls is Loader and args:
                refuse_path("loader", args[0], _EXPECTED)
            new = super().__new__
            if new is not object.__new__:
                return new(cls, *args, **options)
            if (args or options) and cls.__init__ is object.__init__:
                raise TypeError(f"{cls.__name__}() takes no arguments")
            return new(cls)

    @abstractmethod
    def make_request(self, item: Any) -> Any:
        """Return a request for an item: a small, picklable value, the argument of `load`."""

    @abstractmethod
    def load(self, request: Any) -> Any:
        """Load the item of a request; return a tuple of arrays, or a value that can be pickled."""

    @abstractmethod
    def post_process(self, response: Any) -> Any:
        """Turn `response`, the result of `load`, into the value that the iteration yields.

        The arrays of `response` are in shared memory, and stay valid while they are referenced.
        """

    def shutdown(self) -> None:  # noqa: B027  # most loaders hold nothing
        """Release the loader's resources in this process; called once, when an ItemIteration ends.

        `shardio.load`, which has no ItemIteration, never calls this method.
        """


class ItemIteration(Closing, Generator[Any, None, None]):
    """The iterator that `load_with_workers` returns: a generator and a context manager.

    Workers start at the beginning of a `with` block, or when the first item is requested. They stop
    when the iterator is exhausted, fails, is closed or is garbage-collected. The loader's
    `shutdown` is called afterwards; in a `with` block, at the end of the block.
    """

    def __init__(
        self,
        begin: Callable[[], TaskPool | InlinePool],
        loader: Loader,
        items: Iterable[Any],
        timeout_s: float | None,
    ) -> None:
        self._start_task_pool, self._loader, self._timeout_s = begin, loader, timeout_s
        self._source = _iterator(items)
        self._task_pool: TaskPool | InlinePool | None = None
        self._body: Generator[Any, None, None] | None = None
        self._end: Callable[[], object] | None = None
        self._is_over = self._is_closed = self._is_entered = False
        self._single_caller = SingleCaller(
            "another thread is waiting for an item of this iteration"
        )

    def __enter__(self) -> Self:
        self._begin()
        self._is_entered = True
        return self

    def _begin(self) -> Generator[Any, None, None]:
        if self._is_closed or self._is_over:
            raise ClosedError(
                "this iteration has ended or was closed; call load_with_workers again for another"
            )
        if self._task_pool is None or self._body is None:
            task_pool = self._task_pool = self._start_task_pool()
            self._end = Finalizer(self, _end, task_pool, self._loader, os.getpid())
            self._body = _values(task_pool, self._loader, self._source, self._timeout_s)
        return self._body

    def send(self, value: None) -> Any:
        """Return the value of the next item, as `__next__` does; `value` is ignored.

        Raises:
            Exception: an exception of the loader or of the source of items; a note names the item.
            BatchTimeout: the item was not loaded within `timeout_s`.
            WorkerDied: two workers crashed while they loaded the item.
            ClosedError: the iteration was closed before its end.
            InvalidArgument: another thread, or the source of items, is already inside this call.
        """
        with self._single_caller:
            if self._is_over:
                raise StopIteration
            body = self._begin()
            try:
                return next(body)
            except BaseException:
                self._finish()
                raise

    def throw(self, *raised: Any) -> Any:
        """End the iteration, and raise the given exception."""
        self._finish()
        return super().throw(*raised)

    def _finish(self) -> None:
        """End the iteration and the workers; the end of a `with` block shuts the loader down."""
        self._is_over = True
        if self._is_entered and self._task_pool is not None:
            self._body = None
            self._task_pool.close()
        else:
            self.close()

    def close(self) -> None:
        """Stop the workers, even busy ones. Yielded values stay valid. Idempotent."""
        self._is_closed = True
        self._body = None
        if self._end is not None:
            self._end()

    def stats(self) -> ItemStats:
        """Return the figures of the iteration so far, even after `close`."""
        return ItemStats() if self._task_pool is None else self._task_pool.stats

    @property
    def skipped(self) -> tuple[SkippedItem, ...]:
        """The items that have been skipped so far; empty unless on_error="skip" is given."""
        return () if self._task_pool is None else tuple(self._task_pool.error_budget.skipped)


def _values(
    task_pool: TaskPool | InlinePool, loader: Loader, source: Iterator[Any], timeout_s: float | None
) -> Generator[Any, None, None]:
    feed = _Feed(task_pool, loader, source)
    while feed.await_next(timeout_s):
        # Bind no value to a variable, which would keep it alive until the next one is loaded.
        yield feed.post_process(*feed.ready.pop())
    if feed.failures:
        # Keep no other reference to the exception, because its traceback refers to this frame.
        raise feed.failures.pop()


class _Feed:
    def __init__(
        self, task_pool: TaskPool | InlinePool, loader: Loader, source: Iterator[Any]
    ) -> None:
        self._task_pool, self._loader, self._source = task_pool, loader, source
        self._pending_items: dict[int, Any] = {}  # the items being loaded, by their indices
        self.ready: list[tuple[int, Any]] = []  # index and value of the next loaded item
        # The exception that the source, `make_request` or `put` has raised, to be raised again
        # after the values of all earlier items were yielded.
        self.failures: list[Exception] = []

    def await_next(self, timeout_s: float | None) -> bool:
        """Wait until an item is ready; return False at the end of the iteration."""
        task_pool, begin_s, left_s = self._task_pool, time.monotonic(), timeout_s
        self._fill()
        while (found := task_pool.take()) is None:
            if task_pool.is_over:
                return False
            if isinstance(task_pool, TaskPool):
                if timeout_s is not None:
                    left_s = begin_s + timeout_s - time.monotonic()
                    if left_s <= 0:
                        raise task_pool.overdue(timeout_s)
                task_pool.wait(left_s)
            self._fill()
        self.ready.append(found)
        return True

    def post_process(self, number: int, response: Any) -> Any:
        item = self._pending_items.pop(number)
        return _call_method(self._loader, "post_process", response, number, item)

    def _fill(self) -> None:
        while self._task_pool.has_room:
            try:
                self._put_next()
            except Exception as error:  # noqa: BLE001  # `_values` raises it later
                self.failures.append(error)
                self._task_pool.end()

    def _put_next(self) -> None:
        number = self._task_pool.n_put
        try:
            item = next(self._source)
        except StopIteration:
            self._task_pool.end()
            return
        except Exception as error:
            add_note(error, f"in the source, item {number}")
            raise
        request = _call_method(self._loader, "make_request", item, number, item)
        self._pending_items[number] = item
        try:
            self._task_pool.put(request, item)
        except Exception as error:
            add_note(error, f"in the request of item {number} ({short_repr(item)})")
            raise


def _call_method(loader: Loader, method: str, argument: Any, number: int, item: Any) -> Any:
    """Call a method of the loader in this process; errors name the method and the item."""
    try:
        return getattr(loader, method)(argument)
    except (StopIteration, StopAsyncIteration, GeneratorExit) as error:
        # An exception of these types would end the iteration as if there were no more items.
        message = f"{_method_name(loader, method)} raised {type(error).__name__}"
        raise TransformError(f"{message}, item {number} ({short_repr(item)})") from error
    except Exception as error:
        add_note(error, f"in {_method_name(loader, method)}, item {number} ({short_repr(item)})")
        raise


def _method_name(loader: Loader, method: str) -> str:
    return f"{type(loader).__name__}.{method}"


def _iterator(items: Any) -> Iterator[Any]:
    """Return an iterator over `items`; raise InvalidArgument if they are a path or not iterable."""
    refuse_path("items", items)
    try:
        return iter(items)
    except TypeError as error:
        raise InvalidArgument(f"items must be iterable; found {short_repr(items)}") from error


def _end(task_pool: TaskPool | InlinePool, loader: Any, owner_pid: int) -> None:
    """Stop the workers, and then shut the loader down; do nothing in a fork of `owner_pid`."""
    if os.getpid() == owner_pid:
        try:
            task_pool.close()
        finally:
            if (shutdown := getattr(loader, "shutdown", None)) is not None:
                shutdown()


ItemOrder = Literal["input", "completion"]

_METHODS: Final = ("make_request", "load", "post_process")


class SharedMemoryShim(Loader):
    """A wrapper around a loader, for compatibility with tinyloader.

    Args:
        loader: the wrapped loader, whose methods are called.
        smm: a SharedMemoryManager or None; ignored.
        memory_pool_block_count: the default for this argument of `load_with_workers`.
    """

    def __init__(self, loader: Loader, smm: Any, memory_pool_block_count: int | None) -> None:
        _check_loader(loader)
        self.loader = loader
        self.n_blocks = _count_or_none("memory_pool_block_count", memory_pool_block_count, 0)

    def make_request(self, item: Any) -> Any:
        """Return the request of the wrapped loader."""
        return self.loader.make_request(item)

    def load(self, request: Any) -> Any:
        """Load a request with the wrapped loader."""
        return self.loader.load(request)

    def post_process(self, response: Any) -> Any:
        """Finish a response with the wrapped loader."""
        return self.loader.post_process(response)

    def shutdown(self) -> None:
        """Shut the wrapped loader down."""
        self.loader.shutdown()


@refuses(
    {"items": "to read a dataset, write shardio.open(path) or ShardLoader(path, batch_size)"},
    "shardio.load",
)
def load(loader: Loader, items: Iterable[Any]) -> Generator[Any, None, None]:
    """Load items in this process, each item when it is requested; yield the loaded values.

    Raises:
        Exception: an exception of the loader or of the source of items; a note names the item.
    """
    _check_loader(loader)
    task_pool = InlinePool(loader.load, _method_name(loader, "load"))
    return _values(task_pool, loader, _iterator(items), None)


def load_with_workers(
    loader: Loader,
    items: Iterable[Any],
    num_worker: int | None = None,
    shared_memory_enabled: bool = False,  # noqa: FBT001, FBT002  # as tinyloader has it
    memory_pool_block_count: int | None = None,
    *,
    order: ItemOrder = "input",
    on_error: OnError = "raise",
    max_skips: int | None = None,
    timeout_s: float | None = None,
    memory_bytes: int | None = None,
    start_method: Start = "zygote",
) -> ItemIteration:
    """Load items in worker processes; return an iterator over the results of `post_process`.

    Args:
        loader: the loader; it is serialized once, with cloudpickle.
        items: an iterable, which may be endless.
        num_worker: the number of processes; with 0, items are loaded in this process. By default
            the number of CPUs available to this process.
        shared_memory_enabled: ignored; arrays are always sent through shared memory.
        memory_pool_block_count: the maximum number of items that are taken from `items` but not
            yielded yet. The default, two per worker plus two, is also the minimum.
        order: "input" for results in the order of `items`, or "completion" for the order in which
            they are ready.
        on_error: "raise" to raise the first failure of `load`, or "skip" to skip the item.
        max_skips: with "skip", the number of items that may be skipped.
        timeout_s: the maximum time to wait for workers to load an item; None for no limit.
        memory_bytes: the budget for shared memory, and the maximum size of one item; by default
            half of the available memory.
        start_method: the start method of workers: "zygote" or "spawn".

    Raises:
        InvalidArgument: an argument is invalid.
    """
    _check_loader(loader)
    n_workers = usable_cpus() if num_worker is None else check_count("num_worker", num_worker, 0)
    n_blocks = _count_or_none("memory_pool_block_count", memory_pool_block_count, 0)
    if n_blocks is None and isinstance(loader, SharedMemoryShim):
        n_blocks = loader.n_blocks
    n_bytes = _count_or_none("memory_bytes", memory_bytes, 1)
    in_order = one_of("order", order, get_args(ItemOrder)) == "input"
    how: Start = one_of("start_method", start_method, get_args(Start))
    most, name = check_skips(on_error, max_skips), _method_name(loader, "load")

    def begin() -> TaskPool | InlinePool:
        if not n_workers:
            return InlinePool(loader.load, name, most)
        return TaskPool(
            loader.load,
            n_workers,
            max_items=max(n_blocks or 0, DEPTH * n_workers + 2),
            in_order=in_order,
            memory_bytes=n_bytes,
            max_skips=most,
            start_method=how,
            name=name,
        )

    return ItemIteration(begin, loader, items, check_seconds("timeout_s", timeout_s))


def _check_loader(loader: Any) -> None:
    refuse_path("loader", loader, _EXPECTED)
    if isinstance(loader, type):
        raise InvalidArgument(f"loader is the class {loader.__name__}; pass an instance of it")
    lacking = [name for name in _METHODS if not callable(getattr(loader, name, None))]
    if lacking:
        raise InvalidArgument(
            f"loader must have make_request, load and post_process, like a shardio.Loader; "
            f"{type(loader).__name__} lacks {', '.join(lacking)}"
        )


def _count_or_none(name: str, value: Any, least: int) -> int | None:
    return None if value is None else check_count(name, value, least)
