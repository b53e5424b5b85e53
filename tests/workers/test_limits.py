"""The limits of memory and CPUs, on machines that are folders of files."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from shardio._workers.processes import limits as module
from shardio._workers.processes.limits import (
    MemoryLimit,
    available_bytes,
    default_budget,
    limits,
    quota_cpus,
    require,
    usable_cpus,
)
from shardio.errors import InsufficientMemory

MIB = 2**20


def write(root: Path, files: dict[str, object]) -> str:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return str(root)


def machine(available_mib: int = 8000, **more: int) -> dict[str, object]:
    figures = {"MemTotal": 16000, "MemFree": 10, "MemAvailable": available_mib} | more
    return {"proc/meminfo": "\n".join(f"{k}: {v * 1024} kB" for k, v in figures.items())}


def v1(folder: str, limit: int, usage: int, cache: int = 0) -> dict[str, object]:
    base = f"sys/fs/cgroup/memory{folder}"
    stat = (
        f"cache {usage}\nshmem {usage - cache}\n"
        f"total_active_file {cache // 4}\ntotal_inactive_file {cache - cache // 4}"
    )
    return {
        f"{base}/memory.limit_in_bytes": limit,
        f"{base}/memory.usage_in_bytes": usage,
        f"{base}/memory.stat": stat,
    }


def v2(
    folder: str, limit: object, usage: int, cache: int = 0, high: object = "max"
) -> dict[str, object]:
    base = f"sys/fs/cgroup{folder}"
    return {
        f"{base}/memory.max": limit,
        f"{base}/memory.high": high,
        f"{base}/memory.current": usage,
        f"{base}/memory.stat": f"file {usage}\nshmem 5\nactive_file {cache}\ninactive_file 0",
    }


def in_v1(group: str) -> dict[str, object]:
    return {"proc/self/cgroup": f"9:cpu,cpuacct:/elsewhere\n4:memory:{group}\n0::/"}


def in_v2(group: str) -> dict[str, object]:
    return {"proc/self/cgroup": f"0::{group}"}


def least(root: str) -> int:
    return min(limits(root)).n_bytes


def test_without_control_groups_what_the_machine_has_available_counts(tmp_path: Path) -> None:
    root = write(tmp_path, machine(available_mib=300))
    assert limits(root) == [MemoryLimit(300 * MIB, "MemAvailable of this machine")]
    assert quota_cpus(root) is None
    assert limits(str(tmp_path / "empty")) == []


def test_strict_overcommit_caps_at_what_is_not_yet_committed(tmp_path: Path) -> None:
    figures = machine(available_mib=300, CommitLimit=500, Committed_AS=400)
    lenient = write(tmp_path / "a", figures | {"proc/sys/vm/overcommit_memory": 0})
    strict = write(tmp_path / "b", figures | {"proc/sys/vm/overcommit_memory": 2})
    assert (least(lenient), least(strict)) == (300 * MIB, 100 * MIB)


@pytest.mark.parametrize("version", [1, 2])
def test_a_group_leaves_its_limit_less_use_plus_cache(tmp_path: Path, version: int) -> None:
    group = in_v1("/job") if version == 1 else in_v2("/job")
    figures = (v1 if version == 1 else v2)("/job", 200 * MIB, 150 * MIB, 40 * MIB)
    assert least(write(tmp_path, machine() | group | figures)) == 90 * MIB


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("limit", [16000 * MIB, 9223372036854771712])
def test_a_group_that_may_use_the_whole_machine_is_no_limit(
    tmp_path: Path, version: int, limit: int
) -> None:
    group = in_v1("/job") if version == 1 else in_v2("/job")
    figures = (v1 if version == 1 else v2)("/job", limit, 7000 * MIB, 40 * MIB)
    found = limits(write(tmp_path / "a", machine() | group | figures))
    assert found == [MemoryLimit(8000 * MIB, "MemAvailable of this machine")]
    (alone,) = limits(write(tmp_path / "b", group | figures))  # without /proc/meminfo
    assert alone.n_bytes == limit - 6960 * MIB


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_level_above_the_process_counts(tmp_path: Path, version: int) -> None:
    files = in_v1("/a/b/c") if version == 1 else in_v2("/a/b/c")
    group = v1 if version == 1 else v2
    files |= group("/a/b/c", 900 * MIB, 0) | group("/a/b", 800 * MIB, 750 * MIB)
    files |= group("/a", 700 * MIB, 100 * MIB)
    found = min(limits(write(tmp_path, machine() | files)))
    assert found.n_bytes == 50 * MIB
    assert found.name.endswith("/a/b")


@pytest.mark.parametrize(
    ("files", "n_mib"),
    [
        pytest.param(in_v2("/a/mine") | v2("/a/two", MIB, 0) | v2("/b", MIB, 0), 8000, id="others"),
        pytest.param(in_v2("/job") | v2("/job", 10 * MIB, 12 * MIB), 0, id="over the limit"),
        pytest.param(in_v2("/job") | v2("/job", "max", 12 * MIB), 8000, id="no limit"),
        pytest.param(in_v2("/a") | v2("/a", 500 * MIB, 12 * MIB, high=112 * MIB), 100, id="high"),
        pytest.param(in_v1("/docker/1f") | v1("", 200 * MIB, 20 * MIB), 180, id="container"),
        pytest.param(
            in_v2("/../b") | v2("", 200 * MIB, 20 * MIB) | v2("/b", MIB, 0), 180, id="out of sight"
        ),
    ],
)
def test_limits_of_own_groups(tmp_path: Path, files: dict[str, object], n_mib: int) -> None:
    assert least(write(tmp_path, machine() | files)) == n_mib * MIB


def test_a_demand_above_the_limits_names_both_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [MemoryLimit(9 * MIB, "a box"), MemoryLimit(3 * MIB, "b")]
    monkeypatch.setattr(module, "limits", lambda: found)
    assert (available_bytes(), default_budget()) == (3 * MIB, 3 * MIB // 2)
    require(3 * MIB, "3 blocks")
    said = r"4 blocks need 4,194,304 bytes .* 3,145,728 bytes .*\(b\).* batch_size"
    with pytest.raises(InsufficientMemory, match=said):
        require(4 * MIB, "4 blocks")


def test_the_machines_size_counts_where_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "limits", list[MemoryLimit])
    n_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert available_bytes() == n_bytes


def test_a_limit_of_the_address_space_counts_with_what_is_mapped_already() -> None:
    program = (
        "import mmap, resource\n"
        "from shardio._workers.processes import limits as memory\n"
        "memory.limits = list\n"  # this machine may have less
        "limit = 2 << 30\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))\n"
        "before = memory.available_bytes()\n"
        "kept = mmap.mmap(-1, 64 << 20)\n"
        "print(before < limit, before - memory.available_bytes() >= 64 << 20)\n"
    )
    if resource.getrlimit(resource.RLIMIT_AS)[1] != resource.RLIM_INFINITY:
        pytest.skip("the address space is limited here already")
    said = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert said.split() == ["True", "True"]


# CPUs.


@pytest.mark.parametrize(
    ("version", "quota", "expected"),
    [
        (2, "max 100000", None),
        (2, "100000 100000", 1),
        (2, "150000 100000", 2),
        (2, "1000 100000", 1),
        (1, "-1", None),
        (1, "250000", 3),
        (1, "200000", 2),
    ],
)
def test_quotas_round_up(tmp_path: Path, version: int, quota: str, expected: int | None) -> None:
    if version == 2:
        files = in_v2("/a/b") | {"sys/fs/cgroup/a/b/cpu.max": quota}
    else:
        base = "sys/fs/cgroup/cpu/a/b/cpu.cfs"
        files = {f"{base}_quota_us": quota, f"{base}_period_us": "100000"}
        files["proc/self/cgroup"] = "3:cpu,cpuacct:/a/b"
    assert quota_cpus(write(tmp_path, files)) == expected


def test_the_tightest_quota_above_the_process_counts(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/a/b/cpu.max": "400000 100000",
        "sys/fs/cgroup/a/cpu.max": "90000 30000",
        "sys/fs/cgroup/c/cpu.max": "100000 100000",
    }
    assert quota_cpus(write(tmp_path, in_v2("/a/b") | files)) == 3


def test_affinity_and_quota_are_both_caps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 5})
    counts = []
    for quota in (None, 2, 8):
        monkeypatch.setattr(module, "quota_cpus", lambda quota=quota: quota)
        counts.append(usable_cpus())
    assert counts == [3, 2, 3]


def test_without_affinity_every_cpu_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    monkeypatch.setattr(module, "quota_cpus", lambda: None)
    assert usable_cpus() == 7
