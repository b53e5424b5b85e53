"""Short texts about values that have no picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from shardio_tools.view.stored import READ_ERRORS, StoredArray, kind_of, stored_value

MAX_TEXT: Final = 200
"""The maximum length of a text, in characters."""
MAX_FIELDS: Final = 8
MAX_FIRST: Final = 16
"""The maximum numbers of fields, and of an array's numbers, that are shown."""
_TEXT_KINDS: Final = ("text", "tokens", "json", "scalar")
"""The kinds of fields of which texts are shown, in the order of the texts."""


def stored_texts(
    dataset: Any, row: int, shown: Sequence[str] = _TEXT_KINDS
) -> list[dict[str, str]]:
    """Return short texts about stored values of some kinds, or about the damage to them."""
    kinds = {name: kind_of(name, field) for name, field in dataset.schema.items()}
    names = [name for name, kind in kinds.items() if kind in shown and name != "label"]
    names = sorted(names, key=lambda name: _TEXT_KINDS.index(kinds[name]))[:MAX_FIELDS]
    return [{"name": name, "text": _stored_text(dataset, row, name)} for name in names]


def _stored_text(dataset: Any, row: int, name: str) -> str:
    try:
        if dataset.schema[name].array is None:
            return str(stored_value(dataset, row, name))[:MAX_TEXT]
        stored = StoredArray.of(dataset, row, name)
        return array_text(stored.array.dtype, stored.shape, stored.first(MAX_FIRST))
    except READ_ERRORS as error:
        return str(error)[:MAX_TEXT]


def array_text(dtype: object, shape: tuple[int, ...], first: Any) -> str:
    """Return a text for an array: its dtype, shape and first numbers; of a scalar, its number."""
    numbers = " ".join(map(number_text, np.asarray(first).reshape(-1).tolist()))
    if not shape:
        return numbers[:MAX_TEXT]
    more = " …" if math.prod(shape) > MAX_FIRST else ""
    return f"{dtype} {' × '.join(f'{n:,}' for n in shape)}: {numbers}{more}"[:MAX_TEXT]


def number_text(value: Any) -> str:
    """Return a number as a text."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
