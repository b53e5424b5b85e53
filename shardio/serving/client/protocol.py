"""The messages between a server and its clients: JSON, and the bytes of a block behind a batch's.

    client                                          server
      open      who, options                  ──▶
                                              ◀──   opened   lineage, length, first state
      iterate   pass, state, how many ahead   ──▶
                                              ◀──   begun    pass, epoch, steps
                                              ◀══   batch    pass, step, state after it; a block
      credit    pass, taken, up to            ──▶
                                              ◀──   end      pass, state of the next epoch
      check     state                         ──▶
                                              ◀──   checked  epoch
      stop, close                             ──▶
                                              ◀──   beat, failed, stranger

Every message is one head, an object with its `kind`; a batch has a second frame. A server sends
`beat` once a second, and `stranger` to a client without a session. Errors travel as JSON: class
name, message, and the place in a shard. No code travels.

An `Address` is a server as `tcp://host:port`; it tells whether the server is on this machine.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from shardio import errors
from shardio.errors import InvalidArgument, ShardCorrupt, ShardioError
from shardio.format.schema import read_json

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


VERSION: Final = 1
"""Of all this; both sides must have the same."""

MAX_HEAD_BYTES: Final = 4 << 20
"""Of a message without a block."""

FROM_CLIENT: Final = frozenset({"open", "iterate", "credit", "check", "stop", "close"})
FROM_SERVER: Final = frozenset(
    {"opened", "begun", "batch", "end", "checked", "beat", "failed", "stranger"}
)
MAX: Final = 1 << 60
_ENCODER: Final = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


class MalformedMessage(ValueError):
    """The received data is not a valid message."""


def pack(kind: str, **more: Any) -> bytes:
    """Pack the head of a message; in ASCII, since names of files may not be UTF-8."""
    return _ENCODER.encode({"kind": kind, **more}).encode("ascii")


def pack_given(kind: str, **more: Any) -> bytes:
    """Pack the head of a message with values of the user.

    Raises:
        InvalidArgument: JSON cannot represent them, or they are too long for a server.
    """
    try:
        message = pack(kind, **more)
    except (TypeError, ValueError) as error:
        names = ", ".join(more)
        raise InvalidArgument(f"{names}: what travels to a server is JSON: {error}") from error
    if len(message) > MAX_HEAD_BYTES:
        raise InvalidArgument(
            f"options or a state of {len(message)} bytes of JSON; a server takes at most "
            f"{MAX_HEAD_BYTES}: a sampler or weights that are longer are for a loader that reads "
            "the dataset itself"
        )
    return message


def unpack(frames: Sequence[Any], kinds: frozenset[str]) -> dict[str, Any]:
    """Return the head of a message of one of these kinds, after checking its frames.

    Raises:
        MalformedMessage: it is not such a message.
    """
    if not 1 <= len(frames) <= 2:
        raise MalformedMessage(f"a message of {len(frames)} frames")
    content = bytes(frames[0][: MAX_HEAD_BYTES + 1])
    if len(content) > MAX_HEAD_BYTES:
        raise MalformedMessage(f"a head of more than {MAX_HEAD_BYTES} bytes")
    try:
        head = read_json(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(f"a head that is not JSON: {error}") from error
    if not isinstance(head, dict):
        raise MalformedMessage("a head that is not an object")
    kind = head.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise MalformedMessage(f"a message of the kind {json.dumps(kind)[:40]}")
    if (kind == "batch") != (len(frames) == 2):
        raise MalformedMessage(f"a message of the kind {kind} with {len(frames)} frames")
    return head


def number(head: Mapping[str, Any], name: str, most: int = MAX) -> int:
    """Return a number from 0 up to `most` from a message."""
    found = head.get(name)
    if type(found) is not int or not 0 <= found <= most:
        raise MalformedMessage(f"{name} is {_shown(found)}, and not a number from 0 to {most}")
    return found


def text(head: Mapping[str, Any], name: str) -> str:
    """Return a text from a message."""
    found = head.get(name)
    if not isinstance(found, str):
        raise MalformedMessage(f"{name} is {_shown(found)}, and not a text")
    return found


def mapping(head: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return an object from a message."""
    found = head.get(name)
    if not isinstance(found, dict):
        raise MalformedMessage(f"{name} is {_shown(found)}, and not an object")
    return found


def items(head: Mapping[str, Any], name: str) -> list[Any]:
    """Return a list from a message."""
    found = head.get(name)
    if not isinstance(found, list):
        raise MalformedMessage(f"{name} is {_shown(found)}, and not a list")
    return found


def _shown(found: object) -> str:
    return json.dumps(found)[:40]


_PLACES: Final = ("path", "section", "field", "sample", "offset")
_VALUES: Final = ("expected", "found")
_MAX_CHARACTERS: Final = 1 << 16


def as_json(error: BaseException) -> dict[str, Any]:
    """Return an error as JSON values; a foreign one is described by its class."""
    name = type(error).__name__
    if not isinstance(error, ShardioError) or name not in errors.__all__:
        return {"class": "ShardioError", "text": _cut(f"{name}: {error}")}
    if not isinstance(error, ShardCorrupt):
        return {"class": name, "text": _cut(str(error))}
    found: dict[str, Any] = {"class": name, "text": _cut(error.what), "code": error.code}
    found |= {each: getattr(error, each) for each in _PLACES}
    for each in _VALUES:
        value = getattr(error, each)
        found[each] = None if value is None else str(value)
    return found


def from_json(found: Mapping[str, Any]) -> ShardioError:
    """Return the error that a server reports.

    Raises:
        MalformedMessage: it is not one.
    """
    name, what = text(found, "class"), text(found, "text")
    kind: Any = getattr(errors, name) if name in errors.__all__ else ShardioError
    if issubclass(kind, ShardCorrupt):
        places = {each: found.get(each) for each in (*_PLACES, *_VALUES)}
        made: ShardioError = kind(what, code=text(found, "code"), **places)
    else:
        made = kind(what)
    return made


def _cut(said: str) -> str:
    """Return a text cut to the maximum length of a message."""
    if len(said) <= _MAX_CHARACTERS:
        return said
    half = _MAX_CHARACTERS // 2
    return f"{said[:half]}\n[…]\n{said[-half:]}"
