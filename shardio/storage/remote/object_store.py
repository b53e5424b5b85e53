"""Calls that may hang in a network are made in other threads, so that Ctrl-C ends the wait for it.

Python runs the handler of a signal in the main thread, and only once a request there has come back,
which takes up to `stores.REQUEST_S`. A call that is no longer waited for goes on to its own end, or
that of the process.

Objects below one URL: read, downloaded in pieces, and written, each within a deadline.

What may pass, as a server's error, a connection that is cut, a body that comes too slowly or is too
short, is tried again after a pause, from the byte that was reached. What will not pass is an error
at once: nothing there, no permission, another object in the place of the one begun.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, TypeVar

from shardio.errors import (
    DatasetConflict,
    InvalidArgument,
    ShardChanged,
    ShardNotFound,
    StoreUnavailable,
)
from shardio.storage.remote.obstore_adapter import (
    TransientError,
    endpoint_of,
    load_obstore,
    map_obstore_errors,
    open_store,
    replaced_error,
)
from shardio.storage.remote.options import AZURE, validate_url

Item = TypeVar("Item")
R = TypeVar("R")

_SIGNAL_POLL_S: Final = 0.25
"""A signal that comes just before the wait begins does not end it: it is heeded so much later."""


def interruptible(call: Callable[[], R]) -> R:
    """Make a call; where it is made in the main thread, signals are heeded meanwhile."""
    if threading.current_thread() is not threading.main_thread():
        return call()
    running = [future := _start_thread(call)]
    while running:
        running, _ = _wait_some(running)
    return future.result()


def run_parallel(n_threads: int, call: Callable[[R], object], items: Iterable[R]) -> None:
    """Make a call for each of some items; after an error begin none, and raise the first.

    What is under way at an error is waited for, but not at Ctrl-C.
    """
    left, mutex = list(reversed(list(items))), threading.Lock()

    def run() -> None:
        while True:
            with mutex:
                if not left:
                    return
                item = left.pop()
            call(item)

    failed: list[Future[None]] = []
    try:
        running = [_start_thread(run) for _ in range(min(n_threads, len(left)))]
        while running and not failed:
            running, failed = _wait_some(running)
    finally:
        with mutex:
            left.clear()
    while running:
        running, _ = _wait_some(running)
    for each in failed:
        each.result()


def map_ordered(n_threads: int, call: Callable[[Item], R], items: Iterable[Item]) -> Iterator[R]:
    """What a call gives for each of some items, in their order; so many are made at a time.

    What it raises is raised in its turn. What is under way then, or when no more is wanted, is not
    waited for.
    """
    left, coming = iter(items), deque[Future[R]]()
    while True:
        begun = (_start_thread(functools.partial(call, item)) for item in left)
        coming.extend(itertools.islice(begun, n_threads - len(coming)))
        if not coming:
            return
        running = [first := coming.popleft()]
        while running:
            running, _ = _wait_some(running)
        yield first.result()


def _wait_some(running: list[Future[R]]) -> tuple[list[Future[R]], list[Future[R]]]:
    """Wait until all have ended, one has failed, or a while is over; those left, those failed."""
    done, left = wait(running, _SIGNAL_POLL_S, FIRST_EXCEPTION)
    return list(left), [each for each in done if each.exception() is not None]


def _start_thread(call: Callable[[], R]) -> Future[R]:
    """What a call in a thread of its own will come to."""
    future: Future[R] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  # whoever waits raises it
            future.set_exception(error)

    threading.Thread(target=run, name="shardio-request", daemon=True).start()
    return future


T = TypeVar("T")

DEADLINE_S: Final = 120.0
"""How long a call goes on without a byte of progress."""
PIECE_BYTES: Final = 8 << 20
"""What one request of a download asks for."""
_CONCURRENT_PIECES: Final = 4
"""One connection to a store brings less than the network does, and each request waits before."""
_MIN_PIECE_BYTES: Final = 256 << 10
_FIRST_BACKOFF_S: Final = 0.1
_MAX_BACKOFF_S: Final = 5.0
_PART_BYTES: Final = 8 << 20
_CONCURRENT_PARTS: Final = 4


class ObjectPart(NamedTuple):
    """Bytes of an object, how many the whole has, and what tells that it is the same later."""

    data: memoryview
    n_bytes: int
    tag: str | None


def no_cancel() -> None:
    """What a call that nobody cancels asks between two requests."""


class ObjectStore:
    """The objects below a URL; owns a store of obstore, made when it is first asked.

    For several threads at a time. Pickled, it is made anew where it arrives.

    Args:
        url: what the names are below.
        options: see `Remote`.

    Raises:
        InvalidArgument: the URL or an option is not acceptable.
        StoreUnavailable: (from every call) the deadline passed; it says what failed last.
        StoreAccessDenied: (from every call) the store does not let us.
        ShardNotFound: (from reading) there is no such object.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self.url = validate_url(url)
        self._options = dict(options or {})
        self.deadline_s = _validate_deadline(self._options.pop("deadline_s", DEADLINE_S))
        self._store: Any = None
        self._pid = 0

    def __repr__(self) -> str:
        return f"Objects({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectStore, (self.url, {**self._options, "deadline_s": self.deadline_s})

    @property
    def _is_azure(self) -> bool:
        """Whether the store gives no range that is counted from the end."""
        return self.url.partition("://")[0].lower() in AZURE

    @property
    def endpoint(self) -> str:
        """Which server is asked, where that is not the one of the URL's scheme."""
        return endpoint_of(self._options)

    def read(self, name: str, *, deadline_s: float | None = None) -> bytes:
        """The whole of a small object."""
        found = self._get(name, None, deadline_s=deadline_s)
        return bytes(found.data)

    def read_range(self, name: str, start: int, n_bytes: int, tag: str | None = None) -> memoryview:
        """n_bytes of an object from `start` on.

        Raises:
            ShardChanged: it is another object than the one of `tag`.
        """
        found = self._get(name, (start, start + n_bytes), tag=tag)
        if len(found.data) != n_bytes:
            raise self._changed(name, start + n_bytes, found.n_bytes)
        return found.data

    def read_tail(self, name: str, n_bytes: int) -> ObjectPart:
        """The last n_bytes of an object, or all it has; by one request, but two of Azure."""
        if not self._is_azure:
            return self._get(name, {"suffix": n_bytes})
        found = self._retry(name, lambda: load_obstore().head(self._opened(), name))
        size = found["size"]
        return self._get(name, (max(0, size - n_bytes), size), tag=found["e_tag"])

    def download(
        self,
        name: str,
        file: IO[bytes],
        n_bytes: int,
        *,
        check: Callable[[], None] = no_cancel,
    ) -> None:
        """Append to `file` what it lacks of an object of n_bytes.

        After each failure less is asked for at a time, as the network may be slow.

        Args:
            name: of the object.
            file: unbuffered, at its end; it may have the beginning already.
            n_bytes: how many there should be.
            check: called between two requests; what it raises ends the download.

        Raises:
            ShardChanged: the object has another size, or is replaced meanwhile.
        """
        done, tag = file.tell(), None
        size, n_at_once = PIECE_BYTES, _CONCURRENT_PIECES
        began, n_tries = time.monotonic(), 0
        while done < n_bytes:
            check()
            pieces = ((at, min(at + size, n_bytes)) for at in range(done, n_bytes, size))
            ask = functools.partial(self._get_once, name, tag=tag)
            try:
                for part in map_ordered(n_at_once, ask, pieces):
                    if part.n_bytes != n_bytes:
                        raise self._changed(name, n_bytes, part.n_bytes)
                    tag = tag or part.tag
                    if part.tag not in (tag, None):
                        raise replaced_error(self.url, name)
                    _write_all(file, part.data)
                    done += len(part.data)
                    began, n_tries = time.monotonic(), 0
                    check()
            except TransientError as failure:
                n_tries += 1
                size, n_at_once = max(_MIN_PIECE_BYTES, size // 2), max(1, n_at_once // 2)
                self._back_off(name, failure, began, n_tries, None, check)

    def put(self, name: str, data: bytes, *, exclusive: bool) -> None:
        """Write a small object; exclusive: only if there is none of this name.

        Raises:
            DatasetConflict: there is one, with other bytes.
        """
        mode = "create" if exclusive else "overwrite"

        def write() -> None:
            load_obstore().put(self._opened(), name, data, mode=mode, use_multipart=False)

        try:
            self._retry(name, write)
        except FileExistsError:
            # It may be ours: written, and the answer lost.
            if self.read(name) != data:
                raise DatasetConflict(
                    f"{self.url}/{name}: is there already: another writer published first, and "
                    "nothing of theirs was changed; choose another place"
                ) from None

    def upload(self, name: str, path: str, *, check: Callable[[], None] = no_cancel) -> None:
        """Write a file as an object, in parts where it is large; it appears whole or not at all.

        Args:
            name: of the object.
            path: of the file.
            check: called before it is tried again; what it raises ends that.

        Raises:
            StoreUnavailable: also where the store has another number of bytes afterwards.
        """
        n_bytes = os.stat(path).st_size

        def write() -> None:
            load_obstore().put(
                self._opened(),
                name,
                Path(path),
                chunk_size=_PART_BYTES,
                max_concurrency=_CONCURRENT_PARTS,
            )
            found = load_obstore().head(self._opened(), name)["size"]
            if found != n_bytes:
                raise TransientError(f"{n_bytes} bytes were sent, {found} are there")

        self._retry(name, write, check=check)

    def exists(self, name: str) -> bool:
        """Whether there is an object of this name."""
        try:
            self._retry(name, lambda: load_obstore().head(self._opened(), name))
        except ShardNotFound:
            return False
        return True

    def list_names(self, limit: int | None = None) -> list[str]:
        """The names of all objects below the URL; or of the first, at most so many."""

        def read() -> list[str]:
            pages = load_obstore().list(self._opened())
            return [
                each["path"]
                for each in itertools.islice(itertools.chain.from_iterable(pages), limit)
            ]

        return self._retry("", read)

    def remove(self, name: str) -> None:
        """Remove an object; it may be gone already."""
        try:
            self._retry(name, lambda: load_obstore().delete(self._opened(), name))
        except ShardNotFound:
            return

    def _opened(self) -> Any:
        if self._store is None or self._pid != os.getpid():
            self._store, self._pid = open_store(self.url, self._options), os.getpid()
        return self._store

    def _get(
        self, name: str, part: Any, *, tag: str | None = None, deadline_s: float | None = None
    ) -> ObjectPart:
        return self._retry(name, lambda: self._get_once(name, part, tag), deadline_s)

    def _get_once(self, name: str, part: Any, tag: str | None) -> ObjectPart:
        """One request: what it brings is as long as it says."""
        options = {"range": part} if part is not None else {}
        is_weak = tag is not None and tag.startswith("W/")  # matches nothing: RFC 9110, 13.1.1
        if tag is not None and not is_weak:
            options["if_match"] = tag
        with map_obstore_errors(self.url, name, self._options):
            answer = load_obstore().get(self._opened(), name, options=options)
            whole, (start, end) = answer.meta, answer.range
            data = memoryview(answer.bytes())
        if len(data) != end - start or part is None and len(data) != whole["size"]:
            raise TransientError(f"{end - start} bytes were announced, {len(data)} came")
        if isinstance(part, tuple) and (start != part[0] or end != min(part[1], whole["size"])):
            raise TransientError(
                f"bytes {part[0]} to {part[1]} were asked for, {start} to {end} came"
            )
        if is_weak and whole["e_tag"] != tag:
            raise replaced_error(self.url, name)
        return ObjectPart(data, whole["size"], whole["e_tag"])

    def _retry(
        self,
        name: str,
        call: Callable[[], T],
        deadline_s: float | None = None,
        *,
        check: Callable[[], None] = no_cancel,
    ) -> T:
        """Try until it succeeds, fails for good, or the deadline has passed."""
        began, n_tries = time.monotonic(), 0
        while True:
            try:
                with map_obstore_errors(self.url, name, self._options):
                    return interruptible(call)
            except TransientError as failure:
                n_tries += 1
                self._back_off(name, failure, began, n_tries, deadline_s, check)

    def _back_off(
        self,
        name: str,
        failure: TransientError,
        began: float,
        n_tries: int,
        deadline_s: float | None,
        check: Callable[[], None],
    ) -> None:
        """Wait before the next try, the longer the more there were, a little more or less."""
        most_s = self.deadline_s if deadline_s is None else deadline_s
        pause_s = min(_FIRST_BACKOFF_S * 2 ** min(n_tries - 1, 10), _MAX_BACKOFF_S)
        pause_s *= random.uniform(0.5, 1)
        taken_s = time.monotonic() - began
        if taken_s + pause_s > most_s:
            raise StoreUnavailable(
                f"{self.url}/{name}: the store gave nothing for {taken_s:.0f} s, tried {n_tries} "
                f"times, the last time: {failure}; go on later (what was downloaded stays), or "
                "wait longer with storage_options={'deadline_s': …}"
            ) from None
        check()
        time.sleep(pause_s)

    def _changed(self, name: str, expected: int, found: int) -> ShardChanged:
        return ShardChanged(
            "the object in the store has another size than the dataset says",
            code="file_size",
            path=f"{self.url}/{name}",
            expected=expected,
            found=found,
        )


def _write_all(file: IO[bytes], data: memoryview) -> None:
    while len(data):
        data = data[file.write(data) :]


def _validate_deadline(given: object) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or not given > 0:
        raise InvalidArgument(
            f"storage_options['deadline_s'] must be seconds, more than 0; found {given!r}"
        )
    return float(given)
