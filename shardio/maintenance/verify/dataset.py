"""Verify every byte of a shard, or of all shards of a dataset and of its generations.

Operations that rewrite shards verify the old shards first: new hashes over damaged data would hide
the damage. Each process verifies one shard at a time. Processes are used rather than threads
because hashing small rows holds the interpreter lock. Also, touching a mapped page that the disk
cannot read kills the process: the death of a worker is reported as a finding. If there are workers,
the main process therefore does not map shards.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from shardio._workers.processes.limits import usable_cpus
from shardio._workers.processes.worker_pool import WorkerExit
from shardio._workers.ray_cluster import LOCAL, Engine, EngineName
from shardio.dataset.external_lists import InputList
from shardio.dataset.generation import Generation, lineage_of
from shardio.dataset.manifest import GENERATIONS, POINTER, generation_numbers, load, load_generation
from shardio.dataset.transaction import raise_conflict
from shardio.errors import (
    DatasetCorrupt,
    DatasetNotFound,
    InvalidArgument,
    ShardIncomplete,
    ShardUnsupported,
)
from shardio.maintenance.jobs import MaintenanceProgress, Progress, run_jobs
from shardio.maintenance.verify import Finding, Findings
from shardio.maintenance.verify.shard import VerifiedShard, verify_file, verify_or_report
from shardio.maintenance.verify.window import access_once
from shardio.storage.content import open_content
from shardio.storage.file_access import Access
from shardio.storage.fs import refuse_links_outside

LITTLE_BYTES: Final = 512 << 20
"""Below this total size, shards are verified without workers."""


@dataclass(frozen=True, slots=True)
class VerificationReport:
    """The outcome of verifying a dataset.

    `unknown` lists files and folders that the dataset does not name, relative to its folder. They
    are not errors, except that a shard that no generation names is also a finding. If
    `dataset.json` or the published generation cannot be read, `generation` and `lineage` are None
    and all shards in the folder are verified. `n_shards` includes the shards of column groups.
    """

    path: str
    generation: int | None
    lineage: str | None
    n_shards: int
    n_samples: int
    n_bytes: int
    findings: tuple[Finding, ...]
    unknown: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return a JSON-serializable dict."""
        return {**asdict(self), "findings": [finding.as_json() for finding in self.findings]}


def verify_shard(
    path: str | os.PathLike[str], *, workers: int = 0, access: Access = "auto"
) -> list[Finding]:
    """Verify every byte of one shard; return the findings, an empty list for a sound shard.

    Args:
        path: the file.
        workers: with 1 or more, verification runs in a separate process.
        access: "mmap" maps the file. Touching a page that the disk cannot read then kills the
            process; in a separate process this is reported as a finding. "pread" reads by offset;
            "auto" does the same, as mapping is not faster for data that is read once.

    Raises:
        InvalidArgument: workers is negative, or `access` is not "auto", "mmap" or "pread".
        ShardNotFound: there is no such file.
        OSError: the file cannot be opened.
    """
    _check_workers(workers)
    access = access_once(access)
    if not workers:
        return list(verify_file(path, access).findings)
    place = Path(path)
    with contextlib.suppress(ShardIncomplete):  # reported as a finding below
        open_content(os.fspath(place), "pread")  # raise ShardNotFound here, not as a finding
    found = verify_all(place.parent, [place.name], 1, None, access)
    return list(found[place.name].findings)


