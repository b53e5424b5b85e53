"""What this machine can do at most: copies of memory; and what of a dataset lies in memory."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np

from shardio.storage.mmap import PAGE_BYTES, is_cached

_SOURCE_BYTES: Final = 64 << 20
"""Larger than what caches hold."""
_LEAST_COPY_BYTES: Final = 1 << 20
_N_PROBES: Final = 256


def copy_bytes_per_s(n_threads: int, block_bytes: int, *, seconds: float) -> float:
    """How many bytes per second are copied from memory into blocks that are used again and again.

    Args:
        n_threads: that copy at the same time, each into a block of its own.
        block_bytes: the size of a block; small ones are copied many at a time.
        seconds: for how long.
    """
    size = min(_SOURCE_BYTES, max(block_bytes, _LEAST_COPY_BYTES))
    source = np.ones(_SOURCE_BYTES, np.uint8)
    blocks = [np.ones(size, np.uint8) for _ in range(n_threads)]
    end_s = time.perf_counter() + seconds

    def copy(block: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> int:
        n_bytes = 0
        while time.perf_counter() < end_s or not n_bytes:
            start = n_bytes % (_SOURCE_BYTES - size + 1)
            np.copyto(block, source[start : start + size])
            n_bytes += size
        return n_bytes

    start_s = time.perf_counter()
    with ThreadPoolExecutor(n_threads) as threads:
        n_bytes = sum(threads.map(copy, blocks))
    return n_bytes / (time.perf_counter() - start_s)


def cached_share(paths: Sequence[str]) -> float | None:
    """Which share of some files lies in the page cache, by a few probes at random places.

    None where the file system does not tell, or there is nothing to probe.
    """
    sizes = [os.path.getsize(path) for path in paths]
    if not sum(sizes):
        return None
    chance = random.Random(0)
    chosen = chance.choices(range(len(paths)), weights=sizes, k=_N_PROBES)
    n_cached = 0
    for number in set(chosen):
        fd = os.open(paths[number], os.O_RDONLY | os.O_CLOEXEC)
        try:
            for _ in range(chosen.count(number)):
                found = is_cached(fd, chance.randrange(sizes[number]) // PAGE_BYTES * PAGE_BYTES)
                if found is None:
                    return None
                n_cached += found
        finally:
            os.close(fd)
    return n_cached / _N_PROBES


def cpu_times() -> tuple[int, int] | None:
    """How long the CPUs of this machine have been idle, and in all; None if it does not say."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            times = [int(word) for word in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return None
    return times[3] + times[4], sum(times)


def idle_share(before: tuple[int, int] | None, after: tuple[int, int] | None) -> float | None:
    """The share of CPU time that was idle between two answers of `cpu_times`."""
    if before is None or after is None or after[1] == before[1]:
        return None
    return (after[0] - before[0]) / (after[1] - before[1])
