"""Which of several servers is asked next, when, and how long it makes sense to ask any."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from shardio.errors import ServerUnreachable
from shardio.serving.client.address import Address
from shardio.serving.client.link import Denied, Lost

_PATIENCE_S: Final = 60.0
"""How long servers may be away, if the user does not say."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0


class Servers:
    """The servers of a dataset, in turn.

    Args:
        addresses: where they are.
        timeout_s: how long all of them may be away; None for 60 seconds.
    """

    def __init__(self, addresses: Sequence[Address], timeout_s: float | None) -> None:
        self._addresses = list(addresses)
        self._patience_s = _PATIENCE_S if timeout_s is None else timeout_s
        self._denied: set[Address] = set()
        self._said: dict[Address, str] = {}
        """What was heard last of each that was lost."""
        self._lost_s: float | None = None
        """Since when none has done anything."""
        self._pause_s, self._try_s = _FIRST_PAUSE_S, 0.0

    @property
    def current(self) -> Address:
        """Whose turn it is."""
        return self._addresses[0]

    @property
    def said(self) -> str:
        """What was heard last of those that were lost since one was at work."""
        return "; ".join(f"{where}: {what}" for where, what in self._said.items())

    def wait(self, wait_s: float) -> bool:
        """Whether it is time to connect; else wait for that, so long at most."""
        left_s = self._try_s - time.monotonic()
        if left_s > 0:
            time.sleep(min(wait_s, left_s))
        return left_s <= 0

    def lose(self, lost: Lost) -> None:
        """Have the next one's turn come, after a pause that becomes longer each time.

        Raises:
            ServerUnreachable: there has been none for too long, or none lets this client in.
        """
        now_s, address = time.monotonic(), self._addresses.pop(0)
        self._addresses.append(address)
        self._said[address] = str(lost)
        if isinstance(lost, Denied):
            self._denied.add(address)
        if self._lost_s is None:
            self._lost_s = now_s
        away_s = now_s - self._lost_s
        if away_s >= self._patience_s or self._denied.issuperset(self._addresses):
            said = self.said
            self.see_progress()  # who tries again has as much patience as before
            raise ServerUnreachable(f"no server to load from, for {away_s:.0f} s now: {said}")
        self._try_s = now_s + self._pause_s
        self._pause_s = min(_LONGEST_PAUSE_S, self._pause_s * 2)

    def see_progress(self) -> None:
        """One is at work: patience begins anew with the next loss."""
        self._pause_s, self._lost_s = _FIRST_PAUSE_S, None
        self._said.clear()
        self._denied.clear()
