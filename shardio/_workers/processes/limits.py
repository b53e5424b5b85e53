"""The limits on the CPUs and the memory of this process.

The control group of this process and each ancestor of the group may have a limit. Both versions of
the kernel's interface are read, at /sys/fs/cgroup, where every distribution mounts them. `root` is
the root of the file system; tests pass another folder. If a process exceeds the memory limit of its
group, the kernel kills it: call `require` before an allocation.
"""

from __future__ import annotations

import os
import resource
from typing import NamedTuple

from shardio.errors import InsufficientMemory


def control_groups(controller: str, root: str = "/") -> list[tuple[int, str]]:
    """Return the control groups that may limit this process, as (interface version, folder).

    `controller` is "cpu" or "memory". Some folders may not exist: in a container, the kernel may
    report the path of this process's group on the host. Only the topmost folder, that of the
    container's own group, then exists.
    """
    found = []
    for line in read_text(os.path.join(root, "proc/self/cgroup")).splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        folder = os.path.join(root, "sys/fs/cgroup", controller if controllers else "")
        for name in ["", *filter(None, group.split("/"))]:
            if name == "..":  # the group is outside of the container
                break
            folder = os.path.join(folder, name)
            found.append((1 if controllers else 2, folder.rstrip("/")))
    return found


def read_text(path: str) -> str:
    """Read a small kernel file; return "" if it is missing or unreadable."""
    try:
        with open(path, "rb", buffering=0) as file:
            return (file.read() or b"").decode("utf-8", "surrogateescape")
    except OSError:
        return ""


