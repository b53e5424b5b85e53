"""ShardLoader: batches of a dataset, filled by worker processes, as tensors or arrays."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TextIO

from shardio._base.callers import refuses
from shardio._base.classes import Closing
from shardio._base.statistics import LoaderStats
from shardio._engine.dispatch.backends import StartMethod
from shardio._engine.dispatch.engine import Engine
from shardio._engine.filling.batch_spec import BatchSpec
from shardio._loading.epochs import Epochs
from shardio._loading.iterator import BatchAssembler, LoaderIterator, ProgressBar
from shardio._loading.options import (
    TORCH_HABITS,
    Collate,
    Decode,
    LoaderOptions,
    OnError,
    batch_spec_of,
    dataset_habits,
    resolve_view,
)
from shardio._loading.prefetch import RemotePrefetch
from shardio._loading.trace import Trace
from shardio._workers.processes.linux import Finalizer
from shardio.batch.batch import Batch
from shardio.dataset.dataset import Dataset
from shardio.errors import InvalidArgument
from shardio.order import Tail
from shardio.order.sampling import Sampler, Shuffle
from shardio.outputs import Output, create_adapter
from shardio.samples.open_dataset import OpenDataset
from shardio.samples.shard_dataset import DatasetSource, dataset_path
from shardio.samples.view import SampleView
from shardio.serving.client.protocol import is_address
from shardio.storage.remote.connection import RemoteOptions


class ShardLoader(Closing):
    """Iterates over the batches of a dataset; every iteration is one epoch.

    The batches are a pure function of dataset, seed and epoch: the same for any number of workers
    and any prefetch. Workers start in the constructor and run until `close()`, the end of the
    `with` block, or the end of the loader or the process. A loop may be left early. A loader
    belongs to one process. Its iterators may be used in several threads, each by one thread at a
    time.

    Args:
        dataset: a folder; the URL of a dataset in an object store (s3://, gs://, az://, https://);
            an open dataset (`shardio.open`, `shardio.mix`); or a view of one (`dataset.clips`,
            `dataset.pack`). The loader opens an open dataset again, with the same verification and
            cache. A dataset with videos is loaded as the clips that its conversion chose. For
            batches that a server decodes, see `shardio.connect`.
        batch_size: the number of samples in a batch.
        fields: the fields to read, by default all; other fields are not read.
        shuffle: True or "full" permutes all samples, differently each epoch; "blocks" permutes
            within windows of 256 MiB, for data larger than memory; "shards" within windows of 8
            shards; False keeps the order.
        seed: the seed of the order and of the transform's generators, from 0 up.
        sampler: the indices of an epoch's samples in order, with or without repetitions; a torch
            sampler, iterated for each epoch with the global generators seeded; or a function that
            maps the number of an epoch to such indices, always the same for an epoch. A
            `shardio.WeightedSampler` draws samples by their weights.
        num_workers: the number of worker processes; by default the number of CPUs that this process
            may use. 0 does all work in this process, with the same batches.
        transform: `f(sample)` or `f(sample, rng)`, from a dict of fields to a dict of fields, run
            in the workers. The arrays in `sample` are read-only. `rng` is a NumPy Generator seeded
            by (seed, epoch, position), and so are the global generators of Python, NumPy and torch
            (on the CPU). All results must have the fields, dtypes and shapes of the first result.
        batch_transform: `f(batch)` or `f(batch, rng)`, from a dict of the arrays and lists of a
            whole batch to another dict, run in the workers. The position of the first sample seeds
            its generators, so its draws depend on batch_size, rank and world_size.
        output: "tinygrad", "torch" or "jax" for tensors or arrays of these frameworks, or "numpy".
        device: the name of the tensors' device; for tinygrad also a tuple of names, to shard along
            the batch. By default the CPU for torch, otherwise the default of tinygrad or JAX.
        tail: "short" delivers the last, incomplete batch as it is; "drop" leaves it out; "pad"
            fills it up with copies of its rows, for which `batch.valid` is False. The default is
            "pad" with several ranks, otherwise "short".
        rank, world_size: the rank of this process and the number of ranks, as in torch.distributed;
            batch_size is per rank. By default taken from the environment of torchrun, mpirun or
            srun, otherwise 0 of 1. Ranks share seed and dataset; together they load one epoch.
        prefetch: the number of blocks filled ahead, beyond one per worker; by default 2 or, for
            blocks of at most 1 MiB, 10 plus 7 per worker.
        memory_bytes: the budget for all blocks; by default half of the available memory.
        on_error: "raise", or "skip" to replace a failing sample by a substitute, which is drawn at
            random; `batch.valid` is False in its row, and `batch.skipped` names the failing sample
            and the reason.
        max_skips: the number of samples of an epoch that may fail, required with "skip"; one more
            raises TooManySkipped.
        timeout_s: the time that the loop waits for a batch before it raises BatchTimeout, whose
            message shows what every worker is doing; None for no limit. Without workers there is
            no timeout.
        reuse: True if a batch may become invalid as soon as the next one is requested, which is
            faster.
        collate: the way to combine arrays of different shapes: "stack" (different shapes are an
            error, except in fields that the dataset declares as varying, which become lists), "pad"
            (with zeros at the end, and `NAME_mask`), "ragged" (concatenated, with `NAME_offsets`)
            or "list"; a dict from fields to one of these or to the shape to pad to; or
            `f(samples)`, from a list of dicts to a dict.
        start_method: the way to start workers: "zygote" forks them from a small process of shardio;
            "spawn" executes an interpreter for each; "thread" uses threads of this program. The
            batches are the same.
        decode: True delivers pictures as pixels, uint8 (height, width, 3), stacked if all have the
            same size, otherwise combined according to `collate`; videos as clips; and sound as
            samples, with `NAME_span` for the range that is not padding. False delivers the bytes of
            the files. A dict decides field by field: True, False, or for sound a `shardio.Sound`.

    Raises:
        InvalidArgument: an option is invalid; the message lists the accepted values.
        DatasetNotFound, DatasetCorrupt, ShardNotFound, …: the dataset cannot be opened.
        ShardCorrupt, TransformError, WorkerDied, InsufficientMemory: (in the loop) a batch failed;
            the message names the sample.
        TooManySkipped: (in the loop) too many samples failed; the message names the last ones.
    """

    @refuses(TORCH_HABITS | dataset_habits("ShardLoader({}, batch_size)"), "ShardLoader")
    def __init__(
        self,
        dataset: str | os.PathLike[str] | OpenDataset | SampleView,
        batch_size: int,
        *,
        fields: Iterable[str] | None = None,
        shuffle: Shuffle = False,
        seed: int = 0,
        sampler: Sampler | None = None,
        num_workers: int | None = None,
        transform: Callable[..., Any] | None = None,
        batch_transform: Callable[..., Any] | None = None,
        output: Output = "tinygrad",
        device: str | tuple[str, ...] | None = None,
        tail: Tail | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        prefetch: int | None = None,
        memory_bytes: int | None = None,
        on_error: OnError = "raise",
        max_skips: int | None = None,
        timeout_s: float | None = None,
        reuse: bool = False,
        collate: Collate = "stack",
        start_method: StartMethod = "zygote",
        decode: Decode = True,
    ) -> None:
        # The signature documents the options; their record checks them.
        self._options = options = LoaderOptions.of(locals())
        view, media = resolve_view(_open(dataset, options.num_workers), fields, decode)
        self._trace: Trace | None = None
        self._epochs = Epochs(view, options)
        n_at_most = self._epochs.epoch_sampler.n_at_most
        batch_spec = batch_spec_of(options, view, media, n_at_most)
        self._engine = self._engine_for(batch_spec)
        self._prefetch = RemotePrefetch(view.dataset, batch_spec, self._epochs.epoch_sampler.order)
        self._finalizer = Finalizer(self, self._prefetch.end_with, self._engine.close)
        try:
            self._engine.open(view)
            self._assembler = self._assembler_for(view.dataset)
        except BaseException:
            self.close()
            raise

    def _engine_for(self, batch_spec: BatchSpec) -> Engine:
        options = self._options
        return Engine(
            batch_spec,
            n_workers=options.num_workers,
            prefetch=options.prefetch,
            memory_bytes=options.memory_bytes,
            timeout_s=options.timeout_s,
            start_method=options.start_method,
        )

    def _assembler_for(self, opened: Dataset) -> BatchAssembler:
        adapter = create_adapter(self._options.output, self._options.device)
        if adapter is not None and adapter.aliases:
            self._engine.settle_by(adapter.synchronize)
        most = self._options.max_skips or 0
        return BatchAssembler(
            self._engine, adapter, opened, reuses=self._options.reuse, most_skips=most
        )

    @property
    def dataset(self) -> Dataset:
        """The dataset; closed with the loader."""
        return self.view.dataset

    @property
    def view(self) -> SampleView:
        """The view of the dataset; closed with the loader.

        `loader.view[i]` is a sample as the view has it; `fields`, `decode`, `transform` and
        `collate` of the loader do not apply.
        """
        return self._engine.view

    @property
    def epoch(self) -> int:
        """The epoch of the latest iteration; 0 at first. `load_state_dict` sets the next epoch."""
        return self._epochs.number

    def __repr__(self) -> str:
        asked, view = self._options, self.view
        workers = f"{asked.num_workers} worker{'s' * (asked.num_workers != 1)}"
        latest = self._epochs.latest
        epoch = "" if latest is None else f", epoch {latest.plan.epoch}"
        return (
            f"ShardLoader({view.dataset.path!r}: {len(view)} samples in batches of "
            f"{asked.batch_size}, {workers}{epoch})"
        )

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch, for this rank."""
        return self._epochs.n_batches

    def __iter__(self) -> Iterator[Batch]:
        """Start the next epoch, or resume the epoch given to `load_state_dict`."""
        return self._iterate()

    def _iterate(self) -> LoaderIterator:
        iteration = self._epochs.begin(self._engine)
        self._prefetch.follow(iteration, self.view)
        if self._trace is not None and self._trace.is_recording:
            return self._trace.iterator(self, self._engine, self._assembler, iteration)
        return LoaderIterator(self, self._engine, self._assembler, iteration)

    def progress(self, title: str | None = None, *, file: TextIO | None = None) -> ProgressBar:
        """Iterate, as `iter(loader)` does, and show the progress.

        On a terminal, show a bar with batches, rate, time left, and the share of the time that the
        loop waits; otherwise write a line every ten seconds, and one at the end.

        Args:
            title: the text before the bar; the epoch by default.
            file: the output; standard error by default.
        """
        batches = self._iterate()
        plan = batches.iteration.plan
        return ProgressBar(
            batches,
            n_batches=plan.partition.last_step,
            n_done=plan.partition.first_step,
            stats=lambda: self.stats().latest,
            title=f"epoch {plan.epoch}" if title is None else title,
            file=file,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict` to resume after the loop's current batch.

        The state is a small dict of JSON values, equal on all ranks after the same step: save it
        with the model. It describes the latest iteration; a batch counts as consumed once the loop
        has received it.
        """
        return self._epochs.state(self.view)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration resume with the first sample that was not consumed in `state`.

        num_workers, batch_size, rank and world_size may differ. An epoch that began before the
        dataset grew ends with the samples of that time; the next epoch has all samples.

        Raises:
            InvalidArgument: the state is invalid, or belongs to another dataset, subset, seed or
                order.
        """
        self._epochs.load_state(state, self.view)

    def stats(self) -> LoaderStats:
        """Return the loading figures of the latest iteration, and of all iterations together.

        The figures are collected at no cost; call this at any time, even from another thread or
        after `close`. See `LoadingStats` for each figure.
        """
        latest, total = self._engine.stats(self._epochs.latest)
        return LoaderStats(self.epoch, self._options.num_workers, latest, total)

    def trace(self, path: str | os.PathLike[str] | None = None) -> Trace:
        """Record, inside a `with` block, when workers fill batches and what the loop does.

        `with loader.trace("trace.json"):` around a loop writes a file for https://ui.perfetto.dev.
        It covers the iterations that begin inside the block: the latest 512 batches of each worker,
        and the latest 4,096 of the loop. Without a path, call `trace.save(path)` after the block.

        Raises:
            InvalidArgument: the loader is being traced already.
            OSError: (on entering the block) the file cannot be written.
        """
        if self._trace is not None and self._trace.is_recording:
            raise InvalidArgument("the loader is being traced; leave that `with` first")
        self._trace = Trace(self._engine, path)
        return self._trace

    def close(self) -> None:
        """Stop the workers. Batches that are still referenced stay valid. Idempotent."""
        self._finalizer()


def _open(
    dataset: str | os.PathLike[str] | OpenDataset | SampleView, n_workers: int
) -> OpenDataset | SampleView:
    """Open the dataset or the view of a loader, with files of its own.

    From an object store, workers download whole shards, while the main process reads small ranges;
    without workers, the main process downloads whole shards.
    """
    if is_address(dataset):
        raise InvalidArgument(
            f"{dataset!r} is the address of a server: "
            f"write shardio.connect({dataset!r}, batch_size)"
        )
    whole, n_readers = not n_workers, max(1, n_workers)
    if isinstance(dataset, SampleView):
        return dataset.reopened(dataset.dataset.reopen(whole=whole, n_readers=n_readers))
    if isinstance(dataset, OpenDataset):
        return dataset.reopen(whole=whole, n_readers=n_readers)
    path = dataset_path(dataset, ", a dataset of shardio.open or shardio.mix, or a view of one")
    return DatasetSource(path, remote=RemoteOptions(whole=whole, n_readers=n_readers)).open()
