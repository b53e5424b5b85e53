"""The limits on CPUs and memory of this process.

Linux organizes processes in a tree of control groups. The group of this process and each of the
group's ancestors can set a limit, so all of them are read. The kernel's interface to the groups has
two versions, and both are supported. In several functions, `root` is the root of the file system;
tests pass another folder to simulate other machines.

If a process allocates more memory than its control group allows, the process gets no error: the
kernel kills it. `require` is therefore called before an allocation, and raises an error that
contains the required and the available number of bytes.
"""

from __future__ import annotations

import os
import re
import resource
from typing import NamedTuple

from shardio.errors import InsufficientMemory

_ESCAPE = re.compile(r"\\([0-7]{3})")


class CgroupLevel(NamedTuple):
    """A control group: the version (1 or 2) of the kernel's interface, and the group's folder."""

    version: int
    folder: str


def levels(controller: str, root: str = "/") -> list[CgroupLevel]:
    """Return the control groups that may limit this process, from its own group to the root.

    `controller` is "cpu" or "memory". A group of version 2 is included even if the controller is
    not enabled in the group. In that case, the folder of the group lacks the controller's files.
    """
    places = _group_paths(read_text(os.path.join(root, "proc/self/cgroup")), controller)
    found = []
    for line in read_text(os.path.join(root, "proc/self/mountinfo")).splitlines():
        left, _, right = line.partition(" - ")
        mount, kind = left.split(), right.split()
        if len(mount) < 5 or len(kind) < 3:
            continue
        version = _version(kind[0], kind[2].split(","), controller)
        if version in places:
            mounted_group, mount_point = (_unescape(text) for text in mount[3:5])
            top = os.path.join(root, mount_point.lstrip("/"))
            below = _relative_group(places[version], mounted_group)
            found += [CgroupLevel(version, folder) for folder in _ancestor_folders(top, below)]
            del places[version]  # a second mount of the same tree adds nothing
    return found


def read_text(path: str) -> str:
    """Read a small kernel file; return "" if it is missing or unreadable."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""


def read_number(path: str) -> int | None:
    """Read a file that contains one integer; return None if the file is missing or has "max"."""
    text = read_text(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _group_paths(text: str, controller: str) -> dict[int, str]:
    """Return {version: group of this process}; `text` has lines `id:controllers:group`."""
    places = {}
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if number == "0" and not controllers:
            places[2] = group
        elif controller in controllers.split(","):
            places[1] = group
    return places


def _version(kind: str, options: list[str], controller: str) -> int:
    if kind == "cgroup2":
        return 2
    return 1 if kind == "cgroup" and controller in options else 0


def _relative_group(group: str, mounted_group: str) -> str:
    """Return the path of `group` relative to `mounted_group`; "" if both are the same group.

    `mounted_group` is the group whose folder is the mount point. In a container, this is often the
    group of the process itself. The kernel shows a group outside of the container's view as
    `/../…`. In that case, only the mounted group can be read, and the result is "".
    """
    below = os.path.relpath(group, mounted_group)
    return "" if below == "." or below.startswith("..") or "/.." in group else below


def _ancestor_folders(top: str, below: str) -> list[str]:
    parts = below.split("/") if below else []
    return [os.path.join(top, *parts[:n]) for n in range(len(parts), -1, -1)]


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use.

    This is the number of CPUs in the affinity of the process or, if lower, the quota of its control
    groups.
    """
    n_allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    n_cpus, n_quota = n_allowed or 1, quota_cpus()
    return n_cpus if n_quota is None else min(n_cpus, n_quota)


