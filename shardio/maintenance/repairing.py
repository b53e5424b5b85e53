"""Write the undamaged samples of a dataset or shard to a new dataset; list the lost samples."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from shardio._base.classes import one_line
from shardio._base.html import fragment, table
from shardio._base.progress import counted
from shardio.dataset.generation import Generation
from shardio.dataset.manifest import generation_numbers, load, load_generation, refuse_nested
from shardio.dataset.transaction import published_number, raise_conflict
from shardio.dataset.writer import GenerationWriter
from shardio.errors import (
    DataError,
    DatasetCorrupt,
    DatasetNotFound,
    SchemaError,
    ShardCorrupt,
    ShardNotFound,
)
from shardio.format.schema import Schema
from shardio.maintenance.jobs import (
    Progress,
    ShardProgress,
    displays_progress,
    size_of,
    takes_paths,
)
from shardio.maintenance.salvage import restore_shard, schema_of, unreadable_pages
from shardio.maintenance.verify.shard import verify_file
from shardio.shard.reader import ShardReader
from shardio.shard.writer import ShardSummary


@dataclass(frozen=True, slots=True)
class SourceShard:
    """A shard file that is repaired, with the schema that it should have.

    `entry` is the entry for the shard in the generation; None if this entry cannot be read.
    """

    path: str
    schema: Schema
    entry: ShardSummary | None = None

    @property
    def name(self) -> str:
        """The name of the file."""
        return os.path.basename(self.path)


@dataclass(frozen=True, slots=True)
class RepairPlan:
    """The files that are repaired, and the metadata that the new dataset gets.

    A group consists of a shard and the shards that store added columns of the same samples.
    `generation` is the generation that is repaired, if one can be read. `unlisted` maps each shard
    that is left out to the reason. Such a shard may belong to a later generation that is damaged.
    """

    groups: tuple[tuple[SourceShard, ...], ...]
    schema: Schema
    generation: Generation | None = None
    unlisted: Mapping[str, str] = field(default_factory=dict)


def _plan(source: str) -> RepairPlan:
    if not os.path.isdir(source):
        schema = _schema_of([source])
        return RepairPlan(((SourceShard(source, schema),),), schema)
    root, generation, unlisted = Path(source), None, {}
    with contextlib.suppress(DataError, DatasetNotFound):
        generation = load(root)
    for number in () if generation else sorted(_all_generation_numbers(root), reverse=True):
        with contextlib.suppress(DataError):
            generation = load_generation(root, number)
            unlisted = _unlisted_shards(root, generation)
            break
    if generation is not None:
        files = [
            SourceShard(os.path.join(source, s.name), schema, s) for s, schema in generation.files
        ]
        n = len(generation.shards)
        groups = tuple(tuple(files[k::n]) for k in range(n))
        return RepairPlan(groups, generation.full_schema, generation, unlisted)
    names = sorted(name for name in os.listdir(source) if name.endswith(".shard"))
    if not names:
        raise DatasetNotFound(f"{source}: contains neither a dataset nor a shard")
    paths = [os.path.join(source, name) for name in names]
    schema = _schema_of(paths)
    return RepairPlan(tuple((SourceShard(path, schema),) for path in paths), schema)


def _all_generation_numbers(root: Path) -> set[int]:
    """Return the numbers of all generation files, and the number that `dataset.json` points to."""
    published = published_number(root)
    return {*generation_numbers(root), *([] if published is None else [published])}


def _unlisted_shards(root: Path, generation: Generation) -> dict[str, str]:
    later = [number for number in _all_generation_numbers(root) if number > generation.number]
    if not later:
        return {}
    names = {name for name in os.listdir(root) if name.endswith(".shard")}
    for number in range(1, generation.number + 1):
        with contextlib.suppress(DataError):
            names -= {*load_generation(root, number).names}
    reason = (
        f"it may belong to generation {min(later)} or a later one, which cannot be read; "
        f"generation {generation.number} was repaired instead; shardio repair"
    )
    return {name: f"{reason} {name} saves its samples" for name in sorted(names)}


def _schema_of(paths: list[str]) -> Schema:
    """Return the first schema that can be read from the shards at `paths`."""
    reason: Exception | None = None
    for path in paths:
        try:
            return schema_of(path)
        except DataError as error:
            reason = reason or error
    raise DatasetCorrupt(f"no schema can be read: {reason}") from reason


_MAX_REASON: Final = 300


@dataclass(frozen=True, slots=True)
class Loss:
    """Consecutive samples of one shard that are lost for the same reason.

    `first` and `last` are indices in the shard; None if the whole shard is lost, and the number of
    its samples is unknown.
    """

    first: int | None
    last: int | None
    reason: str

    @property
    def n_samples(self) -> int | None:
        """The number of lost samples; None if unknown."""
        return None if self.first is None or self.last is None else self.last - self.first + 1


@dataclass
class ShardRepair:
    """The outcome of the repair of one shard.

    `n_kept` is the number of samples in the new dataset. `mended` contains a note for each change.
    """

    name: str
    n_kept: int = 0
    mended: tuple[str, ...] = ()
    losses: list[Loss] = field(default_factory=list)

    @property
    def outcome(self) -> str:
        """The outcome of the repair: "sound", "mended", "damaged" or "lost".

        In a mended shard, no sample is lost; in a damaged one, some; in a lost one, all.
        """
        if self.losses:
            return "damaged" if self.n_kept else "lost"
        return "mended" if self.mended else "sound"

    @property
    def n_lost(self) -> int:
        """The number of lost samples; a loss of unknown size is not counted."""
        return sum(loss.n_samples or 0 for loss in self.losses)

    def add_loss(self, row: int, reason: str) -> None:
        """Record the loss of the sample at `row`. Call this method in ascending order of rows."""
        last = self.losses[-1] if self.losses else None
        if last and last.last == row - 1 and last.reason == reason:
            self.losses[-1] = Loss(last.first, row, reason)
        else:
            self.losses.append(Loss(row, row, reason))

    def __repr__(self) -> str:
        return one_line(self, [self.name], self.outcome, lost=self.n_lost)

    def as_json(self) -> dict[str, Any]:
        """Return a JSON-serializable dict that can be an entry in the `inputs` of a generation."""
        entry: dict[str, Any] = {"path": self.name, "outcome": self.outcome, "samples": self.n_kept}
        if self.mended:
            entry["mended"] = list(self.mended)
        if self.losses:
            entry["reason"] = self.losses[0].reason
            entry["lost"] = [asdict(loss) for loss in self.losses]
        return entry


def _reason_of(shard: ShardRepair) -> str:
    return shard.losses[0].reason if shard.losses else "; ".join(shard.mended)


@dataclass(frozen=True, slots=True)
class RepairReport:
    """The outcome of a repair. `source` was repaired, and `dataset` is the new dataset."""

    source: str
    dataset: Path
    n_samples: int
    shards: tuple[ShardRepair, ...]

    @property
    def n_lost(self) -> int:
        """The number of lost samples; a loss of unknown size is not counted."""
        return sum(shard.n_lost for shard in self.shards)

    @property
    def is_whole(self) -> bool:
        """True if no sample is lost."""
        return not any(shard.losses for shard in self.shards)

    def __repr__(self) -> str:
        outcomes = Counter(f"{shard.outcome}_shards" for shard in self.shards)
        return one_line(self, [self.source, self.dataset], lost=self.n_lost, **outcomes)

    def _repr_html_(self) -> str:
        facts = f"from {self.source}", counted(self.n_samples, "samples"), f"{self.n_lost:,} lost"
        shards = sorted(self.shards, key=lambda shard: shard.outcome == "sound")
        rows = ((s.name, s.outcome, s.n_kept, s.n_lost, _reason_of(s)) for s in shards)
        header = ("shard", "outcome", "kept", "lost", "reason")
        return fragment("RepairReport", self.dataset, facts, table(header, rows, len(shards)))

    def as_json(self) -> dict[str, Any]:
        """Return a JSON-serializable dict."""
        return {
            "source": self.source,
            "dataset": str(self.dataset),
            "samples": self.n_samples,
            "lost": self.n_lost,
            "shards": [shard.as_json() for shard in self.shards],
        }


@displays_progress
@takes_paths("repair(source, out)", "source", outputs=("out",))
def repair(
    source: str | os.PathLike[str], out: str | os.PathLike[str], *, progress: Progress | None = None
) -> RepairReport:
    """Write every undamaged sample of a dataset or shard to a new dataset at `out`.

    The report, and the `inputs` of the new dataset, list the lost samples with the reasons. A shard
    without damage is copied byte for byte, unless the dataset has added columns.

    Args:
        source: the folder of a dataset, whose `dataset.json` may be damaged, or a shard file.
        out: a folder that is missing or empty.
        progress: called in the calling process, at the start and after every shard; or
            True to show a bar on standard error, as `shardio.convert` does.

    Raises:
        DatasetNotFound, ShardNotFound: `source` does not exist, or contains no shard.
        DatasetCorrupt: no sample can be read, because no schema can be read.
        DatasetExists: `out` is not empty.
        InvalidArgument: `out` lies in a dataset, or contains `source`.
        DatasetConflict: another writer removed shards of `source` during the repair.
    """
    before, plan = published_number(source), _plan(os.fspath(source))
    refuse_nested(out, source)
    sizes = [sum(size_of(shard.path) for shard in group) for group in plan.groups]
    repairs: list[ShardRepair] = []
    with GenerationWriter(out, plan.schema) as output:
        state = ShardProgress(progress, "repairing", sizes)
        for group in plan.groups:
            repairs.append(_repair_group(group, output))
            if repairs[-1].losses:
                raise_conflict(source, before)
            state.report_done(is_damaged=bool(repairs[-1].losses))
        repairs += [
            ShardRepair(name, losses=[Loss(None, None, reason)])
            for name, reason in plan.unlisted.items()
        ]
        details = plan.generation.description if plan.generation else {}
        details["inputs"] = [found.as_json() for found in repairs]
        details["operation"] = {"name": "repair"}
        generation = output.publish(**details)
    return RepairReport(os.fspath(source), Path(out), generation.n_samples, tuple(repairs))


def _repair_group(group: Sequence[SourceShard], output: GenerationWriter) -> ShardRepair:
    """Write the undamaged samples of a group to the new dataset; return the outcome."""
    outcome = ShardRepair(group[0].name)
    with ExitStack() as stack:
        readers: list[ShardReader] = []
        for shard in group:
            about = "" if shard is group[0] else f"{shard.name}: "
            try:
                if len(group) == 1 and _copy_if_undamaged(shard, output, outcome):
                    return outcome
                # Each copy needs a name of its own, because all copies are open at the same time.
                copy = output.staging / f"mended-{len(readers)}.shard"
                path, notes = restore_shard(shard.path, copy, shard.schema)
                outcome.mended += tuple(about + note for note in notes)
                reader = stack.enter_context(ShardReader(path))
                _check_identity(reader, shard)
            except (DataError, ShardNotFound) as error:
                reason = about + _reason(error, shard.path)
                if shard.entry is None:
                    outcome.losses.append(Loss(None, None, reason))
                elif n := shard.entry.n_samples:
                    outcome.losses.append(Loss(0, n - 1, reason))
                return outcome
            readers.append(reader)
        _write_samples(readers, output, outcome)
    return outcome


def _copy_if_undamaged(shard: SourceShard, output: GenerationWriter, outcome: ShardRepair) -> bool:
    """Copy a shard if it is undamaged and matches its entry; return True if it was copied."""
    if unreadable_pages(shard.path):
        return False
    examined = verify_file(shard.path)
    if examined.findings or examined.schema != shard.schema.to_json().decode():
        return False
    n_samples = examined.n_samples or 0
    summary = ShardSummary(shard.name, n_samples, examined.n_bytes, examined.id or "")
    if shard.entry not in (None, summary):
        return False
    if n_samples:
        output.add_copy(shard.path, summary)
    outcome.n_kept = n_samples
    return True


def _check_identity(reader: ShardReader, shard: SourceShard) -> None:
    if reader.schema != shard.schema:
        raise DatasetCorrupt("its schema differs from the dataset's")
    entry = shard.entry
    if entry is not None and (reader.id, len(reader)) != (entry.id, entry.n_samples):
        raise DatasetCorrupt(
            f"another shard has replaced it: expected id {entry.id}, found {reader.id}"
        )


def _write_samples(
    readers: Sequence[ShardReader], output: GenerationWriter, outcome: ShardRepair
) -> None:
    for row in range(min(map(len, readers))):
        sample: dict[str, Any] = {}
        try:
            for reader in readers:
                sample |= reader[row]
            output.append(sample)
        except (DataError, SchemaError) as error:
            outcome.add_loss(row, _reason(error, readers[0].path))
        else:
            outcome.n_kept += 1


def _reason(error: Exception, path: str) -> str:
    """Return the reason for a loss, without file and offset, so that adjacent losses can merge."""
    if isinstance(error, ShardCorrupt):
        where = f"field {error.field!r}: " if error.field else ""
        section = f" ({error.section})" if error.section else ""
        return f"{where}{error.what}{section}"[:_MAX_REASON]
    if isinstance(error, SchemaError):
        # Prefer the message of the cause, because it does not contain the path of the new shard.
        return str(error.__cause__ or error)[:_MAX_REASON]
    return str(error).removeprefix(f"{path}: ")[:_MAX_REASON]
