"""The one door through which shardio changes a file system: every write, fsync, rename and removal.

`perform` sees each of these calls by name, with the file that it is about. An error of the system
leaves it with that file's name, which the system does not say of a write, and with RLIMIT_FSIZE
where that is what it met. Tests and the tools that prove what a conversion survives replace
`perform`: to count the calls, to let one of them fail, or to end the process there.

Links that lead out of a folder: what is read of a dataset lies in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from shardio.errors import DatasetCorrupt

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

BUFFER_BYTES = 64 << 10
_TRIES = 3
"""How often a folder is emptied that another process still fills."""

_RENAME: Final = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)

P = ParamSpec("P")
R = TypeVar("R")


def perform(call: str, path: str, function: Callable[P, R], *given: P.args, **named: P.kwargs) -> R:
    """Make one call of the system that changes the file or folder at `path`.

    Raises:
        OSError: the system refuses; it names `path` if the system named nothing.
    """
    try:
        return function(*given, **named)
    except OSError as error:
        if error.filename is None:
            error.filename = path
        explain_file_limit(error)
        raise


def max_file_bytes() -> int | None:
    """Return how large this process may make a file (RLIMIT_FSIZE), in memory as well; None: any.

    Python ignores SIGXFSZ, so that a write beyond it fails with EFBIG, and nothing is killed.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if soft == resource.RLIM_INFINITY else soft


def explain_file_limit(error: OSError, n_bytes: int | None = None) -> None:
    """Add the limit, the size needed and the way out to an EFBIG error; leave others unchanged.

    Args:
        error: raised by a call of the system.
        n_bytes: how large the file has to be, if that is known.
    """
    most = max_file_bytes()
    if error.errno != errno.EFBIG or most is None:
        return
    need = "more" if n_bytes is None else f"at least {n_bytes}"
    error.strerror = (
        f"{os.strerror(errno.EFBIG)}: it needs {need} bytes, and RLIMIT_FSIZE allows {most}: "
        "raise that limit (`ulimit -f unlimited`)"
    )
    error.args = (error.errno, error.strerror)  # what is pickled


class _File(io.FileIO):
    """A file whose writes come by `perform`."""

    def __init__(self, path: str, file: str | int, mode: str) -> None:
        self._path = path
        super().__init__(file, mode)

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return perform("write", self._path, super().write, data)
        except OSError as error:
            explain_file_limit(error, self.tell() + memoryview(data).nbytes)
            raise


def create(path: str | os.PathLike[str]) -> IO[bytes]:
    """Make a file that is not there yet, for writing; the caller owns it.

    Raises:
        FileExistsError: there is something of this name.
        OSError: the system refuses, now or at a write.
    """
    place = os.fspath(path)
    return io.BufferedWriter(perform("create", place, _File, place, place, "xb"), BUFFER_BYTES)


def create_unnamed(folder: str) -> IO[bytes]:
    """Make a file in `folder` that has no name and goes with its last descriptor."""
    with perform("create", folder, _open_unnamed, folder) as file:
        return io.BufferedRandom(_File(folder, os.dup(file.fileno()), "r+b"), BUFFER_BYTES)


def _open_unnamed(folder: str) -> Any:
    return tempfile.TemporaryFile(dir=folder, buffering=0)


def sync(file: IO[bytes], path: str | os.PathLike[str]) -> None:
    """Write out what the file's buffer holds and wait until all of it is on the disk."""
    file.flush()
    perform("fsync", os.fspath(path), os.fsync, file.fileno())


def rename(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Give a file another name, which replaces what has it."""
    perform("rename", os.fspath(target), os.rename, source, target)


def link(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Give a file a second name; a FileExistsError if that is taken."""
    perform("link", os.fspath(target), os.link, source, target)


def make_folder(path: str | os.PathLike[str]) -> None:
    """Make a folder, and those above it that are missing; it may be there."""
    if not os.path.isdir(path):
        perform("mkdir", os.fspath(path), Path(path).mkdir, parents=True, exist_ok=True)


def unlink(path: str | os.PathLike[str]) -> None:
    """Remove a file; it may be gone already."""
    with contextlib.suppress(FileNotFoundError):
        perform("unlink", os.fspath(path), os.unlink, path)


def remove_folder(path: str | os.PathLike[str]) -> None:
    """Remove a folder if it is empty; it may be gone already."""
    try:
        perform("rmdir", os.fspath(path), os.rmdir, path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
            raise


def remove_tree(path: str | os.PathLike[str]) -> None:
    """Remove a folder and all that is in it; it may be gone already. Links are not followed.

    What another process still puts there is removed as well, unless it comes to no end.
    """
    for tries_left in reversed(range(_TRIES)):
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


def sync_folder(folder: str) -> None:
    """Make a rename in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        perform("fsync", folder, os.fsync, fd)
    finally:
        os.close(fd)


def rename_exclusive(source: str, target: str) -> None:
    """Rename a file to a name that nobody has taken: at no moment is another file replaced.

    Raises:
        FileExistsError: the name is taken; the source stays.
    """
    perform("rename", target, _rename_exclusive, source, target)


def exchange(one: str, other: str) -> bool:
    """Swap what has two names, in one step: at no moment is either of them missing.

    False where the kernel or the file system cannot; nothing has changed then.

    Raises:
        OSError: the system refuses for another reason.
    """
    return perform("rename", other, _exchange, one, other)


def _exchange(one: str, other: str) -> bool:
    if _RENAME is None:
        return False
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if _RENAME(here, os.fsencode(one), here, os.fsencode(other), swap) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS):
        return False
    raise OSError(code, os.strerror(code), other)


def _rename_exclusive(source: str, target: str) -> None:
    if _RENAME is not None:
        here, no_replace = -100, 1  # AT_FDCWD, RENAME_NOREPLACE
        if _RENAME(here, os.fsencode(source), here, os.fsencode(target), no_replace) == 0:
            return
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOSYS):  # this file system cannot
            raise OSError(code, os.strerror(code), target)
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
    os.rename(source, target)


def refuse_links_outside(root: str | Path, *paths: str | Path) -> None:
    """Make sure that nothing of the dataset in `root` is a link to somewhere outside of it.

    A dataset is one folder: what is copied, verified or deleted with it is what is read.

    Raises:
        DatasetCorrupt: naming the link and where it leads.
    """
    for path in paths:
        if not os.path.islink(path):
            continue
        target, inside = os.path.realpath(path), os.path.realpath(root)
        if os.path.commonpath([target, inside]) != inside:
            raise DatasetCorrupt(f"{path}: a link that leads out of the dataset, to {target}")
