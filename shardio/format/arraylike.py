"""Arrays other than NumPy's plain ones: masked arrays are refused, tensors of torch are converted.

Neither package is imported: values are recognized by their class.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from shardio.errors import SchemaError

_PLAIN: Final = frozenset((bool, int, float, str, bytes, type(None), np.ndarray))
"""Types that most elements of a list have, none of which is masked."""


def is_masked(value: object) -> bool:
    """True if a value is a masked array of NumPy, whatever is masked in it."""
    # The exact type first: np.ma takes milliseconds to import.
    is_subclass = type(value) is not np.ndarray and isinstance(value, np.ndarray)
    return is_subclass and isinstance(value, np.ma.MaskedArray)


def refuse_masked(place: str, value: object, depth: int = 1) -> None:
    """Raise an error if a value is a masked array, or a list that has one among its elements.

    Args:
        place: names the field in the message.
        value: any value.
        depth: levels of lists and tuples to search.

    Raises:
        SchemaError: the value is or contains a masked array.
    """
    if is_masked(value):
        raise SchemaError(
            f"{place}: a masked array would lose its mask; fill it, x.filled(0), or give the mask "
            "as a field of its own, np.ma.getmaskarray(x)"
        )
    if depth and isinstance(value, list | tuple) and not _PLAIN.issuperset(map(type, value)):
        for each in value:
            refuse_masked(place, each, depth - 1)
