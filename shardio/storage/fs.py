"""All changes to the file system: every write, fsync, rename and removal goes through `perform`.

Tests, and the tools that prove crash safety, replace `perform`: they count the calls, let one of
the calls fail, or kill the process at one of the calls.

Small JSON files, such as `dataset.json`, are written atomically, and contain a digest of their own
content, which a reader checks.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import io
import json
import os
import resource
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from shardio.errors import DatasetCorrupt, SchemaError, UnsupportedEnvironment
from shardio.format.checksum import hash_bytes
from shardio.format.types.text import MAX_JSON_DEPTH

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

BUFFER_BYTES = 64 << 10
_MAX_TRIES = 3
"""The maximum number of times that `remove_tree` tries to remove a folder. A try fails if another
process adds a file to the folder in the meantime."""

_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_RENAMEAT2: Final = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
_NO_REPLACE, _EXCHANGE = 1, 2  # flags of renameat2(2)

P = ParamSpec("P")
R = TypeVar("R")


def perform(call: str, path: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call `function`, which makes a system call that changes the file or folder at `path`.

    `call` is the name of the system call, for functions that replace `perform`. If the call fails,
    the path is added to the error. If it fails because a file got too large, the limit on file
    sizes is added, too.
    """
    try:
        return function(*args, **kwargs)
    except OSError as error:
        if error.filename is None:
            error.filename = path
        if error.errno == errno.EFBIG and (most := max_file_bytes()) is not None:
            error.strerror = (
                f"{os.strerror(errno.EFBIG)}: RLIMIT_FSIZE allows {most}: raise that limit "
                "(`ulimit -f unlimited`)"
            )
            error.args = (error.errno, error.strerror)  # pickle stores `args`, not `strerror`
        raise


def max_file_bytes() -> int | None:
    """Return the largest file size allowed for this process (RLIMIT_FSIZE); None if unlimited.

    The limit also applies to files in memory (memfd_create(2)). A write beyond it fails with EFBIG.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if soft == resource.RLIM_INFINITY else soft


class _File(io.FileIO):
    """A file whose writes and truncations go through `perform`."""

    def __init__(self, path: str, file: str | int, mode: str) -> None:
        self._path = path
        super().__init__(file, mode)

    def write(self, data: ReadableBuffer, /) -> int:
        return perform("write", self._path, super().write, data)

    def truncate(self, size: int | None = None, /) -> int:
        return perform("truncate", self._path, super().truncate, size)


def create(path: str | os.PathLike[str], *, replace: bool = False) -> IO[bytes]:
    """Create a file and open it for writing; with `replace`, an existing file is emptied."""
    name, mode = os.fspath(path), "wb" if replace else "xb"
    return io.BufferedWriter(perform("create", name, _File, name, name, mode), BUFFER_BYTES)


def create_private(path: str | os.PathLike[str], mode: int = 0o600) -> IO[bytes]:
    """Create a new file with the permissions `mode`, and open it for writing."""
    name = os.fspath(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = perform("create", name, os.open, name, flags, mode)
    return io.BufferedWriter(_File(name, fd, "wb"), BUFFER_BYTES)


def update(path: str | os.PathLike[str]) -> io.FileIO:
    """Open an existing file, without a buffer, to change its content."""
    name = os.fspath(path)
    return _File(name, name, "r+b")


def open_lock_file(path: str) -> int:
    """Open a lock file, which is created if it is missing; return its descriptor."""
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        return perform("create", path, os.open, path, flags | os.O_CREAT, 0o600)


def lock_folder(folder: str | os.PathLike[str], *, wait: bool = False) -> int:
    """Lock a folder; return a descriptor that holds the lock until all its duplicates are closed.

    The kernel releases the lock if the process is killed. If another process holds it, raise
    BlockingIOError unless `wait` is True. FileNotFoundError is also raised if the folder was
    removed before it was locked, and UnsupportedEnvironment if the file system has no locks.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(fd), os.stat(folder)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(folder))
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError) and error.errno in _NO_LOCKS:
            raise UnsupportedEnvironment(
                f"{os.fspath(folder)}: this file system has no locks (flock: {error.strerror}), so "
                "two writers could mix their files; mount it with locks, or write to a local disk "
                "and copy the finished folder"
            ) from error
        raise
    return fd


