"""Reports on a conversion: `Progress` while it runs, `ConversionReport` at its end.

Both contain a `StoreChoice` if the conversion has chosen a store, such as `h264` or `raw`.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any, Final

from shardio._base.classes import one_line
from shardio._base.html import fragment, listing, table
from shardio._base.progress import ProgressState, counted, format_size
from shardio.conversion.converter import ITEMS, Input, OutcomeKind, kind_from_names, known_kinds
from shardio.dataset.generation import ROWS
from shardio.dataset.manifest import POINTER
from shardio.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class StoreEstimate:
    """The estimated size and speed of a store.

    `n_bytes` is the size of the whole dataset. `clips_per_s` is the number of random clips that one
    core decodes per second. `loss` describes how the stored frames differ from those of the source.
    `problem` is the reason why the store cannot be chosen, such as "too large", or "".
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


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a running conversion, as passed to the function `progress` of the caller.

    An input is one file, or one item of a Python iterable. `n_bytes` and `n_bytes_done` are the
    total sizes of all files and of the finished files; for items, they are 0. `name`, `outcome` and
    `reason` are those of the input that finished last. `choice` is as in `ConversionReport`.
    """

    n_inputs_done: int
    n_inputs: int
    n_bytes_done: int
    n_bytes: int
    n_samples: int
    n_broken: int
    name: str = ""
    outcome: OutcomeKind | None = None
    reason: str = ""
    choice: StoreChoice | None = None


def progress_state(state: Progress) -> ProgressState:
    """Return the state of a conversion as it is displayed."""
    has_sizes = state.n_bytes > 0
    unit = "files" if has_sizes else "items"
    return ProgressState(
        title=f"converting to {state.choice.store}" if state.choice else "converting",
        done=state.n_bytes_done if has_sizes else state.n_inputs_done,
        total=state.n_bytes if has_sizes else state.n_inputs,
        counts=f"{state.n_inputs_done:,} of {counted(state.n_inputs, unit)}",
        more=counted(state.n_samples, "samples"),
        faults=f"{state.n_broken:,} broken" if state.n_broken else "",
        name=state.name,
        unit="bytes" if has_sizes else unit,
        n_files=state.n_inputs_done if has_sizes else None,
    )


@dataclass(frozen=True, slots=True)
class InputReport:
    """The result of one input, which is a file or an item of a Python iterable.

    `reason` explains an outcome other than "converted". `n_samples` is the number of samples that
    this conversion read from the input. `detail` contains what the converter recorded about the
    input. `label` is the index of the input's class in `ConversionReport.classes`, or -1. `hash` is
    the xxh3-64 hash of the content if the input gave samples, else "".
    """

    name: str
    outcome: OutcomeKind
    reason: str
    n_samples: int
    n_bytes: int
    detail: Mapping[str, Any] = field(default_factory=dict)
    label: int = -1
    hash: str = ""

    @classmethod
    def of_json(cls, entry: Mapping[str, Any], known: Mapping[str, Input]) -> InputReport:
        """Return the report for an entry of a generation; `known` maps names to inputs."""
        source = known.get(entry["path"], Input(entry["path"], "", 0, -1))
        return cls(
            entry["path"],
            entry["outcome"],
            entry.get("reason", ""),
            entry.get("samples", 0),
            entry.get("bytes", source.n_bytes),
            entry.get("detail", {}),
            source.label,
            entry.get("hash", ""),
        )

    def as_json(self) -> dict[str, Any]:
        """Return the entry that a generation stores about the input."""
        entry: dict[str, Any] = {"path": self.name, "outcome": self.outcome}
        if self.n_samples:
            entry["samples"] = self.n_samples
        if self.hash:
            entry |= {"bytes": self.n_bytes, "hash": self.hash}
        if self.reason:
            entry["reason"] = self.reason
        if self.detail:
            entry["detail"] = dict(self.detail)
        return entry


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """The result of a finished conversion.

    `dataset` is the folder of the dataset, or its URL. `kind` is the name of the converter,
    "items" or "samples". `n_samples` and `n_bytes` count the samples, and the bytes of the shards,
    that the conversion added; `n_samples_before` is the number of samples before an append.
    `inputs` has the report on every file, sorted by name, or on every item, in the given order; it
    is empty for an iterable of samples. `classes` are the names of the dataset's classes.

    `generation` is the number of the generation that has the samples; 0 if no input gave a sample
    and nothing was published. `stopped` is True if the conversion ended early at a broken input.
    `stats_dropped` is True if an append removed statistics of the whole dataset, because they did
    not include the new samples. `view` is the dataset's default view: what a loader reads as one
    sample. `subsets` maps the names of the dataset's subsets to the numbers of their samples.
    `ignored` names the hidden files and folders of the source, and its folders without files.
    `choice` is the choice that `store="auto"` made; None if the caller named the store, or an
    earlier conversion has chosen it.
    """

    dataset: Path | str
    kind: str
    n_samples: int
    n_bytes: int
    elapsed_s: float
    inputs: tuple[InputReport, ...] = ()
    classes: tuple[str, ...] = ()
    stopped: bool = False
    generation: int = 1
    n_samples_before: int = 0
    stats_dropped: bool = False
    view: Mapping[str, Any] = field(default_factory=lambda: ROWS)
    subsets: Mapping[str, int] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    choice: StoreChoice | None = None

    def _outcome(self) -> tuple[str, str]:
        published = f"generation {self.generation}" if self.generation else "nothing published"
        return published, f"{'stopped after ' * self.stopped}{self.elapsed_s:.1f} s"

    def __repr__(self) -> str:
        counts = {"inputs": len(self.inputs), **self.counts, "converted": 0}
        sizes = (f"{name!r} {n:,}" for name, n in self.subsets.items())
        return one_line(self, [self.dataset], *self._outcome(), *sizes, **counts)

    def _repr_html_(self) -> str:
        samples, size = counted(self.n_samples, "samples"), format_size(self.n_bytes)
        converted = [source for source in self.inputs if source.n_samples]
        if self.view["kind"] == "clips":
            n_clips = sum(int(source.detail.get("clips", 0)) for source in converted)
            samples += f" ({counted(n_clips, 'clips')})"
        n_source_bytes = sum(source.n_bytes for source in converted)
        if n_source_bytes and self.kind != ITEMS:  # the size of an item is that of its pickle
            ratio = self.n_bytes / n_source_bytes
            size += f" from {format_size(n_source_bytes)}: ratio {ratio:.2f}"
        facts = self.kind, samples, size, *self._outcome()
        ranked = sorted(self.counts.items(), key=lambda count: _rank(count[0]))
        counts = [f"{n:,} {outcome}" for outcome, n in ranked]
        sizes = self.subsets.items()
        n_classes, n_inputs = len(self.classes), len(self.inputs)
        others = [source for source in self.inputs if source.outcome != "converted"]
        others.sort(key=lambda source: _rank(source.outcome))
        rows = ((i.name, i.outcome, i.n_samples, i.reason) for i in others)
        parts = (
            listing(f"{n_inputs:,} inputs", counts, len(counts)),
            listing(f"{n_classes:,} classes", self.classes, n_classes),
            listing("subsets", (f"{name} {n:,}" for name, n in sizes), len(sizes)),
            listing(f"{len(self.ignored):,} hidden or empty", self.ignored, len(self.ignored)),
            table(("input", "outcome", "samples", "reason"), rows, len(others)),
        )
        return fragment("ConversionReport", self.dataset, facts, *parts)

    @property
    def counts(self) -> dict[str, int]:
        """The number of inputs for each outcome that occurs."""
        return dict(Counter(source.outcome for source in self.inputs))

    @property
    def broken(self) -> tuple[InputReport, ...]:
        """The broken inputs. If there are any, the exit code of `shardio convert` is 1."""
        return tuple(source for source in self.inputs if source.outcome == "broken")

    @property
    def modified(self) -> tuple[InputReport, ...]:
        """The inputs that changed after their conversion. If there are any, the exit code is 1."""
        return tuple(source for source in self.inputs if source.outcome == "modified")


def warn_of_broken(report: ConversionReport, stacklevel: int) -> None:
    """Warn of broken inputs, if there are any; `stacklevel` is that of `warnings.warn`."""
    if broken := report.broken:
        warnings.warn(
            f"{report.dataset}: {len(broken):,} of {counted(len(report.inputs), 'inputs')} are "
            f"broken, and listed in report.broken; the first is {broken[0].name!r}: "
            f"{broken[0].reason}",
            RuntimeWarning,
            stacklevel=stacklevel,
        )


_FAILURES: Final = ("broken", "modified", "not_processed", "empty")
"""The outcomes of inputs that a report lists first."""


def _rank(outcome: str) -> int:
    """Return the place of an outcome in a report: failures first, converted inputs last."""
    if outcome in _FAILURES:
        return _FAILURES.index(outcome)
    return len(_FAILURES) + (outcome == "converted")


_IGNORED_OUTCOMES: Final = ("unsupported", "part")
_MAX_SUFFIXES: Final = 4
_UNREADABLE: Final = {
    **dict.fromkeys((".7z", ".bz2", ".gz", ".rar", ".xz", ".zip"), "unpack the archive first"),
    **dict.fromkeys(
        (".pickle", ".pkl", ".pt", ".pth"),
        "load the file in Python, and pass its samples to shardio.convert(samples, out)",
    ),
}
"""For suffixes of files that no converter reads, what to do instead."""


def check_any_of_kind(
    source: str, kind: str, reports: Sequence[InputReport], *, kind_given: bool, appends: bool
) -> None:
    """Raise InvalidArgument if no file is of the kind; broken and duplicate files count as such."""
    if not reports or any(report.outcome not in _IGNORED_OUTCOMES for report in reports):
        return
    suggested = kind_from_names(report.name for report in reports)
    if kind_given or suggested:
        what = f"no file of the kind {kind!r}"
    else:
        what = "no file of a kind recognized by name, and no video"
    hint, lists_kinds = "pass its kind (--kind KIND, or kind=)", True
    if appends:
        hint = "an append needs files of the same kind as the dataset"
    elif any(report.name == POINTER for report in reports):
        hint, lists_kinds = f"this is a dataset already: shardio inspect {source} shows it", False
    elif all(report.name.endswith(".shard") for report in reports):
        hint, lists_kinds = "shards are converted already: shardio inspect shows them", False
    elif suggested and suggested != kind:
        hint = f"the file names suggest {suggested!r} (--kind {suggested}, or kind={suggested!r})"
    elif advice := _advice_on(report.name for report in reports):
        hint, lists_kinds = advice, False
    error = InvalidArgument(f"{source}: holds {what}: {_describe_files(reports)}; {hint}")
    if lists_kinds:
        error.add_note(f"kinds: {', '.join(known_kinds())}")
    raise error


def _advice_on(names: Iterable[str]) -> str | None:
    """Return what to do instead if all files have suffixes with one piece of advice."""
    found = {_UNREADABLE.get(PurePath(name).suffix.lower()) for name in names}
    return found.pop() if len(found) == 1 else None


def _describe_files(reports: Sequence[InputReport]) -> str:
    suffixes = Counter(PurePath(report.name).suffix.lower() or "no suffix" for report in reports)
    most = sorted(suffixes.items(), key=lambda each: (-each[1], each[0]))[:_MAX_SUFFIXES]
    named = [f"{suffix} ({n:,})" for suffix, n in most]
    if n_others := len(reports) - sum(n for _, n in most):
        named.append(f"others ({n_others:,})")
    rejected = next((f"; {each.name}: {each.reason}" for each in reports if each.reason), "")
    n_files = f"{len(reports):,} file{'s' * (len(reports) > 1)}"
    return f"{n_files}, {', '.join(named)}{rejected}"


def choose_store(
    estimates: Sequence[StoreEstimate],
    *,
    disk: int | None,
    rate: float | None,
    n_cores: int,
    basis: str = "",
) -> StoreChoice:
    """Choose the smallest store that meets both limits; if `rate` is None, the fastest that fits.

    Args:
        estimates: the stores. If two are equal, the first is chosen.
        disk: the maximum size of the dataset in bytes, or None.
        rate: the minimum number of clips per second that `n_cores` cores decode together, or None.
        n_cores: the number of cores that decode.
        basis: the text for `StoreChoice.basis`.

    Raises:
        InvalidArgument: every store has a problem. The notes of the error list them.
    """
    judged = [
        replace(one, problem=one.problem or _unmet_limits(one, disk, rate, n_cores))
        for one in estimates
    ]
    limits = [f"takes at most {format_size(disk)}"] if disk is not None else []
    if rate is not None:
        clips = "clip" if rate == 1 else "clips"
        limits.append(f"decodes {rate:,g} {clips} per second on {counted(n_cores, 'cores')}")
    usable = [one for one in judged if not one.problem]
    if not usable:
        error = InvalidArgument(
            f"store='auto' (--store auto): no store {' and '.join(limits)}; allow more disk space "
            "(--disk) or a lower rate (--rate), store smaller or fewer frames (--size, --fps), or "
            "name a store"
        )
        error.add_note(f"estimates for {basis}:")
        for one in judged:
            speed = f"{one.clips_per_s:,.0f} clips/s per core"
            figures = f"{format_size(one.n_bytes)}, {speed}; " if one.n_bytes else ""
            error.add_note(f"{one.store}: {figures}{one.problem}")
        raise error
    if rate is None:
        what, best = "fastest", min(usable, key=lambda one: (-one.clips_per_s, one.n_bytes))
    else:
        what, best = "smallest", min(usable, key=lambda one: (one.n_bytes, -one.clips_per_s))
    reason = f"{best.store} is the {what} store"
    if limits:
        reason += f" that {' and '.join(limits)}"
    if best.loss:
        reason += f"; {best.loss}"
    return StoreChoice(best.store, reason, basis, tuple(judged))


def _unmet_limits(one: StoreEstimate, disk: int | None, rate: float | None, n_cores: int) -> str:
    """Return a description of the limits that a store does not meet; "" if it meets both."""
    found = ["too large"] if disk is not None and one.n_bytes > disk else []
    if rate is not None and one.clips_per_s * n_cores < rate:
        found.append("too slow")
    return " and ".join(found)
