"""The number and size of the blocks that values get."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from shardio._workers.processes.blocks import Block, Bytes
from shardio._workers.tasks.values import ValueBlocks

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
    blocks.see(block, n_bytes)
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


def test_small_blocks_that_lie_idle_are_no_room_for_large_values(blocks: ValueBlocks) -> None:
    for each in [filled(blocks, MIB // 4) for _ in range(16)]:
        blocks.give_back(each)
    blocks.give_back(filled(blocks, 3 * MIB))
    assert n_that_can_be_taken(blocks) == 2


def test_a_single_value_far_larger_than_others_is_forgotten(blocks: ValueBlocks) -> None:
    blocks.give_back(filled(blocks, 6 * MIB))
    assert n_that_can_be_taken(blocks) == 1
    for _ in range(40):
        blocks.give_back(filled(blocks, MIB // 4))
    assert n_that_can_be_taken(blocks) > 4


def test_what_is_handed_over_keeps_its_block_and_then_gives_it_back(blocks: ValueBlocks) -> None:
    value = blocks.hand_over(filled(blocks, MIB), MIB, is_spare=False)
    assert (len(value), int(value.min())) == (MIB, 7)
    place = value.ctypes.data
    block = blocks.take()
    assert block is not None
    assert block.bytes.ctypes.data != place
    blocks.give_back(block)
    del value
    places = {filled(blocks, MIB).bytes.ctypes.data for _ in range(2)}
    assert place in places


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


def test_blocks_of_large_values_that_all_come_back_take_as_much_as_the_budget(
    blocks: ValueBlocks,
) -> None:
    for each in [filled(blocks, MIB // 4) for _ in range(16)]:
        blocks.give_back(each)
    held = [blocks.hand_over(filled(blocks, 4 * MIB), 4 * MIB, is_spare=True) for _ in range(10)]
    assert n_backed(blocks) >= 40 * MIB
    held.clear()
    assert blocks.n_leased == 0
    assert n_backed(blocks) <= 8 * MIB
    blocks.give_back(filled(blocks, 4 * MIB))
