"""What a changed internal of tinygrad looks like from here."""

from __future__ import annotations

from typing import Final

CHANGED: Final = (
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What the use of one raises, if it is not what it was in the versions known."""
