"""Verify every byte of all shards of a dataset and of its generations.

Operations that write the samples of a shard to new shards verify the old shard first: new hashes
of damaged data would hide the damage. Workers are processes, because the interpreter lock is held
while small rows are hashed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from shardio._base.classes import listed, one_line
from shardio._base.html import fragment, listing, table
from shardio._base.progress import counted, format_size
from shardio._workers.processes.limits import usable_cpus
from shardio._workers.ray_cluster import LOCAL, Engine, EngineName
from shardio.dataset.external_lists import InputList
from shardio.dataset.generation import Generation, lineage_of
from shardio.dataset.manifest import GENERATIONS, POINTER, generation_numbers, load, load_generation
from shardio.dataset.transaction import raise_conflict
from shardio.errors import DatasetCorrupt, DatasetNotFound, InvalidArgument, ShardUnsupported
from shardio.maintenance.jobs import (
    Progress,
    ShardProgress,
    displays_progress,
    run_jobs,
    size_of,
    takes_paths,
)
from shardio.maintenance.verify import Finding, Findings
from shardio.maintenance.verify.shard import VerifiedShard, verify_file, verify_or_report
from shardio.storage.fs import refuse_links_outside

MAX_BYTES_WITHOUT_WORKERS: Final = 512 << 20
"""If all shards together are smaller than this, they are verified without workers by default."""


@dataclass(frozen=True, slots=True)
class VerificationReport:
    """The outcome of verifying a dataset.

    `unknown` lists the files and folders in the dataset's folder that no generation names. There is
    a finding for each shard in this list, but not for other files. `generation` and `lineage` (the
    dataset's id) are None if `dataset.json` or the published generation cannot be read; all shards
    in the folder are then verified. `n_shards` includes the shards of added columns.
    """

    path: str
    generation: int | None
    lineage: str | None
    n_shards: int
    n_samples: int
    n_bytes: int
    findings: tuple[Finding, ...]
    unknown: tuple[str, ...]

    def __repr__(self) -> str:
        n, codes = len(self.findings), listed(dict.fromkeys(f.code for f in self.findings), 80)
        result = f"{counted(n, 'findings')} ({codes})" if n else "no findings"
        return one_line(self, [self.path], result, unknown_files=len(self.unknown))

    def _repr_html_(self) -> str:
        n = len(self.findings)
        result = counted(n, "findings") if n else "no findings"
        counts = counted(self.n_shards, "shards"), counted(self.n_samples, "samples")
        facts = result, *counts, format_size(self.n_bytes)
        names = ("path", "code", "field", "sample", "message")
        rows = (["" if (v := getattr(f, k)) is None else v for k in names] for f in self.findings)
        parts = table(names, rows, n), listing("unknown files", self.unknown, len(self.unknown))
        return fragment("VerificationReport", self.path, facts, *parts)

    def as_json(self) -> dict[str, Any]:
        """Return a JSON-serializable dict."""
        return {**asdict(self), "findings": [finding.as_json() for finding in self.findings]}


@takes_paths("verify_shard(path)", "path")
def verify_shard(path: str | os.PathLike[str]) -> list[Finding]:
    """Verify every byte of one shard; return a list of findings, which is empty for a sound shard.

    Raises:
        ShardNotFound: there is no such file.
        OSError: the file cannot be opened.
    """
    return list(verify_file(path).findings)


def verify_all(
    root: Path,
    names: Sequence[str],
    workers: int | None,
    progress: Progress | None,
    engine: Engine = LOCAL,
) -> dict[str, VerifiedShard]:
    """Verify the shards `names` in a folder; the other arguments are those of `verify_dataset`."""
    sizes = [size_of(root / name) for name in names]
    is_default = workers is None and not engine.is_ray
    if is_default:
        n_useful = min(len(names), usable_cpus())
        workers = n_useful if n_useful > 1 and sum(sizes) >= MAX_BYTES_WITHOUT_WORKERS else 0
    jobs = run_jobs(
        partial(verify_or_report, Path(os.path.abspath(root)) if engine.is_ray else root),
        names,
        workers=workers,
        engine=engine,
        shared_path=root / POINTER if (root / POINTER).exists() else root,
        preload=verify_or_report.__module__,
        starts_here=is_default,
    )
    found: dict[str, VerifiedShard] = {}
    state = ShardProgress(progress, "verifying", sizes)
    with contextlib.closing(jobs):
        for number, examined in jobs:
            name = names[number]
            findings = tuple(replace(each, path=str(root / name)) for each in examined.findings)
            found[name] = replace(examined, findings=findings)
            state.report_done(number, is_damaged=bool(findings))
    return {name: found[name] for name in names}


@displays_progress
@takes_paths("verify_dataset(folder)", "folder")
def verify_dataset(
    folder: str | os.PathLike[str],
    *,
    workers: int | None = None,
    progress: Progress | None = None,
    engine: EngineName = "local",
    address: str | None = None,
) -> VerificationReport:
    """Verify every byte of every shard of a dataset, and its generations.

    Args:
        folder: the folder of the dataset.
        workers: the number of worker processes; at most one per shard is started. With 0, the
            calling process verifies all shards. By default, this is also done if the shards have
            less than half a GiB in total; otherwise, there is one worker per usable CPU, and the
            calling process verifies shards until the workers have started.
        progress: called in the calling process, at the start and after every shard; or
            True to show a bar on standard error, as `shardio.convert` does.
        engine: "local", or "ray" to use the machines of a Ray cluster. All these machines must be
            able to access the dataset at the path `folder`. `workers` is then the total number of
            processes on all machines.
        address: the address of the Ray cluster, as for `shardio.convert`.

    Raises:
        DatasetNotFound: there is no dataset in `folder`.
        InvalidArgument: `workers` is negative.
        DatasetConflict: another writer has removed shards of the generation in the meantime. This
            is not damage. Verify the generation that is published now.
        WorkerDied: a worker process crashed twice on the same shard.
    """
    if workers is not None and workers < 0:
        raise InvalidArgument(f"workers is {workers}; it must be 0 or more")
    where = Engine(engine, address)
    root = Path(folder)
    generations, findings = _verify_generations(root)
    published = generations[-1] if generations else None
    unknown = _unlisted_files(root, generations)
    if published is not None:
        names = published.names
        upcoming = set[str]()
        with contextlib.suppress(DatasetCorrupt, ShardUnsupported):
            # Do not report the shards of a next generation that a writer may be about to publish.
            upcoming = {*load_generation(root, published.number + 1).names}
        what = "no generation of the dataset names this shard"
        strays = [name for name in unknown if name.endswith(".shard") and name not in upcoming]
        findings += [Finding(str(root / name), "unknown_shard", what) for name in strays]
    else:
        names = [name for name in unknown if name.endswith(".shard")]
        unknown = []
    # The shards of column groups come last. Do not count their samples, which are counted already.
    n_whole = len(published.shards) if published else len(names)
    examined = verify_all(root, names, workers, progress, where)
    if published is not None:
        findings += _compare_with_generation(root, published, examined)
        findings += _removal_findings(root)
        if findings or any(found.findings for found in examined.values()):
            raise_conflict(root, published.number)
    return VerificationReport(
        path=os.fspath(folder),
        generation=published.number if published else None,
        lineage=published.lineage if published else None,
        n_shards=len(names),
        n_samples=sum(examined[name].n_samples or 0 for name in names[:n_whole]),
        n_bytes=sum(found.n_bytes for found in examined.values()),
        findings=(*findings, *(f for found in examined.values() for f in found.findings)),
        unknown=tuple(unknown),
    )


def _verify_generations(root: Path) -> tuple[list[Generation], list[Finding]]:
    """Return all generations that can be read, in ascending order, and the findings.

    If `dataset.json` or the published generation cannot be read, no generations are returned.
    """
    try:
        published = load(root)
    except (DatasetCorrupt, ShardUnsupported) as error:
        return [], [Finding.of(str(root / POINTER), error)]
    found, findings = [], []
    for number in generation_numbers(root):
        if not 0 < number < published.number:
            continue
        try:
            found.append(load_generation(root, number))
        except (DatasetCorrupt, ShardUnsupported) as error:
            place = root / GENERATIONS / f"{number:06d}.json"
            findings.append(Finding.of(str(place), error))
    found.append(published)
    findings += _check_inputs(found)
    for generation in found:
        findings += _check_lineage(root, generation, published)
    return found, findings


def _check_inputs(generations: Sequence[Generation]) -> list[Finding]:
    """Check the external lists of inputs, because loading a generation does not read them."""
    findings = []
    lists = (generation.inputs for generation in generations)
    for inputs in {each.file: each for each in lists if isinstance(each, InputList)}.values():
        try:
            _ = inputs.entries
        except DatasetCorrupt as error:
            findings.append(Finding.of(str(inputs.file.path), error))
    return findings


def _removal_findings(root: Path) -> list[Finding]:
    try:
        load(root)
    except DatasetNotFound:
        message = "the file was removed while the dataset was verified: it cannot be opened now"
        return [Finding(str(root / POINTER), "changed", message)]
    except (DatasetCorrupt, ShardUnsupported) as error:
        return [Finding.of(str(root / POINTER), error)]
    return []


def _check_lineage(root: Path, generation: Generation, published: Generation) -> list[Finding]:
    """Check the lineage: a hash of the first generation, repeated in all later generations."""
    expected = published.lineage
    if generation.number == 1:
        expected = lineage_of(generation.schema, generation.shards)
    if generation.lineage == expected:
        return []
    path = root / GENERATIONS / f"{generation.number:06d}.json"
    message = "the lineage differs from the first generation's"
    return [Finding(str(path), "lineage", message, expected=expected, found=generation.lineage)]


def _unlisted_files(root: Path, generations: Sequence[Generation]) -> list[str]:
    """Return the relative paths of files and folders in `root` that no generation names."""
    known = {POINTER, GENERATIONS}
    known |= {name for generation in generations for name in generation.names}
    found = [name for name in sorted(os.listdir(root)) if name not in known]
    if (root / GENERATIONS).is_dir() and generations:
        numbers = {f"{generation.number:06d}.json" for generation in generations}
        numbers |= {part.path.name for one in generations for part in one.external_lists}
        inside = sorted(os.listdir(root / GENERATIONS))
        found += [f"{GENERATIONS}/{name}" for name in inside if name not in numbers]
    return found


def _compare_with_generation(
    root: Path, published: Generation, examined: dict[str, VerifiedShard]
) -> list[Finding]:
    """Compare the shards with their entries in the generation."""
    found: list[Finding] = []
    for shard, schema in published.files:
        actual, findings = examined[shard.name], Findings(root / shard.name)
        try:
            refuse_links_outside(root, root / shard.name)
        except DatasetCorrupt as error:
            findings.add("outside", str(error).removeprefix(f"{findings.path}: "))
        pairs = {
            "bytes": (shard.n_bytes, actual.n_bytes or None),
            "samples": (shard.n_samples, actual.n_samples),
            "id": (shard.id, actual.id),
            "schema": (schema.to_json().decode(), actual.schema),
        }
        for what, (expected, measured) in pairs.items():
            if measured is not None and measured != expected:
                message = f"the shard and its generation disagree about its {what}"
                findings.add("generation", message, field=None, expected=expected, found=measured)
        found += findings.close()
    return found


def require_sound(
    folder: str | os.PathLike[str],
    workers: int | None,
    progress: Progress | None,
    names: Sequence[str] | None = None,
) -> None:
    """Raise DatasetCorrupt if verifying a dataset, or only its shards `names`, finds damage."""
    if names is None:
        report = verify_dataset(folder, workers=workers, progress=progress)
        findings = [each for each in report.findings if each.code != "unknown_shard"]
    else:
        examined = verify_all(Path(folder), names, workers, progress)
        findings = [each for found in examined.values() for each in found.findings]
    if findings:
        raise DatasetCorrupt(
            f"{os.fspath(folder)}: is damaged, and was not touched: {findings[0]} (findings: "
            f"{len(findings)}; shardio verify lists them, shardio repair saves sound samples)"
        )
