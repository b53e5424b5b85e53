"""Where in the program of the user a warning belongs."""

from __future__ import annotations

import sys


def level_of_caller() -> int:
    """How many frames above the one that asks the program is: the `stacklevel` of its warning."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("shardio."):
        frame, level = frame.f_back, level + 1
    return level