def verify_all(
    root: Path,
    names: Sequence[str],
    workers: int | None,
    progress: Progress | None,
    access: Access = "pread",
    engine: Engine = LOCAL,
) -> dict[str, VerifiedShard]:
    """Verify shards of a folder, as `verify_dataset` does; return the result for each name.

    A shard that cannot be read is a finding.
    """
    sizes = [_size_of(root / name) for name in names]
    n_bytes = sum(sizes)
    takes_part = workers is None and access != "mmap"
    if workers is None and not engine.is_ray:
        workers = min(len(names), usable_cpus())
        if takes_part:
            workers = max(0, workers - 1) if n_bytes >= LITTLE_BYTES else 0
    jobs = run_jobs(
        partial(verify_or_report, Path(os.path.abspath(root)) if engine.is_ray else root, access),
        names,
        workers=workers,
        engine=engine,
        sees=root / POINTER if (root / POINTER).exists() else root,
        preload=verify_or_report.__module__,
        takes_part=takes_part,
        on_crash=partial(_unreadable, root),
    )
    found: dict[str, VerifiedShard] = {}
    n_bytes_done = 0
    report = progress or (lambda _: None)
    report(MaintenanceProgress("verifying", 0, len(names), 0, n_bytes))
    for number, examined in jobs:
        name = names[number]
        findings = tuple(replace(each, path=str(root / name)) for each in examined.findings)
        found[name] = replace(examined, findings=findings)
        n_bytes_done += sizes[number]
        report(MaintenanceProgress("verifying", len(found), len(names), n_bytes_done, n_bytes))
    return {name: found[name] for name in names}


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # a missing or unreadable shard is reported when it is verified


def _unreadable(root: Path, name: str, died: WorkerExit) -> VerifiedShard | None:
    """Return the finding if a worker was killed by SIGBUS because it touched an unreadable page."""
    if died.signal != signal.SIGBUS:
        return None
    findings = Findings(root / name)
    message = "the disk cannot read some of its bytes, or the file was truncated in the meantime"
    findings.add("unreadable", message)
    return VerifiedShard(findings.close(), 0)


def _check_workers(workers: int | None) -> None:
    if workers is not None and workers < 0:
        raise InvalidArgument(f"workers is {workers}; it must be 0 or more")


def verify_dataset(
    folder: str | os.PathLike[str],
    *,
    workers: int | None = None,
    progress: Progress | None = None,
    access: Access = "auto",
    engine: EngineName = "local",
    address: str | None = None,
) -> VerificationReport:
    """Verify every byte of every shard of a dataset, its generations, and their consistency.

    Args:
        folder: the dataset.
        workers: the number of processes, at most one per shard; with 0 all work is done in this
            process. By default, if the shards have less than half a GiB in total, this process
            alone; else one per usable CPU, including this process unless shards are mapped.
        progress: called in this process, at the start and after every shard.
        access: how shards are read, as in `verify_shard`.
        engine: "local", or "ray" to use the machines of a Ray cluster, all of which must see the
            dataset under this path; `workers` is then their total number of processes.
        address: the address of the Ray cluster, as for `shardio.convert`.

    Raises:
        DatasetNotFound: there is no dataset in `folder`.
        InvalidArgument: workers is negative, `access` is invalid, or it is "mmap" on a cluster,
            where an unreadable page could not be recognized.
        DatasetConflict: another writer has removed shards of the generation in the meantime. This
            is not damage: verify the generation that is published now.
        WorkerDied: a worker was killed for another reason than unreadable bytes.
    """
    _check_workers(workers)
    where = Engine(engine, address)
    access = access_once(access)
    if where.is_ray and access == "mmap":
        raise InvalidArgument("access is 'mmap'; with engine='ray' it must be 'pread' or 'auto'")
    root = Path(folder)
    generations, findings = _verify_generations(root)
    published = generations[-1] if generations else None
    unknown = _unknown(root, generations)
    if published is not None:
        names = published.names
        begun = _names_of_next(root, published)
        strays = [name for name in unknown if name.endswith(".shard") and name not in begun]
        findings += [_stray(root / name) for name in strays]
    else:
        names = [name for name in unknown if name.endswith(".shard")]
        unknown = []
    # The files of column groups come last; do not count their samples again.
    n_whole = len(published.shards) if published else len(names)
    examined = verify_all(root, names, workers, progress, access, where)
    if published is not None:
        findings += _disagreements(root, published, examined)
        findings += _departure(root)
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
    """Check `dataset.json` and all generations up to the published one.

    Return the readable generations, the published one last. If the published one is unreadable,
    return an empty list.
    """
    try:
        published = load(root)
    except (DatasetCorrupt, ShardUnsupported) as error:
        return [], [_manifest_finding(root / POINTER, error)]
    found, findings = [], []
    for number in generation_numbers(root):
        if not 0 < number < published.number:
            continue
        try:
            found.append(load_generation(root, number))
        except (DatasetCorrupt, ShardUnsupported) as error:
            place = root / GENERATIONS / f"{number:06d}.json"
            findings.append(_manifest_finding(place, error))
    found.append(published)
    findings += _check_inputs(found)
    for generation in found:
        findings += _check_lineage(root, generation, published)
    return found, findings


