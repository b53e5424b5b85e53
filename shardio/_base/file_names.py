"""Names of files as UTF-8 text, which data holds, and as Python spells them.

Python decodes names by the locale: in an ASCII one, `ß` becomes two surrogates. What is stored does
not depend on it, so a stored name becomes a path by its bytes.
"""

from __future__ import annotations

import os
import re
from typing import Final

from shardio.errors import InvalidArgument

_ESCAPE: Final = re.compile(rb"\\(?:\\|x([0-9a-f]{2}))")


def stored_name(name: str) -> str:
    """Return a file name as text that can be stored: bytes that are no UTF-8 are escaped.

    Escapes are hexadecimal. Names that differ stay different: a name that has escapes, or looks as
    if it had, has its backslashes doubled.
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
    """Return the file name that `stored_name` made `stored` of, as Python spells it here."""
    raw = stored.encode()
    if "\\x" in stored:
        raw = _ESCAPE.sub(lambda found: bytes.fromhex((found[1] or b"5c").decode()), raw)
    return os.fsdecode(raw)


def local_name(text: str) -> str:
    """Return a text as Python spells the file that has this name in UTF-8."""
    return os.fsdecode(text.encode())


def utf8_name(name: str) -> str:
    """Return a file name as Python spells it in a UTF-8 locale."""
    return os.fsencode(name).decode("utf-8", "surrogateescape")


def check_encodable(path: str | os.PathLike[str], what: str) -> None:
    """Make sure that the file system encoding can express a path; it can any that Python listed.

    Raises:
        InvalidArgument: it cannot; the message starts with `what`.
    """
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        if error.encoding == "utf-8":  # half of a surrogate pair
            reason = "which is no name that a folder or file can have"
        else:
            reason = (
                f"which the file system encoding of this process, {error.encoding}, cannot "
                "express; set PYTHONUTF8=1, or use a UTF-8 locale"
            )
        raise InvalidArgument(f"{what} is {os.fspath(path)!r}, {reason}") from error
