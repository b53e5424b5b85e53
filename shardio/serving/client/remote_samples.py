"""Samples from several servers of one dataset, in the order of their arrival; used by MultiLoader.

Each server sends the samples of one rank. Together, they send each sample once per epoch.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final, Self

from shardio._base.classes import Closing
from shardio._base.statistics import SkippedItem
from shardio._workers.processes.linux import this_process
from shardio._workers.tasks.zeromq import zeromq
from shardio.batch.batch import Batch
from shardio.errors import BatchTimeout, ClosedError, InvalidArgument, ShardioError
from shardio.serving.client.remote_loader import RemoteIteration, RemoteLoader

_BATCH_SIZE: Final = 32
_STEP_MS: Final = 100
_RESERVED: Final = (
    *("output", "device", "rank", "world_size", "tail", "collate"),
    *("keys", "memory_bytes", "timeout_s"),
)
"""The options of a loader that RemoteSamples sets itself."""


class RemoteSamples(Closing):
    """The samples of several servers. Owns a RemoteLoader for each server.

    The received batches of all servers have at most `memory_bytes` together. `log` is called with a
    line of text for each event.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        options: Mapping[str, Any],
        *,
        keys: Any,
        memory_bytes: int,
        timeout_s: float | None,
        log: Callable[[str], object],
    ) -> None:
        if given := [name for name in _RESERVED if name in options]:
            raise InvalidArgument(f"options: MultiLoader decides {given[0]} itself; leave it out")
        self._timeout_s, self._log, self.skipped = timeout_s, log, list[SkippedItem]()
        self.lock, self._is_closed, self._pid = threading.Lock(), False, this_process.pid
        self._addresses = list(addresses)
        n = len(addresses)
        self._loaders: list[RemoteLoader] = []
        with ExitStack() as undo:
            for rank, address in enumerate(addresses):
                loader = RemoteLoader(
                    address,
                    **{"batch_size": _BATCH_SIZE, **options},
                    output="numpy",
                    keys=keys,
                    rank=rank,
                    world_size=n,
                    tail="short",
                    collate="list",
                    memory_bytes=max(1, memory_bytes // n),
                    timeout_s=timeout_s,
                )
                undo.callback(loader.close)
                self._loaders.append(loader)
                self._check_shares(rank)
                if (found := loader.served.get("batch_transform")) is not None:
                    raise InvalidArgument(
                        f"{address} runs {found} on whole batches, and MultiLoader needs samples: "
                        "use shardio.connect, or serve without --batch-transform"
                    )
            undo.pop_all()

    def _check_shares(self, rank: int) -> None:
        loader, first = self._loaders[rank], self._loaders[0]
        if loader.lineage != first.lineage:
            raise InvalidArgument(
                f"{self._addresses[rank]} serves the dataset of lineage {loader.lineage}, "
                f"{self._addresses[0]} that of {first.lineage}: servers that share an epoch must "
                "serve one dataset"
            )
        if loader.generation != first.generation:
            raise InvalidArgument(
                f"{self._addresses[rank]} serves generation {loader.generation} of the dataset, "
                f"{self._addresses[0]} generation {first.generation}; together they would leave "
                "samples out. Bring the copies to the same generation; if it has just changed, "
                "call kill() and iterate again"
            )

    @property
    def is_owner_process(self) -> bool:
        """True in the process that created this object, False in a forked child."""
        return self._pid == this_process.pid

    def epoch(self, number: int) -> Iterator[Any]:
        """Return an iterator over the samples of an epoch, which several threads may share."""
        with self.lock:
            self.skipped.clear()
            iterations = []
            # Check again, because a server may have been restarted with another dataset.
            for rank in range(len(self._loaders)):
                self._check_shares(rank)
            for loader in self._loaders:
                state = loader.state_dict()
                beginning = {**state, "epoch": number, "position": 0}
                if state != beginning:
                    loader.load_state_dict(beginning)
                iterations.append(loader.begin())
            return _SharedIterator(self._samples(iterations), self)

    def _samples(self, iterations: list[RemoteIteration]) -> Iterator[Any]:
        running, last_batch_s = deque(enumerate(iterations)), time.monotonic()
        try:
            while running:
                if self._is_closed:
                    raise ClosedError("this iteration was ended by kill() or close()")
                found = self._take(running)
                if found is not None:
                    yield from self._rows(*found)
                    last_batch_s = time.monotonic()
                elif running:
                    self._wait(running, last_batch_s)
        finally:
            for each in iterations:
                each.end()

    def _take(self, running: deque[tuple[int, RemoteIteration]]) -> tuple[int, Batch] | None:
        """Return the next batch that has arrived, with the index of its server, or None."""
        for _ in range(len(running)):
            server, each = running.popleft()
            try:
                batch = each.take(0.0)
            except ShardioError as error:
                error.add_note(f"at {self._describe(server, each)}")
                raise
            if each.is_exhausted:
                self._log(f"server {server} has sent all of its share")
                continue
            running.append((server, each))
            if batch is not None:
                return server, batch
        return None

    def _rows(self, server: int, batch: Batch) -> Iterator[dict[str, Any]]:
        """Yield the samples of a batch as dicts, in which arrays are views of the batch."""
        for skip in batch.skipped:
            self.skipped.append(SkippedItem(skip.index, f"server {server}", skip.error, skip.text))
        columns = {name: batch[name] for name in batch}
        present = {name: batch.present(name) for name in batch}
        for row in batch.valid.nonzero()[0].tolist():
            yield {
                name: column[row] if present[name][row] else None
                for name, column in columns.items()
            }

    def _describe(self, server: int, each: RemoteIteration) -> str:
        return f"server {server} ({self._addresses[server]}): {each.describe_progress()}"

    def _wait(self, running: Iterable[tuple[int, RemoteIteration]], last_batch_s: float) -> None:
        if self._timeout_s is not None and time.monotonic() - last_batch_s > self._timeout_s:
            raise BatchTimeout(
                f"no sample arrived within {self._timeout_s:g} s; "
                f"{', '.join(self._describe(*each) for each in running)}"
            )
        zmq = zeromq()
        poller = zmq.Poller()
        for _, each in running:
            for socket in each.sockets:
                poller.register(socket, zmq.POLLIN)
        poller.poll(_STEP_MS)

    def close(self) -> None:
        """Close the loaders of all servers. May be called from any thread. Idempotent."""
        self._is_closed = True
        # Interrupt the loaders first, so that a waiting thread releases the lock.
        for loader in self._loaders:
            loader.interrupt()
        with self.lock:
            for loader in self._loaders:
                loader.close()


class _SharedIterator:
    """An iterator that several threads may use: each step holds the owner's lock."""

    def __init__(self, samples: Iterator[Any], owner: RemoteSamples) -> None:
        self._samples, self._owner = samples, owner

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if not self._owner.is_owner_process:
            raise ClosedError(
                "the iteration was started before this process was forked; start another one here"
            )
        with self._owner.lock:
            return next(self._samples)
