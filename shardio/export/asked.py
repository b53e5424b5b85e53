"""What an export is asked for, and what all formats have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from shardio.dataset.dataset import Dataset
from shardio.errors import InvalidArgument
from shardio.export.reading import Batch
from shardio.format.fields import FIELD_TYPES, Array, Field, List

Prepare = Mapping[str, Callable[[Any], Any]]
"""What becomes of the values of fields that are no columns, before they are written."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The samples to export, which of their fields, and how much goes into one file."""

    dataset: Dataset
    fields: Mapping[str, Field]
    shard_bytes: int

    @property
    def names(self) -> str:
        """The name of the dataset, for messages."""
        return self.dataset.place


class Format(Protocol):
    """Writes samples in one format.

    Made with what is `Asked`, it refuses with InvalidArgument what the format cannot hold, before
    anything is written.
    """

    prepare: Prepare
    words: Mapping[str, str] | None
    """The fields as the option --schema of a conversion back takes them; None: it finds them."""

    def begin(self, folder: Path) -> None:
        """Write into an empty folder from now on."""

    def add(self, batch: Batch) -> None:
        """Write samples, behind those before."""

    def end(self) -> None:
        """Finish all files; they are on the disk then."""

    def close(self) -> None:
        """Let go of files that are still open. Idempotent."""


def refuse(asked: Asked, reasons: Mapping[str, str]) -> None:
    """Refuse fields that a format cannot hold, if there are any; the message says what is left.

    Raises:
        InvalidArgument: there are.
    """
    if not reasons:
        return
    why = "; ".join(f"field {name!r}: {reason}" for name, reason in reasons.items())
    others = ",".join(name for name in asked.fields if name not in reasons)
    way = f"export the others (--fields {others})" if others else "choose another format"
    raise InvalidArgument(f"{asked.names}: {why}; {way}")


def widened(bits: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """The numbers that bfloat16 stand for, given as their bits."""
    found: npt.NDArray[np.float32] = np.left_shift(bits.astype("<u4"), 16).view("<f4")
    return found


def dtype_out(field: Array) -> np.dtype[Any]:
    """The dtype that the numbers of a field have elsewhere: bfloat16 become float32, unchanged."""
    return np.dtype("<f4") if field.dtype == "bfloat16" else field.numpy


def numbers_out(field: Array) -> Callable[[Any], npt.NDArray[Any]]:
    """What makes of a field's numbers those of `dtype_out`."""
    return widened if field.dtype == "bfloat16" else np.asarray


def word_of(field: Field) -> str:
    """A field in a word, as converters take it: `float32[3,*]`, `text?`."""
    if isinstance(field, List):
        word = f"list[{word_of(field.element)}]"
    elif isinstance(field, Array):
        dims = ",".join("*" if n is None else str(n) for n in field.shape)
        word = f"{dtype_out(field).name}{f'[{dims}]' if field.shape else ''}"
    else:
        word = FIELD_TYPES[type(field)].name.lower()
    return f"{word}?" if field.optional else word
