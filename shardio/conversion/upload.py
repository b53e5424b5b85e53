"""Upload a dataset to an object store while it is converted in a local folder.

When a shard is uploaded, the local file is replaced by a note: a small file that contains the name
of the shard in the store. Local disk space is therefore needed only for shards that are not yet
uploaded, and an interrupted conversion can resume.

The generation is uploaded after all shards. The object `dataset.json`, which points to the
generation, comes last: until then, readers of the URL see no dataset. Neither object is ever
overwritten. A lease, which is an object in the store, prevents two conversions from writing to the
same URL.
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
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from shardio._base.callers import warn
from shardio._base.classes import Closing
from shardio.conversion.journal import plan_path, uploaded_name, write_upload_note
from shardio.conversion.report import ConversionReport
from shardio.conversion.staging import LOCK_TIMEOUT_S
from shardio.dataset.manifest import GENERATIONS, POINTER, WORK_FOLDER, holds_dataset, load
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
from shardio.storage.remote.object_store import ObjectStore, no_cancel, run_parallel, start_thread
from shardio.storage.remote.storage import RangeFile

_MAX_CONCURRENT: Final = 4
"""The maximum number of shards that are uploaded or checked at the same time."""
_MAX_UPLOADS: Final = 12
"""The maximum number of unfinished uploads; `submit` waits until there are fewer."""
_POLL_S: Final = 0.25  # the maximum length of one wait, so that Ctrl-C can interrupt it
_SHARD_NAME: Final = re.compile(r"\d{6,}-\d{3,}\.shard")
"""Matches the names of shards, to find uploaded shards that the dataset does not need."""
LEASE_OBJECT: Final = "conversion.json"


def upload_shard(
    objects: ObjectStore, path: str, shard: ShardSummary, check: Callable[[], None] = no_cancel
) -> None:
    """Upload the shard at `path`, unless the store already has it.

    The store has the shard if it has an object with the same name, size and last page (4 KiB),
    because that page contains hashes of the whole content. `check` is called before each request
    except the first; an exception that it raises cancels the upload.
    """
    try:
        tail = objects.read_tail(shard.name, PAGE)
        with open(path, "rb") as file:
            file.seek(-PAGE, os.SEEK_END)
            is_there = tail.n_bytes == shard.n_bytes and bytes(tail.data) == file.read()
    except (ShardNotFound, ShardChanged):  # `read_tail` raises ShardChanged for an empty object.
        is_there = False
    if not is_there:
        check()
        objects.upload(shard.name, path, check=check)


def check_uploaded(objects: ObjectStore, shard: ShardSummary, hint: str) -> None:
    """Raise ShardNotFound or ShardChanged if an uploaded shard is missing or was replaced."""
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
    """Uploads shards in threads; `hint` says how to start again instead of resuming."""

    def __init__(self, objects: ObjectStore, hint: str) -> None:
        self._objects, self.hint = objects, hint
        self._slots = threading.Semaphore(_MAX_CONCURRENT)
        self._running: set[Future[None]] = set()
        self._lock, self._is_closed = threading.Lock(), False

    def submit(self, path: str, shard: ShardSummary) -> None:
        """Start to upload the shard at `path`; wait while _MAX_UPLOADS uploads are unfinished.

        A shard that has a note is only checked. If an earlier upload has failed, raise its error.
        """
        self._wait(_MAX_UPLOADS - 1)
        self._running.add(start_thread(lambda: self._upload(path, shard)))

    def finish(self) -> None:
        """Wait until all shards are uploaded. If an upload has failed, raise its error."""
        self._wait(0)

    def _wait(self, n_left: int) -> None:
        """Wait until at most `n_left` uploads are left; raise the error of one that has failed."""
        wait_s = 0.0
        while True:
            done, self._running = wait(self._running, wait_s, FIRST_COMPLETED)
            for each in done:
                each.result()
            if len(self._running) <= n_left:
                return
            wait_s = _POLL_S

    def close(self) -> None:
        """Cancel the uploads without waiting for them; those that end later leave no notes."""
        with self._lock:
            self._is_closed = True

    def call_when_done(self, callback: Callable[[], object]) -> None:
        """Call a function: now if all uploads have ended, otherwise in a thread once they have."""
        if all(each.done() for each in self._running):
            callback()
        else:
            start_thread(lambda: (wait(self._running), callback()))

    def _upload(self, path: str, shard: ShardSummary) -> None:
        with self._slots:
            self._check()
            if uploaded_name(path) is not None:
                check_uploaded(self._objects, shard, self.hint)
            else:
                upload_shard(self._objects, path, shard, self._check)
                with self._lock:
                    self._check()
                    write_upload_note(path, shard.name)
            with self._lock:
                self._check()
                # The file also exists if there was a note already: an earlier process may have been
                # killed after it wrote the note and before it removed the file.
                unlink(path)

    def _check(self) -> None:
        """Raise _UploadCancelled if the uploader is closed."""
        if self._is_closed:
            raise _UploadCancelled


class _UploadCancelled(Exception):
    """Raised in an upload thread if `close` has cancelled the upload; users never see it."""


class Upload(Closing):
    """A dataset that is converted in a local folder and uploaded to a URL.

    This object owns the upload threads, the lease, and a lock on this machine. `folder_options` are
    the options `append` and `overwrite`, which are refused: they are only for local folders.
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
            raise InvalidArgument(
                f"{url}: {', '.join(given)}: only for datasets in a folder: convert to "
                "a folder and copy it, or choose another URL"
            )
        if url.lower().startswith(("http://", "https://")):
            raise InvalidArgument(
                f"{url}: cannot write to a web server; convert to a folder and copy it, or to an "
                "object store (s3://, gs://, az://)"
            )
        remote = RemoteOptions.of(None, None, storage_options)
        self._objects, self._start_s = ObjectStore(url, remote.options), time.monotonic()
        name = hash_bytes(f"{self._objects.endpoint} {self._objects.url}".encode())
        self.folder = os.path.join(remote.cache_folder, "converting", f"{name:016x}")
        self._hint = (
            f"to start again, remove {self.folder} and everything below {self._objects.url}"
        )
        self.uploader = ShardUploader(self._objects, self._hint)
        self._lock = contextlib.ExitStack()
        self._done_folder = f"{self.folder}.done"
        """The path to which the local folder is renamed after the dataset is published."""
        self._lease = UploadLease(self._objects, Path(f"{self.folder}.json"))
        self._has_lease = False
        self._is_converted = False
        """True if an earlier process has completed the conversion, but has not published it."""
        try:
            make_folder(remote.cache_folder)
            self._lock_locally(f"{remote.cache_folder}/converting.lock", name >> 2)
            with contextlib.suppress(ShardioError, OSError):
                self._clean_up()
            was_interrupted = os.path.exists(self.folder)
            if plan_path(Path(self.folder, WORK_FOLDER)) is None:
                # An earlier process was killed while it wrote Python samples, which have no journal
                # from which the conversion could be resumed.
                remove_tree(self.folder)
            self._is_converted = holds_dataset(self.folder)
            self._has_lease = self._lease.is_held()
            self._begin(resume=resume)
            # `close` keeps the lease while this folder exists, because an interrupted run needs
            # the lease to resume.
            make_folder(self.folder if was_interrupted else os.path.dirname(self.folder))
        except BaseException:
            self.close()
            raise

    def _lock_locally(self, path: str, byte: int) -> None:
        """Lock a byte of the file `path`, because the lease excludes only other machines."""
        end_s = time.monotonic() + LOCK_TIMEOUT_S
        while not self._lock.enter_context(try_exclusive(path, byte)):
            self._lock.close()
            if time.monotonic() > end_s:
                raise DatasetConflict(
                    f"{self._objects.url}: another conversion on this machine is writing there, "
                    "or an interrupted upload has not ended yet; wait for it, or choose another URL"
                )
            time.sleep(0.02)

    def _begin(self, *, resume: bool) -> None:
        """Check that the URL has no data except that of this upload, and acquire the lease."""
        url = self._objects.url
        if not resume and self._is_converted:
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
            self._is_published()  # Another upload may have published since the first check.

    def _is_published(self) -> bool:
        """Return True if this dataset is already published; raise DatasetExists if another is."""
        try:
            pointer = self._objects.read(POINTER)
        except ShardNotFound:
            return False
        if self._is_converted and pointer == Path(self.folder, POINTER).read_bytes():
            return True
        raise DatasetExists(f"{self._objects.url}: already holds a dataset; choose another URL")

    def finish(self, report: ConversionReport) -> ConversionReport:
        """Publish the converted dataset; if there is none, remove all uploaded shards."""
        if not report.generation:
            return self.discard(report)
        try:
            return self.publish(report)
        except DatasetConflict:
            raise
        except BaseException as error:
            if plan_path(Path(self.folder, WORK_FOLDER)) is not None:  # Files, not Python samples.
                error.add_note(
                    f"{self.folder}: the conversion is complete; resume (--resume) publishes it; "
                    f"{self._hint}"
                )
            raise

    def publish(self, report: ConversionReport) -> ConversionReport:
        """Upload the remaining shards and then the generation, and return the report."""
        found, root = load(self.folder), Path(self.folder)
        shards = [shard for shard, _ in found.files]
        here = {shard.name for shard in shards if (root / shard.name).exists()}

        def upload_or_check(shard: ShardSummary) -> None:
            if shard.name in here:
                upload_shard(self._objects, os.path.join(root, shard.name), shard)
            elif self._is_converted:  # An earlier process has uploaded the shard.
                check_uploaded(self._objects, shard, self._hint)

        run_parallel(_MAX_CONCURRENT, upload_or_check, shards)
        for part in found.external_lists:
            self._objects.upload(f"{GENERATIONS}/{part.path.name}", str(part.path))
        for name in (f"{GENERATIONS}/{found.number:06d}.json", POINTER):
            self._objects.put(name, (root / name).read_bytes(), exclusive=True)
        try:
            # The dataset is published now. No other writer can publish here, so all shards that the
            # dataset does not list come from this upload, and are unused.
            self._remove_unused({shard.name for shard in shards})
            rename(self.folder, self._done_folder)
            self._clean_up()
        except (ShardioError, OSError) as error:
            warn(
                f"{self._objects.url}: the dataset is published, but temporary files could not be "
                f"removed: {error}"
            )
        elapsed_s = time.monotonic() - self._start_s
        return replace(report, dataset=self._objects.url, elapsed_s=elapsed_s)

    def discard(self, report: ConversionReport) -> ConversionReport:
        """Remove all uploaded shards, because no dataset is published; return the report."""
        if self._lease.is_held():
            self._remove_unused(set())
        remove_tree(self.folder)  # `close` releases the lease only if the folder does not exist.
        return replace(report, dataset=self._objects.url)

    def close(self) -> None:
        """Stop the threads, and release the lease unless the conversion can be resumed."""
        self.uploader.close()
        try:
            if self._has_lease and not os.path.exists(self.folder):
                # If this fails, the lease stays, and the next conversion to the URL reports it.
                with contextlib.suppress(ShardioError, OSError):
                    self._lease.release()
        finally:
            self.uploader.call_when_done(self._lock.close)

    def _clean_up(self) -> None:
        """Release the lease and remove the local folder, if the dataset was published."""
        if os.path.exists(self._done_folder):
            self._lease.release()
            remove_tree(self._done_folder)

    def _remove_unused(self, names: set[str]) -> None:
        for name in self._objects.list_names():
            if _SHARD_NAME.fullmatch(name) and name not in names:
                self._objects.remove(name)


class UploadLease:
    """An object in the store. Only the machine that owns this lease may write below the URL.

    The owner has a local file with the same content, which includes a random token.
    """

    def __init__(self, objects: ObjectStore, path: Path) -> None:
        self._objects, self._path = objects, path

    def is_held(self) -> bool:
        """Return True if this machine owns the lease; raise DatasetConflict if another one does."""
        try:
            content = self._objects.read(LEASE_OBJECT)
        except ShardNotFound:
            return False
        if content != self._expected_content():
            raise self._conflict(content)
        return True

    def acquire(self) -> None:
        """Acquire the lease; raise DatasetConflict if another process has acquired it before."""
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
        """Remove the object, if this machine owns the lease, and remove the local file."""
        with contextlib.suppress(DatasetConflict):
            if self.is_held():
                self._objects.remove(LEASE_OBJECT)
        unlink(self._path)

    def _expected_content(self) -> bytes | None:
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
