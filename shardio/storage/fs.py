"""All changes to the file system: every write, fsync, rename and removal goes through `perform`.

`perform` receives the name of each system call and the path that the call changes. `perform` adds
the path to an OSError, because the system omits the path for a write, and adds the limit if
RLIMIT_FSIZE was reached. Tests and the tools that prove crash safety replace `perform` to count the
calls, to make a call fail, or to kill the process at a call.

Small JSON files, such as `dataset.json`, contain their own digest: they are written atomically and
checked when read.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import json
import os
import resource
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from shardio.errors import DatasetCorrupt, SchemaError
from shardio.format.checksum import hash_bytes
from shardio.format.types.text import MAX_JSON_DEPTH

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

BUFFER_BYTES = 64 << 10
_TRIES = 3
"""Attempts to empty a folder while another process writes into it."""

_RENAME: Final = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
_NO_REPLACE, _EXCHANGE = 1, 2  # flags of renameat2(2)

P = ParamSpec("P")
R = TypeVar("R")


def perform(call: str, path: str, function: Callable[P, R], *given: P.args, **named: P.kwargs) -> R:
    """Make a system call that changes the file or folder at `path`.

    An OSError names `path` unless the error names another file already.
    """
    try:
        return function(*given, **named)
    except OSError as error:
        if error.filename is None:
            error.filename = path
        explain_file_limit(error)
        raise


def max_file_bytes() -> int | None:
    """Return the largest file size allowed for this process (RLIMIT_FSIZE); None if unlimited.

    The limit also applies to memory files. Python ignores SIGXFSZ, so a write beyond the limit
    fails with EFBIG and does not kill the process.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if soft == resource.RLIM_INFINITY else soft


def explain_file_limit(error: OSError, n_bytes: int | None = None) -> None:
    """Add the limit, the needed size (n_bytes, if known) and a remedy to an EFBIG error."""
    most = max_file_bytes()
    if error.errno != errno.EFBIG or most is None:
        return
    need = "more" if n_bytes is None else f"at least {n_bytes}"
    error.strerror = (
        f"{os.strerror(errno.EFBIG)}: it needs {need} bytes, and RLIMIT_FSIZE allows {most}: "
        "raise that limit (`ulimit -f unlimited`)"
    )
    error.args = (error.errno, error.strerror)  # `args` is what pickle stores


class _File(io.FileIO):
    """A file whose writes go through `perform`."""

    def __init__(self, path: str, file: str | int, mode: str) -> None:
        self._path = path
        super().__init__(file, mode)

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return perform("write", self._path, super().write, data)
        except OSError as error:
            explain_file_limit(error, self.tell() + memoryview(data).nbytes)
            raise

    def truncate(self, size: int | None = None, /) -> int:
        return perform("truncate", self._path, super().truncate, size)


def create(path: str | os.PathLike[str], *, replace: bool = False) -> IO[bytes]:
    """Create a file for writing; the caller owns it.

    With `replace`, an existing file is emptied; otherwise it raises FileExistsError.
    """
    place, mode = os.fspath(path), "wb" if replace else "xb"
    return io.BufferedWriter(perform("create", place, _File, place, place, mode), BUFFER_BYTES)


