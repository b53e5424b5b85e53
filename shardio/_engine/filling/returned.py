"""Make arrays of what user code returns, before anything else is done with it. Used by `fill`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from shardio.format.arraylike import PLAIN_TYPES, with_arrays

_DEPTH: Final = 2
"""Levels of lists: those of a batch have a value for each sample, which may be a list of arrays."""


def plain(made: Any) -> Any:
    """Return a sample or a batch of user code with tensors of torch as arrays.

    All other values are left as they are, for `inference` to judge, and `made` is not changed.

    Raises:
        SchemaError: a value is a masked array or a tensor that cannot become an array. The message
            names the field.
    """
    if not isinstance(made, Mapping):
        return made
    changed = dict[str, Any]()
    for name, value in made.items():
        if type(value) not in PLAIN_TYPES and not isinstance(value, np.generic):
            found = with_arrays(name, value, _DEPTH)
            if found is not value:
                changed[name] = found
    return {**made, **changed} if changed else made
