from __future__ import annotations

import subprocess
import sys

import pytest

from shardio._workers.processes import linux


class Allocator:
    """Notes what malloc was told."""

    def __init__(self) -> None:
        self.told: dict[int, int] = {}

    def mallopt(self, which: int, n_bytes: int) -> int:
        self.told[which] = n_bytes
        return 1


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    found = Allocator()
    monkeypatch.setattr(linux, "_libc", found)
    for name in ("GLIBC_TUNABLES", *linux._MALLOC_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    return found


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("GLIBC_TUNABLES", "glibc.cpu.hwcaps=-AVX2", {-1: 128 << 20, -3: 32 << 20}),
        ("GLIBC_TUNABLES", "glibc.cpu.hwcaps=-AVX2:glibc.malloc.trim_threshold=131072", {}),
        ("MALLOC_TRIM_THRESHOLD_", "131072", {}),
        ("MALLOC_MMAP_THRESHOLD_", "131072", {}),
        ("MALLOC_MMAP_MAX_", "0", {}),
    ],
)
def test_what_is_freed_is_kept_unless_the_environment_says_something_of_malloc(
    allocator: Allocator,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
    told: dict[int, int],
) -> None:
    monkeypatch.setenv(name, value)
    linux.keep_freed_memory()
    assert allocator.told == told
    monkeypatch.setattr(linux, "_libc", object())  # without mallopt
    linux.keep_freed_memory()


def test_finalizer_of_an_object_that_outlives_the_globals_of_modules() -> None:
    program = """
import sys
from shardio._workers.processes.linux import Finalizer
class Owner: pass
sys._late = Owner()
Finalizer(sys._late, print, "called").atexit = False
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
