"""Downloads shards ahead of the training loop, in the order in which it needs them.

Threads of the main process download while workers fill batches. Nothing depends on them: a worker
that needs a shard earlier waits for the download or makes it itself, and their errors are ignored,
as the worker meets and raises the same ones.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from shardio.errors import ShardioError
from shardio.shard.writer import ShardSummary
from shardio.storage.remote.storage import RemoteStorage

N_THREADS: Final = 4
_POLL_S: Final = 0.05
_JOIN_TIMEOUT_S: Final = 1.0
"""Time that `close` waits for running requests."""


class PrefetchRequest(NamedTuple):
    """A file that the epoch needs from one step on."""

    step: int
    storage: RemoteStorage
    summary: ShardSummary


class _Prefetched:
    """A file that is being downloaded, or stays pinned until the loop reaches it."""

    def __init__(self, file: PrefetchRequest) -> None:
        self.file = file
        self._mutex = threading.Lock()
        self._is_pinned = self._is_reached = False

    def keep_pinned(self) -> None:
        """Keep the downloaded file pinned, or unpin it if the loop has already reached it."""
        with self._mutex:
            self._is_pinned = not self._is_reached
        if not self._is_pinned:
            self.file.storage.unpin(self.file.summary)

    def unpin(self) -> None:
        """Unpin the file; the cache counts it as used just now. Idempotent."""
        with self._mutex:
            was_kept, self._is_pinned, self._is_reached = self._is_pinned, False, True
        if was_kept:
            self.file.storage.unpin(self.file.summary)


class _Cancelled(Exception):
    """The epoch is over; partial downloads stay and can be resumed."""


class Prefetcher:
    """Owns the threads that download for one epoch, until `close`.

    A downloaded file stays pinned in the cache until the loop reaches its step, or the epoch has no
    more files to download. Unpinned, it would be the least recently used file, and the next
    download could evict it before it was read.

    Args:
        requests: files in the order in which they are needed; consumed lazily, in a thread.
        current_step: returns the step that the loop has reached; None when it is over.
        max_bytes: limit of downloaded bytes that are not needed yet.
        downloaded: the set to which the paths of downloaded files are added.
    """

    def __init__(
        self,
        requests: Iterator[PrefetchRequest],
        current_step: Callable[[], int | None],
        max_bytes: int,
        downloaded: set[str],
    ) -> None:
        self._requests, self._current_step, self._max_bytes = requests, current_step, max_bytes
        self._downloaded = downloaded
        self._mutex = threading.Lock()
        self._pending: deque[_Prefetched] = deque()
        """Files whose download has started and whose step the loop has not reached, in order."""
        self._is_cancelled = False
        self._threads = [
            threading.Thread(target=self._run, name="shardio-ahead", daemon=True)
            for _ in range(N_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def cancel(self) -> None:
        """Tell the threads to end, without waiting for them."""
        self._is_cancelled = True

    def close(self) -> None:
        """End the threads; one that waits for a server may outlive the call. Idempotent."""
        self.cancel()
        end_s = time.monotonic() + _JOIN_TIMEOUT_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0, end_s - time.monotonic()))

    def _run(self) -> None:
        kept = []
        try:
            while (prefetched := self._next()) is not None:
                # Best effort: the loop meets the same failure, or warning made an error, by itself.
                with contextlib.suppress(ShardioError, OSError, Warning):
                    storage, summary = prefetched.file.storage, prefetched.file.summary
                    storage.pin_with_check(summary, self._check)
                    kept.append(prefetched)
                    prefetched.keep_pinned()
                    self._downloaded.add(storage.path_of(summary))
        except _Cancelled:
            pass
        finally:
            for prefetched in kept:
                prefetched.unpin()

    def _next(self) -> _Prefetched | None:
        """Return the next file once there is room for it; None at the end."""
        with self._mutex:
            file = next(self._requests, None)
            while file is not None:
                self._check()
                step = self._current_step()
                while self._pending and step is not None and self._pending[0].file.step <= step:
                    self._pending.popleft().unpin()
                n_ahead = sum(prefetched.file.summary.n_bytes for prefetched in self._pending)
                if not self._pending or n_ahead + file.summary.n_bytes <= self._max_bytes:
                    self._pending.append(_Prefetched(file))
                    return self._pending[-1]
                time.sleep(_POLL_S)
            return None

    def _check(self) -> None:
        if self._is_cancelled or self._current_step() is None:
            raise _Cancelled
