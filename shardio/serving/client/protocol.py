"""The messages between a server and its clients: JSON objects, and blocks with batches.

    client                                          server
      open      token, options                ──▶
                                              ◀──   opened   lineage, length, initial state
      iterate   number, state, batches ahead  ──▶
                                              ◀──   begun    number, epoch, steps
                                              ◀══   batch    number, step, next state; a block
      credit    number, steps taken, allowed  ──▶
                                              ◀──   end      number, state of the next epoch
      check     state                         ──▶
                                              ◀──   checked  epoch
      stop, close                             ──▶
                                              ◀──   heartbeat, failed, no_session

The first frame of a message is its head, a JSON object; `kind` is the kind of the message. Only a
batch has a second frame: the used part of the block that a worker has filled. `number` identifies
an iteration. A server sends `heartbeat` once a second, and answers `no_session` if a client has no
session. An error is sent as JSON (`failed`): the name of its class, its message, and its location
in a shard. There are no pickles, and every value is checked when it is received.
"""

from __future__ import annotations

import functools
import ipaddress
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from shardio import errors
from shardio._workers.processes.serialization import truncate_middle
from shardio.batch.batch import Batch, Skipped
from shardio.batch.layout import SKIPPED, BlockLayout, layout_of_received_batches
from shardio.errors import InvalidArgument, ShardCorrupt, ShardioError
from shardio.format.schema import Schema
from shardio.format.types.text import canonical_json, read_json

_FORM: Final = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(\d{1,5}|\*)")
_SCHEME: Final = "tcp://"


class Address(NamedTuple):
    """The address of a server, `tcp://host:port`. The port "*" stands for any free port."""

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
        """True if only this machine can reach the host, as with 127.0.0.1, ::1 or "localhost"."""
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return self.host == "localhost"


def is_address(value: Any) -> bool:
    """Return True if a value is an address or a list of addresses, not the path of a dataset."""
    if isinstance(value, str):
        return value.startswith(_SCHEME)
    several = value if isinstance(value, list | tuple) else ()
    return bool(several) and all(isinstance(each, str) and is_address(each) for each in several)


def parse(text: Any) -> Address:
    """Parse an address; raise InvalidArgument if it is invalid."""
    found = _FORM.fullmatch(text) if isinstance(text, str) else None
    if found is None or (found[2] != "*" and int(found[2]) > 65535):
        raise InvalidArgument(f"an address is tcp://host:port; found {text!r}")
    return Address(found[1], found[2])


def parse_all(value: str | Sequence[str]) -> tuple[Address, ...]:
    """Parse an address, or a list of addresses that must be different."""
    given = value if isinstance(value, list | tuple) else [value]
    found = tuple(parse(each) for each in given)
    if not found or len(set(found)) < len(found):
        raise InvalidArgument(
            f"address must be an address or a list of different addresses; found {value!r}"
        )
    return found


VERSION: Final = 1

MAX_HEAD_BYTES: Final = 4 << 20
_Kind = TypeVar("_Kind", str, dict[str, Any], list[Any])

FROM_CLIENT: Final = frozenset({"open", "iterate", "credit", "check", "stop", "close"})
FROM_SERVER: Final = frozenset(
    {"opened", "begun", "batch", "end", "checked", "heartbeat", "failed", "no_session"}
)
MAX: Final = 1 << 60
_ENCODER: Final = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


class MalformedMessage(ValueError):
    """Raised if received data is not a valid message; the text names the member or the field."""


def pack(kind: str, **more: Any) -> bytes:
    """Return the head of a message as ASCII JSON, which can hold file names that are not UTF-8."""
    return _ENCODER.encode({"kind": kind, **more}).encode("ascii")


def pack_user_values(kind: str, **more: Any) -> bytes:
    """Return a message's head; raise InvalidArgument if the user's values cannot be sent."""
    try:
        message = pack(kind, **more)
    except (TypeError, ValueError) as error:
        names = ", ".join(more)
        raise InvalidArgument(f"{names}: cannot be sent to a server as JSON: {error}") from error
    if len(message) > MAX_HEAD_BYTES:
        raise InvalidArgument(
            f"options or a state of {len(message)} bytes of JSON; a server takes at most "
            f"{MAX_HEAD_BYTES}. For a longer sampler, read the dataset with a ShardLoader"
        )
    return message


