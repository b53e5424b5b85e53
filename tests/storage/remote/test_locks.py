"""Locks end with whoever has them, and with nobody else."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardio.storage.remote import cache_folder
from shardio.storage.remote.cache_folder import ByteLocks, folder_lock, try_exclusive

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore:.* use of fork:DeprecationWarning"),
]

SHARD = 5


@contextmanager
def _fork(act: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Fork this process for a function; the fork lives until the end of the `with`."""
    to_child, from_child = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        try:
            act()
        finally:
            os.write(from_child[1], b"-")
            os.close(to_child[1])
            os.read(to_child[0], 1)
            os._exit(0)
    os.read(from_child[0], 1)
    try:
        yield
    finally:
        for fd in (*to_child, *from_child):
            os.close(fd)
        os.waitpid(pid, 0)


def _is_free(path: str) -> bool:
    with try_exclusive(path, SHARD) as is_alone:
        return is_alone


def test_a_fork_does_not_keep_a_lock_that_its_parent_has_undone(tmp_path: Path) -> None:
    path = str(tmp_path / "locks")
    lock = try_exclusive(path, SHARD)
    lock.__enter__()
    with _fork():
        lock.__exit__(None, None, None)
        assert _is_free(path)


def test_a_fork_does_not_undo_what_its_parent_has_locked(tmp_path: Path) -> None:
    path = str(tmp_path / "locks")
    lock = try_exclusive(path, SHARD)
    lock.__enter__()
    with _fork(lambda: lock.__exit__(None, None, None)):
        assert not _is_free(path)
    lock.__exit__(None, None, None)
    assert _is_free(path)


def test_fork_does_not_keep_folder_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = folder_lock(str(tmp_path))
    lock.__enter__()
    with _fork():
        lock.__exit__(None, None, None)
        flock = fcntl.flock
        monkeypatch.setattr(fcntl, "flock", lambda fd, kind: flock(fd, kind | fcntl.LOCK_NB))
        with folder_lock(str(tmp_path)):
            assert cache_folder.holds_folder_lock()


def test_release_during_a_refused_acquire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some, lock = ByteLocks(str(tmp_path / "locks")), cache_folder._lock
    assert some.acquire_shared(SHARD)

    def refuse(fd: int, kind: int, byte: int) -> bool:
        if byte == SHARD:
            return lock(fd, kind, byte)
        some.release(SHARD)  # as a finalizer does, in the middle of anything
        return False

    monkeypatch.setattr(cache_folder, "_lock", refuse)
    assert not some.acquire_shared(SHARD + 1)
    assert _is_free(str(tmp_path / "locks"))
    some.close()
