"""The documents of a dataset that are packed into windows, and their lengths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from shardio.dataset.dataset import Dataset
from shardio.dataset.scan import ShardSamples, scan
from shardio.errors import InvalidArgument
from shardio.format.schema import Schema
from shardio.format.types import Array, Field
from shardio.shard.verification import Rows
from shardio.views.packing import Pack


def resolve_pack(schema: Schema, pack: Any, asked: tuple[str, ...] | None) -> Pack:
    """Validate a loader's `pack` and return it with its field set.

    Args:
        schema: of the dataset.
        pack: as given by the user.
        asked: the fields that the user named, if any.

    Raises:
        InvalidArgument: `pack` is not a Pack, or does not fit the fields.
    """
    if not isinstance(pack, Pack):
        raise InvalidArgument(f"pack must be a shardio.views.Pack; found {pack!r}")
    name = pack.field
    if name is None:
        could = [each for each in asked or schema if _not_packable_reason(schema[each]) is None]
        if len(could) != 1:
            raise InvalidArgument(
                "pack needs one field of tokens, integers in one dimension; of those that are "
                f"read, these are: {', '.join(could) or 'none'}: choose one with Pack(field=…)"
            )
        (name,) = could
    if name not in schema:
        raise InvalidArgument(f"pack: there is no field {name!r}; there are {', '.join(schema)}")
    field = schema[name]
    why_not = _not_packable_reason(field)
    if why_not is not None or not isinstance(field, Array):
        raise InvalidArgument(f"pack: field {name!r} {why_not}; found {field!r}")
    others = [each for each in asked or () if each != name]
    if others:
        raise InvalidArgument(
            f"with pack a sample is a window, made of many rows' {name!r}: leave out {others} of "
            "fields"
        )
    limits = np.iinfo(field.numpy)
    for option, token in (("eot", pack.eot), ("pad", pack.pad)):
        if token is not None and not limits.min <= token <= limits.max:
            raise InvalidArgument(
                f"pack: {option} must be a token that field {name!r} of {field.dtype} can have, "
                f"from {limits.min} to {limits.max}; found {token}"
            )
    return replace(pack, field=name)


def _not_packable_reason(field: Field) -> str | None:
    """Return the reason why a field cannot be packed; None if it can."""
    if not isinstance(field, Array) or field.numpy.kind not in "iu" or field.dtype == "bfloat16":
        return "must be an array of integers, to be packed as tokens"
    if len(field.shape) != 1:
        return "must have one dimension, the tokens of a document, to be packed"
    if field.optional:
        return "must not be optional: a document that is absent is neither empty nor there"
    return None


def pack_documents(dataset: Dataset, pack: Pack) -> None:
    """Set a dataset's samples to windows of the documents in the currently selected rows.

    Document lengths are in the index, 32 bytes per document, unless the field has a fixed shape.

    Raises:
        InvalidArgument: there are tokens, but no window of them.
        ShardCorrupt: that part of the index is damaged.
    """
    lengths = _lengths(dataset, pack) + (pack.eot is not None)
    dataset.rows.set_windows(pack, np.cumsum(lengths, dtype=np.int64))
    if lengths.any() and not len(dataset):
        whole = ' with rest="drop"' if pack.rest == "drop" else ""
        raise InvalidArgument(
            f"{dataset.path}: the {int(lengths.sum())} tokens of field {pack.name!r} are not "
            f"enough for a window of {pack.reach}{whole}"
        )


def _lengths(dataset: Dataset, pack: Pack) -> Rows:
    """Return the number of tokens of the document in each selected row."""
    name, field, n = pack.name, pack.documents(dataset.schema), dataset.rows.n_rows
    if field.is_fixed:
        return np.full(n, field.shape[0], np.int64)
    lengths, itemsize = np.zeros(n, np.int64), field.numpy.itemsize

    def look(part: ShardSamples) -> Rows:
        n_bytes: Rows = part.reader(name).records.entries(name, part.rows)["n_bytes"]
        return n_bytes.astype(np.int64) // itemsize

    for part, found in scan(dataset, look):
        lengths[part.numbers] = found
    return lengths
