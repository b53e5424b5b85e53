"""Upload finished shards in threads while others are converted.

After the upload, the local shard is replaced by a note: a file with the shard's name in the store.
Thus only shards in progress take local disk space, and the notes tell a resumed conversion which
shards are uploaded.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from shardio._base.classes import Closing
from shardio.errors import DataError, ShardChanged, ShardNotFound
from shardio.format.layout import PAGE
from shardio.shard.reader import ShardReader
from shardio.shard.writer import ShardSummary
from shardio.storage.fs import read_checksummed_json, to_checksummed_json, unlink, write_atomic
from shardio.storage.remote.object_store import ObjectStore, no_cancel
from shardio.storage.remote.storage import RangeFile

_MAX_CONCURRENT: Final = 4
"""The number of shards uploaded at a time."""
_MAX_QUEUED: Final = 8
"""The number of queued shards at which `submit` blocks."""
_POLL_S: Final = 0.25


def uploaded_name(path: str) -> str | None:
    """Return the name in the store of the shard uploaded from `path`; None if not uploaded."""
    with contextlib.suppress(DataError, OSError):
        return str(read_checksummed_json(_note_path(path)).get("name"))
    return None


def upload_shard(
    objects: ObjectStore,
    path: str,
    shard: ShardSummary,
    check: Callable[[], None] = no_cancel,
) -> None:
    """Upload a shard, unless the store already has an object with the same last page.

    The last page of a shard identifies the whole content.

    Args:
        objects: the destination.
        path: the local file.
        shard: the summary of the shard, with its name in the store.
        check: called before each request except the first; an exception that it raises cancels
            the upload.

    Raises:
        StoreAccessDenied, StoreUnavailable: the store rejects the upload.
    """
    try:
        tail = objects.read_tail(shard.name, PAGE)
        with open(path, "rb") as file:
            file.seek(-PAGE, os.SEEK_END)
            is_there = tail.n_bytes == shard.n_bytes and bytes(tail.data) == file.read()
    except (ShardNotFound, ShardChanged):  # ShardChanged for an empty object
        is_there = False
    if not is_there:
        check()
        objects.upload(shard.name, path, check=check)


def check_uploaded(objects: ObjectStore, shard: ShardSummary, hint: str) -> None:
    """Check by its last page that an uploaded shard still exists unchanged.

    Args:
        objects: the destination.
        shard: the summary of the shard, with its name in the store.
        hint: the next step if the check fails, for the message.

    Raises:
        ShardNotFound, ShardChanged: the shard is missing or was replaced.
        StoreAccessDenied, StoreUnavailable: the store cannot be read.
    """
    path = f"{objects.url}/{shard.name}"
    try:
        content = RangeFile(objects, shard.name)
        with ShardReader(path, verify="off", access="pread", content=content) as reader:
            found = ShardSummary(shard.name, len(reader), reader.header.file_size, reader.id)
    except ShardNotFound as error:
        raise ShardNotFound(f"{path}: was uploaded and is missing now; {hint}") from error
    if found != shard:
        raise ShardChanged(
            f"the uploaded shard was replaced by another object; {hint}",
            code="replaced",
            path=path,
            expected=shard,
            found=found,
        )


class ShardUploader(Closing):
    """Uploads shards in threads, which it owns until `close`.

    Args:
        objects: the destination.
        hint: the alternative to resuming, for messages.
    """

    def __init__(self, objects: ObjectStore, hint: str) -> None:
        self._objects, self.hint = objects, hint
        self._changed = threading.Condition()
        self._queue: deque[tuple[str, ShardSummary]] = deque()
        self._n_running = 0
        self._error: BaseException | None = None
        self._is_closed = False
        self._done_callback: Callable[[], object] = _no_callback
        self._threads: list[threading.Thread] = []

    def submit(self, path: str, shard: ShardSummary) -> None:
        """Queue the shard at `path` for upload; block while the queue is full.

        A shard that was uploaded before is only checked.

        Raises:
            ShardioError: an earlier upload has failed.
        """
        with self._changed:
            while len(self._queue) >= _MAX_QUEUED and self._error is None:
                self._changed.wait(_POLL_S)
            self._raise()
            self._queue.append((path, shard))
            self._changed.notify_all()
            if len(self._threads) < _MAX_CONCURRENT:
                thread = threading.Thread(target=self._run, name="shardio-send", daemon=True)
                self._threads.append(thread)
                thread.start()

    def finish(self) -> None:
        """Wait until all shards are uploaded.

        Raises:
            ShardioError: an upload has failed.
        """
        with self._changed:
            while (self._queue or self._n_running) and self._error is None:
                self._changed.wait(_POLL_S)
            self._raise()

    def close(self) -> None:
        """Stop. Running uploads are not waited for, and their results are not recorded."""
        with self._changed:
            self._is_closed = True
            self._queue.clear()
            self._changed.notify_all()

    def set_done_callback(self, callback: Callable[[], object]) -> None:
        """Set a function to call when the uploader is closed and running uploads have ended."""
        with self._changed:
            self._done_callback = callback
            self._call_back_if_done()

    def _call_back_if_done(self) -> None:
        if self._is_closed and not self._n_running:
            self._done_callback()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                self._upload(*job)
            except BaseException as error:  # noqa: BLE001  # raised by the next `submit`
                with self._changed:
                    self._error = self._error or error
            with self._changed:
                self._n_running -= 1
                self._call_back_if_done()
                self._changed.notify_all()

    def _next(self) -> tuple[str, ShardSummary] | None:
        with self._changed:
            while not self._queue and not self._is_closed:
                self._changed.wait()
            if self._is_closed or self._error is not None:
                return None
            self._n_running += 1
            self._changed.notify_all()
            return self._queue.popleft()

    def _upload(self, path: str, shard: ShardSummary) -> None:
        if uploaded_name(path) is not None:
            check_uploaded(self._objects, shard, self.hint)
        else:
            upload_shard(self._objects, path, shard, self._check)
            with self._changed:
                self._check()
                write_atomic(
                    _note_path(path), to_checksummed_json({"name": shard.name}), exclusive=False
                )
        with self._changed:
            self._check()
            unlink(path)  # also if a process was killed between writing the note and this line

    def _check(self) -> None:
        """Raise _UploadCancelled if the uploader is closed."""
        if self._is_closed:
            raise _UploadCancelled


class _UploadCancelled(Exception):
    """An internal signal: an upload was cancelled by `close`."""


def _no_callback() -> None:
    pass


def _note_path(path: str) -> Path:
    return Path(f"{path}.sent")
