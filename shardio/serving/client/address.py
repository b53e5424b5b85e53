"""Addresses of servers as `tcp://host:port`, and whether they stay on this machine."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from shardio.errors import InvalidArgument

_FORM: Final = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(\d{1,5}|\*)")
_SCHEME: Final = "tcp://"


class Address(NamedTuple):
    """A host and a port; `port` is "*" where a server takes any that is free."""

    host: str
    port: str

    def __str__(self) -> str:
        return f"{_SCHEME}{self.host}:{self.port}"

    @property
    def is_ipv6(self) -> bool:
        """True if the host is an IPv6 address."""
        return self.host.startswith("[")

    @property
    def is_loopback(self) -> bool:
        """True if it leads only to this machine; a name other than localhost does not."""
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return self.host == "localhost"


def is_address(value: Any) -> bool:
    """Return True for an address or a list of addresses, False for the path of a dataset."""
    if isinstance(value, str):
        return value.startswith(_SCHEME)
    several = value if isinstance(value, list | tuple) else ()
    return bool(several) and all(isinstance(each, str) and is_address(each) for each in several)


def parse(text: Any) -> Address:
    """Parse an address.

    Raises:
        InvalidArgument: it is not one.
    """
    found = _FORM.fullmatch(text) if isinstance(text, str) else None
    if found is None or (found[2] != "*" and int(found[2]) > 65535):
        raise InvalidArgument(f"an address is tcp://host:port; found {text!r}")
    return Address(found[1], found[2])


def parse_all(value: str | Sequence[str]) -> tuple[Address, ...]:
    """Parse one address, or several different ones.

    Raises:
        InvalidArgument: one is invalid or repeated, or there is none.
    """
    given = value if isinstance(value, list | tuple) else [value]
    found = tuple(parse(each) for each in given)
    if not found or len(set(found)) < len(found):
        raise InvalidArgument(f"address must be one, or a list of different ones; found {value!r}")
    return found
