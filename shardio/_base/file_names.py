"""Conversion of file names between stored UTF-8 text and Python strings.

Python decodes file names by the locale: in an ASCII locale, the two bytes of `ß` become surrogates.
Stored names do not depend on the locale.
"""

from __future__ import annotations

import os
import re
from typing import Final

from shardio.errors import InvalidArgument

_ESCAPE: Final = re.compile(rb"\\(?:\\|x([0-9a-f]{2}))")


def stored_name(name: str) -> str:
    r"""Return a file name as text that can be stored; bytes that are not UTF-8 become `\xNN`.

    If a name contains such bytes or `\x`, its backslashes are doubled, so that different names have
    different results.
    """
    raw = os.fsencode(name)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        text = "\\x"
    if "\\x" in text:
        raw = raw.replace(b"\\", b"\\\\")
    return raw.decode("utf-8", "backslashreplace")


def original_name(stored: str) -> str:
    """Return the file name for `stored`, a result of `stored_name`, as the locale decodes it."""
    raw = stored.encode()
    if "\\x" in stored:
        raw = _ESCAPE.sub(lambda found: bytes.fromhex((found[1] or b"5c").decode()), raw)
    return os.fsdecode(raw)


def local_name(text: str) -> str:
    """Return a UTF-8 file name as Python decodes it in the current locale."""
    return os.fsdecode(text.encode())


def utf8_name(name: str) -> str:
    """Return a file name as Python decodes it in a UTF-8 locale."""
    return os.fsencode(name).decode("utf-8", "surrogateescape")


def check_encodable(path: str | os.PathLike[str], what: str) -> None:
    """Raise InvalidArgument unless the file system encoding can encode a path.

    The message begins with `what`, the name of the option.
    """
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        if error.encoding == "utf-8":  # the path contains half of a surrogate pair
            reason = "which is not a valid file name"
        else:
            reason = (
                f"which the file system encoding of this process, {error.encoding}, cannot "
                "encode; set PYTHONUTF8=1, or use a UTF-8 locale"
            )
        raise InvalidArgument(f"{what} is {os.fspath(path)!r}, {reason}") from error
