"""The order of a loader's epochs, its progress, and its state for another process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shardio._engine.dispatch.thread_workers import GENERATOR_LOCK
from shardio._engine.filling.batch_spec import EpochPlan
from shardio._workers.processes.global_generators import seed_generators
from shardio._workers.processes.shared_memory import SharedArray
from shardio.dataset.dataset import Dataset
from shardio.dataset.external_lists import total_bytes
from shardio.dataset.selection import check_positions
from shardio.errors import InvalidArgument
from shardio.format.checksum import hash_bytes
from shardio.format.types.arrays import is_masked
from shardio.order.mixture_order import MixtureSizes
from shardio.order.partition import RankPartition
from shardio.order.permutation import OF_SAMPLERS, SampleGenerators
from shardio.order.sampling import (
    SamplingOptions,
    WeightedSampler,
    cumulative_weights,
    draw_without_replacement,
)
from shardio.order.shuffle import ShardWindow, Window
from shardio.samples.mixture import Mixture
from shardio.views.packing import PackedWindows

_VERSION: Final = 1
_MAX: Final = 1 << 60
_ADVICE: Final = "load it into a loader with the same options as the one that it comes from"


class LoaderState(NamedTuple):
    """The epoch, the number of its consumed positions, and the number it has.

    `window` is the window of a shuffle in blocks or shards; `sizes` are those of a mixture's
    sources when it began, and `tokens` the number of tokens of each source's stream, if the last
    ones are padded to a window.
    """

    epoch: int
    position: int
    n_samples: int
    window: Window | ShardWindow | None = None
    sizes: tuple[int, ...] | None = None
    tokens: tuple[int, ...] | None = None


def state_of(progress: LoaderState, dataset: Dataset, order: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state for `progress_of`, as JSON values.

    `order` holds the options that determine the order of that epoch, besides its number; None marks
    an option without effect.
    """
    state = {
        "version": _VERSION,
        "epoch": progress.epoch,
        "position": progress.position,
        "rows": progress.n_samples,
        **_identity(dataset, order),
        "window": None if progress.window is None else list(progress.window),
        "sizes": None if progress.sizes is None else list(progress.sizes),
        "tokens": None if progress.tokens is None else list(progress.tokens),
    }
    return {name: value for name, value in state.items() if value is not None}


