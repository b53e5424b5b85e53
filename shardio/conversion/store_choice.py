"""Choose a store, such as `h264` or `raw`, from estimates of the size and speed of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardio._base.progress import counted, format_size
from shardio.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class StoreEstimate:
    """The estimated size and speed of a store.

    `n_bytes` is the size of the whole dataset. `clips_per_s` is the number of random clips that one
    core decodes per second. `loss` describes how the stored frames differ from those of the source.
    `problem` is the reason why the store cannot be chosen, such as "misses disk and rate"; "" if
    there is none.
    """

    store: str
    n_bytes: int
    clips_per_s: float
    loss: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class StoreChoice:
    """The store that a conversion with `store="auto"` has chosen.

    `reason` is a sentence. `basis` states which clips were decoded, and from how many files the
    values in `estimates` were scaled to the whole source.
    """

    store: str
    reason: str
    basis: str
    estimates: tuple[StoreEstimate, ...]


def choose_store(
    estimates: Sequence[StoreEstimate],
    *,
    disk: int | None,
    rate: float | None,
    n_cores: int,
    basis: str = "",
) -> StoreChoice:
    """Choose the smallest store that reaches `rate`, or without a rate the fastest.

    Args:
        estimates: the stores. Of two equal stores, the first is chosen.
        disk: the maximum size of the dataset in bytes, or None.
        rate: the minimum number of clips per second that `n_cores` cores decode together, or None.
        n_cores: the number of cores that decode.
        basis: the text for `StoreChoice.basis`.

    Raises:
        InvalidArgument: every store has a problem. The notes of the error list them.
    """
    judged = [
        replace(one, problem=one.problem or _misses(one, disk, rate, n_cores)) for one in estimates
    ]
    limits = [f"takes at most {format_size(disk)}"] if disk is not None else []
    if rate is not None:
        cores = counted(n_cores, "cores")
        limits.append(f"decodes {rate:,g} clips per second on {cores}")
    usable = [one for one in judged if not one.problem]
    if not usable:
        error = InvalidArgument(
            f"store='auto' (--store auto): no store {' and '.join(limits)}; allow more bytes "
            "(--disk) or fewer clips (--rate), store smaller or fewer frames (--size, --fps), or "
            "name a store"
        )
        error.add_note(f"estimates for {basis}:")
        for one in judged:
            speed = f"{one.clips_per_s:,.0f} clips per second and core"
            figures = f"{format_size(one.n_bytes)}, {speed}; " if one.n_bytes else ""
            error.add_note(f"{one.store}: {figures}{one.problem}")
        raise error
    if rate is None:
        best = min(usable, key=lambda one: (-one.clips_per_s, one.n_bytes))
    else:
        best = min(usable, key=lambda one: (one.n_bytes, -one.clips_per_s))
    what = "fastest" if rate is None else "smallest"
    that = f" that {' and '.join(limits)}" if limits else ""
    reason = f"{best.store} is the {what} store{that}"
    return StoreChoice(
        best.store, f"{reason}; {best.loss}" if best.loss else reason, basis, tuple(judged)
    )


def _misses(one: StoreEstimate, disk: int | None, rate: float | None, n_cores: int) -> str:
    found = ["disk"] if disk is not None and one.n_bytes > disk else []
    if rate is not None and one.clips_per_s * n_cores < rate:
        found.append("rate")
    return f"misses {' and '.join(found)}" if found else ""
