"""A stream that is a terminal, for tests of displays."""

from __future__ import annotations

import io


class Terminal(io.StringIO):
    """A stream that is a terminal in UTF-8."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        """Return True."""
        return True