def _identity(dataset: Dataset, order: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything that the meaning of a position depends on."""
    return {"lineage": dataset.lineage, "view": dataset.rows.view_id, **order}


def progress_of(
    state: object, dataset: Dataset, order_of: Callable[[int], Mapping[str, Any]]
) -> LoaderState:
    """Return the progress recorded in a state; `order_of` returns the order options of an epoch.

    Raises:
        InvalidArgument: it is not a state of a loader like this one.
    """
    if not isinstance(state, Mapping) or state.get("version") != _VERSION:
        found = state.get("version") if isinstance(state, Mapping) else state
        raise InvalidArgument(
            f"load_state_dict: expected what state_dict() gave, version {_VERSION}; found {found!r}"
        )
    order = order_of(_count(state, "epoch"))
    for name, expected in _identity(dataset, order).items():
        found = state.get(name)
        if type(found) is not type(expected) or found != expected:
            raise InvalidArgument(
                f"load_state_dict: the state's {name} is {found!r}, that of this loader of "
                f"{dataset.path} is {expected!r}: {_ADVICE}"
            )
    epoch, position, n_samples = (_count(state, name) for name in ("epoch", "position", "rows"))
    most, sizes = order.get("rows", len(dataset)), None
    if isinstance(dataset, Mixture):
        sizes = _sizes(state, dataset)
        most = dataset.mixing.n_positions(sizes)
    if position > n_samples or n_samples > most:
        raise InvalidArgument(
            f"load_state_dict: the state is at position {position} of {n_samples} samples, "
            f"and {dataset.path} has {most}"
        )
    window: Window | ShardWindow | None = None
    if order["shuffle"] == "blocks":
        window = Window.from_state(state.get("window"))
    elif order["shuffle"] == "shards":
        ends, found = dataset.rows.shard_ends, state.get("window")
        window = ShardWindow.from_state(found, ends, n_samples, dataset.path)
    tokens = None
    if dataset.rows.packed is not None and dataset.rows.packed.is_padded:
        had = (n_samples,) if sizes is None else sizes
        tokens = _tokens(state, dataset, dataset.rows.packed, None if "rows" in order else had)
    return LoaderState(epoch, position, n_samples, window, sizes, tokens)


def _sizes(state: Mapping[str, Any], mixture: Mixture) -> tuple[int, ...]:
    """Return the sizes of a mixture's sources when the state's epoch began."""
    found, now = state.get("sizes"), mixture.mixture_sizes.sizes
    if isinstance(found, list | tuple) and len(found) == len(now):
        if all(type(n) is int and 0 < n <= m for n, m in zip(found, now, strict=True)):
            return tuple(found)
    raise InvalidArgument(
        f"load_state_dict: the state's sizes must be at most those of the sources of "
        f"{mixture.path}, {list(now)}; found {found!r}"
    )


def _tokens(
    state: Mapping[str, Any], dataset: Dataset, packed: PackedWindows, had: tuple[int, ...] | None
) -> tuple[int, ...]:
    """Return the number of tokens of each source when the state's epoch began.

    `had` is the number of windows.
    """
    found, now = state.get("tokens"), packed.n_tokens
    if isinstance(found, list | tuple) and len(found) == len(now):
        if all(type(n) is int and 0 <= n <= m for n, m in zip(found, now, strict=True)):
            if had is None or had == tuple(packed.count(found).tolist()):
                return tuple(found)
    raise InvalidArgument(
        f"load_state_dict: the state's tokens must be those that its windows are made of, at most "
        f"the {list(now)} of {dataset.path}; found {found!r}"
    )


def _count(state: Mapping[str, Any], name: str) -> int:
    found = state.get(name)
    if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found <= _MAX:
        raise InvalidArgument(
            f"load_state_dict: the state's {name} must be an integer from 0 to {_MAX}; "
            f"found {found!r}"
        )
    return found


class _Table(NamedTuple):
    """The samples of an epoch, by position, and their hash."""

    epoch: int
    numbers: SharedArray
    hash: str


class EpochSampler:
    """The samples of each epoch and their order.

    Args:
        dataset: only its size is read, now.
        sampling: the options.

    Raises:
        InvalidArgument: a sampler or weights that do not fit the dataset.
    """

    def __init__(self, dataset: Dataset, sampling: SamplingOptions) -> None:
        self._n_samples = len(dataset)
        rows = dataset.rows
        clip_grouping = rows.clip_grouping
        self._bundle = 1 if clip_grouping is None else clip_grouping.k
        """The number of clips that stay together in a shuffle."""
        self._sampling = sampling
        self._latest: _Table | None = None
        self._weights: npt.NDArray[np.float64] | None = None
        """For draws without replacement."""
        self._sums: SharedArray | None = None
        self.mixture_sizes: MixtureSizes | None = None
        """Of epochs that begin now, where several datasets are mixed."""
        if isinstance(dataset, Mixture):
            self.mixture_sizes = dataset.mixture_sizes
            if self.repeats:
                raise InvalidArgument(
                    "sampler decides the order of an epoch, and so does a mixture: pass weights to "
                    "shardio.mix, or load the sources one by one"
                )
        packed = rows.packed
        self._tokens = packed.n_tokens if packed is not None and packed.is_padded else None
        self.window: Window | ShardWindow | None = None
        """Of epochs that begin now."""
        if sampling.is_in_blocks:
            n_bytes, n_samples = total_bytes(dataset.shards), int(dataset.starts[-1])
            if rows.clips is not None or packed is not None:
                # Estimated as if all rows had as many samples as the selected ones.
                n_samples = n_samples * len(dataset) // max(1, rows.n_rows)
                # The number of bundles that runs are made of
                n_samples = max(1, n_samples // self._bundle)
            self.window = Window.of(n_bytes, n_samples)
        if sampling.is_in_shards:
            _check_has_shards(dataset)
            self.window = ShardWindow.of(rows.shard_ends, len(dataset))
        if sampling.sampler is not None and not callable(sampling.sampler):
            self._check_sampler()
        if sampling.weighted is not None:
            weights = _checked(sampling.weighted.weights, self._n_samples)
            self._weights_hash = _hash_of(weights)
            self._n_draws = _count_draws(sampling.weighted, weights)
            if sampling.weighted.replacement:
                self._sums = SharedArray.of(
                    cumulative_weights(weights), "the running sums of weights"
                )
            else:
                self._weights = weights

    @property
    def n_at_most(self) -> int | None:
        """The maximum number of positions of an epoch; None if unknown."""
        is_known = self._sampling.sampler is None or self._is_fixed
        return self.n_positions(0) if is_known else None

    @property
    def is_foreseen(self) -> bool:
        """True if the plan of a later epoch is free: no function is called, nothing is drawn."""
        return self._is_fixed if self._sampling.sampler is not None else self._weights is None

    @property
    def repeats(self) -> bool:
        """True if an epoch may have more positions than there are samples."""
        return self._sampling.sampler is not None or self._sampling.weighted is not None

    def n_positions(self, epoch: int) -> int:
        """Return the number of positions of an epoch that begins now."""
        if self.mixture_sizes is not None:
            return self.mixture_sizes.n_positions
        if self._sampling.sampler is not None:
            return len(self._table(epoch).numbers.array)
        return self._n_samples if self._sampling.weighted is None else self._n_draws

    def beginning(self, epoch: int) -> LoaderState:
        """Return the first position of an epoch that begins now."""
        sizes = None if self.mixture_sizes is None else self.mixture_sizes.sizes
        return LoaderState(epoch, 0, self.n_positions(epoch), self.window, sizes, self._tokens)

    def plan(self, began: LoaderState, partition: RankPartition) -> EpochPlan:
        """Return the plan of a pass over the positions of an epoch that `division` assigns."""
        epoch, window, tokens = began.epoch, began.window, began.tokens
        if self.mixture_sizes is not None:
            mixture_sizes = (
                self.mixture_sizes
                if began.sizes is None
                else replace(self.mixture_sizes, sizes=began.sizes)
            )
            return EpochPlan(epoch, partition, window, mixture_sizes=mixture_sizes, tokens=tokens)
        if self._sums is not None:
            return EpochPlan(epoch, partition, sums=self._sums, tokens=tokens)
        if self.repeats:
            return EpochPlan(epoch, partition, listed=self._table(epoch).numbers, tokens=tokens)
        return EpochPlan(epoch, partition, window, tokens=tokens)

    def identity(self, epoch: int) -> dict[str, Any]:
        """Return the options that determine the positions of an epoch, besides the dataset.

        Options without effect are None; `rows` is set if the epoch can have no other size.
        """
        shuffle = "full" if self._sampling.is_full else self._sampling.shuffle
        found: dict[str, Any] = {"seed": self._sampling.seed, "shuffle": shuffle}
        found |= {"sampler": None, "weights": None, "replacement": None, "mixing": None}
        found["per_video"] = self._bundle if shuffle is not False and self._bundle > 1 else None
        if self.mixture_sizes is not None:
            shares, exhausted = (
                self.mixture_sizes.mixing.shares,
                self.mixture_sizes.mixing.exhausted,
            )
            weights = [share / sum(shares) for share in shares]
            found["mixing"] = {"weights": weights, "exhausted": exhausted}
        if self._sampling.sampler is not None:
            found["sampler"] = self._table(epoch).hash
        if self._sampling.weighted is not None:
            found |= {
                "weights": self._weights_hash,
                "replacement": self._sampling.weighted.replacement,
            }
        if self.repeats:
            found["rows"] = self.n_positions(epoch)
        return found

    def _table(self, epoch: int) -> _Table:
        """Return the samples of an epoch by position; the latest table is cached."""
        if self._latest is None or (self._latest.epoch != epoch and not self._is_fixed):
            if self._weights is None:
                numbers = self._sampled(epoch)
            else:
                seed, n = self._sampling.seed, self._n_draws
                numbers = draw_without_replacement(self._weights, n, seed=seed, epoch=epoch)
            shared = SharedArray.of(numbers, "the order of an epoch")
            self._latest = _Table(epoch, shared, _hash_of(numbers))
        return self._latest

    def _sampled(self, epoch: int) -> npt.NDArray[np.int64]:
        found: Any = self._sampling.sampler
        where = "sampler"
        if callable(found):
            found, where = found(epoch), f"sampler({epoch})"
        elif not self._is_fixed:
            found = _iterated(found, seed=self._sampling.seed, epoch=epoch)
        if not isinstance(found, np.ndarray | Sequence) and isinstance(found, Iterable):
            found = list(found)
        return check_positions(found, self._n_samples, where)

    def _check_sampler(self) -> None:
        """Make sure that a sampler gives positions, and the same ones again for the same epoch.

        Raises:
            InvalidArgument: it does not.
        """
        numbers = self._table(0).numbers.array
        if not self._is_fixed and not np.array_equal(numbers, self._sampled(0)):
            raise InvalidArgument(
                f"sampler {self._sampling.sampler!r}, iterated twice for epoch 0 with the global "
                "generators seeded alike, gives different positions, so that no epoch could be "
                "resumed: leave out a generator of its own, or pass a function of the epoch's "
                "number that returns positions, sampler=f(epoch)"
            )

    @property
    def _is_fixed(self) -> bool:
        """True if every epoch has the same samples in the same order."""
        return self._sampling.has_fixed_sampler


def _iterated(sampler: Any, *, seed: int, epoch: int) -> list[Any]:
    """Iterate a sampler for an epoch, with the global generators seeded for it.

    So one that draws from them, as torch's do, gives all ranks the same, and a resumed epoch too.
    """
    with GENERATOR_LOCK.held():
        seed_generators(SampleGenerators(seed, OF_SAMPLERS).key(epoch, 0))
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)
        return list(sampler)


def _check_has_shards(dataset: Dataset) -> None:
    """Make sure that the samples of a dataset come shard by shard."""
    wrong = None
    if isinstance(dataset, Mixture):
        wrong = "a mixture has those of several datasets"
    elif dataset.rows.row_list is not None and not dataset.rows.row_list.ascends:
        wrong = "those of this selection come in another; sort what select() is given"
    elif dataset.rows.packed is not None:
        wrong = "a window of tokens may begin in one shard and end in another"
    elif dataset.rows.clip_grouping is not None:
        wrong = "per_video keeps clips of a video together, wherever it lies"
    if wrong is not None:
        raise InvalidArgument(
            f"{dataset.path}: shuffle='shards' is for samples that lie in shards in their order, "
            f"and {wrong}; or pass shuffle='blocks'"
        )


def _checked(weights: Any, n: int) -> npt.NDArray[np.float64]:
    """Return a copy of the weights, one for each of n samples."""
    what = f"weights must be {n} numbers from 0 up, one for each sample, not all 0"
    try:
        if is_masked(weights):
            raise TypeError("found a masked array, which would lose its mask; fill it")
        given = np.asarray(weights)
        if given.size and given.dtype.kind not in "biufO":
            raise TypeError(f"found an array of {given.dtype}, shape {given.shape}")
        found = given.astype(np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"{what}: {error}") from error
    if found.shape != (n,):
        raise InvalidArgument(f"{what}; found an array of shape {found.shape}")
    wrong = np.flatnonzero(~((found >= 0) & np.isfinite(found)))
    if len(wrong):
        raise InvalidArgument(f"{what}; found {found[wrong[0]]} at {int(wrong[0])}")
    with np.errstate(over="ignore"):
        total = found.sum()
    if not 0 < total < np.inf:
        raise InvalidArgument(f"{what}; their sum is {total}")
    return found


def _count_draws(sampler: WeightedSampler, weights: npt.NDArray[np.float64]) -> int:
    if sampler.replacement:
        return len(weights) if sampler.n_draws is None else sampler.n_draws
    most = int(np.count_nonzero(weights))
    if sampler.n_draws is None:
        return most
    if sampler.n_draws > most:
        raise InvalidArgument(
            f"n_draws must be at most {most} without replacement: so many weights are above 0; "
            f"found {sampler.n_draws}"
        )
    return sampler.n_draws


def _hash_of(numbers: npt.NDArray[Any]) -> str:
    return f"{hash_bytes(numbers.data):016x}"
