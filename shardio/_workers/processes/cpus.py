"""How many CPUs this process may use."""

from __future__ import annotations

import os

from shardio._workers.processes.cgroups import Level, levels, read_number, read_text

__all__ = ["quota_cpus", "usable_cpus"]


def usable_cpus() -> int:
    """Count the CPUs this process may use, at least 1: its affinity, capped by its group's quota.

    A quota counts as the next whole number: with 1.5 CPUs, two busy processes use all of it.
    """
    n_allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    n_cpus, n_quota = n_allowed or 1, quota_cpus()
    return n_cpus if n_quota is None else min(n_cpus, n_quota)


def quota_cpus(root: str = "/") -> int | None:
    """Read how many CPUs' worth of time the control groups grant; None without a quota."""
    quotas = (_quota_us(level) for level in levels("cpu", root))
    counts = [max(1, -(-quota // period)) for quota, period in quotas if quota > 0 and period > 0]
    return min(counts, default=None)


def _quota_us(level: Level) -> tuple[int, int]:
    """Read a group's quota and the period that it is for, in microseconds; 0 for none."""
    if level.version == 2:
        quota, _, period = read_text(f"{level.folder}/cpu.max").partition(" ")
        period = period.strip()
        is_set = quota.isdigit() and period.isdigit()
        return (int(quota), int(period)) if is_set else (0, 0)
    quota_us = read_number(f"{level.folder}/cpu.cfs_quota_us")
    period_us = read_number(f"{level.folder}/cpu.cfs_period_us")
    return quota_us or 0, period_us or 0
