from __future__ import annotations

import errno
import gc
import mmap
import os
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any, NoReturn

import numpy as np
import pytest

from shardio._workers.processes.blocks import Block, BlockMap, BlockPool
from shardio._workers.processes.shared_memory import LARGE_BYTES, reserve_memory_file
from shardio.errors import InsufficientMemory

KIB = 1024
MIB = 1024 * KIB


def n_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def n_maps() -> int:
    """Return the number of maps of blocks this process has."""
    with open("/proc/self/maps") as maps:
        return sum("memfd:shardio" in line for line in maps)


def refusing(number: int) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return refuse


# Memory files.


def test_a_memory_file_is_reserved_and_nobody_can_take_mapped_pages_away() -> None:
    fd = reserve_memory_file(MIB, "a test")
    try:
        found = os.fstat(fd)
        assert (found.st_size, found.st_blocks * 512, found.st_nlink) == (MIB, MIB, 0)
        assert not os.get_inheritable(fd)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, MIB - 1)
        os.ftruncate(fd, 2 * MIB)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, MIB)
    finally:
        os.close(fd)


@pytest.mark.usefixtures("swept")
def test_a_memory_file_larger_than_memory_is_refused_before_anything_is_reserved() -> None:
    before = n_descriptors()
    with pytest.raises(InsufficientMemory, match="3 elephants need"):
        reserve_memory_file(1 << 60, "3 elephants")
    with pytest.raises(InsufficientMemory, match="a block need"):
        BlockPool(1 << 60, 1 << 61).make()
    assert n_descriptors() == before


@pytest.mark.usefixtures("swept")
@pytest.mark.parametrize(
    ("number", "kind", "said"),
    [
        (errno.ENOMEM, InsufficientMemory, f"refused {MIB} bytes for a test"),
        (errno.ENOSPC, InsufficientMemory, f"refused {MIB} bytes for a test"),
        (errno.EINTR, InterruptedError, "Interrupted"),
    ],
)
def test_memory_that_others_took_meanwhile_is_memory_short_and_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception], said: str
) -> None:
    before = n_descriptors()
    monkeypatch.setattr(os, "posix_fallocate", refusing(number))
    with pytest.raises(kind, match=said):
        reserve_memory_file(MIB, "a test")
    assert n_descriptors() == before


@pytest.mark.usefixtures("swept")
def test_an_unmappable_block_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    before = n_descriptors()
    monkeypatch.setattr(mmap, "mmap", refusing(errno.ENOMEM))
    with pytest.raises(InsufficientMemory, match="the map of a block"):
        Block(0, MIB)
    assert n_descriptors() == before


# Maps of one block, as main and a worker have them.


@pytest.fixture
def block() -> Any:
    made = Block(0, 64 * KIB)
    yield made
    os.close(made.fd)


def test_a_block_grows_to_whole_pages_and_never_shrinks(block: Block) -> None:
    block.grow(64 * KIB + 1)
    assert len(block.bytes) == os.fstat(block.fd).st_size == 68 * KIB
    block.grow(1)
    assert len(block.bytes) == 68 * KIB


def test_growth_asks_for_memory_first(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InsufficientMemory, match="values of varying size need"):
        block.grow(1 << 60)
    monkeypatch.setattr(os, "posix_fallocate", refusing(errno.ENOMEM))
    with pytest.raises(InsufficientMemory, match="refused"):
        block.grow(MIB)
    assert len(block.bytes) == 64 * KIB


def test_a_trimmed_block_gets_its_memory_again_before_it_is_written_to(block: Block) -> None:
    worker = BlockMap(block.fd)
    worker.bytes[:] = 7
    block.trim(10 * KIB)
    assert (block.backed_bytes(), len(block.bytes)) == (12 * KIB, 64 * KIB)
    worker.grow(30 * KIB)
    assert block.backed_bytes() == 32 * KIB
    assert worker.bytes[: 12 * KIB].min() == 7 and not worker.bytes[12 * KIB :].any()


