"""How far a loader has come, and the state that says so to another process or another day."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from shardio.dataset.dataset import Dataset
from shardio.dataset.mixture import Mixture
from shardio.errors import InvalidArgument
from shardio.order.block_shuffle import Window
from shardio.order.shard_shuffle import ShardWindow
from shardio.views.packing import Packed

_VERSION: Final = 1
_MOST: Final = 1 << 60
_ADVICE: Final = "load it into a loader that is made as the one was that it comes from"


class Progress(NamedTuple):
    """The epoch, how many of its positions are consumed, and how many it has.

    `window` is what it is shuffled by, if it is shuffled in blocks or in shards; `sizes` are those
    that the sources of a mixture had when it began, and `tokens` how many tokens the stream of each
    source had, where the last ones are padded to a window.
    """

    epoch: int
    position: int
    n_samples: int
    window: Window | ShardWindow | None = None
    sizes: tuple[int, ...] | None = None
    tokens: tuple[int, ...] | None = None


def state_of(progress: Progress, dataset: Dataset, order: Mapping[str, Any]) -> dict[str, Any]:
    """What `progress_of` makes the progress from, as JSON can say it.

    `order` is what decides the order of that epoch, beside its number; what is None in it has no
    part in that.
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
    """What the meaning of a position depends on."""
    return {"lineage": dataset.lineage, "view": dataset.rows.view_id, **order}


def progress_of(
    state: object, dataset: Dataset, order_of: Callable[[int], Mapping[str, Any]]
) -> Progress:
    """The progress that a state tells of; `order_of` gives what decides the order of an epoch.

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
    return Progress(epoch, position, n_samples, window, sizes, tokens)


def _sizes(state: Mapping[str, Any], mixture: Mixture) -> tuple[int, ...]:
    """How many samples the sources of a mixture had when the state's epoch began."""
    found, now = state.get("sizes"), mixture.blend.sizes
    if isinstance(found, list | tuple) and len(found) == len(now):
        if all(type(n) is int and 0 < n <= m for n, m in zip(found, now, strict=True)):
            return tuple(found)
    raise InvalidArgument(
        f"load_state_dict: the state's sizes must be at most those of the sources of "
        f"{mixture.path}, {list(now)}; found {found!r}"
    )


def _tokens(
    state: Mapping[str, Any], dataset: Dataset, packed: Packed, had: tuple[int, ...] | None
) -> tuple[int, ...]:
    """How many tokens each source had when the state's epoch began; `had` is how many windows."""
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
    if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found <= _MOST:
        raise InvalidArgument(
            f"load_state_dict: the state's {name} must be an integer from 0 to {_MOST}; "
            f"found {found!r}"
        )
    return found
