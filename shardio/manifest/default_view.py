"""What the samples of a dataset are when nothing else is asked for: its rows, or clips of videos.

A view is written down as JSON. Of `ROWS` every row is a sample; of `{"kind": "clips", "frames": 16,
"stride": 1, "step": 16}` every clip of the one field of videos is, cut as `shardio.views.clips` has
it, whole ones only. `"size": [height, width]`, which may be left out, is that of their pictures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from shardio.format.fields import Video
from shardio.format.schema import Schema

ROWS: Final[Mapping[str, Any]] = {"kind": "rows"}

_NUMBERS: Final = {"frames": 1 << 31, "stride": 1 << 31, "step": 1 << 62}
_MAX_SIDE: Final = 16384


def is_known(view: Any) -> bool:
    """Whether this version knows what a view means, if it is one at all."""
    if not isinstance(view, Mapping):
        return False
    if view.get("kind") == "clips":
        return view.keys() <= {"kind", "size", *_NUMBERS}
    return dict(view) == ROWS


def why_wrong(view: Mapping[str, Any], schema: Schema) -> str | None:
    """Say what is wrong with a view that is known, of samples of a schema; None if nothing is."""
    if view["kind"] == "rows":
        return None
    for name, most in _NUMBERS.items():
        if not _is_number(view.get(name), most):
            return f"{name} must be a whole number from 1 up to {most:,}; found {view.get(name)!r}"
    size = view.get("size", [1, 1])
    is_pair = isinstance(size, list | tuple) and len(size) == 2
    if not is_pair or not all(_is_number(side, _MAX_SIDE) for side in size):
        return f"size must be [height, width], each from 1 to {_MAX_SIDE}; found {size!r}"
    if (n := sum(isinstance(field, Video) for field in schema.values())) != 1:
        return f"clips need one field of videos; the schema has {n}"
    return None


def _is_number(value: Any, most: int) -> bool:
    return type(value) is int and 1 <= value <= most
