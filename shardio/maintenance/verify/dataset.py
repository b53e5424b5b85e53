"""Verify every byte of a shard, or of all shards of a dataset and of its generations.

Operations that rewrite shards verify the old shards first: new hashes over damaged data would hide
the damage.

`survey_shard` reads only the metadata. A shard that breaks any rule cannot be opened, but a survey
reads as much of the metadata as possible, from the last page if the first is damaged.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from shardio._workers.ray_cluster import Engine, EngineName
from shardio.dataset.external_lists import InputList
from shardio.dataset.generation import Generation, lineage_of
from shardio.dataset.manifest import GENERATIONS, POINTER, load, load_generation
from shardio.dataset.transaction import raise_conflict
from shardio.errors import (
    DataError,
    DatasetCorrupt,
    DatasetNotFound,
    InvalidArgument,
    ShardIncomplete,
    ShardUnsupported,
)
from shardio.format.layout import NO_FIELD, PAGE, Header, Kind, Section, unpack_header, unpack_table
from shardio.format.schema import Schema
from shardio.maintenance.verify.findings import Finding, Findings
from shardio.maintenance.verify.runner import VerificationProgress, verify_all
from shardio.maintenance.verify.shard import VerifiedShard, verify_file
from shardio.maintenance.verify.window import access_once
from shardio.shard.reader import open_sections, read_schema
from shardio.storage.content import Content, open_content
from shardio.storage.file_access import Access
from shardio.storage.fs import refuse_links_outside

_Sections = dict[tuple[int, int, int], Section]


@dataclass(frozen=True, slots=True)
class Survey:
    """The readable metadata of one shard; `findings` has the errors, with file offsets.

    A shard without findings can be opened. Unreadable parts are None or empty.
    """

    path: str
    n_bytes: int
    findings: tuple[Finding, ...]
    header: Header | None = None
    schema: Schema | None = None
    sections: tuple[Section, ...] = ()

    def field_of(self, section: Section) -> str | None:
        """Return the name of the field that a section belongs to, if any."""
        if section.field == NO_FIELD:
            return None
        names = list(self.schema or {})
        return names[section.field] if section.field < len(names) else f"number {section.field}"


def survey_shard(path: str | os.PathLike[str], *, access: Access = "auto") -> Survey:
    """Read the metadata of a shard, damaged or not.

    Args:
        path: the file.
        access: as in `verify_shard`.

    Raises:
        InvalidArgument: `access` is not "auto", "mmap" or "pread".
        ShardNotFound: there is no such file.
        OSError: the file cannot be opened.
    """
    findings = Findings(path)
    name = findings.path
    try:
        content, _ = open_content(name, access_once(access))
    except ShardIncomplete as error:
        findings.add("incomplete", str(error).removeprefix(f"{name}: "))
        return Survey(name, 0, findings.close())
    with findings.catching():
        header, schema, sections = open_sections(content, name)
        return Survey(name, content.nbytes, (), header, schema, tuple(sections.values()))
    return _salvage(content, name, findings.close())


def _salvage(content: Content, path: str, refusal: tuple[Finding, ...]) -> Survey:
    """Read the remaining metadata of a shard that could not be opened, part by part."""
    header = _any_header(content, path)
    further = Findings(path)
    sections = _sections(content, header, further) if header else {}
    schema = _schema(content, sections, further)
    findings = (*refusal, *(f for f in further.close() if f not in refusal))
    return Survey(path, content.nbytes, findings, header, schema, tuple(sections.values()))


def _any_header(content: Content, path: str) -> Header | None:
    """Return the header of the first page, else of the last page; None if both are damaged."""
    if content.nbytes < PAGE:
        return None
    for offset in (0, content.nbytes - PAGE):
        try:
            return unpack_header(bytes(content[offset : offset + PAGE]), path, offset=offset)
        except DataError:
            continue  # the error was recorded when opening; the other page may still help
    return None


def _sections(content: Content, header: Header, findings: Findings) -> _Sections:
    end = header.table_offset + header.table_size
    if end > content.nbytes:
        return {}  # the file is truncated, which is recorded already
    with findings.catching():
        table = bytes(content[header.table_offset : end])
        return {s.key: s for s in unpack_table(table, header, findings.path)}
    return {}


def _schema(
    content: Content, sections: Mapping[tuple[int, int, int], Section], findings: Findings
) -> Schema | None:
    schema = sections.get((Kind.SCHEMA, NO_FIELD, 0))
    if schema is None or schema.offset + schema.size > content.nbytes:
        return None
    with findings.catching():
        return read_schema(content, dict(sections), findings.path)
    return None


_GENERATION_NAME: Final = re.compile(r"[0-9]{6}\.json")


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


def _check_workers(workers: int | None) -> None:
    if workers is not None and workers < 0:
        raise InvalidArgument(f"workers is {workers}; it must be 0 or more")


def verify_dataset(
    folder: str | os.PathLike[str],
    *,
    workers: int | None = None,
    progress: Callable[[VerificationProgress], None] | None = None,
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
        names = [shard.name for shard, _ in published.files]
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
    for name in sorted(os.listdir(root / GENERATIONS)):
        number = int(name.removesuffix(".json")) if _GENERATION_NAME.fullmatch(name) else 0
        if not 0 < number < published.number:
            continue
        try:
            found.append(load_generation(root, number))
        except (DatasetCorrupt, ShardUnsupported) as error:
            findings.append(_manifest_finding(root / GENERATIONS / name, error))
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
    known |= {shard.name for generation in generations for shard, _ in generation.files}
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
        following = load_generation(root, published.number + 1)
        return {shard.name for shard, _ in following.files}
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


@dataclass(frozen=True, slots=True)
class MaintenanceProgress:
    """The progress of an operation; `step` is "verifying", "writing" or "counting"."""

    step: str
    n_shards_done: int
    n_shards: int
    n_bytes_done: int
    n_bytes: int


Progress = Callable[[MaintenanceProgress], None]


def ends_of(sizes: Iterable[int]) -> list[int]:
    """Return the cumulative sizes, starting with 0, for progress reports."""
    return list(accumulate(sizes, initial=0))


def report_step(progress: Progress | None, step: str, n_done: int, ends: Sequence[int]) -> None:
    """Report that n_done shards are done; `ends` are the cumulative sizes from `ends_of`."""
    if progress is not None:
        progress(MaintenanceProgress(step, n_done, len(ends) - 1, ends[n_done], ends[-1]))


def require_sound(
    folder: str | os.PathLike[str], workers: int | None, progress: Progress | None
) -> None:
    """Verify every byte of a dataset.

    Raises:
        DatasetNotFound: there is no dataset in `folder`.
        DatasetCorrupt: verification has findings; the message quotes the first.
    """
    report = verify_dataset(folder, workers=workers, progress=_verification_progress(progress))
    _refuse(folder, [f for f in report.findings if f.code not in _NO_DAMAGE])


def require_sound_shards(
    folder: str | os.PathLike[str],
    names: Sequence[str],
    workers: int | None,
    progress: Progress | None,
) -> None:
    """Verify every byte of some shards of a dataset.

    Raises:
        DatasetCorrupt: verification has findings; the message quotes the first.
    """
    examined = verify_all(Path(folder), names, workers, _verification_progress(progress))
    _refuse(folder, [f for found in examined.values() for f in found.findings])


def _verification_progress(
    progress: Progress | None,
) -> Callable[[VerificationProgress], None] | None:
    if progress is None:
        return None
    return lambda state: progress(MaintenanceProgress("verifying", *astuple(state)))


def _refuse(folder: str | os.PathLike[str], findings: Sequence[Finding]) -> None:
    if findings:
        raise DatasetCorrupt(
            f"{os.fspath(folder)}: is damaged, and was not touched: {findings[0]} (findings: "
            f"{len(findings)}; shardio verify lists them, shardio repair saves sound samples)"
        )
