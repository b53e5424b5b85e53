"""ShardLoader: batches of a dataset, filled by worker processes, as tensors or arrays."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal, TextIO, Unpack, overload

from shardio._base.callers import refuses
from shardio._base.classes import undo_on_error
from shardio._base.html import fragment
from shardio._base.progress import counted
from shardio._base.statistics import LoaderStats
from shardio._engine.dispatch.backends import StartMethod
from shardio._engine.dispatch.engine import Engine
from shardio._loading.epochs import Epochs
from shardio._loading.iterator import BatchAssembler, BatchLoader, LoaderIterator, ProgressBar
from shardio._loading.options import (
    TORCH_ADVICE,
    Collate,
    Decode,
    Layout,
    LoaderKeywords,
    LoaderOptions,
    OnError,
    batch_spec_of,
    dataset_advice,
    resolve_view,
)
from shardio._loading.prefetch import RemotePrefetch
from shardio._loading.trace import Trace
from shardio._workers.processes.linux import Finalizer
from shardio.batch.batch import Batch, Value_co
from shardio.dataset.dataset import Dataset
from shardio.errors import InvalidArgument, ShardioError
from shardio.format.schema import Schema
from shardio.order.ranks import Tail
from shardio.order.sampling import Sampler, Shuffle
from shardio.outputs import Output, TorchDevice, create_adapter
from shardio.samples.open_dataset import OpenDataset
from shardio.samples.shard_dataset import DatasetSource, dataset_path
from shardio.samples.view import SampleView
from shardio.serving.client.protocol import is_address
from shardio.storage.remote.connection import RemoteOptions

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardio.outputs.jax import Array as JaxArray
    from shardio.outputs.tinygrad import Tensor
    from shardio.outputs.torch import Tensor as TorchTensor

Source = str | os.PathLike[str] | OpenDataset | SampleView


class ShardLoader(BatchLoader, Generic[Value_co]):
    """An iterable over the batches of a dataset; every iteration is one epoch.

    The batches depend only on the dataset, the options, the seed and the epoch. Workers run until
    `close()`, the end of the `with` block, or the garbage collection of the loader. A loop may be
    left early. A loader can only be used in the process that created it, and each of its iterators
    only in one thread at a time.

    Args:
        dataset: a folder; the URL of a dataset in an object store (s3://, gs://, az://, https://);
            an open dataset (`shardio.open`, `shardio.mix`); or a view of one (`dataset.clips`,
            `dataset.pack`). The loader opens an open dataset again, with the same verification and
            cache. Videos are loaded as clips, by default with the settings of their conversion.
        batch_size: the number of samples in a batch.
        fields: the fields to read, by default all.
        shuffle: True or "full" permutes all samples, with a different permutation in each epoch.
            "blocks", for data larger than memory, permutes runs of consecutive samples (up to 4
            MiB), and then the samples within each window of 64 runs. "shards" permutes the shards,
            and then the samples within each window of 8 shards. False keeps the order of the
            dataset.
        seed: the seed of the order and of the transform's generators, at least 0.
        sampler: the indices of the samples of an epoch in their order, with or without repetitions.
            Pass a sequence of indices; a torch sampler, which is iterated for each epoch with the
            global generators seeded; or a function `f(epoch)` that always returns the same indices
            for the same epoch. With a `shardio.WeightedSampler`, the probability of each
            sample is proportional to its weight.
        num_workers: the number of worker processes; by default the number of CPUs that this process
            may use. With 0, this process does all the work, and the batches are the same.
        transform: a function `f(sample)` or `f(sample, rng)`, which gets a sample as a dict of
            fields and returns a dict of fields. It runs in the workers. The arrays in `sample` are
            read-only. `rng` is a NumPy Generator seeded by (seed, epoch, position). The global
            generators of Python, NumPy and torch (on the CPU) are seeded, too. All results must
            have the fields and dtypes of the first result and, with collate="stack", its shapes.
        batch_transform: a function `f(batch)` or `f(batch, rng)`, which gets the arrays and lists
            of a whole batch as a dict and returns another dict. It runs in the workers. The
            generators are seeded by the position of the first sample of the batch.
        output: "tinygrad", "torch" or "jax" for tensors or arrays of these frameworks, or "numpy".
            The default is "tinygrad", with a warning if the program uses torch.
        device: the name of the device of the tensors; for torch also a `torch.device`. For
            tinygrad, a tuple of names is also accepted; each batch is then split over these devices
            along its first axis. The default is the CPU for torch, otherwise the default device of
            tinygrad or JAX.
        tail: the treatment of the last batch if it is incomplete. "short" delivers it as it is;
            "drop" leaves it out; "pad" fills it up with copies of its rows, for which `batch.valid`
            is False. The default is "pad" with several ranks, otherwise "short".
        rank, world_size: the rank of this process and the number of ranks, as in torch.distributed.
            By default, both are taken from the environment that torchrun, mpirun or srun sets;
            otherwise they are 0 and 1. All ranks must use the same seed and dataset. Together they
            load one epoch; each rank loads batches of `batch_size` samples.
        prefetch: the number of blocks (each is the memory of a batch) that are filled ahead of the
            loop, in addition to one block per worker. The default is 2; for blocks of at most
            1 MiB, it is 10 plus 7 per worker.
        memory_bytes: the budget for all blocks; by default half of the available memory.
        on_error: "raise" to raise errors, or "skip" to replace a failing sample with a substitute,
            which is a randomly drawn sample. In the row of the substitute, `batch.valid` is False;
            `batch.skipped` names the failing sample and the reason.
        max_skips: with "skip", the number of samples of an epoch that may fail; it must be given.
            If more samples fail, TooManySkipped is raised.
        timeout_s: the time that the loop waits for a batch before it raises BatchTimeout, whose
            message describes the activity of every worker; None for no limit. Without workers,
            there is no timeout.
        reuse: True if a batch may become invalid as soon as the next batch is requested. This is
            faster.
        collate: the way to combine the arrays of a field into a batch if their shapes may differ.
            With "stack", different shapes are an error, except in fields that the dataset declares
            as varying: these become lists. "pad" pads the arrays with zeros at the end, and adds a
            field `NAME_mask`. "ragged" concatenates the arrays, and adds a field `NAME_offsets`.
            "list" makes lists. A dict maps each field to one of these names, or to the shape to
            which its arrays are padded. A function `f(samples)` gets the samples of a batch as a
            list of dicts, and returns the batch as a dict.
        start_method: the way to start workers. "zygote" forks them from a small process of shardio;
            "spawn" executes a new interpreter for each worker; "thread" uses threads of this
            program. The batches are the same.
        decode: True delivers decoded media. Pictures are pixels, uint8 (height, width, 3); they are
            stacked if all have the same size, and otherwise combined according to `collate`. Videos
            are clips. Sound is an array of audio samples, and a field `NAME_span` has the range of
            this array that is not padding. False delivers the bytes of the files. A dict maps each
            field to True, to False or, for sound, to a `shardio.Sound`.
        layout: the order of the axes of pictures and clips: "HWC" for (…, height, width, channels),
            "CHW" for (…, channels, height, width), a view of the same memory. The default is "CHW"
            if `transform` or `batch_transform` gets tensors (see `shardio.transforms.OnTensors`),
            otherwise "HWC".

    Raises:
        InvalidArgument: an option is invalid; the message lists the accepted values.
        DatasetNotFound, DatasetCorrupt, ShardNotFound, …: the dataset cannot be opened.
        ShardCorrupt, TransformError, WorkerDied, InsufficientMemory: (in the loop) a batch failed;
            the message names the sample.
        TooManySkipped: (in the loop) too many samples failed; the message names the last ones.
    """

    _public = (
        "batch_size close dataset epoch indices_at load_state_dict num_workers progress schema "
        "state_at state_dict stats trace view"
    )

    if TYPE_CHECKING:  # the type of the values in a batch depends on `output`

        @overload
        def __init__(
            self: ShardLoader[Tensor],
            dataset: Source,
            batch_size: int,
            *,
            output: Literal["tinygrad"] = ...,
            **options: Unpack[LoaderKeywords],
        ) -> None: ...
        @overload
        def __init__(
            self: ShardLoader[npt.NDArray[Any]],
            dataset: Source,
            batch_size: int,
            *,
            output: Literal["numpy"],
            **options: Unpack[LoaderKeywords],
        ) -> None: ...
        @overload
        def __init__(
            self: ShardLoader[TorchTensor],
            dataset: Source,
            batch_size: int,
            *,
            output: Literal["torch"],
            **options: Unpack[LoaderKeywords],
        ) -> None: ...
        @overload
        def __init__(
            self: ShardLoader[JaxArray],
            dataset: Source,
            batch_size: int,
            *,
            output: Literal["jax"],
            **options: Unpack[LoaderKeywords],
        ) -> None: ...
        @overload
        def __init__(
            self: ShardLoader[Any],
            dataset: Source,
            batch_size: int,
            *,
            output: Output,
            **options: Unpack[LoaderKeywords],
        ) -> None: ...

    @refuses(TORCH_ADVICE | dataset_advice("ShardLoader({}, batch_size)"), "ShardLoader")
    def __init__(
        self,
        dataset: Source,
        batch_size: int,
        *,
        fields: Iterable[str] | None = None,
        shuffle: Shuffle = False,
        seed: int = 0,
        sampler: Sampler | None = None,
        num_workers: int | None = None,
        transform: Callable[..., Any] | None = None,
        batch_transform: Callable[..., Any] | None = None,
        output: Output | None = None,
        device: str | tuple[str, ...] | TorchDevice | None = None,
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
        layout: Layout | None = None,
    ) -> None:
        # The signature lists the options for users; LoaderOptions checks their values.
        self._options = options = LoaderOptions.of(locals())
        view, media = resolve_view(_open(dataset, options.num_workers), fields, decode)
        self._trace: Trace | None = None
        self._epochs = Epochs(view, options)
        n_positions_per_epoch = self._epochs.epoch_sampler.n_positions_per_epoch
        batch_spec = batch_spec_of(options, view, media, n_positions_per_epoch)
        self._fields = batch_spec.fields
        self._engine = Engine(
            batch_spec,
            n_workers=options.num_workers,
            prefetch=options.prefetch,
            memory_bytes=options.memory_bytes,
            timeout_s=options.timeout_s,
            start_method=options.start_method,
        )
        self._prefetch = RemotePrefetch(view.dataset, batch_spec, self._epochs.epoch_sampler.order)
        self._finalizer = Finalizer(self, self._prefetch.cancel_and_close, self._engine.close)
        with undo_on_error(self.close):
            self._engine.open(view)
            self._assembler = self._assembler_for(view.dataset)

    def _assembler_for(self, opened: Dataset) -> BatchAssembler:
        adapter = create_adapter(self._options.output, self._options.device)
        if adapter is not None and (adapter.aliases or adapter.uploads is not None):
            self._engine.set_synchronize(adapter.synchronize)
        reuses, most = self._options.reuse, self._options.max_skips or 0
        return BatchAssembler(self._engine, adapter, opened, reuses=reuses, max_skips=most)

    @property
    def batch_size(self) -> int:
        """The number of samples in a batch; the last batch of an epoch may have fewer."""
        return self._options.batch_size

    @property
    def num_workers(self) -> int:
        """The number of worker processes or threads; 0 without workers."""
        return self._options.num_workers

    @property
    def dataset(self) -> Dataset:
        """The dataset; closed with the loader."""
        return self.view.dataset

    @property
    def view(self) -> SampleView:
        """The view of the dataset; closed with the loader.

        `loader.view[i]` is a sample of this view. The options `fields`, `decode`, `transform` and
        `collate` of the loader have no effect on this sample.
        """
        return self._engine.view

    @property
    def schema(self) -> Schema:
        """The fields of a batch, with their types as they arrive.

        The shape of an array is that of one sample if all samples have the same shape or the batch
        has a list of arrays; otherwise (collate="pad", "ragged" or a function) that of the batch.
        If there are user functions, this property waits until a worker has computed the first
        sample.
        """
        return self._engine.layout().delivered_schema

    @property
    def read_schema(self) -> Schema:
        """The fields that are read, as in samples of the view: before any transform."""
        schema, stored = self.view.schema, self.dataset.schema
        return Schema({n: f for n, f in schema.items() if n in self._fields or n not in stored})

    @property
    def epoch(self) -> int:
        """The index of the epoch of the latest iteration; 0 before the first iteration.

        After `load_state_dict`, the index of the epoch that the next iteration will resume.
        """
        return self._epochs.number

    def __repr__(self) -> str:
        asked, view = self._options, self.view
        workers = counted(asked.num_workers, "workers")
        latest = self._epochs.latest
        epoch = "" if latest is None else f", epoch {latest.plan.epoch}"
        return (
            f"ShardLoader({view.dataset.path!r}: {len(view)} samples in batches of "
            f"{asked.batch_size}, {workers}{epoch}{', closed' * self._is_closed})"
        )

    def _repr_html_(self) -> str:
        asked, latest = self._options, self._epochs.latest
        order = "a sampler" if asked.sampler is not None else f"shuffle={asked.shuffle!r}"
        facts = (
            "" if self.dataset.subset_name is None else f"subset {self.dataset.subset_name!r}",
            self.view.summary,
            f"batches of {asked.batch_size:,}",
            f"{order}, seed {asked.seed}",
            counted(asked.num_workers, "workers"),
            f"rank {asked.rank} of {asked.world_size}" if asked.world_size > 1 else "",
            f"layout {asked.layout}" if asked.layout else "",
            f"{asked.output}{'' if asked.device is None else f' on {asked.device}'}",
            "" if latest is None else f"epoch {latest.plan.epoch}",
            "closed" * self._is_closed,
            "" if asked.transform is None else "fields before the transform:",
        )
        return fragment("ShardLoader", self.dataset.path, facts, self.read_schema.html_table())

    @property
    def _is_closed(self) -> bool:
        return not self._finalizer.alive

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch that this rank loads."""
        return self._epochs.n_batches

    def __iter__(self) -> Iterator[Batch[Value_co]]:
        """Start the next epoch, or resume the epoch of a state given to `load_state_dict`."""
        return self._iterate()

    def _iterate(self) -> LoaderIterator:
        try:
            iteration = self._epochs.begin(self._engine)
        except ShardioError as error:
            error.__traceback__ = None  # as in LoaderIterator
            raise
        self._prefetch.start(iteration, self.view)
        if self._trace is not None and self._trace.is_recording:
            return self._trace.iterator(self, self._engine, self._assembler, iteration)
        return LoaderIterator(self, self._engine, self._assembler, iteration)

    def progress(
        self, title: str | None = None, *, file: TextIO | None = None
    ) -> ProgressBar[Value_co]:
        """Start the next epoch, as `iter(loader)` does; return an iterator that shows the progress.

        On a terminal or in a notebook, show a bar with the number of batches, the rate, the share
        of the time during which the loop waits, and the time left. Otherwise, write a line every
        ten seconds, and a line at the end.

        Args:
            title: the text before the bar; the epoch by default.
            file: the output; standard error by default.
        """
        batches = self._iterate()
        plan = batches.iteration.plan
        return ProgressBar(
            batches,
            n_batches=plan.partition.stop_step,
            n_done=plan.partition.first_step,
            stats=lambda: self.stats().latest,
            title=f"epoch {plan.epoch}" if title is None else title,
            file=file,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of the latest iteration as a state for `load_state_dict`.

        The iteration will resume after the batch that the loop received last; this batch counts as
        consumed. The state is a small dict of JSON values, to be saved with the model. After the
        same step, it is equal on all ranks.
        """
        return self._epochs.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration resume with the first sample that was not consumed in `state`.

        num_workers, batch_size, rank and world_size may differ from those of the loader that
        returned the state. If samples were appended to the dataset after the epoch had begun, the
        resumed epoch does not contain them; the next epoch does.

        Raises:
            InvalidArgument: the state is invalid, or belongs to a loader with another dataset,
                subset, seed or order.
        """
        self._epochs.load_state(state)

    def state_at(self, epoch: int, batch: int = 0) -> dict[str, Any]:
        """Return the state from which the next iteration starts at a given batch of an epoch.

        `loader.load_state_dict(loader.state_at(3, 10))` makes the next iteration deliver batch 10
        of epoch 3 and those after it. No batch before it is loaded.

        Raises:
            InvalidArgument: there is no such batch.
        """
        return self._epochs.state_at(epoch, batch)

    def indices_at(self, epoch: int, batch: int = 0) -> npt.NDArray[Any]:
        """Return the indices, in the view, of the samples of a batch of an epoch.

        They are computed from the order of the epoch; no sample is read. With on_error="skip", a
        sample that fails has a substitute in the batch that is delivered.

        Raises:
            InvalidArgument: there is no such batch.
        """
        return self._epochs.indices_at(epoch, batch)

    def stats(self) -> LoaderStats:
        """Return the loading figures of the latest iteration, and of all iterations together.

        `LoadingStats` describes each figure. Loaders always collect the figures, at no noticeable
        cost. This method may be called at any time, even in another thread, and after `close`.
        """
        latest, total = self._engine.stats(self._epochs.latest)
        return LoaderStats(self.epoch, self._options.num_workers, latest, total)

    def trace(self, path: str | os.PathLike[str] | None = None) -> Trace:
        """Return a context manager that records the work of the workers and of the loop.

        `with loader.trace("trace.json"):` around a loop writes a file that https://ui.perfetto.dev
        can show. The trace has the latest 512 batches that each worker filled, and the latest 4,096
        batches of all loops that begin inside the `with` statement. If no `path` is given, call
        `save(path)` of the context manager afterwards.

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


def _open(dataset: Source, n_workers: int) -> OpenDataset | SampleView:
    """Open the dataset of a loader; if it is open already, open it again with separate open files.

    If the dataset is in an object store, workers download whole shards, and the main process only
    reads small ranges. Without workers, the main process downloads whole shards.
    """
    if is_address(dataset):
        raise InvalidArgument(
            f"{dataset!r} is the address of a server: "
            f"write shardio.connect({dataset!r}, batch_size)"
        )
    if isinstance(dataset, SampleView):
        return dataset.reopened(dataset.dataset.reopen(n_workers=n_workers))
    if isinstance(dataset, OpenDataset):
        return dataset.reopen(n_workers=n_workers)
    path = dataset_path(dataset, ", a dataset of shardio.open or shardio.mix, or a view of one")
    return DatasetSource(path, remote=RemoteOptions().for_main_process(n_workers)).open()