def _check_inputs(generations: Sequence[Generation]) -> list[Finding]:
    """Read each external list of inputs once; opening a dataset does not read them."""
    findings = []
    lists = (generation.inputs for generation in generations)
    for inputs in {each.part: each for each in lists if isinstance(each, InputList)}.values():
        try:
            _ = inputs.entries
        except DatasetCorrupt as error:
            findings.append(_manifest_finding(inputs.part.path, error))
    return findings


def _departure(root: Path) -> list[Finding]:
    """Return a finding if the dataset was removed or damaged during verification."""
    try:
        load(root)
    except DatasetNotFound:
        message = "the file was removed while the dataset was verified: it cannot be opened now"
        return [Finding(str(root / POINTER), "changed", message)]
    except (DatasetCorrupt, ShardUnsupported) as error:
        return [_manifest_finding(root / POINTER, error)]
    return []


def _manifest_finding(path: Path, error: Exception) -> Finding:
    code = "unsupported" if isinstance(error, ShardUnsupported) else "dataset"
    return Finding(str(path), code, str(error).removeprefix(f"{path}: "))


def _check_lineage(root: Path, generation: Generation, published: Generation) -> list[Finding]:
    """Compare a generation's lineage with the lineage of the first generation."""
    expected = published.lineage
    if generation.number == 1:
        expected = lineage_of(generation.schema, generation.shards)
    if generation.lineage == expected:
        return []
    path = root / GENERATIONS / f"{generation.number:06d}.json"
    message = "the lineage differs from the first generation's"
    return [Finding(str(path), "lineage", message, expected=expected, found=generation.lineage)]


def _unknown(root: Path, generations: Sequence[Generation]) -> list[str]:
    """Return the entries of the folder that no generation names."""
    known = {POINTER, GENERATIONS}
    known |= {name for generation in generations for name in generation.names}
    found = [name for name in sorted(os.listdir(root)) if name not in known]
    if (root / GENERATIONS).is_dir() and generations:
        numbers = {f"{generation.number:06d}.json" for generation in generations}
        numbers |= {part.path.name for one in generations for part in one.external_lists}
        inside = sorted(os.listdir(root / GENERATIONS))
        found += [f"{GENERATIONS}/{name}" for name in inside if name not in numbers]
    return found


def _names_of_next(root: Path, published: Generation) -> set[str]:
    """Return the shards of a complete generation that is not published yet.

    The writer may be about to publish the generation, so these shards do not count as unknown.
    """
    with contextlib.suppress(DatasetCorrupt, ShardUnsupported):
        return {*load_generation(root, published.number + 1).names}
    return set()


def _stray(path: Path) -> Finding:
    return Finding(str(path), "unknown_shard", "no generation of the dataset names this shard")


def _disagreements(
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
        for what, (expected, is_so) in pairs.items():
            if is_so is not None and is_so != expected:
                message = f"the shard and its generation disagree about its {what}"
                findings.add("generation", message, field=None, expected=expected, found=is_so)
        found += findings.close()
    return found


_NO_DAMAGE = {"unknown_shard"}
"""Codes of findings about the folder that do not concern the dataset's own samples."""


def require_sound(
    folder: str | os.PathLike[str],
    workers: int | None,
    progress: Progress | None,
    names: Sequence[str] | None = None,
) -> None:
    """Verify every byte of a dataset, or only of the shards named.

    Raises:
        DatasetCorrupt: verification has findings; the message quotes the first.
    """
    if names is None:
        report = verify_dataset(folder, workers=workers, progress=progress)
        findings = [each for each in report.findings if each.code not in _NO_DAMAGE]
    else:
        examined = verify_all(Path(folder), names, workers, progress)
        findings = [each for found in examined.values() for each in found.findings]
    if findings:
        raise DatasetCorrupt(
            f"{os.fspath(folder)}: is damaged, and was not touched: {findings[0]} (findings: "
            f"{len(findings)}; shardio verify lists them, shardio repair saves sound samples)"
        )
