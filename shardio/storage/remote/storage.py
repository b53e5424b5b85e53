"""What a dataset in a store says of itself, in a folder of this machine: `dataset.json` and states.

What is published is never changed, so only `dataset.json` is asked for again. Where the store
cannot be reached, what it said last is gone by.

A shard that stays in its store, and is read by ranges: for a look at it, or single samples.

Its end is read first, in one request, and kept: there lie the header page again, section table and
schema, which is all that opening an ordinary shard needs. The first page is taken to be like the
last: whoever downloads the shard compares them.

The files of a dataset in an object store, as `shards.places` has them for a folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final

from shardio._base.stack_level import level_of_caller
from shardio.errors import (
    DatasetNotFound,
    InvalidArgument,
    ShardIncomplete,
    ShardNotFound,
    StoreUnavailable,
)
from shardio.format.layout import PAGE
from shardio.shard.verification import Rows
from shardio.shard.writer import ShardSummary
from shardio.storage import fs
from shardio.storage.file_access import Access, FileState, choose_access
from shardio.storage.pread import PreadFile
from shardio.storage.remote.cache import ShardCache
from shardio.storage.remote.locks import folder_lock
from shardio.storage.remote.object_store import ObjectStore, no_cancel
from shardio.storage.remote.options import RemoteOptions, validate_url

ListFiles = Callable[[Mapping[str, Any]], Collection[str]]

POINTER: Final = "dataset.json"
GENERATIONS: Final = "generations"
_REFRESH_DEADLINE_S: Final = 5.0
"""How long a store is tried that need not be asked."""
_DAMAGED_ERRORS: Final = (KeyError, TypeError, ValueError, OverflowError, RecursionError)
"""What `dataset.json` raises that is not one: whoever reads it says what is wrong."""


class ManifestCache:
    """Copies of the small files of a dataset; those of all processes, in the same folder.

    Args:
        folder: of this machine, which exists.
        objects: the dataset in its store.
        list_files: the function that returns the names of the files a generation's JSON refers to.
    """

    def __init__(self, folder: str, objects: ObjectStore, list_files: ListFiles) -> None:
        self.folder, self._objects, self._list_files = folder, objects, list_files

    def download(self, number: int | None) -> None:
        """Have `dataset.json`, and a state of the dataset by its number, else the published one.

        Nothing is asked for that is here, but `dataset.json` if there is no number.

        Raises:
            DatasetNotFound: there is none at the URL.
            StoreAccessDenied, StoreUnavailable: as `Objects` says; the latter not if all is here.
        """
        if number is None or not os.path.exists(self._path(POINTER)):
            self._download_pointer()
        if number is None:
            with contextlib.suppress(*_DAMAGED_ERRORS):
                number = int(json.loads(Path(self._path(POINTER)).read_bytes())["generation"])
        if number is not None:  # else reading it says what is wrong
            name = f"{GENERATIONS}/{number:06d}.json"
            self._download(name)
            for part in self._parts(self._path(name)):
                self._download(f"{GENERATIONS}/{part}")

    def _download(self, name: str) -> None:
        if not os.path.exists(self._path(name)):
            with contextlib.suppress(ShardNotFound):  # reading it says that it is missing
                self.write(name, self._objects.read(name))

    def invalidate(self) -> None:
        """Remove all states: what came is not what was written, or another dataset's."""
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self._path(GENERATIONS)):
                if not name.endswith(".tmp"):  # which another process is about to rename
                    fs.unlink(self._path(f"{GENERATIONS}/{name}"))

    def _download_pointer(self) -> None:
        old = self._pointer()
        try:
            new = self._objects.read(
                POINTER, deadline_s=None if old is None else _REFRESH_DEADLINE_S
            )
        except ShardNotFound as error:
            raise DatasetNotFound(
                f"{self._objects.url}: holds no {POINTER}: not a dataset, or never finished"
            ) from error
        except StoreUnavailable as error:
            if old is None:
                raise
            warnings.warn(
                f"{self._objects.url}: goes by what the store said last, as it cannot be reached "
                f"now: {error}",
                stacklevel=level_of_caller(),
            )
            return
        with folder_lock(self.folder):
            # Read again: of processes that begin at a time, the first may have brought states.
            old = self._pointer()
            if new != old:
                if old is None or _lineage(new) != _lineage(old):
                    self.invalidate()
                self.write(POINTER, new)

    def _pointer(self) -> bytes | None:
        """Return the content of `dataset.json` as it was brought last; None before that."""
        with contextlib.suppress(FileNotFoundError):
            return Path(self._path(POINTER)).read_bytes()
        return None

    def write(self, name: str, remote_file: bytes) -> None:
        """Write a file that appears whole or not at all."""
        path = self._path(name)
        fs.make_folder(os.path.dirname(path))
        temporary = f"{path}.{secrets.token_hex(6)}.tmp"
        try:
            with fs.create(temporary) as file:
                file.write(remote_file)
            fs.rename(temporary, path)
        except BaseException:
            fs.unlink(temporary)
            raise

    def _parts(self, generation: str) -> list[str]:
        """Return the names of a generation's external list files; none if it is damaged."""
        with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
            raw = Path(generation).read_bytes()
            if b'"external_lists"' in raw:  # in almost no generation
                named = self._list_files(json.loads(raw))
                return [name for name in sorted(named) if name == os.path.basename(name)]
        return []

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)


