"""Upload a dataset to an object store: shards as they are finished, the generation last.

Readers of the URL see nothing until everything is uploaded: the generation is written after all
shards, and `dataset.json` last; both are only created, never overwritten. An interrupted upload can
be resumed, because a folder on this machine contains the journal of the conversion.

Threads upload finished shards while others are converted. After the upload, the local shard is
replaced by a note: a file with the shard's name in the store. Thus only shards in progress take
local disk space, and the notes tell a resumed conversion which shards are uploaded.

A lease, which is an object in the store, prevents two conversions from writing to one URL. A local
file contains the lease's token, so that this machine can resume.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from shardio._base.classes import Closing
from shardio.conversion.journal import WORK_FOLDER, plan_path, uploaded_name, write_upload_note
from shardio.conversion.report import ConversionReport, InputReport
from shardio.conversion.staging import LOCK_PATIENCE_S
from shardio.dataset.external_lists import total_bytes
from shardio.dataset.generation import Generation
from shardio.dataset.manifest import GENERATIONS, POINTER, holds_dataset, load
from shardio.errors import (
    DataError,
    DatasetConflict,
    DatasetExists,
    InvalidArgument,
    ShardChanged,
    ShardioError,
    ShardNotFound,
)
from shardio.format.checksum import hash_bytes
from shardio.format.layout import PAGE
from shardio.shard.reader import ShardReader
from shardio.shard.writer import ShardSummary
from shardio.storage.fs import (
    make_folder,
    read_checksummed_json,
    remove_tree,
    rename,
    to_checksummed_json,
    unlink,
    write_atomic,
)
from shardio.storage.remote.cache_folder import try_exclusive
from shardio.storage.remote.connection import RemoteOptions
from shardio.storage.remote.object_store import ObjectStore, no_cancel, run_parallel
from shardio.storage.remote.storage import RangeFile

_MAX_CONCURRENT: Final = 4
"""The number of shards uploaded or checked at a time."""
_MAX_QUEUED: Final = 8
"""The number of queued shards at which `submit` blocks."""
_POLL_S: Final = 0.25
_SHARD_NAME: Final = re.compile(r"\d{6,}-\d{3,}\.shard")
"""The names of shards; an interrupted conversion may have uploaded some that are not needed."""
LEASE_OBJECT: Final = "conversion.json"
"""The name of the lease object."""


def upload_shard(
    objects: ObjectStore,
    path: str,
    shard: ShardSummary,
    check: Callable[[], None] = no_cancel,
) -> None:
    """Upload a shard from `path` unless the store has an object with the same last page.

    The last page of a shard identifies the whole content. `shard` has the name in the store.
    `check` is called before each request except the first; its exceptions cancel the upload.
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

    `shard` has the name in the store; `hint` is the next step if the check fails.

    Raises:
        ShardNotFound, ShardChanged: the shard is missing or was replaced.
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

    `hint` is the alternative to resuming, for messages.
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

        A shard that was uploaded before is only checked. The error of an earlier upload is raised.
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
        """Wait until all shards are uploaded, and raise the error of a failed upload."""
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
                write_upload_note(path, shard.name)
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


