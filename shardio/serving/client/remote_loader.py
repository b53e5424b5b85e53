"""RemoteLoader, alias `shardio.connect`: a loader of batches that a server decodes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, Self, TextIO, Unpack, overload

from shardio._base.callers import refuse_unknown_options
from shardio._base.classes import undo_on_error
from shardio._base.statistics import LoaderStats, LoadingStats
from shardio._loading.iterator import BatchLoader, ProgressBar
from shardio._loading.options import (
    TORCH_ADVICE,
    SharedKeywords,
    check_seconds,
    warn_of_no_batch,
)
from shardio._workers.processes.limits import default_budget
from shardio._workers.processes.linux import Finalizer, this_process
from shardio.batch.batch import Batch, Value_co
from shardio.errors import ClosedError, InvalidArgument
from shardio.order.ranks import check_rank
from shardio.order.sampling import check_count
from shardio.outputs import (
    Output,
    TensorAdapter,
    TorchDevice,
    check_device,
    create_adapter,
    resolve_output,
)
from shardio.serving.client.batch_stream import Stream
from shardio.serving.client.connection import ClientKeys, client_keys
from shardio.serving.client.handshake import (
    ELSEWHERE,
    KNOWN,
    RECORDS,
    LoaderInfo,
    ReceivedBatch,
    State,
    options_to_json,
)
from shardio.serving.client.protocol import Address, parse_all
from shardio.shard.verification import Verify

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardio.outputs.jax import Array as JaxArray
    from shardio.outputs.tinygrad import Tensor
    from shardio.outputs.torch import Tensor as TorchTensor

_MAX_BYTES: Final = 1 << 30
_MAX_AHEAD: Final = 16
_OWN: Final = ("keys", "output", "device", "prefetch", "memory_bytes", "timeout_s")
"""The options that the client uses itself and does not send to the server."""
_VIEW_ADVICE: Final = (
    'write {0}={{"{1}": …}}: the server makes the view of its dataset, with the arguments of '
    "dataset.{0}"
)
_ADVICE: Final = (
    TORCH_ADVICE
    | {
        each.name: _VIEW_ADVICE.format(view, each.name)
        for view, kind in RECORDS.items()
        for each in fields(kind)
        if each.name not in ("field", "pad")  # ambiguous: in both views; also in collate
    }
    | {
        "clip": _VIEW_ADVICE.format("clips", "frames"),
        "windows": "a server has no view of time steps: load dataset.windows(…) with a ShardLoader",
        "sound": 'write decode={"audio": shardio.Sound(…)}, with the name of the field',
    }
)
"""Options of other loaders, of datasets and of views, and what to write instead."""


class RemoteKeywords(SharedKeywords, total=False):
    """The keywords of RemoteLoader except `output`, for type checkers."""

    keys: str | os.PathLike[str] | None
    clips: Mapping[str, Any] | None
    pack: Mapping[str, Any] | None
    subset: str | None
    verify: Verify


class RemoteLoader(BatchLoader, Generic[Value_co]):
    """A loader whose batches a server reads and decodes.

    The batches and `state_dict()` are bit for bit the same as those of a ShardLoader of the served
    dataset with the same options. If the server is lost during an epoch, the loader reconnects to
    this server or to another one, and continues without losing or repeating a batch. Use a loader
    only in the process that has created it, and in one thread at a time. A new iteration ends the
    previous iteration.

    Args:
        address: "tcp://host:port", or a list of addresses of servers of the same dataset.
        batch_size: as in ShardLoader. So are `output`, `device`, `rank`, `world_size` and all
            `options` that can be sent as data. An option that the server decides raises
            InvalidArgument. `clips` or `pack` selects a view of the dataset; its value is a dict
            with the arguments of the dataset's method of the same name.
        keys: the folder with the keys of this client; by default SHARDIO_KEYS from the environment.
            Servers on other machines require keys.
        prefetch: the number of batches to request in addition to the next batch, by default 15.
        memory_bytes: the maximum size of all requested batches, by default at most 1 GiB.
        timeout_s: the maximum time in seconds to wait for a batch or for an answer, and also the
            maximum time for which no server can be reached. None means no limit for a batch, and 60
            seconds for a server.

    Raises:
        InvalidArgument: the client or the server does not accept an option.
        TypeError: an option is unknown.
        ServerUnreachable: (also in the loop) no server answers, or none accepts this client's key.
        BatchTimeout: (also in the loop) the server is alive, but does not answer in time.
        ShardCorrupt, TransformError, …: the errors of the loader at the server.
    """

    _public = (
        "address close epoch generation lineage load_state_dict progress served state_dict stats"
    )

    if TYPE_CHECKING:  # the type of the values in a batch depends on `output`

        @overload
        def __init__(
            self: RemoteLoader[Tensor],
            address: str | Sequence[str],
            batch_size: int,
            *,
            output: Literal["tinygrad"] = ...,
            **options: Unpack[RemoteKeywords],
        ) -> None: ...
        @overload
        def __init__(
            self: RemoteLoader[npt.NDArray[Any]],
            address: str | Sequence[str],
            batch_size: int,
            *,
            output: Literal["numpy"],
            **options: Unpack[RemoteKeywords],
        ) -> None: ...
        @overload
        def __init__(
            self: RemoteLoader[TorchTensor],
            address: str | Sequence[str],
            batch_size: int,
            *,
            output: Literal["torch"],
            **options: Unpack[RemoteKeywords],
        ) -> None: ...
        @overload
        def __init__(
            self: RemoteLoader[JaxArray],
            address: str | Sequence[str],
            batch_size: int,
            *,
            output: Literal["jax"],
            **options: Unpack[RemoteKeywords],
        ) -> None: ...
        @overload
        def __init__(
            self: RemoteLoader[Any],
            address: str | Sequence[str],
            batch_size: int,
            *,
            output: Output,
            **options: Unpack[RemoteKeywords],
        ) -> None: ...

    def __init__(
        self,
        address: str | Sequence[str],
        batch_size: int,
        *,
        keys: str | os.PathLike[str] | None = None,
        output: Output | None = None,
        device: str | tuple[str, ...] | TorchDevice | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        prefetch: int | None = None,
        memory_bytes: int | None = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> None:
        known = sorted(KNOWN | ELSEWHERE.keys() | set(_OWN))
        refuse_unknown_options("shardio.connect", options, known, _ADVICE)
        self._addresses = parse_all(address)
        self._keys = client_keys(keys)
        _check_keys(self._addresses, self._keys)
        output = resolve_output(output, uses_torch=False)
        place = check_rank(rank, world_size)
        sent_options = options_to_json(
            {"batch_size": check_count("batch_size", batch_size, 1), **options}
            | dict(zip(("rank", "world_size"), place, strict=True))
        )
        if sent_options.keys() >= RECORDS.keys():
            raise InvalidArgument("clips and pack are two views of the dataset: pass one of them")
        max_bytes = min(_MAX_BYTES, default_budget()) if memory_bytes is None else memory_bytes
        self._sent_options, self._has_warned = sent_options, False
        self._adapter = create_adapter(output, check_device(device, output))
        self._stream = Stream(
            self._addresses,
            self._keys,
            sent_options,
            max_bytes=check_count("memory_bytes", max_bytes, 1),
            max_ahead=_MAX_AHEAD if prefetch is None else check_count("prefetch", prefetch, 0) + 1,
            timeout_s=check_seconds("timeout_s", timeout_s),
        )
        self._pid = this_process.pid
        self._finalizer = Finalizer(self, self._stream.close)
        self._latest: RemoteIteration | None = None
        self._totals = LoadingStats()
        with undo_on_error(self.close):
            self._next: State = self._stream.open().state

    def __repr__(self) -> str:
        n, closed = self._sent_options["batch_size"], ", closed" * (not self._finalizer.alive)
        return f"RemoteLoader({self.address!r}: batches of {n}{closed})"

    @property
    def address(self) -> str | list[str]:
        """The address or addresses of the servers."""
        found = [str(each) for each in self._addresses]
        return found[0] if len(found) == 1 else found

    @property
    def lineage(self) -> str:
        """The identifier of the dataset."""
        return self._loader_info().lineage

    @property
    def generation(self) -> int:
        """The generation, or version, of the dataset that the server has opened."""
        return self._loader_info().generation

    @property
    def served(self) -> State:
        """The names of the server's `transform` and `batch_transform`; None if there is none."""
        return self._loader_info().served

    @property
    def epoch(self) -> int:
        """The epoch of the latest iteration, or of a state loaded after it; 0 without either."""
        found: int = self._next["epoch"] if self._latest is None else self._latest.epoch
        return found

    def __len__(self) -> int:
        """Return the number of batches of an epoch for this rank."""
        return self._loader_info().n_batches

    def __iter__(self) -> Iterator[Batch[Value_co]]:
        """Start the next epoch or, after `load_state_dict`, resume from the loaded state."""
        return RemoteIterator(self, self.begin())

    def begin(self) -> RemoteIteration:
        """Start an iteration and return it; `iter(loader)` calls this and returns an iterator."""
        self.check_open()
        self._end_latest()
        iteration = RemoteIteration(self._stream, self._adapter, self._next)
        self._warn_of_no_batch(iteration)
        self._latest = iteration
        self._next = {**self._loader_info().state, "epoch": iteration.epoch + 1}
        return iteration

    def _end_latest(self) -> None:
        if self._latest is not None:
            self._latest.end()
            self._totals += self._latest.stats()
            self._latest = None

    def _warn_of_no_batch(self, iteration: RemoteIteration) -> None:
        """Warn, once per loader, if an epoch has no batch because of tail="drop"."""
        options, n = self._sent_options, iteration.state["rows"]
        is_lost = n and not (iteration.state["position"] or iteration.last_step)
        if is_lost and options.get("tail") == "drop" and not self._has_warned:
            self._has_warned = True
            warn_of_no_batch(iteration.epoch, n, options["batch_size"], options["world_size"])

    def progress(
        self, title: str | None = None, *, file: TextIO | None = None
    ) -> ProgressBar[Value_co]:
        """Start an iteration that shows a progress bar, as `ShardLoader.progress` does."""
        iteration = self.begin()
        return ProgressBar(
            RemoteIterator(self, iteration),
            n_batches=iteration.last_step,
            n_done=iteration.first_step,
            stats=lambda: self.stats().latest,
            title=f"epoch {iteration.epoch}" if title is None else title,
            file=file,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which to resume after the current batch of the loop.

        A ShardLoader of the same dataset with the same options accepts the state, and vice versa.
        """
        latest = self._latest
        return dict(self._next if latest is None or latest.is_exhausted else latest.state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration begin with the first batch that follows a state.

        Raise InvalidArgument if the state belongs to another dataset, subset, seed or order.
        """
        self.check_open()
        if not isinstance(state, Mapping):
            raise InvalidArgument(
                f"load_state_dict: expected a result of state_dict(); found {state!r}"
            )
        if self._latest is not None:
            self._latest.end()
        self._stream.check(dict(state))
        self._end_latest()
        self._next = dict(state)

    def stats(self) -> LoaderStats:
        """Return the statistics of this client; `n_restarts` counts the lost connections."""
        latest = LoadingStats() if self._latest is None else self._latest.stats()
        return LoaderStats(self.epoch, 0, latest, self._totals + latest)

    def close(self) -> None:
        """End the session at the server. Batches that were returned stay valid. Idempotent."""
        self._finalizer()

    def interrupt(self) -> None:
        """Make a thread that waits for a batch raise ClosedError soon. Call `close` afterwards."""
        self._stream.interrupt()

    def _loader_info(self) -> LoaderInfo:
        info = self._stream.loader_info
        if info is None:
            raise ClosedError("this loader was closed before a server had opened its dataset")
        return info

    def check_open(self) -> None:
        """Raise ClosedError if the loader was closed, or if this is a forked child."""
        if not self._finalizer.alive or self._pid != this_process.pid:
            raise ClosedError(
                "this loader was closed, or created before this process was forked: create another "
                "one here"
            )


class RemoteIterator:
    """An iterator over the batches of an iteration. It keeps its RemoteLoader alive."""

    def __init__(self, loader: RemoteLoader, iteration: RemoteIteration) -> None:
        self._loader, self._iteration = loader, iteration
        self._end = Finalizer(self, iteration.end)  # if this iterator is garbage-collected
        self._end.atexit = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if not self._iteration.is_over:
            self._loader.check_open()
        found = self._iteration.take(None)
        if found is None:
            raise StopIteration
        return found


class RemoteIteration:
    """One iteration of a RemoteLoader, which begins from a state. Borrows the loader's stream."""

    def __init__(self, stream: Stream, adapter: TensorAdapter | None, state: State) -> None:
        self._stream, self._adapter, self.state = stream, adapter, state
        self._began_s, self._ended_s = time.monotonic(), 0.0
        self._waiting_s = self._hand_over_s = 0.0
        self._n_batches = self._n_samples = self._n_bytes = self._n_skipped = 0
        self._n_losses = stream.n_losses
        self.is_over = self.is_exhausted = False
        self.epoch, self.first_step, self.last_step = stream.begin(state)

    def take(self, wait_s: float | None) -> Batch | None:
        """Return the next batch; None if there is none within `wait_s`, or if it `is_exhausted`."""
        if self.is_over:
            if not self.is_exhausted:
                raise ClosedError("this iteration was ended by close() or by a new iteration")
            return None
        entered_s = time.monotonic()
        try:
            arrived = self._stream.take(wait_s)
        except BaseException:
            self.end()
            raise
        came_s = time.monotonic()
        self._waiting_s += came_s - entered_s
        if arrived is None:
            if self._stream.is_over:
                self.is_exhausted = True
                self.end()
            return None
        batch = self._hand_over(arrived)
        self._hand_over_s += time.monotonic() - came_s
        return batch

    def _hand_over(self, arrived: ReceivedBatch) -> Batch:
        batch = arrived.batch
        self._n_batches += 1
        self._n_samples += batch.n_rows
        self._n_bytes += arrived.n_bytes
        self._n_skipped += len(batch.skipped)
        if self._adapter is not None:
            wrap, uploads = self._adapter.wrap, self._adapter.uploads
            if uploads is not None:
                uploads.begin_batch()
            batch = batch.map_arrays(wrap, wrap if self._adapter.wraps_items else None)
        # Set the state last: from now on, the batch counts as taken.
        self.state = arrived.state
        return batch

    def end(self) -> None:
        """End this iteration; the server stops sending its batches. Idempotent."""
        if not self.is_over:
            self.is_over, self._ended_s = True, time.monotonic()
            self._stream.stop()

    def stats(self) -> LoadingStats:
        """Return the statistics of this iteration so far."""
        until_s = self._ended_s if self.is_over else time.monotonic()
        return LoadingStats(
            elapsed_s=until_s - self._began_s,
            waiting_s=self._waiting_s,
            hand_over_s=self._hand_over_s,
            n_batches=self._n_batches,
            n_samples=self._n_samples,
            n_bytes=self._n_bytes,
            n_skipped=self._n_skipped,
            n_restarts=self._stream.n_losses - self._n_losses,
        )

    def describe_progress(self) -> str:
        """Describe the progress of this iteration and, if a server was lost, the reason."""
        n_done, n = self.first_step + self._n_batches, self.last_step
        message = f": {self._stream.last_error}" if self._stream.last_error else ""
        return f"{n_done} of {n} batches received{message}"

    @property
    def sockets(self) -> tuple[Any, ...]:
        """The sockets that become readable when a batch may have arrived."""
        return self._stream.sockets


def _check_keys(addresses: Sequence[Address], keys: ClientKeys | None) -> None:
    for address in addresses:
        if keys is None and not address.is_loopback:
            raise InvalidArgument(
                f"{address} is another machine, and connections to other machines need keys: make "
                "a folder of keys for this client there with `shardio serve --make-keys DIR`, then "
                "pass keys= or set SHARDIO_KEYS"
            )
