"""Samples from columns of values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def row_samples(
    columns: Mapping[str, Iterable[Any]],
    about: Mapping[str, Any],
    n_rows: int,
    n_together: int = 256,
) -> Iterator[dict[str, Any]]:
    """Yield `n_rows` samples from columns; `about` has values that all samples share.

    For speed, `n_together` samples at a time are filled, column by column, and are in memory
    together. Calling `dict(zip(...))` for each sample would take four times as long.
    """
    template = {**dict.fromkeys(columns), **about}
    left = {name: iter(values) for name, values in columns.items()}
    for first in range(0, n_rows, n_together):
        samples = [template.copy() for _ in range(min(n_together, n_rows - first))]
        for name, values in left.items():
            for sample, value in zip(samples, values, strict=False):
                sample[name] = value
        yield from samples