def read_number(path: str) -> int | None:
    """Read a file that contains one integer; return None if the file is missing or has text."""
    text = read_text(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def usable_cpus() -> int:
    """Return the number of CPUs that the affinity and the control groups allow."""
    n_allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    n_cpus, n_quota = n_allowed or 1, quota_cpus()
    return n_cpus if n_quota is None else min(n_cpus, n_quota)


def quota_cpus(root: str = "/") -> int | None:
    """Return the number of CPUs, rounded up, that the control groups' quotas allow, or None."""
    counts = []
    for version, folder in control_groups("cpu", root):
        if version == 2:
            words = read_text(f"{folder}/cpu.max").split()
        else:
            names = "cpu.cfs_quota_us", "cpu.cfs_period_us"
            words = [read_text(f"{folder}/{name}").strip() for name in names]
        if len(words) == 2 and all(word.isdigit() for word in words):  # "max" and -1 mean no quota
            quota_us, period_us = map(int, words)
            counts.append(max(1, -(-quota_us // max(1, period_us))))
    return min(counts, default=None)


_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_DEFAULT_HINT = (
    "use a smaller batch_size, fewer num_workers or less prefetch, read fewer fields, or raise "
    "that limit"
)
_STRICT = 2  # the value of vm.overcommit_memory at which the kernel never overcommits memory


class MemoryLimit(NamedTuple):
    """The number of bytes that a limit leaves, and the name of the limit."""

    n_bytes: int
    name: str


def available_bytes() -> int:
    """Return the bytes that the tightest limit leaves; the page cache counts as available."""
    return tightest().n_bytes


def default_budget() -> int:
    """Return half of the available bytes; the other half is for the program's own data."""
    return available_bytes() // 2


def require(n_bytes: int, what: str, hint: str = _DEFAULT_HINT) -> None:
    """Raise InsufficientMemory unless n_bytes are available for `what`, a plural noun."""
    _require_within(tightest(), n_bytes, what, hint)


def require_page_cache(n_bytes: int, what: str, hint: str) -> None:
    """Raise InsufficientMemory unless the limits of the page cache leave n_bytes for `what`."""
    _require_within(_least(page_cache_limits()), n_bytes, what, hint)


def _require_within(limit: MemoryLimit, n_bytes: int, what: str, hint: str) -> None:
    if n_bytes > limit.n_bytes:
        raise InsufficientMemory(
            f"{what} need {_in_mib(n_bytes)}, but only {_in_mib(limit.n_bytes)} is available "
            f"({limit.name}): {hint}"
        )


def limits(root: str = "/") -> list[MemoryLimit]:
    """Return all limits that files below `root` contain; without /proc, the list is empty."""
    figures = _meminfo(root)
    found = _page_cache_limits(root, figures)
    overcommit = read_number(os.path.join(root, "proc/sys/vm/overcommit_memory"))
    if overcommit == _STRICT and {"CommitLimit", "Committed_AS"} <= figures.keys():
        left_bytes = figures["CommitLimit"] - figures["Committed_AS"]
        name = "CommitLimit, as vm.overcommit_memory is 2"
        found.append(MemoryLimit(max(0, left_bytes), name))
    return found


def page_cache_limits(root: str = "/") -> list[MemoryLimit]:
    """Return the limits that apply to the page cache as well as to allocated memory."""
    return _page_cache_limits(root, _meminfo(root))


def _page_cache_limits(root: str, figures: dict[str, int]) -> list[MemoryLimit]:
    found = []
    if "MemAvailable" in figures:
        found.append(MemoryLimit(figures["MemAvailable"], "MemAvailable of this machine"))
    # A group that may use all memory of the machine leaves at least MemAvailable. Reading its
    # figures would take most of the 0.4 ms of this function, which each new block calls.
    machine_bytes = figures.get("MemTotal") if found else None
    for group in control_groups("memory", root):
        if limit := _group_limit(*group, machine_bytes):
            found.append(limit)
    return found


def tightest() -> MemoryLimit:
    """Return the limit that leaves the fewest bytes; the page cache counts as available."""
    found = limits()
    soft_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft_bytes != resource.RLIM_INFINITY:
        mapped_pages = read_text("/proc/self/statm").partition(" ")[0] or "0"
        left_bytes = soft_bytes - int(mapped_pages) * _PAGE_BYTES
        found.append(MemoryLimit(max(0, left_bytes), "RLIMIT_AS, see `ulimit -v`"))
    return _least(found)


def _least(found: list[MemoryLimit]) -> MemoryLimit:
    if not found:  # on macOS: the total memory of the machine is the best available figure
        return MemoryLimit(os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES, "memory of this machine")
    return min(found)


def _meminfo(root: str) -> dict[str, int]:
    return _parse_key_values(read_text(os.path.join(root, "proc/meminfo")), unit_bytes=1024)


def _group_limit(version: int, folder: str, machine_bytes: int | None) -> MemoryLimit | None:
    """Return the limit minus the memory in use (without page cache).

    Return None if there is no limit, or one of at least `machine_bytes`.
    """
    if version == 2:
        # Above "high", the kernel slows the process down, which is as bad as killing it.
        caps = [read_number(f"{folder}/memory.{name}") for name in ("max", "high")]
        usage = "memory.current"
        cache: tuple[str, ...] = ("active_file", "inactive_file", "slab_reclaimable")
    else:
        caps = [read_number(f"{folder}/memory.limit_in_bytes")]
        usage = "memory.usage_in_bytes"
        cache = ("total_active_file", "total_inactive_file")
    limit_bytes = min((cap for cap in caps if cap is not None), default=None)
    if limit_bytes is None or (machine_bytes is not None and limit_bytes >= machine_bytes):
        return None
    used_bytes = read_number(f"{folder}/{usage}")
    if used_bytes is None:
        return None
    # Count only cached pages of files. The group's figure "cache" also includes shared memory, such
    # as the blocks of loaders, which the kernel cannot reclaim.
    figures = _parse_key_values(read_text(f"{folder}/memory.stat"), unit_bytes=1)
    cache_bytes = min(used_bytes, sum(figures.get(name, 0) for name in cache))
    left_bytes = max(0, limit_bytes - used_bytes + cache_bytes)
    return MemoryLimit(left_bytes, f"the limit of the control group {folder}")


def _parse_key_values(text: str, *, unit_bytes: int) -> dict[str, int]:
    """Parse lines of names and numbers, such as `MemFree:  12 kB` or `shmem 4096`."""
    rows = (line.split() for line in text.splitlines())
    return {
        row[0].rstrip(":"): int(row[1]) * unit_bytes
        for row in rows
        if len(row) >= 2 and row[1].isdigit()
    }


def _in_mib(n_bytes: int) -> str:
    return f"{n_bytes:,} bytes ({n_bytes / 2**20:,.1f} MiB)"
