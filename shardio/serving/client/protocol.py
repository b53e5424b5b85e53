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
                                              ◀──   heartbeat, failed, no_session

Every message is one head, an object with its `kind`; a batch has a second frame. A server sends
`heartbeat` once a second, and `no_session` to a client without a session. Errors travel as JSON:
class name, message, and the place in a shard. No code travels.

An `Address` is a server as `tcp://host:port`; it knows whether the server is on this machine.

A batch travels as the filled block of its worker, of which only the used part is sent. The receiver
reads it like a block of its own, after `check` has checked its numbers.
"""

from __future__ import annotations

import functools
import ipaddress
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shardio import errors
from shardio.batch.batch import Batch, Skipped
from shardio.batch.layout import SKIPPED, BlockLayout, layout_of_received_batches
from shardio.errors import InvalidArgument, ShardCorrupt, ShardioError
from shardio.format.schema import Schema, canonical_json, read_json
from shardio.format.types import Array

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
    {"opened", "begun", "batch", "end", "checked", "heartbeat", "failed", "no_session"}
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
            f"{MAX_HEAD_BYTES}: a longer sampler is for a loader that reads "
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


def _cut(message: str) -> str:
    """Return a text cut to the maximum length of a message."""
    if len(message) <= _MAX_CHARACTERS:
        return message
    half = _MAX_CHARACTERS // 2
    return f"{message[:half]}\n[…]\n{message[-half:]}"


_ALIGNMENT: Final = 64
_MAX_ROWS: Final = 1 << 32
_MAX_VALUES: Final = 1 << 48
_SKIPPED_NUMBERS: Final = ("row", "index", "shard", "sample")

Block = npt.NDArray[np.uint8]


@functools.lru_cache(maxsize=16)
def layout_text(layout: BlockLayout) -> str:
    """Return a layout as text for `layout_of`."""
    schema = layout.schema.to_json().decode("utf-8")
    whole = [slot.name for slot in layout.whole]
    return canonical_json({"schema": schema, "whole": whole, "rows": layout.n_rows}).decode("utf-8")


@functools.lru_cache(maxsize=16)
def layout_of(content: str) -> BlockLayout:
    """Return the layout of the blocks that a server sends.

    Raises:
        MalformedMessage: it is not a layout.
    """
    try:
        found = read_json(content)
        if not isinstance(found, dict):
            raise MalformedMessage("a layout that is not an object")
        schema = Schema.from_json(text(found, "schema").encode("utf-8"))
        whole, n_rows = items(found, "whole"), number(found, "rows", _MAX_ROWS)
        if not all(isinstance(schema.get(n), Array) for n in whole if isinstance(n, str)):
            raise MalformedMessage("a layout with arrays that its schema does not have")
        return layout_of_received_batches(schema, n_rows, frozenset(map(str, whole)))
    except MalformedMessage:
        raise
    except (ShardioError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise MalformedMessage(f"an invalid layout: {error}") from error


def pack_batch(batch: Batch) -> tuple[dict[str, Any], Block]:
    """Return the head of a batch's message, and the used part of its block."""
    layout, block, n_rows = batch.filled
    head = {
        "layout": layout_text(layout),
        "rows": n_rows,
        "epoch": batch.epoch,
        "step": batch.step,
        "skipped": [asdict(each) for each in batch.skipped],
    }
    return head, block[: layout.heap + _heap_bytes(layout, block, n_rows)]


def _heap_bytes(layout: BlockLayout, block: Block, n_rows: int) -> int:
    """Return how much of the heap the values of a batch use."""
    end = 0
    for slot in layout.varying:
        extents = layout.extents(block, slot)[:n_rows]
        if len(extents):
            end = max(end, int((extents["place"] + extents["n_bytes"]).max()))
    for whole, (place, *shape) in zip(layout.whole, layout.heads(block), strict=True):
        end = max(end, place + int(np.prod(shape, dtype=np.int64)) * whole.dtype.itemsize)
    return end


def unpack_batch(head: Mapping[str, Any], content: Any) -> Batch:
    """Return the batch of a message, over a copy of its block aligned as tensors need it.

    Raises:
        MalformedMessage: its block does not fit the layout.
    """
    layout, n_rows = layout_of(text(head, "layout")), number(head, "rows", _MAX_ROWS)
    received = np.frombuffer(content, np.uint8)
    check(layout, received, n_rows)
    block = _aligned(len(received))
    block[:] = received
    skipped = tuple(map(_skipped, items(head, "skipped")))
    epoch, step = number(head, "epoch"), number(head, "step")
    return Batch(layout, block, n_rows, layout.arrays(block, n_rows), epoch, step, (), {}, skipped)


def _aligned(n_bytes: int) -> Block:
    memory = np.empty(n_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + n_bytes]


def _skipped(found: Any) -> Skipped:
    if not isinstance(found, dict):
        raise MalformedMessage("a skipped sample that is not an object")
    row, index, shard, sample = (number(found, name) for name in _SKIPPED_NUMBERS)
    return Skipped(row, index, shard, sample, text(found, "error"), text(found, "text"))


def check(layout: BlockLayout, block: Block, n_rows: int) -> None:
    """Check that all places in a block lie inside it.

    Raises:
        MalformedMessage: naming the field and the offending place.
    """
    if not n_rows <= layout.n_rows:
        raise MalformedMessage(f"a batch of {n_rows} rows in a block for {layout.n_rows}")
    if len(block) < layout.heap:
        raise MalformedMessage(
            f"a block of {len(block)} bytes, where its layout needs {layout.heap}"
        )
    heap_bytes = len(block) - layout.heap
    if n_rows and int(layout.origins(block)["status"][:n_rows].max()) > SKIPPED:
        raise MalformedMessage("a row in an unknown state")
    for slot in layout.presence:
        if n_rows and int(layout.present(block, slot)[:n_rows].view(np.uint8).max()) > 1:
            raise MalformedMessage(f"field {slot.name!r}: its presence is neither 0 nor 1")
    for varying in layout.varying:
        _check_extents(layout, block, n_rows, varying, heap_bytes)
    for whole, (place, *shape) in zip(layout.whole, layout.heads(block), strict=True):
        n_bytes = math.prod((whole.dtype.itemsize, *shape))
        is_shape = min(place, *shape) >= 0 and math.prod(max(1, n) for n in shape) < _MAX_VALUES
        if not is_shape or place + n_bytes > heap_bytes:
            raise MalformedMessage(f"field {whole.name!r}: shape {shape} from byte {place} on")


def _check_extents(
    layout: BlockLayout, block: Block, n_rows: int, slot: Any, heap_bytes: int
) -> None:
    extents = layout.extents(block, slot)[:n_rows]
    places, sizes = extents["place"], extents["n_bytes"]
    limit = np.uint64(heap_bytes)
    if bool(((places > limit) | (sizes > limit - np.minimum(places, limit))).any()):
        raise MalformedMessage(
            f"field {slot.name!r}: a value beyond the {heap_bytes} bytes of the heap"
        )
    field = layout.schema[slot.name]
    if isinstance(field, Array):
        shapes = layout.shapes(block, slot)[:n_rows].astype(np.float64)
        # Exact up to the largest possible heap; a dimension of 0 bounds the others as well.
        is_wrong = shapes.prod(axis=1) * field.numpy.itemsize != sizes
        if bool((is_wrong | (np.maximum(shapes, 1).prod(axis=1) >= _MAX_VALUES)).any()):
            raise MalformedMessage(
                f"field {slot.name!r}: a value that is not as large as its shape"
            )
