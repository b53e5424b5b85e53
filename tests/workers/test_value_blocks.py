"""The number and size of the blocks that values get, also where they are lent to workers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from shardio._base.classes import Closing
from shardio._workers.processes.blocks import Block, Bytes
from shardio._workers.tasks import values
from shardio._workers.tasks.values import BlockLender, LentBlocks, ValueBlocks

MIB = 1 << 20


@pytest.fixture
def blocks() -> Iterator[ValueBlocks]:
    with ValueBlocks(3, 8 * MIB) as made:
        yield made


def filled(blocks: ValueBlocks, n_bytes: int) -> Block:
    """Return a block that a worker has filled with a value of that size."""
    block = blocks.take()
    assert block is not None
    block.grow(n_bytes)
    block.bytes[:n_bytes] = 7
    blocks.note_filled(block, n_bytes)
    return block


def n_that_can_be_taken(blocks: ValueBlocks) -> int:
    taken = []
    while (block := blocks.take()) is not None:
        taken.append(block)
    for block in taken:
        blocks.give_back(block)
    return len(taken)


def test_as_many_values_are_under_way_as_memory_has_room_for() -> None:
    for size, expected in ((MIB // 4, 32), (MIB, 8), (3 * MIB, 2), (8 * MIB, 1)):
        with ValueBlocks(3, 8 * MIB) as blocks:
            blocks.give_back(filled(blocks, size))
            assert n_that_can_be_taken(blocks) == expected


def test_a_single_value_far_larger_than_others_is_forgotten(blocks: ValueBlocks) -> None:
    for each in [filled(blocks, MIB // 4) for _ in range(16)]:  # idle ones are no room for it
        blocks.give_back(each)
    blocks.give_back(filled(blocks, 6 * MIB))
    assert n_that_can_be_taken(blocks) == 1
    for _ in range(40):
        blocks.give_back(filled(blocks, MIB // 4))
    assert n_that_can_be_taken(blocks) > 4


def test_the_last_blocks_are_handed_over_and_never_copied() -> None:
    with ValueBlocks(3, MIB) as blocks:
        held = []
        with pytest.warns(RuntimeWarning, match="values are copied"):
            held.append(blocks.hand_over(filled(blocks, MIB), MIB, is_spare=False))
        held.append(blocks.hand_over(filled(blocks, MIB), MIB, is_spare=True))
        assert blocks.n_copies == 1
    assert all(np.all(value == 7) for value in held)


def n_backed(blocks: ValueBlocks) -> int:
    """Return the memory that all blocks take."""
    pool = blocks._pool
    return sum(os.fstat(pool[number].fd).st_blocks * 512 for number in range(len(pool)))


def test_blocks_of_small_values_do_not_keep_the_memory_of_large_ones(blocks: ValueBlocks) -> None:
    held: list[Bytes] = []
    for i in range(200):
        size = 4 * MIB if i % 20 == 0 else MIB // 16
        held.append(blocks.hand_over(filled(blocks, size), size, is_spare=True))
        del held[:-16]
        leased = sum(value.nbytes for value in held)
        assert n_backed(blocks) <= 8 * MIB + leased, i
        assert blocks._pool.n_bytes == n_backed(blocks)
    assert blocks.n_copies == 0


def test_large_blocks_that_come_back_take_no_more_than_the_budget(blocks: ValueBlocks) -> None:
    for each in [filled(blocks, MIB // 4) for _ in range(16)]:
        blocks.give_back(each)
    held = [blocks.hand_over(filled(blocks, 4 * MIB), 4 * MIB, is_spare=True) for _ in range(10)]
    assert n_backed(blocks) >= 40 * MIB
    held.clear()
    assert blocks.n_leased == 0
    assert n_backed(blocks) <= 8 * MIB
    blocks.give_back(filled(blocks, 4 * MIB))


# Blocks lent to workers for the large samples of the dataset that they iterate.


class Side(Closing):
    """Main's side, and workers that are not processes."""

    def __init__(self, n_workers: int, memory_bytes: int) -> None:
        self.supply = BlockLender(n_workers, memory_bytes)
        self.stocks = [LentBlocks() for _ in range(n_workers)]
        self._fds: list[int] = []
        self.sent: list[tuple[int, int, bool]] = []
        """To whom, which block, and whether its descriptor went along."""

    def send(self, worker: int, number: int, fds: Sequence[int]) -> None:
        self.sent.append((worker, number, bool(fds)))
        self._fds += (copies := [os.dup(fd) for fd in fds])
        self.stocks[worker].add(number, copies)

    def close(self) -> None:
        self.supply.close()
        while self._fds:
            os.close(self._fds.pop())

    def ask(self, worker: int) -> None:
        self.supply.ask(worker)
        self.supply.give(self.send)

    def arrive(self, worker: int, *arrays: Bytes) -> list[Bytes]:
        """Deliver what a worker sends."""
        packed = values.pack_value(list(arrays))
        number = self.stocks[worker].fill(packed)
        memory = self.supply.hand_over(worker, number, packed.n_bytes)
        found: list[Bytes] = values.read_value(memory)
        self.supply.give(self.send)
        return found

    def n_of(self, worker: int) -> int:
        """Return how many blocks a worker can fill one after the other."""
        return len(self.stocks[worker]._idle)


