"""A client of one URL in an object store: reads, resumable downloads and writes with deadlines.

After a transient failure (a server error, a lost connection, a response that is late or too short),
a request is repeated after a pause; a download continues from the last byte that was received.
After a permanent failure (a missing object or permission, an object that was replaced while it was
read), an exception is raised at once.

Requests run in separate threads. Otherwise a request could block signal handlers, and outlast its
deadline, for up to `REQUEST_TIMEOUT_S`. After Ctrl-C in the main thread, or when the deadline has
passed, the request is abandoned: it runs until it ends or the process exits, and its result is
ignored.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import IO, Any, Final, NamedTuple, TypeVar

from shardio._base.callers import warn
from shardio._base.progress import counted
from shardio.errors import (
    DatasetConflict,
    ShardChanged,
    ShardNotFound,
    StoreUnavailable,
)
from shardio.storage.remote.connection import (
    AZURE,
    CONNECT_TIMEOUT_S,
    DEADLINE_HINT,
    DEADLINE_S,
    NoConnection,
    TransientError,
    endpoint_of,
    load_obstore,
    map_obstore_errors,
    open_store,
    pop_deadline,
    replaced_error,
    validate_url,
)

Item = TypeVar("Item")
R = TypeVar("R")

_SIGNAL_POLL_S: Final = 0.25
"""The maximum duration of one wait. A signal just before a wait is handled only after the wait."""


def no_cancel() -> None:
    """Do nothing. This is the default of `check`: the operation is never cancelled."""


def interruptible(call: Callable[[], R], check: Callable[[], None] = no_cancel) -> R:
    """Return the result of `call`; meanwhile, signal handlers can run and raise an exception.

    `check` is called repeatedly during the wait; an exception that it raises abandons the call.
    """
    return next(map_ordered(1, lambda _: call(), [None], check=check))


def run_parallel(n_threads: int, call: Callable[[R], object], items: Iterable[R]) -> None:
    """Call a function for each item, in up to `n_threads` threads.

    If a call raises an exception, no further call is started, and the exception is raised when the
    running calls have ended. After Ctrl-C, KeyboardInterrupt is raised at once.
    """
    left = deque(items)

    def run() -> None:
        while True:
            try:
                item = left.popleft()
            except IndexError:
                return
            call(item)

    failed: list[Future[None]] = []
    try:
        running = [start_thread(run) for _ in range(min(n_threads, len(left)))]
        while running and not failed:
            running, failed = _wait_briefly(running)
    finally:
        left.clear()
    while running:
        running, _ = _wait_briefly(running)
    for each in failed:
        each.result()


def map_ordered(
    n_threads: int,
    call: Callable[[Item], R],
    items: Iterable[Item],
    *,
    check: Callable[[], None] = no_cancel,
) -> Iterator[R]:
    """Yield the result of a function for each item, in order; run up to `n_threads` calls at once.

    The exception of a call is raised in place of its result. `check` is called repeatedly during a
    wait and may raise an exception, too. After an exception, or when the iterator is no longer
    used, calls that are still running are abandoned.
    """
    left, coming = iter(items), deque[Future[R]]()
    while True:
        begun = (start_thread(functools.partial(call, item)) for item in left)
        coming.extend(itertools.islice(begun, n_threads - len(coming)))
        if not coming:
            return
        running = [first := coming.popleft()]
        while running:
            running, _ = _wait_briefly(running)
            if running:
                check()
        yield first.result()


def _wait_briefly(running: list[Future[R]]) -> tuple[list[Future[R]], list[Future[R]]]:
    """Wait at most _SIGNAL_POLL_S; return the running futures, and those that have failed."""
    done, left = wait(running, _SIGNAL_POLL_S, FIRST_EXCEPTION)
    return list(left), [each for each in done if each.exception() is not None]


def start_thread(call: Callable[[], R]) -> Future[R]:
    """Run a function in a daemon thread, and return the future of its result."""
    future: Future[R] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  # raised by `future.result()`
            future.set_exception(error)

    threading.Thread(target=run, name="shardio-request", daemon=True).start()
    return future


_CONNECT_DEADLINE_S: Final = float(CONNECT_TIMEOUT_S)
"""The default limit on the time for connecting to a server that has never answered. A wrong address
is more likely than a server that is about to start."""
_NOTE_AFTER_S: Final = 1.0
"""The time without success after which a warning says that a call is being repeated."""
PIECE_BYTES: Final = 8 << 20
"""The number of bytes per request of a download or a large range."""
_CONCURRENT_PIECES: Final = 4
"""The number of simultaneous requests of a download. One connection is often slower than the
network."""
_MIN_PIECE_BYTES: Final = 256 << 10
_FIRST_BACKOFF_S: Final = 0.1
_MAX_BACKOFF_S: Final = 5.0
_UPLOAD_PART_BYTES: Final = 8 << 20
_CONCURRENT_UPLOAD_PARTS: Final = 4


class ObjectPart(NamedTuple):
    """Bytes of an object, the size of the whole object, and the tag of its version (ETag)."""

    data: memoryview
    n_bytes: int
    tag: str | None


class ObjectStore:
    """A client for the objects below a URL. Names are relative to the URL. Thread-safe.

    Owns a store of obstore, which the first request opens. An unpickled copy opens its own store.
    `options` are arguments of `obstore.store.from_url`, and `deadline_s`. Unless `deadline_s` is
    given, connecting to a server that has never answered is attempted for a few seconds only.

    Raises:
        InvalidArgument: the URL or an option is invalid.
        StoreUnavailable: (from every call) the deadline has passed; the message quotes the last
            failure.
        StoreAccessDenied: (from every call) the store denies access.
        ShardNotFound: (from reading) there is no such object.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self.url = validate_url(url)
        self._options = dict(options or {})
        given_s = pop_deadline(self._options)
        self.deadline_s = DEADLINE_S if given_s is None else given_s
        self._connect_deadline_s = _CONNECT_DEADLINE_S if given_s is None else given_s
        self._store: Any = None
        self._pid = 0
        self._has_answered = self._is_noted = False

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectStore, (self.url, {**self._options, "deadline_s": self.deadline_s})

    @property
    def endpoint(self) -> str:
        """The server; an empty string stands for the default of the URL's scheme."""
        return endpoint_of(self._options)

    def read(self, name: str, *, deadline_s: float | None = None) -> bytes:
        """Return the content of a small object."""
        return bytes(self._get(name, None, deadline_s=deadline_s).data)

    def read_range(self, name: str, start: int, n_bytes: int, tag: str | None = None) -> memoryview:
        """Return `n_bytes` of an object from `start`.

        Raises ShardChanged if bytes are missing, or if the tag of the object is not `tag`.
        """
        data = []
        for part in self._read_parts(name, start, start + n_bytes, tag):
            if part.n_bytes < start + n_bytes:
                raise self._changed(name, start + n_bytes, part.n_bytes)
            data.append(part.data)
        return data[0] if len(data) == 1 else memoryview(b"".join(data))

    def read_tail(self, name: str, n_bytes: int) -> ObjectPart:
        """Return the last `n_bytes` of an object, or the whole object if it is smaller."""
        # This takes one request. On Azure, it takes two: a range cannot be counted from the end.
        if self.url.partition("://")[0].lower() not in AZURE:
            return self._get(name, {"suffix": n_bytes})
        found = self._retry(name, lambda: load_obstore().head(self._get_store(), name))
        size = found["size"]
        return self._get(name, (max(0, size - n_bytes), size), tag=found["e_tag"])

    def download(
        self, name: str, file: IO[bytes], n_bytes: int, *, check: Callable[[], None] = no_cancel
    ) -> None:
        """Download the bytes of an object that `file` lacks, and append them to `file`.

        `file` has no buffer and is positioned at its end. `n_bytes` is the size of the object.
        `check` is called between requests; an exception that it raises cancels the download. Raises
        ShardChanged if the object has another size, or was replaced meanwhile.
        """
        for part in self._read_parts(name, file.tell(), n_bytes, check=check):
            if part.n_bytes != n_bytes:
                raise self._changed(name, n_bytes, part.n_bytes)
            data = part.data
            while len(data):
                data = data[file.write(data) :]

    def _read_parts(
        self,
        name: str,
        start: int,
        stop: int,
        tag: str | None = None,
        check: Callable[[], None] = no_cancel,
    ) -> Iterator[ObjectPart]:
        """Yield a range of an object in parts, in order; parts have the same tag.

        Several requests run at once. After a failure, they are smaller and fewer.
        """
        size, n_at_once = PIECE_BYTES, _CONCURRENT_PIECES
        back_off = _BackOff(self, name, check=check)
        while True:
            check()
            pieces = [(at, min(at + size, stop)) for at in range(start, stop, size)]
            ask = functools.partial(self._get_once, name, tag=tag)
            try:
                for part in map_ordered(n_at_once, ask, pieces, check=back_off.check_deadline):
                    tag = tag or part.tag
                    if part.tag not in (tag, None):
                        raise replaced_error(self.url, name)
                    start += len(part.data)
                    yield part
                    back_off.reset()
                    check()
                return
            except TransientError as failure:
                size, n_at_once = max(_MIN_PIECE_BYTES, size // 2), max(1, n_at_once // 2)
                back_off(failure)

    def put(self, name: str, data: bytes, *, exclusive: bool) -> None:
        """Write a small object.

        With `exclusive`, raise DatasetConflict if the object exists with other data.
        """
        mode = "create" if exclusive else "overwrite"

        def write() -> None:
            load_obstore().put(self._get_store(), name, data, mode=mode, use_multipart=False)

        try:
            self._retry(name, write)
        except FileExistsError:
            # An earlier attempt may have written the object even though its response was lost.
            if self.read(name) != data:
                raise DatasetConflict(
                    f"{self.url}/{name}: already exists: another writer published first, and its "
                    "files are unchanged; choose another URL"
                ) from None

    def upload(self, name: str, path: str, *, check: Callable[[], None] = no_cancel) -> None:
        """Upload a file as an object; the object appears with all of its content or not at all.

        After a failed attempt, `check` is called; an exception that it raises cancels the upload.
        The deadline begins again with each part that is sent.
        """
        n_bytes = os.stat(path).st_size
        back_off = _BackOff(self, name, check=check)

        def write() -> None:
            parts = {"chunk_size": _UPLOAD_PART_BYTES, "max_concurrency": _CONCURRENT_UPLOAD_PARTS}
            with open(path, "rb") as file:
                source = _UploadSource(file, back_off.note_progress)
                load_obstore().put(self._get_store(), name, source, **parts)
            found = load_obstore().head(self._get_store(), name)["size"]
            if found != n_bytes:
                raise TransientError(f"uploaded {n_bytes} bytes, the object has {found}")

        self._retry(name, write, back_off)

    def list_names(self, limit: int | None = None) -> list[str]:
        """Return the names of the objects below the URL: at most `limit`, or all for None."""
        back_off = _BackOff(self, "")

        def read() -> list[str]:
            names: list[str] = []
            for part in load_obstore().list(self._get_store()):
                names += [each["path"] for each in part]
                back_off.note_progress(len(names))
                if limit is not None and len(names) >= limit:
                    break
            return names[:limit]

        return self._retry("", read, back_off)

    def remove(self, name: str) -> None:
        """Remove an object, if it exists."""
        with contextlib.suppress(ShardNotFound):
            self._retry(name, lambda: load_obstore().delete(self._get_store(), name))

    def _get_store(self) -> Any:
        if self._store is None or self._pid != os.getpid():
            self._store, self._pid = open_store(self.url, self._options), os.getpid()
        return self._store

    def mark_success(self) -> None:
        """Note that the server has answered: later failures are repeated until the deadline."""
        self._has_answered, self._is_noted = True, False

    def deadline_of(self, failure: TransientError) -> float:
        """Return the time in seconds for which attempts that fail like this are repeated."""
        if isinstance(failure, NoConnection) and not self._has_answered:
            return self._connect_deadline_s
        self._has_answered = True
        return self.deadline_s

    def warn_of_repetition(self, failure: TransientError, deadline_s: float) -> None:
        """Warn, only once until the next success, that calls fail and are repeated."""
        if not self._is_noted:
            self._is_noted = True
            # Where warnings are errors, this one must not end the repetition.
            limit = f" for up to {deadline_s:.0f} s" if deadline_s < math.inf else ""
            with contextlib.suppress(UserWarning):
                warn(f"{self.url}: {failure}; trying again{limit}")

    def _get(
        self, name: str, part: Any, *, tag: str | None = None, deadline_s: float | None = None
    ) -> ObjectPart:
        back_off = _BackOff(self, name, deadline_s)
        return self._retry(name, lambda: self._get_once(name, part, tag), back_off)

    def _get_once(self, name: str, part: Any, tag: str | None) -> ObjectPart:
        """Send one request; raise TransientError if the response has another length or range."""
        options = {"range": part} if part is not None else {}
        # A server must not accept a weak tag in a condition (RFC 9110, 13.1.1): compare it here.
        is_weak = tag is not None and tag.startswith("W/")
        if tag is not None and not is_weak:
            options["if_match"] = tag
        with map_obstore_errors(self.url, name, self._options):
            answer = load_obstore().get(self._get_store(), name, options=options)
            meta, (start, end) = answer.meta, answer.range
            data = memoryview(answer.bytes())
        if len(data) != end - start or part is None and len(data) != meta["size"]:
            raise TransientError(f"expected {end - start} bytes, received {len(data)}")
        if isinstance(part, tuple) and (start != part[0] or end != min(part[1], meta["size"])):
            raise TransientError(
                f"requested bytes {part[0]} to {part[1]}, received {start} to {end}"
            )
        if is_weak and meta["e_tag"] != tag:
            raise replaced_error(self.url, name)
        return ObjectPart(data, meta["size"], meta["e_tag"])

    def _retry(self, name: str, call: Callable[[], R], back_off: _BackOff | None = None) -> R:
        back_off = back_off or _BackOff(self, name)
        while True:
            try:
                with map_obstore_errors(self.url, name, self._options):
                    found = interruptible(call, back_off.check_deadline)
                self.mark_success()
                return found
            except TransientError as failure:
                back_off(failure)

    def _changed(self, name: str, expected: int, found: int) -> ShardChanged:
        what, path = "the size of the object differs from the size in the dataset", self.url
        sizes: Any = {"expected": expected, "found": found}
        return ShardChanged(what, code="file_size", path=f"{path}/{name}", **sizes)


class _UploadSource:
    """A file that obstore uploads in parts; reports how many bytes were certainly sent."""

    def __init__(self, file: IO[bytes], note_progress: Callable[[int], None]) -> None:
        self._file, self._note_progress = file, note_progress
        self.seek, self.tell = file.seek, file.tell

    def read(self, n_bytes: int) -> bytes:
        """Return the next `n_bytes` of the file."""
        self._note_progress(self._file.tell() - _CONCURRENT_UPLOAD_PARTS * _UPLOAD_PART_BYTES)
        return self._file.read(n_bytes)


class _BackOff:
    """The pauses between the attempts of a call, which get longer, and the attempts' deadline.

    `deadline_s`, by default the deadline of the store, limits the time since the last progress: the
    start, the last `reset`, or the last `note_progress`. No attempt begins, and none is waited for,
    after this time. `check` is called before each pause.
    """

    def __init__(
        self,
        store: ObjectStore,
        name: str,
        deadline_s: float | None = None,
        check: Callable[[], None] = no_cancel,
    ) -> None:
        self._store, self._object, self._check = store, f"{store.url}/{name}", check
        self._deadline_s = store.deadline_s if deadline_s is None else deadline_s
        self._failure, self._furthest = TransientError("no response"), 0
        self._begin()

    def reset(self) -> None:
        """Begin again after a success."""
        self._store.mark_success()
        self._begin()

    def _begin(self) -> None:
        self._began_s = self._active_s = time.monotonic()
        self._n_tries = 0

    def note_progress(self, position: int) -> None:
        """Record that the running attempt has reached `position`; 0 or less is ignored.

        The attempt may then continue. Another attempt may follow only if this one has come further
        than those before: otherwise, a failure at the same position could be repeated forever.
        """
        if position > self._furthest:
            self._furthest = position
            self._begin()
        elif position > 0:
            self._active_s = time.monotonic()

    def check_deadline(self) -> None:
        """Raise StoreUnavailable if the running attempt has made no progress until the deadline."""
        taken_s = time.monotonic() - self._active_s
        if taken_s > self._deadline_s:
            raise self._no_data_error(self._failure, taken_s, self._n_tries + 1)

    def __call__(self, failure: TransientError) -> None:
        """Sleep before the next attempt; raise StoreUnavailable if the deadline would pass."""
        pause_s = min(_FIRST_BACKOFF_S * 2 ** min(self._n_tries, 10), _MAX_BACKOFF_S)
        pause_s *= random.uniform(0.5, 1)
        self._failure, self._n_tries = failure, self._n_tries + 1
        taken_s = time.monotonic() - self._began_s
        deadline_s = min(self._deadline_s, self._store.deadline_of(failure))
        if taken_s + pause_s > deadline_s:
            if isinstance(failure, NoConnection):
                raise StoreUnavailable(
                    f"{self._object}: {failure}, after {counted(self._n_tries, 'attempts')} in "
                    f"{taken_s:.0f} s; check the address, or set "
                    f"{DEADLINE_HINT} to wait for the server"
                ) from None
            raise self._no_data_error(failure, taken_s, self._n_tries) from None
        if taken_s > _NOTE_AFTER_S:
            self._store.warn_of_repetition(failure, deadline_s)
        self._check()
        time.sleep(pause_s)
        self._active_s = self._began_s

    def _no_data_error(
        self, failure: TransientError, taken_s: float, n_tries: int
    ) -> StoreUnavailable:
        return StoreUnavailable(
            f"{self._object}: no data from the store for {taken_s:.0f} s, after "
            f"{counted(n_tries, 'attempts')}; last failure: {failure}; try again later "
            f"(transferred data is kept), or set {DEADLINE_HINT} to wait longer"
        )