def unpack(frames: Sequence[Any], kinds: frozenset[str]) -> dict[str, Any]:
    """Return the head of a message of one of `kinds`, given its frames."""
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
    """Return the member `name` of a message, which must be an integer from 0 to `most`."""
    found = head.get(name)
    if type(found) is not int or not 0 <= found <= most:
        shown = json.dumps(found)[:40]
        raise MalformedMessage(f"{name} is {shown}, not a number from 0 to {most}")
    return found


def member(head: Mapping[str, Any], name: str, kind: type[_Kind]) -> _Kind:
    """Return the member `name` of a message, which must be of the type `kind`."""
    found = head.get(name)
    if not isinstance(found, kind):
        raise MalformedMessage(f"{name} is {json.dumps(found)[:40]}, not a {kind.__name__}")
    return found


_PLACES: Final = ("path", "section", "field", "sample", "offset")
_VALUES: Final = ("expected", "found")
_MAX_CHARACTERS: Final = 1 << 16


def error_to_json(error: BaseException) -> dict[str, Any]:
    """Return an error as JSON values. An error of another library becomes a ShardioError."""
    kind = type(error).__name__
    text = error.what if isinstance(error, ShardCorrupt) else str(error)
    if not isinstance(error, ShardioError) or kind not in errors.__all__:
        kind, text = "ShardioError", f"{kind}: {error}"
    found: dict[str, Any] = {"class": kind, "text": truncate_middle(text, _MAX_CHARACTERS)}
    if isinstance(error, ShardCorrupt):
        found |= {each: getattr(error, each) for each in ("code", *_PLACES)}
        for each in _VALUES:
            value = getattr(error, each)
            found[each] = None if value is None else str(value)
    return found


def error_from_json(found: Mapping[str, Any]) -> ShardioError:
    """Return the error that `error_to_json` has converted to these JSON values."""
    name, what = member(found, "class", str), member(found, "text", str)
    kind: type[ShardioError] = getattr(errors, name) if name in errors.__all__ else ShardioError
    if not issubclass(kind, ShardCorrupt):
        return kind(what)
    where: dict[str, Any] = {each: found.get(each) for each in (*_PLACES, *_VALUES)}
    return kind(what, code=member(found, "code", str), **where)


_ALIGNMENT: Final = 64
_MAX_ROWS: Final = 1 << 32
_MAX_VALUES: Final = 1 << 48

Block = npt.NDArray[np.uint8]


@functools.lru_cache(maxsize=16)
def layout_to_json(layout: BlockLayout) -> str:
    """Return the layout of a block as JSON."""
    schema = layout.schema.to_json().decode("utf-8")
    whole = [slot.name for slot in layout.whole]
    return canonical_json({"schema": schema, "whole": whole, "rows": layout.n_rows}).decode("utf-8")