def lock_holder(folder: str | os.PathLike[str]) -> int | None:
    """Return the id of the process that has locked a folder; None if it is unknown.

    The process may have exited: a lock is held until all duplicates of its descriptor are closed,
    also those of child processes. The holder is unknown if it runs in another container, and on
    file systems whose device numbers differ from those in `/proc/locks`.
    """
    try:
        found = os.stat(folder)
        locks = Path("/proc/locks").read_text("ascii")
    except OSError:
        return None
    device = found.st_dev
    place = f"{os.major(device):02x}:{os.minor(device):02x}:{found.st_ino}"
    for _, kind, *words in map(str.split, locks.splitlines()):
        if kind == "FLOCK" and place in words:  # that of a process which waits is "->"
            return int(words[2]) or None
    return None


def copy(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Copy the content of a file to a new file, which the caller must sync."""
    with open(source, "rb") as old, create(target) as new:
        shutil.copyfileobj(old, new, 1 << 20)


def create_unnamed(folder: str) -> IO[bytes]:
    """Create a file without a name in `folder`; the file is deleted with its last descriptor."""
    create_file: Callable[..., Any] = tempfile.TemporaryFile
    with perform("create", folder, create_file, dir=folder, buffering=0) as file:
        return io.BufferedRandom(_File(folder, os.dup(file.fileno()), "r+b"), BUFFER_BYTES)


def sync(file: IO[bytes], path: str | os.PathLike[str]) -> None:
    """Flush the file's buffer and wait until all data is on the disk."""
    file.flush()
    perform("fsync", os.fspath(path), os.fsync, file.fileno())


def sync_path(path: str | os.PathLike[str]) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        perform("fsync", os.fspath(path), os.fsync, fd)
    finally:
        os.close(fd)


def rename(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Rename a file; if `target` exists, it is replaced."""
    perform("rename", os.fspath(target), os.rename, source, target)


def link(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Add a second name to a file; raise FileExistsError if `target` exists."""
    perform("link", os.fspath(target), os.link, source, target)


def make_folder(path: str | os.PathLike[str], mode: int = 0o777) -> None:
    """Create a folder and its missing parents; do nothing if the folder exists."""
    if not os.path.isdir(path):
        perform("mkdir", os.fspath(path), Path(path).mkdir, mode, parents=True, exist_ok=True)


def make_temporary_folder(folder: str | os.PathLike[str] | None, prefix: str = "shardio-") -> Path:
    """Create a folder in `folder`, or in the system's temporary folder; the caller removes it."""
    parent = tempfile.gettempdir() if folder is None else os.fspath(folder)
    try:
        return Path(perform("mkdir", parent, tempfile.mkdtemp, prefix=prefix, dir=parent))
    except OSError as error:
        error.filename = parent  # a random name in it would mean nothing
        raise


def touch(path: str) -> None:
    """Set the modification time of a file to now."""
    perform("utime", path, os.utime, path)


def unlink(path: str | os.PathLike[str]) -> None:
    """Remove a file, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        perform("unlink", os.fspath(path), os.unlink, path)


def remove_folder(path: str | os.PathLike[str]) -> None:
    """Remove a folder if it exists and is empty; otherwise do nothing."""
    try:
        perform("rmdir", os.fspath(path), os.rmdir, path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
            raise


def remove_tree(path: str | os.PathLike[str]) -> None:
    """Remove a folder with all of its content, if it exists; links in it are not followed."""
    for tries_left in reversed(range(_MAX_TRIES)):
        try:
            _remove_once(path)
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not tries_left:
                raise


def _remove_once(path: str | os.PathLike[str]) -> None:
    with os.scandir(path) as found:
        entries = list(found)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            remove_tree(entry.path)
        else:
            unlink(entry.path)
    perform("rmdir", os.fspath(path), os.rmdir, path)


def rename_exclusive(source: str, target: str) -> None:
    """Rename a file; if `target` exists, raise FileExistsError and change nothing.

    Without renameat2(2), the check and the rename are two steps, not one atomic step.
    """
    perform("rename", target, _rename_exclusive, source, target)


def exchange(one: str, other: str) -> bool:
    """Swap two files or folders atomically; return False if this is not supported."""
    return perform("rename", other, _renameat2, one, other, _EXCHANGE)


def _rename_exclusive(source: str, target: str) -> None:
    if not _renameat2(source, target, _NO_REPLACE):
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        os.rename(source, target)


def _renameat2(source: str, target: str, flag: int) -> bool:
    """Call renameat2(2); return False if the kernel or the file system does not support it."""
    at_cwd = -100  # AT_FDCWD
    if _RENAMEAT2 is None:
        return False
    if _RENAMEAT2(at_cwd, os.fsencode(source), at_cwd, os.fsencode(target), flag) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS):
        return False
    raise OSError(code, os.strerror(code), target)


def refuse_links_outside(root: str | Path, *paths: str | Path) -> None:
    """Raise DatasetCorrupt if one of `paths` is a link that leads out of `root`, a dataset.

    A program that copies, verifies or deletes the dataset would miss a file outside.
    """
    for path in paths:
        if not os.path.islink(path):
            continue
        target, inside = os.path.realpath(path), os.path.realpath(root)
        if os.path.commonpath([target, inside]) != inside:
            raise DatasetCorrupt(f"{path}: a link that leads out of the dataset, to {target}")


_NO_DIGEST: Final = "0" * 16
_TOO_DEEP: Final = b"\n" + b" " * (MAX_JSON_DEPTH + 1)
"""The start of a line that is nested more than MAX_JSON_DEPTH deep, in JSON made by `_dumps`."""


def _dumps(content: Mapping[str, Any]) -> bytes:
    """Return `content` as canonical JSON: keys sorted, and one more space of indent per level."""
    text = json.dumps(content, ensure_ascii=False, sort_keys=True, indent=1, allow_nan=False)
    return text.encode("utf-8") + b"\n"


def _digest(text: bytes) -> str:
    """Return the digest of a JSON file: the hash of its text without the line with the digest."""
    # Only the outermost keys are indented by a single space. A nested key "digest" is not found.
    before, start, rest = text.partition(b'\n "digest": ')
    if start:
        after = rest.partition(b"\n")[2]
        if after == b"}\n":  # the digest is the last key: remove the comma before it
            before = before.removesuffix(b",")
        text = b"{}\n" if before + after == b"{}\n" else before + b"\n" + after
    return f"{hash_bytes(text):016x}"


def read_checksummed_json(path: Path) -> dict[str, Any]:
    """Read a file made by `to_checksummed_json`; raise DatasetCorrupt if it was changed."""
    raw = read_file(path)
    try:
        content = json.loads(raw.decode("utf-8"))
        rest = {key: value for key, value in content.items() if key != "digest"}
        intact, digest = raw == _dumps(content), _digest(raw)
    except (ValueError, AttributeError, RecursionError) as error:
        raise DatasetCorrupt(f"{path}: not JSON: {error}") from error
    if _TOO_DEEP in raw:
        raise DatasetCorrupt(f"{path}: nested more than {MAX_JSON_DEPTH} deep")
    if not intact or content.get("digest") != digest:
        raise DatasetCorrupt(
            f"{path}: changed since it was written: expected digest {content.get('digest')}, "
            f"found {digest}"
        )
    return rest


def read_file(path: Path) -> bytes:
    """Return the content of a regular file; raise DatasetCorrupt for others, such as a pipe."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise DatasetCorrupt(f"{path}: is a socket; expected a file") from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise DatasetCorrupt(f"{path}: is a folder, pipe or device; expected a file")
    with open(fd, "rb") as file:
        return file.read()


def to_checksummed_json(content: Mapping[str, Any]) -> bytes:
    """Return `content` as JSON with a digest; raise SchemaError if JSON cannot represent it."""
    try:
        # Turn all keys into strings first: when the file is read, its keys are strings, and
        # `_dumps` must then sort them in the same order. Without indents, json is fast: it runs in
        # C.
        plain = json.loads(json.dumps(content, sort_keys=True, allow_nan=False))
        text = _dumps({**plain, "digest": _NO_DIGEST})
        if _TOO_DEEP in text:
            raise ValueError(f"nested more than {MAX_JSON_DEPTH} deep")
        line = b'\n "digest": "%s"'
        return text.replace(line % _NO_DIGEST.encode(), line % _digest(text).encode(), 1)
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError(f"a generation cannot be written as JSON: {error}") from error


def write_atomic(path: Path, content: bytes, *, exclusive: bool) -> None:
    """Write a file so that it appears with all of its content, or not at all.

    An existing file is replaced; with `exclusive`, FileExistsError is raised instead. On return,
    the new file and its name are on the disk.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}.tmp")
    try:
        with create(temporary) as file:
            file.write(content)
            sync(file, temporary)
        if exclusive:
            link(temporary, path)
            unlink(temporary)
        else:
            rename(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):  # if the hidden file stays, no reader will open it
            unlink(temporary)
        if isinstance(error, OSError) and error.filename == str(temporary):
            error.filename = str(path)
        raise
    sync_path(path.parent)
