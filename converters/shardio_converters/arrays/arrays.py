"""Arrays from .npy, .npz and .safetensors: a sample of each file, or of each row."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

from shardio import Input
from shardio_converters.arrays.array_files import open_arrays
from shardio_converters.arrays.array_samples import ArraySamples
from shardio_converters.arrays.stored_array import StoredArray


@dataclass(frozen=True, kw_only=True)
class Arrays(ArraySamples):
    """Makes samples of arrays, which keep their names; the one of a .npy is `array`.

    With `rows`, each row along the first axis, which all arrays of a file share, is a sample;
    without it, each file is one. By default a file that is the only one is taken by rows, if it
    can be. `fields` says what the arrays are, as `{"x": "float32[3,*]", "y": "int64?"}`; by default
    the files themselves do: the first one gives dtypes and numbers of dimensions, a dimension that
    differs varies, an array that some files lack may be missing.

    Fields: the arrays, by name; and of these, those whose names no array has: `label` int64;
    `source`, the file's name below the source folder; with `rows`, `row` int64, from 0.

    Raises:
        InvalidArgument: an option is not acceptable.
    """

    kind: ClassVar[str] = "arrays"
    version: ClassVar[str] = "1"
    what: ClassVar[str] = ".npy, .npz or .safetensors"
    rows_of_many: ClassVar[bool] = False

    def open(self, source: Input, files: ExitStack) -> Sequence[StoredArray] | None:
        """The arrays of a file; None where it is of another kind."""
        return open_arrays(source.path, source.name, files)
