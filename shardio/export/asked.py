"""What an export is asked for, and what all formats have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shardio.dataset.dataset import Dataset
from shardio.errors import InvalidArgument
from shardio.export.reading import Batch
from shardio.format.fields import Field

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
