"""What a server says of the loader that it has made, and when that is the same as another's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from shardio.batch.batch import Batch
from shardio.errors import InvalidArgument
from shardio.serving.client.address import Address
from shardio.serving.client.protocol import VERSION, mapping, number, text

State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Arrived:
    """A batch, and the state of a loader behind it."""

    batch: Batch
    state: State
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Opened:
    """A loader at a server: `state` is its first one, `served` what else its batches depend on."""

    lineage: str
    generation: int
    n_batches: int
    state: State
    served: State

    @classmethod
    def of(cls, head: Mapping[str, Any], address: Address) -> Self:
        """Read the message of a server.

        Raises:
            InvalidArgument: it is of another version.
            Garbled: it is no such message.
        """
        if number(head, "version") != VERSION:
            raise InvalidArgument(
                f"{address} speaks version {head['version']} of shardio's messages, this is "
                f"version {VERSION}: install the same shardio on both"
            )
        number(mapping(head, "state"), "epoch")
        return cls(
            text(head, "lineage"),
            number(head, "generation"),
            number(head, "batches"),
            mapping(head, "state"),
            mapping(head, "served"),
        )

    def check_follows(self, before: Opened, address: Address) -> None:
        """Make sure that its batches are those of another one.

        Raises:
            InvalidArgument: naming what differs.
        """
        for name in ("lineage", "served"):
            was, found = getattr(before, name), getattr(self, name)
            if was != found:
                raise InvalidArgument(
                    f"{address} serves other batches than this loader began with: {name} is "
                    f"{found!r}, and was {was!r}"
                )
