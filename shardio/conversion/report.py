"""What a conversion says while it runs (`Progress`) and when it is done (`ConversionReport`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardio.conversion.source import Input, OutcomeKind
from shardio.dataset.generation import ROWS


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a conversion is. Bytes are those of the inputs that are done with.

    `name` is the input that was finished last, `outcome` and `reason` what became of it; all
    empty at the start.
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
    """What became of one input; `detail` is what its converter recorded.

    `n_samples` are those that this conversion has made of it, `label` is the position of its class
    in the report's `classes`, -1 for none, and `hash` the xxh3-64 of its content where it gave
    samples.
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
        """Make a report again from what a generation keeps, and the inputs by name."""
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
        """Give what a generation keeps: nothing that depends on the machine or the moment."""
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
    """What a finished conversion did.

    `n_samples` and `n_bytes` (of shards) are what it has made, `n_samples_before` what the dataset
    had that was appended to. `inputs` are all files of the source in order of their names (none for
    samples from an iterable), `generation` the number of the one with the samples (0: no input gave
    a sample, and nothing was published), `stopped` says that the conversion ended at a broken
    input. `stats_dropped`: the dataset had statistics that are true of its earlier samples alone,
    which the new generation does not have. `view` is what the samples of a loader are unless it is
    asked for others. `dataset` is a URL if it is in an object store.
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
        """The number of inputs by outcome, of those that occurred."""
        return dict(Counter(source.outcome for source in self.inputs))

    @property
    def broken(self) -> tuple[InputReport, ...]:
        """The inputs that could not be read: where there are any, the exit code is 1."""
        return tuple(source for source in self.inputs if source.outcome == "broken")

    @property
    def modified(self) -> tuple[InputReport, ...]:
        """The inputs of which the dataset has the samples of another state: exit code 1, too."""
        return tuple(source for source in self.inputs if source.outcome == "modified")
