"""Arrays of Zarr stores: a sample of each row, or of each store."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import ClassVar

from shardio import Input
from shardio_converters.arrays.array_samples import ArraySamples, BlockArray
from shardio_converters.arrays.zarr_stores import ZIP, open_store, stores_in


@dataclass(frozen=True, kw_only=True)
class Zarr(ArraySamples):
    """Makes samples of the arrays of Zarr stores; `a/b` is the field `a.b`, the only one `array`.

    With `rows`, each row along the first axis, which all arrays of a store share, is a sample;
    without it, each store is one. By default they are taken by rows where in every store all arrays
    have equally many. `fields` are as those of `arrays`, and so is what a sample has beside them.

    Raises:
        InvalidArgument: an option is not acceptable.
    """

    kind: ClassVar[str] = "zarr"
    version: ClassVar[str] = "1"
    what: ClassVar[str] = "Zarr store"
    rows_of_many: ClassVar[bool] = True

    def parts(self, inputs: Sequence[Input]) -> Mapping[str, Sequence[str]]:
        """Give the files of a store that is a folder to the one that describes it."""
        return stores_in(inputs)

    def open(self, source: Input, files: ExitStack) -> Sequence[BlockArray] | None:
        """The arrays of a store; None where it is none."""
        return open_store(source, files)

    def name_of(self, source: Input) -> str:
        """The store's own name: of its folder, or its file."""
        if source.name.lower().endswith(ZIP):
            return source.name
        folder = os.path.dirname(source.name)
        return folder or os.path.basename(os.path.dirname(source.path))

    def libraries(self) -> Mapping[str, str]:
        """Give the versions of zarr and of numcodecs, which decode."""
        return {name: import_module(name).__version__ for name in ("zarr", "numcodecs")}
