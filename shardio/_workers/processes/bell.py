"""A bell that any thread may ring to end the wait of a crew."""

from __future__ import annotations

import os
import threading

from shardio._base.closing import Closing
from shardio._workers.processes.linux import files_explained


class Bell(Closing):
    """An event of the kernel, which can be polled by its descriptor; owned until `close`.

    `ring` and `close` are for any thread.
    """

    def __init__(self) -> None:
        with files_explained():
            self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()  # or a ring might go to what has got the number after a close
        self._is_closed = False

    def fileno(self) -> int:
        """The descriptor: readable once the bell has rung, until it is `hush`ed."""
        return self._fd

    def ring(self) -> None:
        """Have whoever polls it wake up; nothing once it is closed."""
        with self._lock:
            if not self._is_closed:
                os.eventfd_write(self._fd, 1)

    def hush(self) -> None:
        """Take in that it has rung."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:  # it has not
            return

    def close(self) -> None:
        """Let go of the descriptor. Idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._fd)