@pytest.fixture
def side() -> Iterator[Side]:
    with Side(2, 64 * MIB) as made:
        yield made


def of(value: int, n_bytes: int = MIB) -> Bytes:
    return np.full(n_bytes, value, np.uint8)


def test_who_has_not_asked_has_no_block_and_who_has_keeps_as_many(side: Side) -> None:
    side.ask(1)
    assert side.n_of(1) == 1  # nobody knows how large samples are
    side.arrive(1, of(7))
    n = side.n_of(1)
    assert n > 1
    assert (side.n_of(0), bool(side.stocks[0])) == (0, False)
    for value in range(20):
        assert np.array_equal(side.arrive(1, of(value))[0], of(value))
        assert side.n_of(1) == n


def test_each_worker_has_a_block_whatever_the_others_keep_and_memory_allows() -> None:
    with Side(3, MIB // 4) as side:
        for worker in range(3):
            side.ask(worker)
        assert [side.n_of(worker) for worker in range(3)] == [1, 1, 1]


def test_a_loop_that_holds_one_sample_at_a_time_has_none_copied_whatever_memory_allows() -> None:
    with Side(2, MIB // 4) as side:
        side.ask(0)
        side.ask(1)
        held = side.arrive(0, of(0))
        for n in range(1, 20):
            held = side.arrive(n % 2, of(n))  # the one before is held until this one is there
            assert np.array_equal(held[0], of(n))
        assert side.supply._blocks.n_copies == 0


def test_who_was_held_up_before_the_loop_had_to_wait_gets_more_as_far_as_memory_allows() -> None:
    with Side(2, 20 * MIB) as side:
        for worker in (0, 1):
            side.ask(worker)
            side.arrive(worker, of(7, MIB - 4096))
        n = side.n_of(0)
        side.supply.grant_more()
        side.ask(1)
        assert (side.n_of(0), side.n_of(1)) == (2 * n, 2 * n)  # both had asked
        side.supply.grant_more()
        side.supply.grant_more()  # nobody has asked since the one before
        side.supply.give(side.send)
        assert (side.n_of(0), side.n_of(1)) == (2 * n, 20 - 2 * n)


@pytest.mark.filterwarnings("ignore:values are copied")  # where large ones come close together
def test_a_worker_fills_blocks_that_have_lost_their_memory_as_any() -> None:
    with Side(1, 4 * MIB) as side:
        side.ask(0)
        held: list[list[Bytes]] = []
        for i in range(60):
            size = 3 * MIB if i % 7 == 3 else MIB // 4
            held.append(side.arrive(0, of(i, size)))
            del held[:-12]
            for at, (value,) in enumerate(held, i + 1 - len(held)):
                assert value.min() == value.max() == at
        pool = side.supply._blocks._pool
        n_held = sum(value.nbytes for (value,) in held)
        assert pool.n_bytes <= 4 * MIB + 3 * MIB + n_held
