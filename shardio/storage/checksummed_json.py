"""Small JSON files with a digest of themselves: written atomically, checked when read.

The manifest stores `dataset.json` and generations in this form.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from shardio.errors import DatasetCorrupt, SchemaError
from shardio.format.checksum import hash_bytes
from shardio.format.values import MAX_JSON_DEPTH
from shardio.storage.fs import create, link, rename, sync, sync_folder, unlink

_NO_DIGEST: Final = "0" * 16
_TOO_DEEP: Final = b"\n" + b" " * (MAX_JSON_DEPTH + 1)
"""The start of a line whose value is nested too deep."""


def _dumps(content: Mapping[str, Any]) -> bytes:
    """Serialize in canonical form: sorted keys, an indent of one space."""
    text = json.dumps(content, ensure_ascii=False, sort_keys=True, indent=1, allow_nan=False)
    return text.encode("utf-8") + b"\n"


def _digest(text: bytes) -> str:
    """Return the digest of a serialized file without its digest line."""
    # Only keys of the outermost level follow a line break and a single space.
    before, start, rest = text.partition(b'\n "digest": ')
    if start:
        behind = rest.partition(b"\n")[2]
        if behind == b"}\n":  # the last key
            before = before.removesuffix(b",")
        text = b"{}\n" if before + behind == b"{}\n" else before + b"\n" + behind
    return f"{hash_bytes(text):016x}"


def read_checksummed_json(path: Path) -> dict[str, Any]:
    """Read a file written by `to_checksummed_json` and return its content without the digest.

    Raises:
        DatasetCorrupt: the file is not of this form, or changed since it was written.
        OSError: the system cannot read it.
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
    """Read a regular file; a pipe, socket or device is refused without waiting for it.

    Raises:
        DatasetCorrupt: it is not a regular file.
        OSError: the system cannot read it.
    """
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
    """Serialize `content` together with its digest.

    Raises:
        SchemaError: a value cannot be represented in JSON.
    """
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


def write_atomic(path: Path, content: bytes, *, exclusive: bool) -> None:
    """Write a file that appears whole or not at all; with `exclusive`, never replace one."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with create(temporary) as file:
            file.write(content)
            sync(file, temporary)
        if exclusive:
            link(temporary, path)
            unlink(temporary)
        else:
            rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):  # a hidden file that nobody reads
            unlink(temporary)
        raise
    sync_folder(str(path.parent))
