"""The order of samples in the epochs of a loader, and the loader's progress as a saveable state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio._base.classes import listed
from shardio._engine.dispatch.engine import Engine
from shardio._engine.dispatch.iterations import EpochIteration
from shardio._engine.dispatch.thread_workers import GENERATOR_LOCK
from shardio._engine.filling.batch_spec import EpochPlan, samples_of
from shardio._loading.options import LoaderOptions, warn_of_no_batch
from shardio._workers.processes.global_generators import seed_generators
from shardio._workers.processes.shared_memory import SharedArray
from shardio.dataset.selection import check_positions
from shardio.errors import InvalidArgument
from shardio.format.checksum import hash_bytes
from shardio.format.types.array_values import is_masked
from shardio.order import Order
from shardio.order.mixture_order import InterleavedOrder
from shardio.order.permutation import OF_SAMPLERS, Positions, SampleGenerators
from shardio.order.ranks import RankPartition
from shardio.order.sampling import (
    ORDERS,
    ListedOrder,
    WeightedOrder,
    WeightedSampler,
    check_count,
    draw_without_replacement,
    holds_positions,
)
from shardio.samples.mixture import Mixture
from shardio.samples.token_view import TokenView
from shardio.samples.view import SampleView

_VERSION: Final = 1
_MAX_COUNT: Final = 1 << 60
_OTHER_SAMPLES: Final = {
    "lineage": "another dataset",
    "view": "another subset, selection or view of the dataset",
}


def state_of(plan: EpochPlan, epoch_sampler: EpochSampler) -> dict[str, Any]:
    state = {
        "version": _VERSION,
        "epoch": plan.epoch,
        "position": plan.partition.first,
        "rows": plan.partition.n,
        **_identity(epoch_sampler, plan.order),
        **plan.order.to_state(),
        "tokens": None if plan.stream_tokens is None else list(plan.stream_tokens),
    }
    return {name: value for name, value in state.items() if value is not None}


def _identity(epoch_sampler: EpochSampler, order: Order) -> dict[str, Any]:
    """Return the values that determine the samples of an epoch; None for an unused option."""
    view, seed = epoch_sampler.view, epoch_sampler.seed
    lineage = view.dataset.lineage
    found = {"lineage": lineage, "view": view.identity, "seed": seed}
    found |= dict.fromkeys(("shuffle", "sampler", "weights", "replacement", "mixing", "per_video"))
    return found | order.identity(epoch_sampler.samples)


def plan_of(state: object, epoch_sampler: EpochSampler) -> EpochPlan:
    """Return the plan for the rest of an epoch; raise InvalidArgument if `state` is invalid."""
    if not isinstance(state, Mapping) or state.get("version") != _VERSION:
        found = repr(state)
        if isinstance(state, Mapping):
            names = listed(map(repr, state), 100)
            found = f"the keys {names}" if names else "an empty dict"
            found = repr(state["version"]) if "version" in state else found
        raise InvalidArgument(
            f"load_state_dict: expected a result of state_dict(), version {_VERSION}; found {found}"
        )
    samples, order = epoch_sampler.samples, epoch_sampler.order_of(_count(state, "epoch"))
    for name, expected in _identity(epoch_sampler, order).items():
        given = state.get(name)
        if type(given) is not type(expected) or given != expected:
            differs = (
                f"the state's {name} is {given!r}, that of this loader of {samples.path} is "
                f"{expected!r}: load the state into a loader with the same options"
            )
            if name in _OTHER_SAMPLES:
                differs = f"the state belongs to {_OTHER_SAMPLES[name]}: {differs}"
            raise InvalidArgument(f"load_state_dict: {differs}")
    epoch, position, n_samples = (_count(state, name) for name in ("epoch", "position", "rows"))
    most = order.n_positions(samples)
    if position > n_samples or n_samples > most:
        raise InvalidArgument(
            f"load_state_dict: the state is at position {position} of {n_samples} samples, "
            f"and {samples.path} has {most}"
        )
    order, tokens, view = order.from_state(state, samples, n_samples), None, epoch_sampler.view
    if isinstance(view, TokenView) and view.stream_tokens is not None:
        sizes = None if isinstance(order, ListedOrder) else tuple(state.get("sizes", [n_samples]))
        tokens = _tokens(state, view, sizes)
    partition = epoch_sampler.partition(n_samples, position)
    return EpochPlan(epoch, partition, order, tokens)


def _tokens(
    state: Mapping[str, Any], view: TokenView, n_windows: tuple[int, ...] | None
) -> tuple[int, ...]:
    """Return the token counts in `state`; `n_windows` has the saved window count of each source."""
    found, now = state.get("tokens"), view.packed.n_tokens
    if isinstance(found, list | tuple) and len(found) == len(now):
        if all(type(n) is int and 0 <= n <= m for n, m in zip(found, now, strict=True)):
            if n_windows is None or n_windows == tuple(view.packed.count(found).tolist()):
                return tuple(found)
    raise InvalidArgument(
        f"load_state_dict: the state's tokens must be enough for its windows, and at most "
        f"{list(now)}, the tokens of {view.dataset.path}; found {found!r}"
    )


def _count(state: Mapping[str, Any], name: str) -> int:
    return check_count(f"load_state_dict: the state's {name}", state.get(name), 0, _MAX_COUNT)


class EpochSampler:
    """The order of the samples in new epochs.

    A new epoch has all samples that the dataset has now. An epoch that is resumed from a state may
    have begun when the dataset had fewer samples.
    """

    def __init__(self, view: SampleView, options: LoaderOptions) -> None:
        self.view, self.samples, self.seed = view, samples_of(view), options.seed
        self._options, self._sampler = options, options.sampler
        self._draw: Callable[..., Positions] | None = None
        """A function that draws weighted samples without replacement; None for other orders."""
        self._origin: dict[str, Any] = {}
        """The values that determine weighted draws, for the state of the loader."""
        self._latest: tuple[int, ListedOrder] | None = None
        """The epoch whose samples were listed last, and the order of that epoch."""
        self.order: Order | None = None
        """The order of every epoch; None if the samples are listed anew when an epoch begins."""
        self.n_positions_per_epoch: int | None = None
        """The number of positions of every epoch; None if it is unknown."""
        if self._sampler is not None:
            ListedOrder.check(self.samples)
            if isinstance(self._sampler, WeightedSampler):
                self._set_weights(
                    self._sampler, _check_weights(self._sampler.weights, self.samples.n)
                )
            elif not callable(self._sampler):
                self._check_sampler()
        else:
            kind = ORDERS[options.shuffle]
            kind.check(self.samples)
            self.order = kind.begin(self.samples)
            if isinstance(view.dataset, Mixture):
                sizes = view.dataset.sizes_of(view.source_ends)
                self.order = InterleavedOrder(self.order, sizes)
        if self.order is not None:
            self.n_positions_per_epoch = self.order.n_positions(self.samples)

    def order_of(self, epoch: int) -> Order:
        return self._listed_order(epoch) if self.order is None else self.order

    def _listed_order(self, epoch: int) -> ListedOrder:
        if self._latest is None or self._latest[0] != epoch:
            numbers = (
                self._sample_positions(epoch) if self._draw is None else self._draw(epoch=epoch)
            )
            origin = self._origin or {"sampler": _hash_of(numbers)}
            table = SharedArray.from_array(numbers, "the order of an epoch")
            self._latest = epoch, ListedOrder(table, len(numbers), origin)
        return self._latest[1]

    def n_positions(self, epoch: int) -> int:
        n = self.n_positions_per_epoch
        return self.order_of(epoch).n_positions(self.samples) if n is None else n

    def plan_epoch(self, epoch: int) -> EpochPlan:
        partition = self.partition(self.n_positions(epoch))
        return EpochPlan(epoch, partition, self.order_of(epoch), self.view.stream_tokens)

    def partition(self, n_samples: int, first: int = 0) -> RankPartition:
        asked = self._options
        rank = asked.rank, asked.world_size
        return RankPartition(n_samples, first, asked.batch_size, *rank, asked.tail)

    def _set_weights(self, sampler: WeightedSampler, weights: npt.NDArray[np.float64]) -> None:
        self._origin = {"weights": _hash_of(weights), "replacement": sampler.replacement}
        self.n_positions_per_epoch = n = _count_draws(sampler, weights)
        if sampler.replacement:
            sums = SharedArray.from_array(np.cumsum(weights), "the running sums of weights")
            self.order = WeightedOrder(sums, n, self._origin)
        else:
            self._draw = functools.partial(draw_without_replacement, weights, n, seed=self.seed)

    def _check_sampler(self) -> None:
        """Check that the sampler yields indices of samples, and the same indices a second time."""
        listed = self._listed_order(0)
        if holds_positions(self._sampler):
            self.order = listed
        elif not np.array_equal(listed.table.array, self._sample_positions(0)):
            raise InvalidArgument(
                f"sampler {self._sampler!r}, iterated twice for epoch 0 with the global "
                "generators seeded alike, yields different positions, so that no epoch could be "
                "resumed: use only the global generators, or pass a function of the epoch's number "
                "that returns positions, sampler=f(epoch)"
            )

    def _sample_positions(self, epoch: int) -> npt.NDArray[np.int64]:
        found: Any = self._sampler
        where = "sampler"
        if callable(found):
            found, where = found(epoch), f"sampler({epoch})"
        elif not holds_positions(found):
            found = _iterate_sampler(found, seed=self.seed, epoch=epoch)
        if not isinstance(found, np.ndarray | Sequence) and isinstance(found, Iterable):
            found = list(found)
        return check_positions(found, self.samples.n, where)


def _iterate_sampler(sampler: Any, *, seed: int, epoch: int) -> list[Any]:
    """Iterate a sampler for an epoch, with the global random generators seeded for this epoch.

    A sampler that draws from these generators, such as torch's, then yields the same samples on all
    ranks, and when the epoch is resumed.
    """
    with GENERATOR_LOCK.held():
        seed_generators(SampleGenerators(seed, OF_SAMPLERS).key(epoch, 0))
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)
        return list(sampler)


def _check_weights(weights: Any, n: int) -> npt.NDArray[np.float64]:
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
            f"n_draws must be at most {most} without replacement, the number of weights above 0; "
            f"found {sampler.n_draws}"
        )
    return sampler.n_draws


def _hash_of(numbers: npt.NDArray[Any]) -> str:
    return f"{hash_bytes(numbers.data):016x}"


class Epochs:
    def __init__(self, view: SampleView, options: LoaderOptions) -> None:
        self.epoch_sampler = EpochSampler(view, options)
        self.latest: EpochIteration | None = None
        """The latest iteration; None before the first one, and after `load_state`."""
        self._options = options
        self._next: EpochPlan | int = 0
        """The index of the next epoch, or the plan for the rest of an epoch from a loaded state."""
        self._has_warned = False

    @property
    def number(self) -> int:
        """The index of the latest epoch; of the next one if none has begun since `load_state`."""
        if self.latest is not None:
            return self.latest.plan.epoch
        return self._next.epoch if isinstance(self._next, EpochPlan) else self._next

    @property
    def n_batches(self) -> int:
        epoch_sampler = self.epoch_sampler
        return epoch_sampler.partition(epoch_sampler.n_positions(self.number)).stop_step

    def begin(self, engine: Engine) -> EpochIteration:
        plan, epoch_sampler, successor = self._next_plan(), self.epoch_sampler, None
        self._warn_of_no_batch(plan)
        if epoch_sampler.order is not None:
            successor = epoch_sampler.plan_epoch(plan.epoch + 1)
        self.latest = engine.iterate(plan, successor)
        self._next = plan.epoch + 1
        return self.latest

    def _warn_of_no_batch(self, plan: EpochPlan) -> None:
        partition = plan.partition
        is_whole = partition.tail == "drop" and partition.n and not partition.first
        if is_whole and not partition.stop_step and not self._has_warned:
            self._has_warned = True
            warn_of_no_batch(plan.epoch, partition.n, partition.batch_size, partition.world_size)

    def state(self) -> dict[str, Any]:
        latest = self.latest
        if latest is None or latest.is_exhausted:
            return state_of(self._next_plan(), self.epoch_sampler)
        partition = latest.plan.partition
        rest = replace(partition, first=partition.position(latest.next_loop_step))
        return state_of(replace(latest.plan, partition=rest), self.epoch_sampler)

    def state_at(self, epoch: int, batch: int) -> dict[str, Any]:
        plan = self._plan_from(epoch, batch)
        return state_of(plan, self.epoch_sampler)

    def indices_at(self, epoch: int, batch: int) -> npt.NDArray[np.int64]:
        plan, sampler = self._plan_from(epoch, batch), self.epoch_sampler
        partition = plan.partition
        order = plan.order.arrange(sampler.samples, partition.n, seed=sampler.seed, epoch=epoch)
        step = partition.first_step
        found: npt.NDArray[np.int64] = order.at(partition.positions(step, step + 1))
        return found

    def _plan_from(self, epoch: int, batch: int) -> EpochPlan:
        """Return the plan for an epoch from a batch on; raise InvalidArgument if there is none."""
        plan = self.epoch_sampler.plan_epoch(check_count("epoch", epoch, 0, _MAX_COUNT))
        partition, n = plan.partition, plan.partition.stop_step
        if check_count("batch", batch, 0) >= n:
            raise InvalidArgument(f"there is no batch {batch} in epoch {epoch}, which has {n}")
        return replace(plan, partition=replace(partition, first=partition.position(batch)))

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._next = plan_of(state, self.epoch_sampler)
        self.latest = None

    def _next_plan(self) -> EpochPlan:
        plan = self._next
        return plan if isinstance(plan, EpochPlan) else self.epoch_sampler.plan_epoch(plan)