def quota_cpus(root: str = "/") -> int | None:
    """Return the number of CPUs that the control groups' quotas allow; None without a quota.

    A fraction is rounded up, because one busy process cannot use a quota of 1.5 CPUs, but two can.
    """
    quotas = (_quota_us(level) for level in levels("cpu", root))
    counts = [max(1, -(-quota // period)) for quota, period in quotas if quota > 0 and period > 0]
    return min(counts, default=None)


def _quota_us(level: CgroupLevel) -> tuple[int, int]:
    """Return the CPU time that a group may use per period, and the period, in microseconds.

    If the group has no quota, one of the numbers is 0 or negative.
    """
    if level.version == 2:
        quota, _, period = read_text(f"{level.folder}/cpu.max").partition(" ")
        period = period.strip()
        is_set = quota.isdigit() and period.isdigit()
        return (int(quota), int(period)) if is_set else (0, 0)
    quota_us = read_number(f"{level.folder}/cpu.cfs_quota_us")
    period_us = read_number(f"{level.folder}/cpu.cfs_period_us")
    return quota_us or 0, period_us or 0


_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_DEFAULT_HINT = (
    "use a smaller batch_size, fewer num_workers or less prefetch, read fewer fields, or raise "
    "that limit"
)
_STRICT = 2  # the value of vm.overcommit_memory at which the kernel never overcommits memory


class MemoryLimit(NamedTuple):
    """A limit on memory: the number of bytes that are still available, and a name for messages."""

    n_bytes: int
    name: str


def available_bytes() -> int:
    """Return the number of bytes that this process can safely allocate now.

    Several limits are compared, and the lowest number counts: the available memory of the machine
    and of each control group (the page cache counts as available), the address space that RLIMIT_AS
    leaves, and the memory that the kernel's limit on committed memory leaves.
    """
    return _tightest().n_bytes


def default_budget() -> int:
    """Return half of the available bytes; the other half is for the program's own data."""
    return available_bytes() // 2


def require(n_bytes: int, what: str, hint: str = _DEFAULT_HINT) -> None:
    """Raise InsufficientMemory unless n_bytes are available.

    The message begins with `what`, a noun that is preferably a plural, and ends with `hint`.
    """
    _require_within(_tightest(), n_bytes, what, hint)


def require_page_cache(n_bytes: int, what: str, hint: str) -> None:
    """Raise InsufficientMemory unless n_bytes are available for the page cache.

    Limits on address space and committed memory are not checked, because cached pages do not count
    towards them.
    """
    _require_within(_least(page_cache_limits()), n_bytes, what, hint)


def _require_within(tightest: MemoryLimit, n_bytes: int, what: str, hint: str) -> None:
    if n_bytes > tightest.n_bytes:
        raise InsufficientMemory(
            f"{what} need {_in_mib(n_bytes)}, but only {_in_mib(tightest.n_bytes)} is available "
            f"({tightest.name}): {hint}"
        )


def limits(root: str = "/") -> list[MemoryLimit]:
    """Return all limits that files below `root` contain; without /proc, the list is empty."""
    return [*page_cache_limits(root), *_commit_limits(root)]


def page_cache_limits(root: str = "/") -> list[MemoryLimit]:
    """Return the limits that apply to the page cache as well as to allocated memory."""
    found = []
    figures = _meminfo(root)
    if "MemAvailable" in figures:
        found.append(MemoryLimit(figures["MemAvailable"], "MemAvailable of this machine"))
    found += [limit for level in levels("memory", root) if (limit := _group_limit(level))]
    return found


def _tightest() -> MemoryLimit:
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


def _commit_limits(root: str) -> list[MemoryLimit]:
    if read_number(os.path.join(root, "proc/sys/vm/overcommit_memory")) != _STRICT:
        return []
    figures = _meminfo(root)
    if not {"CommitLimit", "Committed_AS"} <= figures.keys():
        return []
    left_bytes = figures["CommitLimit"] - figures["Committed_AS"]
    return [MemoryLimit(max(0, left_bytes), "CommitLimit, as vm.overcommit_memory is 2")]


def _group_limit(level: CgroupLevel) -> MemoryLimit | None:
    """Return the memory that is available in a control group; None if the group has no limit.

    This is the limit, minus the memory in use, plus the page cache, which the kernel can reclaim.
    """
    folder = level.folder
    if level.version == 2:
        # Above the limit "high", the kernel slows the process down. For a loader, this is as bad as
        # being killed.
        caps = [read_number(f"{folder}/memory.{name}") for name in ("max", "high")]
        usage = "memory.current"
        cache: tuple[str, ...] = ("active_file", "inactive_file", "slab_reclaimable")
    else:
        caps = [read_number(f"{folder}/memory.limit_in_bytes")]
        usage = "memory.usage_in_bytes"
        cache = ("total_active_file", "total_inactive_file")
    limit_bytes = min((cap for cap in caps if cap is not None), default=None)
    used_bytes = read_number(f"{folder}/{usage}")
    if limit_bytes is None or used_bytes is None:
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
