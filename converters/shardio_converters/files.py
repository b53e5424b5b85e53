"""Convert between file names in data (UTF-8) and Python's file names (locale encoding)."""

from __future__ import annotations

import os


def named_path(folder: str, name: str) -> str:
    """Return the path of a file that data names relative to a folder."""
    # Encode lone surrogates, which JSON can escape; no file has such a name.
    return os.path.join(folder, os.fsdecode(name.encode("utf-8", "surrogatepass")))


def data_name(name: str) -> str:
    """Return the name that data uses for a file that Python lists as `name`."""
    return os.fsencode(name).decode("utf-8", "surrogateescape")
