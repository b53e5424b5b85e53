from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardio._workers.processes import limits
from shardio._workers.processes.limits import quota_cpus, usable_cpus

V2 = {
    "proc/self/cgroup": "0::/a/b",
    "proc/self/mountinfo": "41 31 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
}
V1 = {
    "proc/self/cgroup": "3:cpu,cpuacct:/a/b",
    "proc/self/mountinfo": "41 31 0:38 / /sys/fs/cgroup rw - cgroup cgroup rw,cpu,cpuacct",
}


def write(root: Path, files: dict[str, str]) -> str:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    return str(root)


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", None), ("100000 100000", 1), ("150000 100000", 2), ("1000 100000", 1)],
)
def test_a_quota_of_version_2_counts_as_the_next_whole_number(
    tmp_path: Path, quota: str, expected: int | None
) -> None:
    root = write(tmp_path, V2 | {"sys/fs/cgroup/a/b/cpu.max": quota})
    assert quota_cpus(root) == expected


@pytest.mark.parametrize(("quota", "expected"), [("-1", None), ("250000", 3), ("200000", 2)])
def test_a_quota_of_version_1_counts_as_the_next_whole_number(
    tmp_path: Path, quota: str, expected: int | None
) -> None:
    base = "sys/fs/cgroup/a/b/cpu.cfs_"
    root = write(tmp_path, V1 | {f"{base}quota_us": quota, f"{base}period_us": "100000"})
    assert quota_cpus(root) == expected


def test_the_tightest_quota_above_the_process_counts(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/a/b/cpu.max": "400000 100000",
        "sys/fs/cgroup/a/cpu.max": "90000 30000",
        "sys/fs/cgroup/c/cpu.max": "100000 100000",
    }
    assert quota_cpus(write(tmp_path, V2 | files)) == 3


def test_without_control_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert quota_cpus(str(tmp_path)) is None


def test_affinity_and_quota_are_both_caps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 5})
    counts = []
    for quota in (None, 2, 8):
        monkeypatch.setattr(limits, "quota_cpus", lambda quota=quota: quota)
        counts.append(usable_cpus())
    assert counts == [3, 2, 3]


def test_without_affinity_every_cpu_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    monkeypatch.setattr(limits, "quota_cpus", lambda: None)
    assert usable_cpus() == 7