class Pins:
    """Stands for a device: it notes what is pinned, and that it is mapped until unpinned."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.n_pinned = 0

    def __call__(self, memory: Any) -> Callable[[], None]:
        self.sizes.append(len(memory))
        self.n_pinned += 1
        address = f"{memory.ctypes.data:x}-"

        def unpin() -> None:
            with open("/proc/self/maps") as maps:
                assert any(line.startswith(address) for line in maps), "unmapped while pinned"
            self.n_pinned -= 1

        return unpin


def test_a_block_is_pinned_once_for_each_map_and_unpinned_before_it_is_unmapped(
    block: Block,
) -> None:
    pins = Pins()
    for _ in range(2):
        block.pin(pins)
    assert (pins.sizes, pins.n_pinned) == ([64 * KIB], 1)
    block.grow(80 * KIB)
    assert pins.n_pinned == 0
    block.pin(pins)
    assert (pins.sizes, pins.n_pinned) == ([64 * KIB, 80 * KIB], 1)
    for _ in range(2):
        block.unpin()
    assert pins.n_pinned == 0


# The pool.


@pytest.fixture
def pool() -> Any:
    made = BlockPool(64 * KIB, budget=4 * 64 * KIB)
    yield made
    made.close()


def test_a_closed_pool_has_unpinned_its_blocks_also_those_that_are_leased() -> None:
    pins, pool = Pins(), BlockPool(64 * KIB, budget=4 * 64 * KIB)
    for _ in range(3):
        pool[pool.make_extra()].pin(pins)
    lease = pool.lease(1)
    pool.close()
    assert (pins.n_pinned, len(lease)) == (0, 64 * KIB)


def test_blocks_are_made_up_to_the_budget_and_there_is_always_a_first_one(pool: BlockPool) -> None:
    assert [pool.make() for _ in range(6)] == [0, 1, 2, 3, None, None]
    assert (len(pool), pool.n_bytes, pool[1].number, pool.take_idle()) == (4, 256 * KIB, 1, None)
    pool.give_back(0)
    pool.give_back(1)
    assert {pool.take_idle(), pool.take_idle()} == {0, 1}
    with closing(BlockPool(64 * KIB, budget=1)) as small:
        assert [small.make(), small.make()] == [0, None]


def test_without_memory_for_the_first_block_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = BlockPool(64 * KIB, budget=MIB)
    monkeypatch.setattr(os, "posix_fallocate", refusing(errno.ENOMEM))
    with pytest.raises(InsufficientMemory):
        pool.make()
    monkeypatch.undo()
    assert pool.make() == 0
    monkeypatch.setattr(os, "posix_fallocate", refusing(errno.ENOMEM))
    assert pool.make() is None
    assert len(pool) == 1
    pool.close()


# Leases.


def returned(pool: BlockPool) -> list[int]:
    """Return the blocks that have come back, each once."""
    pool.take_back_returned(lambda: None)
    return list(iter(pool.take_idle, None))


def leased(pool: BlockPool) -> tuple[int, Any]:
    number = pool.make()
    assert number is not None
    return number, pool.lease(number)


def test_a_block_comes_back_once_when_the_last_view_of_its_lease_is_gone(pool: BlockPool) -> None:
    held = dict(leased(pool) for _ in range(4))
    for number in (2, 0, 3, 1):
        held[number][-1] = 5
        assert (len(held[number]), pool[number].bytes[-1]) == (64 * KIB, 5)
        views = [held[number][i : i + 10] for i in range(20)]
        copies = [views[0].copy(), held[number][[1, 2]], bytes(views[0]), held[number][3]]
        del held[number]
        while views:
            assert returned(pool) == []
            views.pop()
        assert (returned(pool), returned(pool), len(copies)) == ([number], [], 4)


VIEWS: dict[str, Callable[[Any], Any]] = {
    "slice": lambda memory: memory[100:200],
    "steps": lambda memory: memory[::7],
    "rows": lambda memory: memory[:64].view(np.float64).reshape(2, 4),
    "part of a part": lambda memory: memory[:64].view(np.float64)[3:4].T,
    "new axis": lambda memory: memory[:9].reshape(3, 3)[1][np.newaxis],
    "memoryview": lambda memory: memoryview(memory[5:10]),
    "memoryview cast": lambda memory: memory[5:10].data.cast("b"),
    "frombuffer": lambda memory: np.frombuffer(memory[8:16], np.int64),
    "base": lambda memory: memory[3:4].base,
    "inside others": lambda memory: {"batch": [(memory[3:4],)]},
    "windows": lambda memory: np.lib.stride_tricks.sliding_window_view(memory[:10], 3),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_a_view_of_any_kind_keeps_the_lease(pool: BlockPool, kind: str) -> None:
    number, memory = leased(pool)
    kept = VIEWS[kind](memory)
    del memory
    gc.collect()
    assert returned(pool) == []
    del kept
    assert returned(pool) == [number]


def test_a_lease_may_end_in_another_thread(pool: BlockPool) -> None:
    number, memory = leased(pool)
    held = [memory]
    del memory
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert returned(pool) == [number]


def test_a_block_grows_as_far_as_the_budget_of_all_and_no_further(pool: BlockPool) -> None:
    block = pool[pool.make_extra()]
    block.grow(100 * KIB, preferred=MIB)
    assert len(block.bytes) == 256 * KIB  # four blocks of 64 KiB
    with pytest.raises(InsufficientMemory, match="262145 bytes; memory_bytes allows 262144"):
        block.grow(256 * KIB + 1)
    assert len(block.bytes) == 256 * KIB


# Ends.


@pytest.mark.usefixtures("swept")
def test_many_pools_leave_no_descriptor_and_no_map() -> None:
    descriptors, maps = n_descriptors(), n_maps()
    for _ in range(50):
        pool = BlockPool(64 * KIB, budget=MIB)
        number, memory = leased(pool)
        pool[number].grow(100 * KIB)
        pool.make()
        pool.close()
        pool.close()
        assert len(pool) == 0
        del pool, memory
    gc.collect()
    assert (n_descriptors(), n_maps()) == (descriptors, maps)


@pytest.mark.usefixtures("swept")
@pytest.mark.parametrize("n_bytes", [64 * KIB, 3 * LARGE_BYTES])
def test_memory_outlives_the_pool_for_as_long_as_it_is_held(n_bytes: int) -> None:
    maps = n_maps()
    pool = BlockPool(n_bytes, budget=MIB)
    pool.make()
    memory = pool.lease(pool.make_extra())
    memory[:] = 7
    kept = memory[10:20]
    pool.close()
    del memory, pool
    gc.collect()
    assert kept.tolist() == [7] * 10
    assert n_maps() == maps + 1
    del kept
    assert n_maps() == maps