def _lineage(pointer: bytes) -> Any:
    with contextlib.suppress(*_DAMAGED_ERRORS):
        return json.loads(pointer)["lineage"]
    return None


TAIL_BYTES: Final = 64 << 10
BLOCK_BYTES: Final = 64 << 10
"""What is asked for around a small read; a larger one is asked for as it is."""
_BLOCKS_KEPT: Final = 64


class RangeFile(PreadFile):
    """Reads one object by ranges; keeps its end, and some blocks that were read last.

    Used from several threads at a time.

    Args:
        objects: what the name is of.
        name: of the object.

    Raises:
        ShardNotFound, StoreAccessDenied, StoreUnavailable: as `Objects` says, also from every read.
        ShardChanged: (from every read) another object is in its place.
    """

    def __init__(self, objects: ObjectStore, name: str) -> None:
        self.path = f"{objects.url}/{name}"
        self._objects, self._name = objects, name
        tail = objects.read_tail(name, TAIL_BYTES)
        self.nbytes, self._tag = tail.n_bytes, tail.tag
        if self.nbytes == 0:
            raise ShardIncomplete(f"{self.path}: the object is empty: its writer did not finish")
        self._tail, self._tail_start = tail.data, self.nbytes - len(tail.data)
        self.state = FileState(0, 0, self.nbytes, 0)
        self._blocks: OrderedDict[int, memoryview] = OrderedDict()
        self._mutex = threading.Lock()

    def __getitem__(self, part: slice) -> memoryview:
        """Read a part of the object."""
        start, stop, _ = part.indices(self.nbytes)
        if stop <= start:
            return memoryview(b"")
        if stop <= PAGE <= len(self._tail):  # the first page: the last one is the same
            return self._tail[len(self._tail) - PAGE :][start:stop]
        if start >= self._tail_start:
            return self._tail[start - self._tail_start : stop - self._tail_start]
        first, last = start // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES
        if first == last:
            return self._block(first)[start - first * BLOCK_BYTES : stop - first * BLOCK_BYTES]
        if last - first == 1 and stop - start <= BLOCK_BYTES:
            return memoryview(
                bytes(self[start : last * BLOCK_BYTES]) + self[last * BLOCK_BYTES : stop]
            )
        return self._objects.read_range(self._name, start, stop - start, self._tag)

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill a buffer from `offset` on."""
        view[:] = self[offset : offset + view.nbytes]

    def _read_all(self, views: list[memoryview], n_bytes: int, offset: int) -> None:
        whole = self[offset : offset + n_bytes]
        done = 0
        for view in views:
            view[:] = whole[done : done + view.nbytes]
            done += view.nbytes

    def _block(self, number: int) -> memoryview:
        with self._mutex:
            found = self._blocks.get(number)
            if found is not None:
                self._blocks.move_to_end(number)
                return found
        start = number * BLOCK_BYTES
        n_bytes = min(BLOCK_BYTES, self.nbytes - start)
        found = self._objects.read_range(self._name, start, n_bytes, self._tag)
        with self._mutex:
            self._blocks[number] = found
            while len(self._blocks) > _BLOCKS_KEPT:
                self._blocks.popitem(last=False)
        return found


class RemoteStorage:
    """Whole shards are brought into a cache and mapped there; or parts of them are read by ranges.

    Which of both `remote.whole` says. For any thread, in any process but a fork.

    Args:
        url: of the dataset.
        remote: how it is read.
        list_files: see `Mirror`.
    """

    def __init__(self, url: str, remote: RemoteOptions, list_files: ListFiles) -> None:
        self.root = validate_url(url)
        self._remote, self._objects = remote, ObjectStore(url, remote.options)
        self._cache = ShardCache(remote.cache_folder, remote.cache_bytes, self._objects)
        self._manifests = ManifestCache(self._cache.root, self._objects, list_files)

    def resolve_access(self, asked: Access) -> Access:
        """How its files are read: by offset where they are not brought whole."""
        if not self._remote.whole:
            if asked == "mmap":
                raise InvalidArgument(
                    f"{self.root}: access='mmap' is for shards that are here: load it by a "
                    "ShardLoader, which brings them"
                )
            return "pread"
        return choose_access(self._cache.root, asked)

    @property
    def worker_access(self) -> Access:
        """How those read its files who have them brought whole."""
        return choose_access(self._cache.root, self._remote.access)

    def manifest_folder(self, generation: int | None) -> str:
        """The folder that `dataset.json` and a state of the dataset lie in, brought if need be."""
        self._manifests.download(generation)
        return self._cache.root

    def invalidate(self) -> bool:
        """Have the states brought anew: what came is damaged."""
        self._manifests.invalidate()
        return True

    def max_pinned(self, sizes: Rows) -> int:
        """How many files may be held at a time, of which these are the bytes.

        All, if they fit; else such a part of the cache as leaves every reader its own, and as much
        for what is brought ahead.
        """
        if not self._remote.whole or self.fits(sizes):
            return max(1, len(sizes))
        share = self._cache.max_bytes // (2 * self._remote.n_readers)
        return max(1, share // int(sizes.max(initial=1)))

    def path_of(self, summary: ShardSummary) -> str:
        """Where a file is, or will be once it is held."""
        return self._cache.path_of(summary)

    def pin(self, summary: ShardSummary) -> str:
        """Have a file here, and keep it until as many calls of `unpin`; returns its path.

        Where it is read by ranges, and not here, this is its URL.

        Raises:
            ShardCorrupt, CacheFull, StoreUnavailable, StoreAccessDenied, ShardNotFound,
                ShardChanged: as `ShardCache.hold` says.
        """
        return self._cache.pin(summary) if self._remote.whole else self.pin_if_cached(summary)

    def pin_if_cached(self, summary: ShardSummary) -> str:
        """The same for a look at a file: where it is not here, this is its URL."""
        return self._cache.pin_if_cached(summary) or f"{self.root}/{summary.name}"

    @property
    def max_bytes(self) -> int:
        """How much the cache may hold."""
        return self._cache.max_bytes

    def fits(self, sizes: Rows) -> bool:
        """Whether files of these bytes all fit into the cache, and stay where they are."""
        n_bytes: int = sum(sizes.tolist())
        return n_bytes <= self._cache.max_bytes

    def download(self, summary: ShardSummary, check: Callable[[], None] = no_cancel) -> None:
        """Have a file here for whoever holds it next; `check` as in `ShardCache.hold`."""
        self.pin_for(summary, check)
        self._cache.unpin(summary)

    def pin_for(self, summary: ShardSummary, check: Callable[[], None] = no_cancel) -> None:
        """Bring a file, and keep it until `unpin`; `check` as in `ShardCache.hold`."""
        self._cache.pin(summary, check)

    def remote_file(self, summary: ShardSummary, path: str) -> PreadFile | None:
        """What reads a file by the path that it was held by, if it is not here; else None."""
        if os.path.isabs(path):
            return None
        return RangeFile(self._objects, summary.name)

    def unpin(self, summary: ShardSummary) -> None:
        """No longer keep a file. In any thread, in the middle of anything, also once closed."""
        self._cache.unpin(summary)

    def close(self) -> None:
        """Bring no more files. Those that are held stay until they are released. Idempotent."""
        self._cache.close()