class Upload(Closing):
    """A dataset being uploaded. It owns the upload threads, the lease and a local lock.

    `folder_options` are options that only folders support, by name; True if given.

    Raises:
        DatasetExists: the URL contains data, or an earlier conversion is not published yet.
        DatasetConflict: another conversion, on any machine, is writing to the URL.
        InvalidArgument: an option is for folders only, or the URL belongs to a web server.
    """

    def __init__(
        self,
        url: str,
        storage_options: Mapping[str, Any] | None,
        *,
        resume: bool,
        **folder_options: bool,
    ) -> None:
        if given := [name for name, is_given in folder_options.items() if is_given]:
            raise InvalidArgument(f"{url}: {', '.join(given)}: only for datasets in a folder")
        if url.lower().startswith(("http://", "https://")):
            raise InvalidArgument(
                f"{url}: cannot write to a web server; convert to a folder and copy it, or to an "
                "object store (s3://, gs://, az://)"
            )
        remote = RemoteOptions.of(None, None, storage_options)
        self._objects, self._start_s = ObjectStore(url, remote.options), time.monotonic()
        name = hash_bytes(f"{self._objects.endpoint} {self._objects.url}".encode())
        self.folder = os.path.join(remote.cache_folder, "converting", f"{name:016x}")
        """The local folder in which the dataset is converted."""
        self._hint = (
            f"to start again, remove {self.folder} and everything below {self._objects.url}"
        )
        self.uploader, self._lock = (
            ShardUploader(self._objects, self._hint),
            contextlib.ExitStack(),
        )
        self._done_folder = f"{self.folder}.done"
        """The name of the local folder after the dataset is published."""
        self._lease, self._has_lease = (
            UploadLease(self._objects, Path(f"{self.folder}.json")),
            False,
        )
        self.is_converted = False
        """True if the conversion is complete and only needs to be published."""
        try:
            make_folder(remote.cache_folder)
            self._lock_locally(f"{remote.cache_folder}/converting.lock", name >> 2)
            self._clean_up()
            self.is_converted = holds_dataset(self.folder)
            self._has_lease = self._lease.is_held()
            self._begin(resume=resume)
        except BaseException:
            self.close()
            raise

    def _lock_locally(self, path: str, byte: int) -> None:
        """Lock out other conversions on this machine, which would use the same lease."""
        end_s = time.monotonic() + LOCK_PATIENCE_S
        while not self._lock.enter_context(try_exclusive(path, byte)):
            self._lock.close()
            if time.monotonic() > end_s:
                raise DatasetConflict(
                    f"{self._objects.url}: another conversion on this machine is writing there, "
                    "or an interrupted upload has not ended yet; wait for it, or choose another URL"
                )
            time.sleep(0.02)

    def _begin(self, *, resume: bool) -> None:
        """Check that the URL contains only our own data, and acquire the lease."""
        url = self._objects.url
        if not resume and self.is_converted:
            raise DatasetExists(
                f"{self.folder}: the conversion for {url} is complete but not published; resume "
                f"(--resume) publishes it; {self._hint}"
            )
        if self._is_published():
            return
        if not self._has_lease:
            if found := self._objects.list_names(1):
                raise DatasetExists(f"{url}: already holds data ({found[0]}); choose another URL")
            self._lease.acquire()
            self._has_lease = True
            self._is_published()  # another upload may have started and ended in between
        if not self.is_converted and not self.has_plan:
            remove_tree(self.folder)  # left by a killed process that wrote samples: not resumable
        make_folder(os.path.dirname(self.folder))

    @property
    def has_plan(self) -> bool:
        """True if the folder has a plan, which records the inputs of an earlier conversion."""
        return plan_path(Path(self.folder, WORK_FOLDER)) is not None

    def _is_published(self) -> bool:
        """Return True if the dataset converted here is published; refuse any other dataset."""
        try:
            pointer = self._objects.read(POINTER)
        except ShardNotFound:
            return False
        if self.is_converted and pointer == Path(self.folder, POINTER).read_bytes():
            return True
        raise DatasetExists(f"{self._objects.url}: already holds a dataset; choose another URL")

    def publish(self, report: ConversionReport | None = None) -> ConversionReport:
        """Upload everything in the folder, the generation last, and return the report.

        `report` is None if an earlier process converted Python samples. If the store fails, the
        upload can be resumed.

        Raises:
            DatasetConflict: another writer has published at the URL.
            ShardNotFound, ShardChanged: an uploaded shard is missing or was replaced.
        """
        found, root = load(self.folder), Path(self.folder)
        shards = [shard for shard, _ in found.files]
        here = {shard.name for shard in shards if (root / shard.name).exists()}
        run_parallel(
            _MAX_CONCURRENT, self._upload_shard, [shard for shard in shards if shard.name in here]
        )
        if self.is_converted:  # an earlier process has uploaded the remaining shards
            sent = [shard for shard in shards if shard.name not in here]
            run_parallel(_MAX_CONCURRENT, self._check_shard, sent)
        for part in found.external_lists:
            self._objects.upload(f"{GENERATIONS}/{part.path.name}", str(part.path))
        report = report or _report_from(found)  # may read the inputs from an external list
        for name in (f"{GENERATIONS}/{found.number:06d}.json", POINTER):
            self._objects.put(name, (root / name).read_bytes(), exclusive=True)
        # The dataset is published now, so no unlisted shard can belong to another writer.
        self._remove_unused({shard.name for shard in shards})
        rename(self.folder, self._done_folder)
        self._clean_up()
        elapsed_s = time.monotonic() - self._start_s
        return replace(report, dataset=self._objects.url, elapsed_s=elapsed_s)

    def discard(self, report: ConversionReport) -> ConversionReport:
        """Remove uploaded shards, because nothing is published; return the report for the URL."""
        if self._lease.is_held():
            self._remove_unused(set())
        remove_tree(self.folder)  # so that `close` releases the lease
        return replace(report, dataset=self._objects.url)

    def close(self) -> None:
        """Stop the threads, and release the lease unless the conversion can be resumed."""
        self.uploader.close()
        try:
            if self._has_lease and not os.path.exists(self.folder):
                with contextlib.suppress(ShardioError, OSError):  # the next conversion reports it
                    self._lease.release()
        finally:
            self.uploader.set_done_callback(self._lock.close)

    def _clean_up(self) -> None:
        """Release the lease and remove the local folder if the dataset was published."""
        if os.path.exists(self._done_folder):
            self._lease.release()
            remove_tree(self._done_folder)

    def _upload_shard(self, shard: ShardSummary) -> None:
        upload_shard(self._objects, os.path.join(self.folder, shard.name), shard)

    def _check_shard(self, shard: ShardSummary) -> None:
        check_uploaded(self._objects, shard, self._hint)

    def _remove_unused(self, names: set[str]) -> None:
        """Remove uploaded shards that the dataset does not list."""
        for name in self._objects.list_names():
            if _SHARD_NAME.fullmatch(name) and name not in names:
                self._objects.remove(name)


