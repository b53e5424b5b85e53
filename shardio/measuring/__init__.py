"""Measurements of a dataset on this machine, and the limits of the machine.

`measure` finds out how fast a dataset loads, and what limits the speed; `stored` measures a dataset
that was just converted.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from dataclasses import dataclass

from shardio._workers.processes import limits, linux
from shardio.errors import UnsupportedEnvironment
from shardio.measuring.measure import Conclusion, LoadingReport, LoadingRun, measure_loading
from shardio.measuring.stored import StoredReport, measure_clips, measure_stored, source_bytes
from shardio.storage.file_access import max_maps

__all__ = [
    "Conclusion",
    "LoadingReport",
    "LoadingRun",
    "MachineLimits",
    "StoredReport",
    "machine_limits",
    "measure_clips",
    "measure_loading",
    "measure_stored",
    "source_bytes",
]


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """The limits of this machine, this process and its control groups."""

    n_cpus: int
    """The CPUs of the machine."""
    n_usable_cpus: int
    """The CPUs that this process may use; the default number of workers."""
    quota_cpus: int | None
    """The CPUs that the quotas of control groups allow; None without a quota."""
    memory_bytes: int
    """The memory that is available; the page cache counts as available."""
    memory_limit: str
    """The name of the limit that `memory_bytes` comes from."""
    max_open_files: int | None
    """The number of files that this process may open (`ulimit -n`); None for no limit."""
    max_raised_open_files: int | None
    """The number that `max_open_files` can be raised to without privileges; None for no limit."""
    max_maps: int
    """The number of memory maps that the kernel allows a process (vm.max_map_count)."""
    missing: tuple[str, ...]
    """The features of the kernel that worker processes need and that are missing."""


def machine_limits() -> MachineLimits:
    """Return the limits of this machine, which a loader or conversion may run into."""
    memory = limits.tightest()
    files = [
        None if n == resource.RLIM_INFINITY else n
        for n in resource.getrlimit(resource.RLIMIT_NOFILE)
    ]
    return MachineLimits(
        n_cpus=os.cpu_count() or 1,
        n_usable_cpus=limits.usable_cpus(),
        quota_cpus=limits.quota_cpus(),
        memory_bytes=memory.n_bytes,
        memory_limit=memory.name,
        max_open_files=files[0],
        max_raised_open_files=files[1],
        max_maps=max_maps(),
        missing=tuple(_missing_features()),
    )


def _missing_features() -> list[str]:
    missing = []
    ways: list[Callable[[], int]] = [lambda: linux.open_pidfd(os.getpid()), linux.memory_file]
    for open_descriptor in ways:
        try:
            os.close(open_descriptor())
        except UnsupportedEnvironment as error:
            missing.append(str(error))
    return missing
