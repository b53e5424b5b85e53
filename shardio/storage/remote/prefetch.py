"""Shards are downloaded before they are needed, in the order in which they will be.

By threads of the process that has the loop, while workers fill batches. Who needs a shard that is
not here yet waits for it, or downloads it himself: nothing depends on these threads, and an error
of theirs is no error. He will meet it, and raise it.
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
"""How long the end waits for requests that are under way."""


class PrefetchRequest(NamedTuple):
    """A file that the pass needs from one step on."""

    step: int
    bucket: RemoteStorage
    summary: ShardSummary


class _Prefetched:
    """A file that is being downloaded, or here and kept until the loop comes to it."""

    def __init__(self, file: PrefetchRequest) -> None:
        self.file = file
        self._mutex = threading.Lock()
        self._is_kept = self._is_reached = False

    def keep(self) -> None:
        """Keep the downloaded file pinned, or release it if the loop has already reached it."""
        with self._mutex:
            self._is_kept = not self._is_reached
        if not self._is_kept:
            self.file.bucket.release(self.file.summary)

    def release(self) -> None:
        """Unpin the file; the cache counts it as used just now. Idempotent."""
        with self._mutex:
            was_kept, self._is_kept, self._is_reached = self._is_kept, False, True
        if was_kept:
            self.file.bucket.release(self.file.summary)


class _Cancelled(Exception):
    """The pass is over: what is being downloaded stays as far as it came."""


class Prefetcher:
    """Owns the threads that download for one pass, until `close`.

    A downloaded file stays pinned in the cache until the loop reaches its step, or the pass has no
    more files to download. Unpinned, it would be the least recently used file, and the next
    download could evict it before it was read.

    Args:
        wanted: files in the order in which they are needed; asked for as it goes on, in a thread.
        reached: the step that the loop has come to; None when it is over.
        most_bytes: how much may be here that is not needed yet.
        here: the paths of those that have come are added to it.
    """

    def __init__(
        self,
        wanted: Iterator[PrefetchRequest],
        reached: Callable[[], int | None],
        most_bytes: int,
        here: set[str],
    ) -> None:
        self._wanted, self._reached, self._most_bytes = wanted, reached, most_bytes
        self._here = here
        self._mutex = threading.Lock()
        self._coming: deque[_Prefetched] = deque()
        """Files whose download has begun and whose step the loop has not reached, in order."""
        self._is_over = False
        self._threads = [
            threading.Thread(target=self._run, name="shardio-ahead", daemon=True)
            for _ in range(N_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def cancel(self) -> None:
        """Have the threads end, which is not waited for."""
        self._is_over = True

    def close(self) -> None:
        """End the threads; one that waits for a server may be left behind. Idempotent."""
        self.cancel()
        end_s = time.monotonic() + _JOIN_TIMEOUT_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0, end_s - time.monotonic()))

    def _run(self) -> None:
        kept = []
        try:
            while (coming := self._next()) is not None:
                with contextlib.suppress(ShardioError, OSError):
                    bucket, summary = coming.file.bucket, coming.file.summary
                    bucket.keep(summary, self._check)
                    kept.append(coming)
                    coming.keep()
                    self._here.add(bucket.path_of(summary))
        except _Cancelled:
            pass
        finally:
            for coming in kept:
                coming.release()

    def _next(self) -> _Prefetched | None:
        """The next file, once there is room for it; None at the end."""
        with self._mutex:
            file = next(self._wanted, None)
            while file is not None:
                self._check()
                step = self._reached()
                while self._coming and step is not None and self._coming[0].file.step <= step:
                    self._coming.popleft().release()
                n_ahead = sum(coming.file.summary.n_bytes for coming in self._coming)
                if not self._coming or n_ahead + file.summary.n_bytes <= self._most_bytes:
                    self._coming.append(_Prefetched(file))
                    return self._coming[-1]
                time.sleep(_POLL_S)
            return None

    def _check(self) -> None:
        if self._is_over or self._reached() is None:
            raise _Cancelled
