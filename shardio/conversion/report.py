"""Reports of a conversion: `Progress` while it runs, `ConversionReport` at its end.

`check_any_of_kind` raises an error instead, if no input is of the converter's kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Final

from shardio.conversion.converter import BUILT_IN, Input, OutcomeKind, kind_from_names, known_kinds
from shardio.dataset.generation import ROWS
from shardio.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a running conversion. `n_bytes` is the total size of all inputs.

    `name` is the last finished input; `outcome` and `reason` are the result of this input. All
    three are empty at the start.
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


@dataclass(frozen=True, slots=True)
class InputReport:
    """The result of one input; `detail` is extra information recorded by its converter.

    `n_samples` counts the samples that this conversion read from the input, `label` is the index of
    the input's class in the report's `classes` or -1, and `hash` is the xxh3-64 of an input that
    gave samples.
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
        """Return the entry for a generation, which depends neither on machine nor on time."""
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

    `n_samples` and `n_bytes` count the samples and the bytes of shards that the conversion added,
    `n_samples_before` the samples of the dataset before an append. `inputs` are all files of the
    source in name order (empty for samples from an iterable). `generation` is the number of the
    published generation, 0 if no input gave a sample. `stopped` is True if the conversion ended at
    a broken input. `stats_dropped` is True if statistics of the dataset were dropped because they
    do not include the new samples. `view` is the default view of a loader. `dataset` is a URL if
    the dataset is in an object store.
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

    @property
    def counts(self) -> dict[str, int]:
        """The number of inputs by outcome, without zeros."""
        return dict(Counter(source.outcome for source in self.inputs))

    @property
    def broken(self) -> tuple[InputReport, ...]:
        """The inputs that could not be read; the exit code is 1 if there are any."""
        return tuple(source for source in self.inputs if source.outcome == "broken")

    @property
    def modified(self) -> tuple[InputReport, ...]:
        """The inputs that changed after their conversion; the exit code is 1 if there are any."""
        return tuple(source for source in self.inputs if source.outcome == "modified")


_IGNORED_OUTCOMES: Final = ("unsupported", "part")
_MAX_SUFFIXES: Final = 4
_MAX_NAMES: Final = 3


class NoMatchingInputs(InvalidArgument):
    """Raised if a source contains no file of the requested kind."""


def check_any_of_kind(
    source: str, kind: str, reports: Sequence[InputReport], *, kind_given: bool, appends: bool
) -> None:
    """Check that at least one file is of the kind, even if it is broken, empty or a duplicate.

    `source` is named in the message. `kind_given` is True if the caller chose the kind, `appends`
    for an append to a dataset of that kind.

    Raises:
        NoMatchingInputs: there is no such file; the message lists the files and the known kinds.
    """
    if not reports or any(report.outcome not in _IGNORED_OUTCOMES for report in reports):
        return
    suggested = kind_from_names(report.name for report in reports)
    if kind_given or suggested:
        what = f"no file of the kind {kind!r}"
    else:
        what = "no file of a kind recognized by name, and no video"
    hint = "pass its kind (--kind KIND, or kind=)"
    if appends:
        hint = "an append needs files of the same kind as the dataset"
    elif suggested and suggested != kind:
        hint = f"the file names suggest {suggested!r} (--kind {suggested}, or kind={suggested!r})"
    error = NoMatchingInputs(f"{source}: holds {what}: {_describe_files(reports)}; {hint}")
    error.add_note(_list_kinds())
    raise error


def _describe_files(reports: Sequence[InputReport]) -> str:
    """Return the number of files by suffix, and the reason of the first rejection."""
    suffixes = Counter(PurePath(report.name).suffix.lower() or "no suffix" for report in reports)
    most = sorted(suffixes.items(), key=lambda each: (-each[1], each[0]))[:_MAX_SUFFIXES]
    named = [f"{suffix} ({n:,})" for suffix, n in most]
    if n_others := len(reports) - sum(n for _, n in most):
        named.append(f"others ({n_others:,})")
    first = next((f"; {each.name}: {each.reason}" for each in reports if each.reason), "")
    n_files = f"{len(reports):,} file{'s' * (len(reports) > 1)}"
    return f"{n_files}, {', '.join(named)}{first}"


def _list_kinds() -> str:
    """Return the known kinds, with the file names that indicate them."""
    hints = {kind: known.suffixes or known.hints for kind, known in BUILT_IN.items()}
    recognized = [f"{kind} ({_abbreviate(names)})" for kind, names in hints.items() if names]
    unrecognized = [kind for kind in known_kinds() if not hints.get(kind)]
    return (
        f"kinds recognized by file name: {', '.join(recognized)}; kinds that need --kind: "
        f"{', '.join(unrecognized)}"
    )


def _abbreviate(names: Sequence[str]) -> str:
    return ", ".join([*names[:_MAX_NAMES], *["…"] * (len(names) > _MAX_NAMES)])