def create_private(path: str | os.PathLike[str], mode: int = 0o600) -> IO[bytes]:
    """Create a file with the permissions `mode` for writing; raise FileExistsError if it exists."""
    place = os.fspath(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = perform("create", place, os.open, place, flags, mode)
    return io.BufferedWriter(_File(place, fd, "wb"), BUFFER_BYTES)


def update(path: str | os.PathLike[str]) -> io.FileIO:
    """Open an existing file, unbuffered, to change its content; the caller owns it."""
    place = os.fspath(path)
    return _File(place, place, "r+b")


def open_lock_file(path: str) -> int:
    """Open a lock file for reading and writing; create it if it is missing."""
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        return perform("create", path, os.open, path, flags | os.O_CREAT, 0o600)


def copy(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Copy the content of a file to a new file; the caller syncs the new file."""
    with open(source, "rb") as old, create(target) as new:
        shutil.copyfileobj(old, new, 1 << 20)


def create_unnamed(folder: str) -> IO[bytes]:
    """Create a file without a name in `folder`; it is deleted when its last descriptor closes."""
    with perform("create", folder, _open_unnamed, folder) as file:
        return io.BufferedRandom(_File(folder, os.dup(file.fileno()), "r+b"), BUFFER_BYTES)


def _open_unnamed(folder: str) -> Any:
    return tempfile.TemporaryFile(dir=folder, buffering=0)


def sync(file: IO[bytes], path: str | os.PathLike[str]) -> None:
    """Flush the file's buffer and wait until all data is on the disk."""
    file.flush()
    perform("fsync", os.fspath(path), os.fsync, file.fileno())


def sync_path(path: str | os.PathLike[str]) -> None:
    """Make a closed file durable or, for a folder, the earlier renames in it."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        perform("fsync", os.fspath(path), os.fsync, fd)
    finally:
        os.close(fd)


def rename(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Rename a file, replacing an existing target."""
    perform("rename", os.fspath(target), os.rename, source, target)


def link(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Add a second name to a file; raise FileExistsError if `target` exists."""
    perform("link", os.fspath(target), os.link, source, target)


def make_folder(path: str | os.PathLike[str], mode: int = 0o777) -> None:
    """Create a folder and its missing parents, unless the folder exists."""
    if not os.path.isdir(path):
        perform("mkdir", os.fspath(path), Path(path).mkdir, mode, parents=True, exist_ok=True)


def make_temporary_folder(folder: str | os.PathLike[str] | None, prefix: str = "shardio-") -> Path:
    """Create a folder with an unused name in `folder`, by default the system's temporary folder.

    The caller removes it.
    """
    place = tempfile.gettempdir() if folder is None else os.fspath(folder)
    return Path(perform("mkdir", place, tempfile.mkdtemp, prefix=prefix, dir=place))


def touch(path: str) -> None:
    """Set the modification time of a file to now."""
    perform("utime", path, os.utime, path)


def unlink(path: str | os.PathLike[str]) -> None:
    """Remove a file, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        perform("unlink", os.fspath(path), os.unlink, path)


def remove_folder(path: str | os.PathLike[str]) -> None:
    """Remove a folder, if it exists and is empty."""
    try:
        perform("rmdir", os.fspath(path), os.rmdir, path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
            raise


def remove_tree(path: str | os.PathLike[str]) -> None:
    """Remove a folder with its content, if it exists. Links are not followed.

    Files that another process adds in the meantime are removed too, in a limited number of
    attempts.
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


def rename_exclusive(source: str, target: str) -> None:
    """Rename a file atomically; raise FileExistsError, changing nothing, if `target` exists."""
    perform("rename", target, _rename_exclusive, source, target)


def exchange(one: str, other: str) -> bool:
    """Swap two names atomically: both exist at every moment.

    Return False, with nothing changed, if the kernel or the file system does not support it.
    """
    return perform("rename", other, _renameat2, one, other, _EXCHANGE)


def _rename_exclusive(source: str, target: str) -> None:
    if not _renameat2(source, target, _NO_REPLACE):
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        os.rename(source, target)


def _renameat2(source: str, target: str, flag: int) -> bool:
    """Call renameat2(2); return False if the kernel or the file system does not support it."""
    here = -100  # AT_FDCWD
    if _RENAME is None:
        return False
    if _RENAME(here, os.fsencode(source), here, os.fsencode(target), flag) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS):
        return False
    raise OSError(code, os.strerror(code), target)


def refuse_links_outside(root: str | Path, *paths: str | Path) -> None:
    """Raise DatasetCorrupt if one of `paths` is a link that leads out of the dataset in `root`.

    All files of a dataset must be in its folder, so that copying, verifying or deleting the folder
    includes them.
    """
    for path in paths:
        if not os.path.islink(path):
            continue
        target, inside = os.path.realpath(path), os.path.realpath(root)
        if os.path.commonpath([target, inside]) != inside:
            raise DatasetCorrupt(f"{path}: a link that leads out of the dataset, to {target}")


_NO_DIGEST: Final = "0" * 16
_TOO_DEEP: Final = b"\n" + b" " * (MAX_JSON_DEPTH + 1)
"""The start of a line of indented JSON that is nested too deeply."""


def _dumps(content: Mapping[str, Any]) -> bytes:
    """Serialize in canonical form: sorted keys, indented by one space."""
    text = json.dumps(content, ensure_ascii=False, sort_keys=True, indent=1, allow_nan=False)
    return text.encode("utf-8") + b"\n"


def _digest(text: bytes) -> str:
    """Return the digest of a serialized file, computed without its digest line."""
    # Only outermost keys are indented by a single space, so a nested "digest" cannot match.
    before, start, rest = text.partition(b'\n "digest": ')
    if start:
        behind = rest.partition(b"\n")[2]
        if behind == b"}\n":  # the last key
            before = before.removesuffix(b",")
        text = b"{}\n" if before + behind == b"{}\n" else before + b"\n" + behind
    return f"{hash_bytes(text):016x}"


def read_checksummed_json(path: Path) -> dict[str, Any]:
    """Read a file written by `to_checksummed_json`; return its content without the digest.

    Raises DatasetCorrupt if the file is no JSON with a digest, or was changed after it was written.
    """
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
    """Read a regular file; raise DatasetCorrupt at once for a pipe, socket, device or folder."""
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
    """Serialize `content` together with its digest; raise SchemaError if JSON cannot hold it."""
    try:
        # Convert keys to strings before sorting. (Without indents, json runs in C.)
        plain = json.loads(json.dumps(content, sort_keys=True, allow_nan=False))
        text = _dumps({**plain, "digest": _NO_DIGEST})
        if _TOO_DEEP in text:
            raise ValueError(f"nested more than {MAX_JSON_DEPTH} deep")
        line = b'\n "digest": "%s"'
        return text.replace(line % _NO_DIGEST.encode(), line % _digest(text).encode(), 1)
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError(f"a generation cannot be written as JSON: {error}") from error


def write_atomic(path: Path, content: bytes, *, exclusive: bool, durable: bool = True) -> None:
    """Write a file that appears whole or not at all; with `durable`, wait until it is on the disk.

    An existing file is replaced or, with `exclusive`, raises FileExistsError.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with create(temporary) as file:
            file.write(content)
            if durable:
                sync(file, temporary)
        if exclusive:
            link(temporary, path)
            unlink(temporary)
        else:
            rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):  # a hidden file that stays behind is never read
            unlink(temporary)
        raise
    if durable:
        sync_path(path.parent)
