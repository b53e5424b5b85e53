"""Blocks in large pages: where they lie, what is in them, and what happens where there are none."""

from __future__ import annotations

import errno
import mmap
import os
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from shardio._workers.processes import shared_memory
from shardio._workers.processes.blocks import Block, BlockMap, BlockPool
from shardio._workers.processes.shared_memory import LARGE_BYTES, reserve_memory_file
from shardio.errors import InsufficientMemory

pytestmark = pytest.mark.usefixtures("asked")

SIZES = [LARGE_BYTES, LARGE_BYTES + 1, 3 * LARGE_BYTES - 4096, 5 * LARGE_BYTES + 12345]


class Refusing(mmap.mmap):
    """A map whose pages the kernel does not collapse, or not all of whose are there at once."""

    number = errno.EINVAL

    def madvise(self, *_: int) -> NoReturn:
        raise OSError(self.number, os.strerror(self.number))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what has been observed of the kernel."""
    monkeypatch.setattr(shared_memory._KernelSupport, "is_enabled", True)


def address_of(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def n_large(block: BlockMap) -> int:
    """Return the number of large pages a block is mapped in."""
    maps = Path("/proc/self/smaps").read_text()
    ours = next(m for m in re.split(r"(?m)^(?=[0-9a-f]+-)", maps) if starts_at(block, m))
    found = re.search(r"ShmemPmdMapped: *(\d+) kB", ours)
    return int(found[1]) * 1024 // LARGE_BYTES if found else 0


def starts_at(block: BlockMap, entry: str) -> bool:
    return entry.startswith(f"{address_of(block.bytes):x}-")


def kernel_collapses(n_bytes: int = LARGE_BYTES) -> bool:
    """Return True if this system makes large pages of shared memory on request now."""
    fd = os.memfd_create("a test")
    try:
        os.ftruncate(fd, n_bytes)
        os.posix_fallocate(fd, 0, n_bytes)
        memory, first = shared_memory.map_whole(fd, n_bytes, n_bytes)
        memory.madvise(25, first, n_bytes)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


@pytest.mark.parametrize("n_bytes", SIZES)
def test_a_block_has_its_size_and_all_maps_show_the_same_memory(n_bytes: int) -> None:
    block = Block(0, n_bytes)
    other = BlockMap(block.fd)
    assert os.fstat(block.fd).st_size == len(block.bytes) == len(other.bytes) == n_bytes
    assert address_of(block.bytes) % LARGE_BYTES == address_of(other.bytes) % LARGE_BYTES == 0
    assert not block.bytes.any()
    rng = np.random.default_rng(n_bytes)
    other.bytes[:] = rng.integers(0, 256, n_bytes, np.uint8)
    np.testing.assert_array_equal(block.bytes, other.bytes)
    earlier = block.bytes
    block.grow(n_bytes + 2 * LARGE_BYTES)
    assert not block.bytes[n_bytes:].any()
    np.testing.assert_array_equal(block.bytes[:n_bytes], earlier)
    earlier[0] ^= 255
    assert block.bytes[0] == earlier[0]  # of the same memory
    os.close(block.fd)
    with closing(BlockPool(n_bytes, 1 << 30)) as pool:
        leased = pool.lease(pool.make_extra())
        assert address_of(leased) == address_of(pool[0].bytes)


@pytest.mark.skipif(not kernel_collapses(), reason="this kernel makes no large pages of memfds")
@pytest.mark.parametrize("n_bytes", SIZES)
def test_every_whole_large_page_of_a_block_is_one(n_bytes: int) -> None:
    block = Block(0, n_bytes)
    found = n_large(block), n_large(BlockMap(block.fd))
    os.close(block.fd)
    n_whole = n_bytes // LARGE_BYTES
    if found != (n_whole, n_whole) and not kernel_collapses(n_whole * LARGE_BYTES):
        pytest.skip("memory is in pieces: there are not so many large pages now")
    assert found == (n_whole, n_whole)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOMEM, errno.EAGAIN, errno.EBUSY])
def test_a_block_without_large_pages(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(Refusing, "number", number)
    monkeypatch.setattr(mmap, "mmap", Refusing)
    block = Block(0, LARGE_BYTES + 5)
    assert os.fstat(block.fd).st_blocks * 512 >= LARGE_BYTES + 5  # reserved all the same
    block.bytes[-1] = 7
    assert os.pread(block.fd, 1, LARGE_BYTES + 4) == b"\7"
    os.close(block.fd)
    assert not shared_memory._KernelSupport.is_enabled


@pytest.mark.parametrize(("ns", "is_asked_again"), [(9_900_000, True), (10_100_000, False)])
def test_slow_kernels(monkeypatch: pytest.MonkeyPatch, *, ns: int, is_asked_again: bool) -> None:
    class Collapsing(mmap.mmap):
        def madvise(self, option: int, start: int = 0, n_bytes: int = 0) -> None:
            assert start % 4096 == 0
            clock[0] += ns * (n_bytes // LARGE_BYTES)

    clock = [0]
    monkeypatch.setattr(mmap, "mmap", Collapsing)
    monkeypatch.setattr(shared_memory, "now_ns", lambda: clock[0])
    os.close(reserve_memory_file(20 * LARGE_BYTES, "a test"))
    assert shared_memory._KernelSupport.is_enabled is is_asked_again
    assert clock[0] == ns * (20 if is_asked_again else 16)


def test_a_block_takes_the_last_addresses_there_are() -> None:
    code = f"""
import os, resource
from shardio._workers.processes.blocks import Block
n_mapped = int(open("/proc/self/statm").read().split()[0]) * 4096
n_bytes = 10 * {LARGE_BYTES}
resource.setrlimit(resource.RLIMIT_AS, (n_mapped + n_bytes, resource.RLIM_INFINITY))
block = Block(0, n_bytes)
block.bytes[-1] = 7
assert os.pread(block.fd, 1, n_bytes - 1) == b"\\7"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_block_is_mapped_without_the_number_of_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise InsufficientMemory("no address range is left in this process")

    monkeypatch.setattr(shared_memory, "replace_map", refuse)
    block = Block(0, 2 * LARGE_BYTES)
    block.bytes[-1] = 7
    assert os.pread(block.fd, 1, 2 * LARGE_BYTES - 1) == b"\7"
    os.close(block.fd)
