"""Verification in the background, and the rows that its findings are about."""

from __future__ import annotations

import os
from typing import Any, Final

import shardio
from shardio.maintenance import Finding, MaintenanceProgress, verify_dataset
from shardio_tools.output import decode_names, format_count
from shardio_tools.view.jobs import Job, Jobs
from shardio_tools.view.source import Source

_KIND: Final = "verification"
_N_LISTED: Final = 1000
_N_WORKERS: Final = 2
_LARGE_BYTES: Final = 1 << 30
"""The size from which worker processes verify; smaller datasets are verified in a thread."""


class Verification:
    """The damage of a dataset, as far as it has been looked for."""

    def __init__(self, source: Source, jobs: Jobs) -> None:
        self._source, self._jobs = source, jobs
        self._by_row: dict[int, str] = {}
        self._by_shard: dict[int, str] = {}
        self._findings: list[dict[str, Any]] = []
        self._n_findings = self._n_checked = 0

    def start(self) -> None:
        """Verify every byte in the background.

        Raises:
            InvalidArgument: the dataset is in an object store.
        """
        if self._source.is_remote:
            raise shardio.InvalidArgument(
                "datasets in object stores are verified where a copy is: download it, or run "
                "shardio verify on a machine that mounts it"
            )
        self._jobs.start(_KIND, self._verify)

    def _verify(self, job: Job) -> None:
        def show(state: MaintenanceProgress) -> None:
            self._n_checked = state.n_shards_done
            share = state.n_bytes_done / max(1, state.n_bytes)
            job.report(share, f"{state.n_shards_done:,} of {format_count(state.n_shards, 'shard')}")

        dataset = self._source.dataset
        n_bytes = dataset.shards.n_bytes if dataset is not None else 0
        workers = _N_WORKERS if n_bytes >= _LARGE_BYTES else 0
        found = verify_dataset(self._source.path, workers=workers, progress=show)
        places = _places(dataset) if dataset is not None else {}
        by_row: dict[int, str] = {}
        by_shard: dict[int, str] = {}
        for finding in found.findings:
            shard = places.get(os.path.basename(finding.path))
            text = decode_names(str(finding))
            if shard is None or dataset is None:
                continue
            if finding.sample is None:
                by_shard.setdefault(shard, text)
            else:
                by_row.setdefault(int(dataset.shard_starts[shard]) + finding.sample, text)
        listed = (_describe(each, dataset, places) for each in found.findings[:_N_LISTED])
        self._findings, self._n_findings = [*listed], len(found.findings)
        self._by_row, self._by_shard = by_row, by_shard

    def as_json(self) -> dict[str, Any]:
        """Return the state of the verification and its findings."""
        job = self._jobs.get(_KIND)
        return {
            "state": job.state if job else "none",
            "progress": job.progress if job else 0,
            "text": decode_names(job.text) if job else "",
            "n_checked": self._n_checked,
            "findings": self._findings,
            "n_findings": self._n_findings,
        }

    def clear(self) -> None:
        """Cancel the job and discard its findings, because another generation is shown."""
        self._jobs.forget(_KIND)
        self._by_row, self._by_shard, self._findings = {}, {}, []
        self._n_findings = self._n_checked = 0

    def damage(self, dataset: shardio.ShardDataset, row: int) -> str | None:
        """Return what was found about a row or its shard; None if nothing was."""
        if (text := self._by_row.get(row)) is not None or not self._by_shard:
            return text
        shard = int(dataset.shard_starts.searchsorted(row, side="right")) - 1
        return self._by_shard.get(shard)


def _places(dataset: shardio.ShardDataset) -> dict[str, int]:
    """Return the index of each shard by the name of its file, also of added columns."""
    groups = (dataset.shards, *dataset.column_groups.values())
    return {name: i for group in groups for i, name in enumerate(group.names())}


def _describe(
    finding: Finding, dataset: shardio.ShardDataset | None, places: dict[str, int]
) -> dict[str, Any]:
    name = os.path.basename(finding.path)
    shard, row = places.get(name), None
    if shard is not None and dataset is not None and finding.sample is not None:
        row = int(dataset.shard_starts[shard]) + finding.sample
    return {
        "row": row,
        "shard": decode_names(name),
        "field": finding.field,
        "code": finding.code,
        "text": decode_names(finding.message),
    }