@functools.lru_cache(maxsize=16)
def layout_from_json(content: str) -> BlockLayout:
    """Return the layout that `layout_to_json` has written as JSON."""
    try:
        found = read_json(content)
        if not isinstance(found, dict):
            raise MalformedMessage("a layout that is not an object")
        schema = Schema.from_json(member(found, "schema", str).encode("utf-8"))
        whole, n_rows = member(found, "whole", list), number(found, "rows", _MAX_ROWS)
        if not all(n in schema and schema[n].array for n in whole if isinstance(n, str)):
            raise MalformedMessage("a layout with arrays that are not in its schema")
        return layout_of_received_batches(schema, n_rows, frozenset(map(str, whole)))
    except MalformedMessage:
        raise
    except (ShardioError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise MalformedMessage(f"an invalid layout: {error}") from error


def pack_batch(batch: Batch) -> tuple[dict[str, Any], Block]:
    """Return the members for the head of a batch's message, and the used part of the block."""
    layout, block, n_rows = batch.filled_block
    head = {
        "layout": layout_to_json(layout),
        "rows": n_rows,
        "epoch": batch.epoch,
        "step": batch.step,
        "skipped": [asdict(each) for each in batch.skipped],
    }
    return head, block[: layout.heap + _heap_bytes(layout, block, n_rows)]


def _heap_bytes(layout: BlockLayout, block: Block, n_rows: int) -> int:
    """Return how many bytes of the block's heap the values of a batch use."""
    end = 0
    for slot in layout.varying:
        extents = layout.extents(block, slot)[:n_rows]
        if len(extents):
            end = max(end, int((extents["offset"] + extents["n_bytes"]).max()))
    for whole, (offset, *shape) in zip(layout.whole, layout.heads(block), strict=True):
        end = max(end, offset + int(np.prod(shape, dtype=np.int64)) * whole.dtype.itemsize)
    return end


def unpack_batch(head: Mapping[str, Any], content: Any) -> Batch:
    """Return the batch of a message. Its arrays are views of a copy of the received block."""
    layout, n_rows = layout_from_json(member(head, "layout", str)), number(head, "rows", _MAX_ROWS)
    received = np.frombuffer(content, np.uint8)
    check(layout, received, n_rows)
    memory = np.empty(len(received) + _ALIGNMENT, np.uint8)  # the block must be aligned
    start = -memory.ctypes.data % _ALIGNMENT
    block = memory[start : start + len(received)]
    block[:] = received
    skipped = tuple(map(_skipped, member(head, "skipped", list)))
    epoch, step = number(head, "epoch"), number(head, "step")
    values = layout.arrays(block, n_rows)
    return Batch.of_block(layout, block, n_rows, values, epoch, step, skipped=skipped)


def _skipped(found: Any) -> Skipped:
    if not isinstance(found, dict):
        raise MalformedMessage("a skipped sample that is not an object")
    row, index, shard, sample = (number(found, n) for n in ("row", "index", "shard", "sample"))
    error, text = member(found, "error", str), member(found, "text", str)
    return Skipped(row, index, shard, sample, error, text)


def check(layout: BlockLayout, block: Block, n_rows: int) -> None:
    """Raise MalformedMessage unless all values of a received block are within the block."""
    if not n_rows <= layout.n_rows:
        raise MalformedMessage(f"a batch of {n_rows} rows in a block for {layout.n_rows}")
    if len(block) < layout.heap:
        raise MalformedMessage(
            f"a block of {len(block)} bytes; its layout needs at least {layout.heap}"
        )
    heap_bytes = len(block) - layout.heap
    if n_rows and int(layout.origins(block)["status"][:n_rows].max()) > SKIPPED:
        raise MalformedMessage("a row in an unknown state")
    for slot in layout.presence:
        if n_rows and int(layout.present(block, slot)[:n_rows].view(np.uint8).max()) > 1:
            raise MalformedMessage(f"field {slot.name!r}: a presence byte that is not 0 or 1")
    for varying in layout.varying:
        _check_extents(layout, block, n_rows, varying, heap_bytes)
    for whole, (offset, *shape) in zip(layout.whole, layout.heads(block), strict=True):
        n_bytes = math.prod((whole.dtype.itemsize, *shape))
        is_shape = min(offset, *shape) >= 0 and math.prod(max(1, n) for n in shape) < _MAX_VALUES
        if not is_shape or offset + n_bytes > heap_bytes:
            raise MalformedMessage(f"field {whole.name!r}: shape {shape} from byte {offset} on")


def _check_extents(
    layout: BlockLayout, block: Block, n_rows: int, slot: Any, heap_bytes: int
) -> None:
    extents = layout.extents(block, slot)[:n_rows]
    offsets, sizes = extents["offset"], extents["n_bytes"]
    limit = np.uint64(heap_bytes)
    if bool(((offsets > limit) | (sizes > limit - np.minimum(offsets, limit))).any()):
        raise MalformedMessage(
            f"field {slot.name!r}: a value beyond the {heap_bytes} bytes of the heap"
        )
    if array := layout.schema[slot.name].array:
        shapes = layout.shapes(block, slot)[:n_rows].astype(np.float64)
        # These products are floats, which are exact up to the size of the largest possible heap.
        # In the check against _MAX_VALUES, a dimension of 0 counts as 1. Otherwise the other
        # dimensions of an empty array would be unlimited.
        is_wrong = shapes.prod(axis=1) * array.numpy.itemsize != sizes
        if bool((is_wrong | (np.maximum(shapes, 1).prod(axis=1) >= _MAX_VALUES)).any()):
            raise MalformedMessage(
                f"field {slot.name!r}: a value that is not as large as its shape"
            )