def _report_from(found: Generation) -> ConversionReport:
    """Return the report of a conversion that an earlier process completed."""
    return ConversionReport(
        dataset="",
        kind=str(found.converter.get("name")),
        n_samples=found.n_samples,
        n_bytes=total_bytes(found.shards),
        elapsed_s=0,
        inputs=tuple(InputReport.of_json(dict(entry), {}) for entry in found.inputs),
        classes=found.classes,
        view=found.view,
    )


class UploadLease:
    """The exclusive right of this machine to write below a URL, for one conversion at a time.

    The local file at `path` has the content of the lease, and proves that this machine owns it.
    """

    def __init__(self, objects: ObjectStore, path: Path) -> None:
        self._objects, self._path = objects, path

    def is_held(self) -> bool:
        """Return True if this machine already owns the lease, from an earlier conversion.

        Raises:
            DatasetConflict: another machine holds the lease.
        """
        try:
            content = self._objects.read(LEASE_OBJECT)
        except ShardNotFound:
            return False
        if content != self._expected_content():
            raise self._conflict(content)
        return True

    def acquire(self) -> None:
        """Acquire the lease; raise DatasetConflict if another process was first."""
        if (content := self._expected_content()) is None:
            make_folder(str(self._path.parent))
            since = datetime.now(UTC).isoformat(timespec="seconds")
            lease_info = {"token": secrets.token_hex(16), "host": platform.node(), "since": since}
            content = to_checksummed_json(lease_info)
            write_atomic(self._path, content, exclusive=False)
        try:
            self._objects.put(LEASE_OBJECT, content, exclusive=True)
        except DatasetConflict:
            raise self._conflict(self._objects.read(LEASE_OBJECT)) from None

    def release(self) -> None:
        """Remove the lease from store and machine, unless another machine owns it. Idempotent."""
        with contextlib.suppress(DatasetConflict):
            if self.is_held():
                self._objects.remove(LEASE_OBJECT)
        unlink(self._path)

    def _expected_content(self) -> bytes | None:
        """Return the content of our lease object; None if there is no local file."""
        try:
            return to_checksummed_json(read_checksummed_json(self._path))
        except (DataError, OSError):
            return None

    def _conflict(self, content: bytes) -> DatasetConflict:
        try:
            lease_info = json.loads(content)
            holder = f"on {lease_info['host']}, since {lease_info['since']}"
        except (ValueError, TypeError, KeyError):
            holder = "with an unreadable lease"
        return DatasetConflict(
            f"{self._objects.url}/{LEASE_OBJECT}: another conversion is writing there, {holder}: "
            "wait for it, or choose another URL; if it will never be resumed, remove everything "
            "below the URL"
        )
