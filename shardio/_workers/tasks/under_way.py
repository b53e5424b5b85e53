"""An item that was put into a flow and not taken: where it is, and what has come of it."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from shardio._workers.processes.blocks import Block, Bytes
from shardio._workers.processes.serialization import shortened, text_of
from shardio._workers.tasks.value_blocks import ValueBlocks
from shardio._workers.tasks.values import read_value
from shardio.errors import TransformError

_NOTHING: Final[Bytes] = np.zeros(0, np.uint8)


class Call:
    """The state of one item; its block is that of a flow's `ValueBlocks`.

    Args:
        step: its number.
        item: what errors name.
        request: what the function is called with, pickled.
    """

    __slots__ = (
        "block",
        "error",
        "is_begun",
        "is_suspended",
        "item",
        "memory",
        "n_bytes",
        "n_deaths",
        "n_given",
        "request",
        "step",
        "worker",
    )

    def __init__(self, step: int, item: Any, request: bytes) -> None:
        self.step, self.item, self.request = step, item, request
        self.block: Block | None = None
        self.n_bytes, self.n_deaths = 0, 0
        self.memory: bytearray | None = None
        """The value, where it came with the answer."""
        self.error: BaseException | None = None
        """Why it is to be skipped."""
        self.worker: int | None = None
        """Who has it."""
        self.is_begun = self.is_suspended = False
        """Whether that worker has a generator for it; whether main is to ask for more of that."""
        self.n_given = 0
        """How many results of the generator have come."""

    @property
    def named(self) -> str:
        """What it is in messages."""
        return f"item {self.step} ({shortened(self.item)})"

    def split(self, n_results: int) -> Call:
        """What has come so far, which is so many results of a generator; more are to come."""
        part = Call(self.step, self.item, b"")
        part.block, part.n_bytes, part.memory = self.block, self.n_bytes, self.memory
        self.block = self.memory = None
        self.n_given += n_results
        self.is_suspended = True
        return part

    def lose(self) -> None:
        """The worker that had it is dead."""
        self.worker, self.is_begun = None, False

    def give_back(self, blocks: ValueBlocks) -> None:
        """Its block is not needed any more."""
        if self.block is not None:
            blocks.give_back(self.block)
            self.block = None

    def value(self, blocks: ValueBlocks, is_called: str, *, is_last: bool) -> Any:
        """What the function has returned; its arrays keep the block while they are held.

        Raises:
            TransformError: it cannot be unpickled.
            InsufficientMemory: there is no memory for it.
        """
        memory = _NOTHING
        if self.memory is not None:
            memory = np.frombuffer(self.memory, np.uint8)
        elif self.block is not None:
            block, self.block = self.block, None
            memory = blocks.hand_over(block, self.n_bytes, is_spare=is_last)
        try:
            return read_value(memory)
        except Exception as error:
            raise TransformError(
                f"what {is_called} returned for {self.named} cannot be unpickled in this process: "
                f"{type(error).__name__}: {text_of(error)}"
            ) from error
