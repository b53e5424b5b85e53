"""What has arrived of the workers that iterate a dataset: counted, handed over, or skipped."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from shardio._workers.processes.lenience import Lenience
from shardio._workers.processes.serialization import text_of
from shardio._workers.tasks.messages import counted_bytes, unpack_sample, unpack_samples
from shardio._workers.tasks.outbox import WorkerInfo
from shardio.errors import TransformError, WorkerDied

SKIPPED: Final = object()
"""In the place of a sample that is left out."""


class Arrivals:
    """The samples of all workers, each numbered by its worker; of one message they are at hand.

    Args:
        n_workers: whose they are.
        lenience: which samples that fail are left out.
    """

    def __init__(self, n_workers: int, lenience: Lenience) -> None:
        self._lenience = lenience
        self.n_arrived = [0] * n_workers
        """Samples handed over or skipped."""
        self.n_owed = [0] * n_workers
        """Bytes that their worker has not been told are handed over."""
        self._n_skipped = [0] * n_workers
        self._last_was_skipped = [False] * n_workers
        self._at_hand: deque[tuple[memoryview, list[Any]]] = deque()
        self.sender = 0
        """Whose samples are at hand."""

    @property
    def n_at_hand(self) -> int:
        """How many samples of the message taken in last are to be handed over."""
        return len(self._at_hand)

    def n_known(self, worker: int) -> int:
        """How many samples of a worker have arrived, those at hand among them."""
        return self.n_arrived[worker] + (self.n_at_hand if worker == self.sender else 0)

    def check(self, worker: int, number: int) -> None:
        """Compare with how many samples a worker has sent before a message.

        Raises:
            WorkerDied: some are lost.
        """
        if number != self.n_arrived[worker]:
            raise WorkerDied(
                f"worker {worker} sent {number} samples, and {self.n_arrived[worker]} arrived"
            )

    def take_in(self, worker: int, message: Sequence[Any], n_samples: int) -> None:
        """Have the samples of a message at hand; none of another may be.

        Args:
            message: one frame, and the memory of each larger array of the last sample.
        """
        self._at_hand.extend(unpack_samples(message, n_samples))
        self.sender = worker
        self._last_was_skipped[worker] = False
        self.n_owed[worker] += counted_bytes(message, n_samples)

    def hand_over(self) -> Any:
        """The next of the samples at hand; SKIPPED for one that cannot be had and is forgiven.

        Raises:
            TransformError: it cannot be unpickled.
            TooManySkipped: one more is skipped than may.
        """
        worker = self.sender
        pickled, buffers = self._at_hand.popleft()
        try:
            sample = unpack_sample(pickled, buffers)
        except Exception as error:  # noqa: BLE001  # raised, or told with what was skipped
            failure = TransformError(
                f"sample {self.n_arrived[worker]} of worker {worker} cannot be unpickled: "
                f"{type(error).__name__}: {text_of(error)}"
            )
            failure.__cause__ = error
            self.skip(worker, failure)
            self._last_was_skipped[worker] = False  # there, all was well
            return SKIPPED
        self.n_arrived[worker] += 1
        return sample

    def skip(self, worker: int, error: BaseException) -> None:
        """Leave out the next sample of a worker, or raise why it failed.

        Raises:
            TooManySkipped: one more is skipped than may.
        """
        if not self._lenience.forgives(error):
            raise error
        number = self.n_arrived[worker]
        self.n_arrived[worker] += 1
        self._n_skipped[worker] += 1
        self._last_was_skipped[worker] = True
        self._lenience.skip(number, WorkerInfo(worker, len(self.n_arrived)), error)

    def ended_with_a_skip(self, worker: int) -> bool:
        """Whether the last sample of a worker failed there, so that it may have ended it."""
        return self._last_was_skipped[worker]

    def counted(self, worker: int) -> str:
        """How many samples of a worker there were, in words."""
        n_skipped = self._n_skipped[worker]
        said = f", and {n_skipped} skipped" if n_skipped else ""
        return f"{self.n_arrived[worker] - n_skipped} samples{said}"
