"""Any items, loaded in worker processes: the interface of tinyloader.

A `Loader` says how; `load` does it in this process, `load_with_workers` in others, with what they
return in shared memory.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any, Final, Literal, get_args

from shardio._loading.items import ItemIteration, Loader, iterator, named, values
from shardio._loading.options import OnError, count, most_skips, one_of, seconds
from shardio._workers.processes.limits import usable_cpus
from shardio._workers.processes.worker_main import Start
from shardio._workers.tasks.inline import InlinePool
from shardio._workers.tasks.schedule import DEPTH
from shardio._workers.tasks.task_pool import TaskPool
from shardio.errors import InvalidArgument

__all__ = ["Loader", "ItemIteration", "SharedMemoryShim", "load", "load_with_workers"]

ItemOrder = Literal["input", "completion"]

_METHODS: Final = ("make_request", "load", "post_process")


class SharedMemoryShim(Loader):
    """A loader around another, as tinyloader has one; it adds nothing.

    Args:
        loader: does the work.
        smm: a SharedMemoryManager, or None; its memory is not used.
        memory_pool_block_count: how far ahead items are loaded, as for `load_with_workers`.
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


def load(loader: Loader, items: Iterable[Any]) -> Generator[Any, None, None]:
    """Load items one by one, when they are asked for, all in this process.

    Raises:
        what the loader or the source raises, with a note of where.
    """
    _check_loader(loader)
    flow = InlinePool(loader.load, is_called=named(loader, "load"))
    return values(flow, loader, iterator(items), None)


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
    """Load items in worker processes; gives what `post_process` returns, item by item.

    Args:
        loader: how; it is pickled once, by cloudpickle.
        items: taken one by one, only so far ahead; may be endless.
        num_worker: how many processes; by default as many as this one may use CPUs. 0 loads in
            this process.
        shared_memory_enabled: changes nothing: arrays always come through shared memory.
        memory_pool_block_count: how many items may be under way; at least, and by default, two for
            each worker and two more.
        order: "input", or "completion": as they are loaded.
        on_error: "raise" the first failure of `load`, or "skip" the item.
        max_skips: how many items may be skipped, from 0 up.
        timeout_s: how long the loop waits for an item; None for ever.
        memory_bytes: budget of the shared memory, and the most that one item may take; by default
            half of what is available.
        start_method: how workers start: "zygote", "spawn", "forkserver" or "fork".

    Raises:
        InvalidArgument: an argument is not acceptable.
    """
    _check_loader(loader)
    n_workers = usable_cpus() if num_worker is None else count("num_worker", num_worker, 0)
    n_blocks = _count_or_none("memory_pool_block_count", memory_pool_block_count, 0)
    if n_blocks is None and isinstance(loader, SharedMemoryShim):
        n_blocks = loader.n_blocks
    n_bytes = _count_or_none("memory_bytes", memory_bytes, 1)
    in_order = one_of("order", order, get_args(ItemOrder)) == "input"
    how: Start = one_of("start_method", start_method, get_args(Start))
    most, is_called = most_skips(on_error, max_skips), named(loader, "load")

    def begin() -> TaskPool | InlinePool:
        if not n_workers:
            return InlinePool(loader.load, max_skips=most, is_called=is_called)
        return TaskPool(
            loader.load,
            n_workers,
            most_items=max(n_blocks or 0, DEPTH * n_workers + 2),
            in_order=in_order,
            memory_bytes=n_bytes,
            max_skips=most,
            start_method=how,
            is_called=is_called,
        )

    return ItemIteration(begin, loader, items, seconds("timeout_s", timeout_s))


def _check_loader(loader: Any) -> None:
    if isinstance(loader, type):
        raise InvalidArgument(f"loader is the class {loader.__name__}; give one of it")
    lacking = [name for name in _METHODS if not callable(getattr(loader, name, None))]
    if lacking:
        raise InvalidArgument(
            f"loader must have make_request, load and post_process, as a shardio.Loader has; "
            f"{type(loader).__name__} lacks {', '.join(lacking)}"
        )


def _count_or_none(name: str, value: Any, least: int) -> int | None:
    return None if value is None else count(name, value, least)
