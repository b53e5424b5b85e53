"""Inputs that are read together with others: one of them gives the samples, the rest are parts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from shardio.conversion.inputs import Listing
from shardio.conversion.source import Input, Source

Parts = Mapping[str, Sequence[str]]


def join(listing: Listing, source: Source) -> Listing:
    """Give inputs their parts, as a source's `parts` has them.

    An input with parts in its own folder, or with an empty list of them, stands for that folder:
    its class is the folder above. A folder with nothing but parts is no class.
    """
    find: Callable[[Sequence[Input]], Parts] = getattr(source, "parts", lambda _: {})
    if not (parts := find(listing.inputs)):
        return listing
    known = {one.name: one for one in listing.inputs}
    part_of: dict[str, str] = {}
    for name, others in parts.items():
        part_of |= {other: name for other in others if other not in parts and other not in part_of}
    folders = {one.name: listing.classes[one.label] for one in known.values() if one.label >= 0}
    own = {name: folder for name, folder in folders.items() if name not in part_of}
    for name in parts.keys() & own.keys():
        here = os.path.dirname(name) + "/"
        if not parts[name] or any(other.startswith(here) for other in parts[name]):
            own[name] = os.path.dirname(own[name])
    held = {folders[name] for name in (*parts, *part_of) if name in folders}
    classes = tuple(sorted({*own.values(), *listing.classes} - (held - {*own.values()}) - {""}))
    numbers = {name: number for number, name in enumerate(classes)}
    inputs = (
        replace(
            one,
            label=numbers.get(own.get(one.name, ""), -1),
            parts=tuple(known[other] for other in parts.get(one.name, ())),
            part_of=part_of.get(one.name, ""),
        )
        for one in listing.inputs
    )
    return Listing(tuple(inputs), classes)
