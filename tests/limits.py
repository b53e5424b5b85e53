"""Temporary limits of this process, and what it has open."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def files_of_at_most(n_bytes: int) -> Iterator[None]:
    """Limit the files that this process and its children write to n_bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def n_open(path: str | Path) -> int:
    """Return the number of descriptors this process has of files in a folder."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{fd}").startswith(str(path))
        except FileNotFoundError:
            continue  # that of the listing itself
    return found
