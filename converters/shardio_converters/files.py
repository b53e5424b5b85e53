"""Convert names of files between data and Python; report errors of libraries as MediaError."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any, Final

from shardio import Input, MediaError
from shardio.media import demux, probe

_PIECE_BYTES: Final = 16 << 20


def named_path(folder: str, name: str) -> str:
    """Return the path of a file in `folder`, given its name in a data file, such as an index."""
    # JSON may contain lone surrogates as escapes. Encode them too, instead of raising an error: no
    # file has such a name, so the path does not exist.
    return os.path.join(folder, os.fsdecode(name.encode("utf-8", "surrogatepass")))


def data_name(name: str) -> str:
    """Return the name by which a data file refers to a file that Python lists as `name`."""
    return os.fsencode(name).decode("utf-8", "surrogateescape")


@contextmanager
def open_media(source: Input, *, has_suffix: bool) -> Iterator[IO[bytes]]:
    """Open a file; a broken link is read as empty, or is an error if it has a media suffix."""
    try:
        file: IO[bytes] = open(source.path, "rb")
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP) or has_suffix:
            raise MediaError(f"{source.path}: cannot be read: {error.strerror}") from error
        file = io.BytesIO()
    with file:
        try:
            yield file
        except OSError as error:
            raise MediaError(f"{source.path}: cannot be read: {error.strerror}") from error


def read_up_to(read: Callable[[int], bytes], n_bytes: int) -> bytes:
    """Return the next `n_bytes` that `read` returns, or fewer at the end.

    The bytes are read in pieces, so that a wrong size in a damaged file allocates little memory.
    """
    data = read(min(n_bytes, _PIECE_BYTES))
    if len(data) == n_bytes:  # the usual case
        return data
    pieces, n_left = [data], n_bytes - len(data)
    while n_left and data:
        data = read(min(n_left, _PIECE_BYTES))
        pieces.append(data)
        n_left -= len(data)
    return b"".join(pieces)


def media_value(field: Any, data: bytes, name: str = "") -> Any:
    """Return the bytes of a media file as the value of a field; check the header."""
    if field.is_streamed:
        return demux(data, field.medium, name=name)
    if field.medium == "image":
        probe(data)
    return data


@contextmanager
def damage(kinds: tuple[type[Exception], ...], place: str = "") -> Iterator[None]:
    """Raise a library's exceptions as MediaError, except an OSError that names a file."""
    try:
        yield
    except kinds as error:
        if isinstance(error, MediaError) or getattr(error, "filename", None) is not None:
            raise
        raise MediaError(f"{place}: damaged: {error}" if place else f"damaged: {error}") from error
