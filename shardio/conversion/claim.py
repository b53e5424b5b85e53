"""Who is converting into a place in a store: an object there says so until all is published.

So of two who write to one URL the second is refused before anything of the first is overwritten. A
file of this machine has the same token, for who goes on with what was interrupted.
"""

from __future__ import annotations

import contextlib
import json
import platform
import secrets
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from shardio.errors import DataError, DatasetConflict, ShardNotFound
from shardio.storage.checksummed_json import read_sealed, sealed, write_sealed
from shardio.storage.fs import make_folder, unlink
from shardio.storage.remote.objects import Objects

CLAIM: Final = "conversion.json"
"""The name of the object."""


class Claim:
    """The right to write below a URL; it is this machine's, of whose conversions one has it.

    Args:
        objects: below the URL.
        place: the file of this machine that says that it is ours.

    Raises:
        StoreAccessDenied, StoreUnavailable: (from every call) as `Objects` says.
    """

    def __init__(self, objects: Objects, place: Path) -> None:
        self._objects, self._place = objects, place

    def is_there(self) -> bool:
        """Whether it is ours already, as an earlier conversion has left it.

        Raises:
            DatasetConflict: it is another's.
        """
        try:
            content = self._objects.read(CLAIM)
        except ShardNotFound:
            return False
        if content != self._written():
            raise self._conflict(content)
        return True

    def take(self) -> None:
        """Make it ours.

        Raises:
            DatasetConflict: another was faster.
        """
        if (content := self._written()) is None:
            make_folder(str(self._place.parent))
            since = datetime.now(UTC).isoformat(timespec="seconds")
            said = {"token": secrets.token_hex(16), "host": platform.node(), "since": since}
            content = sealed(said)
            write_sealed(self._place, content, exclusive=False)
        try:
            self._objects.put(CLAIM, content, exclusive=True)
        except DatasetConflict:
            raise self._conflict(self._objects.read(CLAIM)) from None

    def give_up(self) -> None:
        """Remove it, there and here; another's stays. Idempotent."""
        with contextlib.suppress(DatasetConflict):
            if self.is_there():
                self._objects.remove(CLAIM)
        unlink(self._place)

    def _written(self) -> bytes | None:
        """What the object holds if it is ours."""
        try:
            return sealed(read_sealed(self._place))
        except (DataError, OSError):
            return None

    def _conflict(self, content: bytes) -> DatasetConflict:
        try:
            said = json.loads(content)
            who = f"on {said['host']}, since {said['since']}"
        except (ValueError, TypeError, KeyError):
            who = "of which it says nothing that can be read"
        return DatasetConflict(
            f"{self._objects.url}/{CLAIM}: another conversion is writing there, {who}: wait for "
            "it, or choose another place; if it will never be resumed, remove all that lies there"
        )
