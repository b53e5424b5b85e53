"""Datasets of HDF5 files: a sample of each row, or of each file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import ClassVar

from shardio import Input
from shardio_converters.arrays.array_samples import ArraySamples, BlockArray
from shardio_converters.arrays.hdf5_files import open_datasets
from shardio_converters.told_fields import STEP_S


@dataclass(frozen=True, kw_only=True)
class Hdf5(ArraySamples):
    """Makes samples of the datasets of HDF5 files; `a/b` is the field `a.b`.

    With `rows`, each row along the first axis, which all datasets of a file share, is a sample;
    without it, each file is one. By default they are taken by rows where in every file all datasets
    have equally many. `fields` are as those of `arrays`, and so is what a sample has beside them.

    Raises:
        InvalidArgument: an option is not acceptable.
    """

    kind: ClassVar[str] = "hdf5"
    version: ClassVar[str] = "1"
    what: ClassVar[str] = "HDF5"
    rows_of_many: ClassVar[bool] = True
    step_s: ClassVar[float] = STEP_S

    def open(self, source: Input, files: ExitStack) -> Sequence[BlockArray] | None:
        """The datasets of a file; None where it is of another kind."""
        return open_datasets(source.path, source.name, files)

    def libraries(self) -> Mapping[str, str]:
        """Give the versions of h5py and of HDF5, which decodes."""
        version = import_module("h5py").version
        return {"h5py": version.version, "hdf5": version.hdf5_version}
