"""A local cache of whole, verified shards, shared by all processes of a machine.

    FOLDER/README.txt
    FOLDER/used                     the approximate size of all shards; counted again at the limit
    FOLDER/DATASET/origin           the URL of the dataset
    FOLDER/DATASET/locks            a file of which one byte per shard is locked
    FOLDER/DATASET/NAME.ID.shard    a shard; complete and verified if its .ok file is valid
    FOLDER/DATASET/NAME.ID.shard.ok
    FOLDER/DATASET/.NAME.ID.shard.BYTES.part    a partial download

To *pin* a shard means to hold a shared lock on its byte in the file `locks`. A process that
downloads or removes a shard holds the exclusive lock. The kernel releases the locks of a killed
process; the next process that needs the shard resumes its partial download. Files are not synced to
the disk. Instead, an .ok file is valid only until the machine restarts; after that, the shard is
verified again.

To *evict* a shard means to remove it to make room. Pins are not needed for safety: a mapped file
stays readable after its removal. Pins save downloads. With shuffle="shards", 2 workers and room for
12 of 40 shards, an epoch downloads 1.16 times the size of the dataset with pins, and 1.3 times
without (2026-11, 60 samples of 6 KiB a shard).

A downloaded shard must have the id that the generation names: a hash of the section table. This
table contains hashes of the sections that store hashes, and those sections contain hashes of all
other bytes that readers use. All hashes are checked.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from shardio.errors import (
    CacheFull,
    DataError,
    ShardCorrupt,
    ShardIncomplete,
    ShardioError,
    ShardUnsupported,
    UnsupportedEnvironment,
)
from shardio.format.checksum import hash_bytes
from shardio.format.layout import Kind
from shardio.format.sections import stored_bytes
from shardio.shard.reader import ShardReader
from shardio.shard.verification import Rows
from shardio.shard.writer import ShardSummary
from shardio.storage import fs
from shardio.storage.remote.cache_folder import (
    ByteLocks,
    CacheEvictor,
    lock_byte,
    remove_cached,
    try_exclusive,
)
from shardio.storage.remote.object_store import ObjectStore, no_cancel

_ROWS_AT_ONCE: Final = 1 << 14


def verify_download(path: str, shard: ShardSummary) -> None:
    """Check all hashes of a file; raise one of `_DAMAGED_ERRORS` unless it is the intact shard."""
    with ShardReader(path, verify="first", access="mmap") as reader:
        found = (reader.id, len(reader), reader.header.file_size)
        expected = (shard.id, shard.n_samples, shard.n_bytes)
        if found != expected:
            what = "not the shard that the generation names (id, samples, bytes)"
            facts: Any = {"expected": expected, "found": found}
            raise ShardCorrupt(what, code="generation", path=path, **facts)
        for section in reader.sections:
            if section.kind == Kind.DICTIONARY:
                reader.units.read_section(section)
        for first in range(0, len(reader), _ROWS_AT_ONCE):
            rows = np.arange(first, min(first + _ROWS_AT_ONCE, len(reader)))
            for name in reader.schema.optional:
                reader.records.present(name, rows)
            for name in reader.schema.columns:
                reader.units.check_column(name, rows)
            for k, name in enumerate(reader.schema.records):
                _check_records(reader, name, k, rows)


def _check_records(reader: ShardReader, name: str, k: int, rows: Rows) -> None:
    """Verify the stored bytes of the field `name`, the k-th in `schema.records`; do not decode."""
    records, units = reader.records, reader.units
    entries = records.entries(name, rows)
    records.shapes(name, rows)
    if reader.schema[name].is_streamed:
        for stream in records.streams(name, rows, entries):
            stream.data[:]
        return
    columns = (
        rows.tolist(),
        (entries["offset"] + np.uint64(records.offset)).tolist(),
        stored_bytes(entries).tolist(),
        entries["hash"].tolist(),
    )
    for row, offset, n_bytes, expected in zip(*columns, strict=True):
        stored = reader.content[offset : offset + n_bytes]
        units.check_record(name, k, row, offset, stored, expected)


README: Final = """\
Shards that shardio downloaded from object stores. Everything here may be deleted while no process
uses it; shards are downloaded again when needed.
"""
_MAX_DOWNLOADS: Final = 3
"""The number of downloads of a shard that are verified before the object counts as damaged."""
_POLL_S: Final = 0.02
_MAX_WAIT_S: Final = 10.0
"""The maximum time to wait for a shard that is missing although other processes have pinned it,
which means that somebody has removed it by hand."""
_DISK_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_DAMAGED_ERRORS: Final = (ShardCorrupt, ShardIncomplete, ShardUnsupported)
"""The errors for a damaged shard. ShardUnsupported is raised for a damaged version number."""

_TRIAL_BYTE: Final = 1 << 60
"""A byte that `lock_byte` never returns."""

T = TypeVar("T")


class ShardCache:
    """The cached shards of one dataset. Owns the locks of pinned shards. Thread-safe.

    `objects` is the dataset in the object store. `folder` is the folder of the cache, which is
    created for this user only. `max_bytes` limits the whole cache; None means nine tenths of the
    usable space. Raises UnsupportedEnvironment if the folder is not writable.
    """

    def __init__(self, folder: str, max_bytes: int | None, objects: ObjectStore) -> None:
        self.folder, self._objects = folder, objects
        name = f"{hash_bytes(f'{objects.endpoint} {objects.url}'.encode()):016x}"
        self.root = os.path.join(folder, name)
        self._lock_path = os.path.join(self.root, "locks")
        try:
            self._prepare()
        except OSError as error:
            raise UnsupportedEnvironment(
                f"{folder}: not usable as a cache of shards ({error}): name another folder with "
                "`cache`, or with the environment variable SHARDIO_CACHE"
            ) from error
        self._locks = ByteLocks(self._lock_path)
        self._evictor = CacheEvictor(folder, max_bytes)

    def _prepare(self) -> None:
        for folder in (self.folder, self.root):
            fs.make_folder(folder, 0o700)
        for path, text in (
            (os.path.join(self.folder, "README.txt"), README),
            (os.path.join(self.root, "origin"), f"{self._objects.url}\n"),
        ):
            if not os.path.exists(path):
                with fs.create(path, replace=True) as file:
                    file.write(text.encode())
        # Raise OSError now if the file system is read-only or has no locks.
        with try_exclusive(self._lock_path, _TRIAL_BYTE):
            pass

    @property
    def max_bytes(self) -> int:
        """The limit of the cache in bytes, over all datasets."""
        return self._evictor.max_bytes

    def path_of(self, shard: ShardSummary) -> str:
        """Return the path of a shard in the cache, whether or not it exists."""
        return os.path.join(self.root, _file_name(shard))

    def pin_if_cached(self, shard: ShardSummary) -> str | None:
        """Pin a shard until `unpin` and return its path; None if it is not cached and verified."""
        byte = lock_byte(_file_name(shard))
        try:
            if not self._locks.acquire_shared(byte):
                return None
        except FileNotFoundError:  # the folder of the cache was removed
            return None
        path = self.path_of(shard)
        if _is_verified(path, shard):
            with contextlib.suppress(OSError):
                fs.touch(f"{path}.ok")
            return path
        self._locks.release(byte)
        return None

    def pin(self, shard: ShardSummary, check: Callable[[], None] = no_cancel) -> str:
        """Pin a shard until `unpin` and return its path; download and verify it first if needed.

        If another process or thread is downloading the shard, wait for the end of this download.
        `check` is called repeatedly during a wait or download. Exceptions of `check` and errors of
        ObjectStore are raised.

        Raises:
            ShardCorrupt: the store returned damaged data three times.
            ShardUnsupported: the shard was written by a newer shardio.
            CacheFull: the disk is full, and all shards in the cache are pinned.
            UnsupportedEnvironment: the cache, or a pinned file in it, was removed.
        """
        try:
            return self._pin(shard, check)
        except FileNotFoundError as error:
            if isinstance(error, ShardioError) or os.path.isdir(self.root):
                raise
            raise UnsupportedEnvironment(
                f"{self.root}: the cache was removed while in use: reopen the dataset, or choose "
                "another cache"
            ) from error

    def _pin(self, shard: ShardSummary, check: Callable[[], None]) -> str:
        byte, waits_from_s = lock_byte(_file_name(shard)), time.monotonic()
        while True:
            if (path := self.pin_if_cached(shard)) is not None:
                return path
            with try_exclusive(self._lock_path, byte) as is_exclusive:
                if is_exclusive and not _is_verified(self.path_of(shard), shard):
                    self._fetch(shard, check)
            if is_exclusive:
                continue
            if not self._locks.acquire_shared(byte):  # another process is downloading the shard
                waits_from_s = time.monotonic()
            else:
                self._locks.release(byte)
                if time.monotonic() - waits_from_s > _MAX_WAIT_S:
                    raise UnsupportedEnvironment(
                        f"{self.path_of(shard)}: was removed or changed while in use: end the "
                        "processes that use it, or choose another cache"
                    )
            check()
            time.sleep(_POLL_S * random.uniform(0.5, 1.5))

    def unpin(self, shard: ShardSummary) -> None:
        """Undo one call of `pin`, and mark the shard as just used."""
        with contextlib.suppress(OSError):
            fs.touch(f"{self.path_of(shard)}.ok")
        self._locks.release(lock_byte(_file_name(shard)))

    def close(self) -> None:
        """Shrink the cache to its limit; close the lock file once all shards are unpinned."""
        self._locks.close()
        self._evictor.trim()

    def _fetch(self, shard: ShardSummary, check: Callable[[], None]) -> None:
        """Download and verify a shard; the caller holds its exclusive lock."""
        path = self.path_of(shard)
        if os.path.exists(path):  # it was cached before the machine restarted, or is damaged
            with contextlib.suppress(*_DAMAGED_ERRORS):
                verify_download(path, shard)
                self.retry_when_full(
                    shard.name, shard.n_bytes, lambda: _record_verified(path, shard)
                )
                return
            remove_cached(path)
        partial = os.path.join(self.root, f".{os.path.basename(path)}.{shard.n_bytes}.part")
        for n_left in reversed(range(_MAX_DOWNLOADS)):
            self.retry_when_full(
                shard.name, shard.n_bytes, lambda: self._evictor.reserve(partial, shard.n_bytes)
            )
            self.retry_when_full(
                shard.name, shard.n_bytes, lambda: self._download(shard, partial, check)
            )
            try:
                verify_download(partial, shard)
                break
            except _DAMAGED_ERRORS as error:
                fs.unlink(partial)
                if not n_left:
                    raise self._damaged_error(shard, partial, error) from error
        self._evictor.finish(partial, path)
        self.retry_when_full(shard.name, shard.n_bytes, lambda: _record_verified(path, shard))

    def _download(self, shard: ShardSummary, partial: str, check: Callable[[], None]) -> None:
        with fs.update(partial) as file:
            if file.seek(0, os.SEEK_END) > shard.n_bytes:
                file.truncate(0)
                file.seek(0)
            self._objects.download(shard.name, file, shard.n_bytes, check=check)

    def retry_when_full(self, name: str, n_bytes: int, call: Callable[[], T]) -> T:
        """Call `call`; while the disk is too full for `n_bytes`, evict shards and repeat.

        Raises CacheFull, with the name of the file, if nothing can be evicted.
        """
        while True:
            try:
                return call()
            except OSError as error:
                if error.errno not in _DISK_FULL:
                    raise
                if not self._evictor.evict(n_bytes):
                    raise self._full_error(name, n_bytes) from error

    def _damaged_error(
        self, shard: ShardSummary, partial: str, error: DataError
    ) -> ShardCorrupt | ShardUnsupported:
        url = f"{self._objects.url}/{shard.name}"
        if isinstance(error, ShardUnsupported):
            return ShardUnsupported(str(error).replace(partial, url))
        return ShardCorrupt(
            f"the object in the store is damaged: downloaded {_MAX_DOWNLOADS} times, and each "
            f"copy differs from the data written ({error}); publish it again, or reopen the "
            "dataset if another object has taken its place",
            code=getattr(error, "code", "incomplete"),
            path=url,
            field=getattr(error, "field", None),
            sample=getattr(error, "sample", None),
        )

    def _full_error(self, name: str, n_bytes: int) -> CacheFull:
        free = shutil.disk_usage(self.folder).free
        used = self._evictor.used_bytes()
        return CacheFull(
            f"{self.folder}: the disk is full: {n_bytes} bytes are needed for {name}, "
            f"{free} are free, and all {used} in the cache are in use; choose a cache on a larger "
            "disk, a smaller cache_bytes, or fewer workers"
        )


def _file_name(shard: ShardSummary) -> str:
    stem = shard.name.removesuffix(".shard").encode()[:180]  # a file's name has at most 255 bytes
    return f"{stem.decode(errors='ignore')}.{shard.id}.shard"


def _verification_record(path: str, shard: ShardSummary) -> str:
    found = os.stat(path)
    facts = (shard.id, found.st_size, found.st_ino, found.st_mtime_ns, _boot_id())
    return " ".join(map(str, facts)) + "\n"


def _is_verified(path: str, shard: ShardSummary) -> bool:
    """Return True if a shard is cached and was verified since the machine started."""
    try:
        is_recorded = Path(f"{path}.ok").read_text("ascii") == _verification_record(path, shard)
        return is_recorded and os.stat(path).st_size == shard.n_bytes
    except (OSError, ValueError):
        return False


def _record_verified(path: str, shard: ShardSummary) -> None:
    ok_path = f"{path}.ok"
    fs.unlink(ok_path)
    with fs.create(ok_path) as file:
        file.write(_verification_record(path, shard).encode())


def _boot_id() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return ""
