"""Samples that a function of the user makes of items, converted as files are.

Each item is an input, in the order given: listed with what became of it, converted by whichever
worker is free, and kept when a conversion that was interrupted goes on.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

from shardio._workers.processes.cargo import pickled
from shardio.conversion.appending import load_base
from shardio.conversion.execution import append_files, convert_files
from shardio.conversion.inputs import Listing
from shardio.conversion.item_source import ItemSource, MakesSamples, infer_of
from shardio.conversion.report import ConversionReport
from shardio.conversion.request import Request
from shardio.conversion.source import Item
from shardio.conversion.staging import Staging
from shardio.conversion.worker import Job
from shardio.errors import InvalidArgument
from shardio.format.checksum import hash_bytes
from shardio.format.schema import Schema

_MAX_NAME: Final = 200  # characters


def list_items(items: Iterable[Any]) -> Listing:
    """List items in their order, each with a name of its own.

    What JSON can say is known again by that, anything else by its pickle.

    Raises:
        InvalidArgument: there is none, or one cannot be pickled.
    """
    found: list[Item] = []
    seen: Counter[str] = Counter()
    for item in items:
        packed = pickled(item, "give what it is made of, and make it in the function")
        content = _as_json(item) or packed
        number = hash_bytes(content)
        name = _distinct(_name_of(item, content, number), seen)
        found.append(
            Item(name, name, len(content), -1, (number, 0), hash=f"{number:016x}", packed=packed)
        )
    if not found:
        raise InvalidArgument("there is no item to make samples of")
    return Listing(tuple(found), ())


def _distinct(name: str, seen: Counter[str]) -> str:
    """A name that no item before has; behind one that was there stands how often."""
    seen[name] += 1
    return name if seen[name] == 1 else _distinct(f"{name} ({seen[name]})", seen)


def _as_json(item: Any) -> bytes:
    """An item as JSON says it, a path as text; nothing if JSON cannot say it."""
    try:
        return json.dumps(item, sort_keys=True, default=os.fspath).encode()
    except (TypeError, ValueError, RecursionError):
        return b""


def _name_of(item: Any, content: bytes, number: int) -> str:
    if isinstance(item, os.PathLike):
        item = os.fspath(item)
    if isinstance(item, str) and item:
        name = item.encode("utf-8", "backslashreplace").decode()
    elif _as_json(item):
        name = content.decode()
    else:
        return f"{type(item).__name__} {number:016x}"
    return name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}… {number:016x}"


def convert_items(
    items: Iterable[Any],
    make: MakesSamples,
    function: str,
    out: str | os.PathLike[str],
    request: Request,
    *,
    schema: Schema | None,
    names: Sequence[str] | None,
    append: bool,
) -> ConversionReport:
    """Convert what a function makes of items into a dataset at `out`, or into more of it."""
    request.check(None, append=append)
    base = load_base(out) if append else None
    staging = Staging(
        os.fspath(out),
        resume=request.resume,
        overwrite=request.overwrite,
        appends=append,
        hint=request.hint,
    )
    listing = list_items(items)
    parts = None if names is None else tuple(names)
    if schema is None:
        schema = base.schema if base is not None else infer_of(make, listing.inputs, parts)
    keeps = request.keep_partial
    if base is not None and base.converter:
        keeps = keeps or bool(base.converter.get("options", {}).get("keep_partial", False))
    job = Job(
        ItemSource(function, parts, make, schema),
        str(staging.folder),
        shard_bytes=request.shard_bytes,
        keep_partial=keeps,
        stop_at_broken=request.on_error == "stop",
    )
    return (append_files if append else convert_files)(listing, staging, job, request)
