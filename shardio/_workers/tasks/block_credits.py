"""The blocks that large samples of a dataset arrive in, and which side owns which block.

A worker without a block for a sample asks for one; from then on main keeps it supplied with a few,
as far as memory allows. A block belongs to the worker until its content is handed over, and then to
the arrays that view it; when the last array is gone, any worker may get the block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from shardio._base.classes import Closing
from shardio._workers.processes.blocks import Block, BlockMap, Bytes
from shardio._workers.processes.limits import require
from shardio._workers.tasks.values import ValueBlocks, place, read_buffers, write_buffers
from shardio.errors import UnsupportedEnvironment

_FEW: Final = 4
"""Blocks of a worker, at first: one is written to, the others are on their way."""
_HELD: Final = 2
"""Samples that any loop holds for a moment, this one and the next: they are not copied."""


class BlockLender(Closing):
    """Main's side: the blocks, which it owns, and the worker that each is lent to.

    Args:
        n_workers: the number of workers that fill them.
        memory_bytes: the budget of all blocks.
    """

    def __init__(self, n_workers: int, memory_bytes: int) -> None:
        self._blocks = ValueBlocks(None, memory_bytes)
        self._of_worker: list[dict[int, Block]] = [{} for _ in range(n_workers)]
        self._n_each: dict[int, int] = {}
        """The number of blocks that each worker that has asked should have."""
        self._were_held_up = set[int]()
        """The workers that have asked since the loop last had to wait for long."""
        self._are_known = False  # the size of samples

    def ask(self, worker: int) -> None:
        """Record that a worker has a large sample and no block."""
        self._n_each.setdefault(worker, _FEW)
        self._were_held_up.add(worker)

    def grant_more(self) -> None:
        """Grant more blocks to workers that were held up before the loop had to wait for long.

        Otherwise few blocks are faster, as they stay in the cache. A dataset that yields many
        samples at once and then none for a while gets ahead in this way.
        """
        for worker in self._were_held_up:
            self._n_each[worker] *= 2
        self._were_held_up.clear()

    def give(self, send: Callable[[int, int, Sequence[int]], object]) -> None:
        """Send blocks to those who have asked and have fewer than they should.

        Args:
            send: a worker, a block's number, and its descriptor if that is news to the worker.

        Raises:
            InsufficientMemory: there is no memory for a single one.
        """
        for worker in self._n_each:
            # Each worker gets one, whatever memory allows: those of the others may stay idle for
            # long.
            if not self._of_worker[worker]:
                self._give(worker, send, is_needed=True)
        for worker, n in self._n_each.items() if self._are_known else ():
            while len(self._of_worker[worker]) < n and self._give(worker, send):
                pass

    def _give(
        self,
        worker: int,
        send: Callable[[int, int, Sequence[int]], object],
        *,
        is_needed: bool = False,
    ) -> bool:
        """Send one block, if one is available."""
        block = self._blocks.take(is_needed=is_needed)
        if block is None:
            return False
        self._of_worker[worker][block.number] = block
        send(worker, block.number, [] if worker in block.known_to else [block.fd])
        block.known_to.add(worker)
        return True

    def hand_over(self, worker: int, number: int, sizes: Sequence[int]) -> list[Bytes]:
        """Return views of the content of a worker's block, which keep the block, or a copy.

        It is copied if the loop holds more than memory allows and this is the worker's last block.

        Raises:
            InsufficientMemory: there is no memory for the copy.
        """
        block = self._of_worker[worker].pop(number)
        *starts, n_bytes = place(sizes)
        self._blocks.see(block, n_bytes)
        self._are_known = True
        is_spare = bool(self._of_worker[worker]) or self._blocks.n_leased < _HELD
        memory = self._blocks.hand_over(block, n_bytes, is_spare=is_spare)
        return read_buffers(sizes, memory, starts)

    def stop_lending(self, worker: int) -> None:
        """Stop lending blocks to a worker."""
        self._n_each.pop(worker, None)
        self._were_held_up.discard(worker)
        for block in self._of_worker[worker].values():
            self._blocks.give_back(block)
        self._of_worker[worker].clear()

    def close(self) -> None:
        """Release all blocks; memory that was handed over stays valid."""
        self._n_each.clear()
        self._were_held_up.clear()
        self._blocks.close()


class LentBlocks:
    """The blocks that a worker has, and has not filled; the worker's side."""

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}
        self._maps: dict[int, BlockMap] = {}
        self._idle: list[int] = []
        self._loss: UnsupportedEnvironment | None = None

    def __bool__(self) -> bool:
        """Return True if `fill` will not block (it has a block, or will raise)."""
        return bool(self._idle) or self._loss is not None

    def add(self, number: int, fds: Sequence[int]) -> None:
        """Add a block that main has sent, with its descriptor the first time."""
        if fds:
            self._fds[number] = fds[0]
        self._idle.append(number)

    def lose(self, error: UnsupportedEnvironment) -> None:
        """Record that a block's descriptor did not arrive: main sends no other."""
        self._loss = error

    def fill(self, buffers: Sequence[Any]) -> tuple[int, list[int]]:
        """Copy buffers into a block; return its number and the sizes of the buffers.

        The block stays here until `drop_filled`.

        Raises:
            InsufficientMemory: there is no memory for it.
            UnsupportedEnvironment: no block is left, as one was lost.
        """
        if self._loss is not None and not self._idle:
            raise self._loss
        number = self._idle[-1]
        # Mapped here and not before: an error is then reported for a sample
        if number not in self._maps:
            self._maps[number] = BlockMap(self._fds[number])
        block = self._maps[number]
        parts = [buffer.raw() for buffer in buffers]
        sizes = [part.nbytes for part in parts]
        *starts, n_bytes = place(sizes)
        if (n_lacking := n_bytes - block.backed_bytes()) > 0:
            what, hint = "the arrays of a sample", "let the dataset give smaller samples"
            require(n_lacking, what, hint)
        block.grow(n_bytes)
        write_buffers(parts, block.bytes, starts)
        return number, sizes

    def drop_filled(self) -> None:
        """Drop the block that was filled last: its content was sent and belongs to main."""
        self._idle.pop()
