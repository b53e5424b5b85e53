"""Facts about rows of the grid: title, label, text and the field of the thumbnail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import shardio
from shardio_tools.output import decode_names
from shardio_tools.view.stored import READ_ERRORS, thumbnail_fields
from shardio_tools.view.texts import stored_texts

_MAX_TEXT: Final = 200
_MAX_READ: Final = 1 << 20
"""The maximum size of a text of which the beginning is shown, in bytes."""
_TITLES: Final = (
    *("title", "name", "source", "path", "file", "file_name", "filename", "key", "__key__", "id"),
)
"""Fields of text that are titles, the best first."""


def class_field(dataset: shardio.ShardDataset) -> str | None:
    """Return the field whose integers are indices of classes; None if there is none."""
    field = dataset.schema.columns.get("label")
    is_label = field is not None and not field.shape and "int" in field.dtype
    return "label" if is_label else None


def _text_fields(dataset: shardio.ShardDataset) -> tuple[str | None, str | None]:
    """Return the field with titles, and the first other field of text."""
    texts = [name for name, field in dataset.schema.items() if field.is_utf8]
    title = next((name for name in _TITLES if name in texts), None)
    return title, next((name for name in texts if name != title), None)


def describe_rows(
    dataset: shardio.ShardDataset, chosen: Sequence[int], positions: Sequence[int]
) -> list[dict[str, Any]]:
    """Return facts about the rows `chosen`, whose positions in a list are `positions`."""
    title, text = _text_fields(dataset)
    names = [name for name in (title, text, class_field(dataset)) if name is not None]
    picture = next(iter(thumbnail_fields(dataset.schema)), None)
    values = {name: _values(dataset, name, chosen) for name in names}
    found = []
    for i, (row, position) in enumerate(zip(chosen, positions, strict=True)):
        facts: dict[str, Any] = {"position": position, "row": row, "title": f"{row}"}
        facts |= {"label": None, "text": "", "subset": None, "damaged": None, "marked": False}
        facts["image"] = picture
        for name in names:
            value = values[name][i]
            if isinstance(value, Exception):
                facts["damaged"] = decode_names(str(value))
            elif name == title:
                facts["title"] = _short(value) or f"{row}"
            elif name == text:
                facts["text"] = _short(value)
            elif value is not None:
                facts["label"] = class_name(dataset, int(value))
        if text is None and picture is None and not facts["damaged"]:
            texts = stored_texts(dataset, row, ("tokens", "scalar"))
            facts["text"] = _short(", ".join(f"{each['name']} {each['text']}" for each in texts))
        found.append(facts)
    return found


def class_name(dataset: shardio.ShardDataset, value: int) -> str:
    """Return the name of the class with an index; the index as text if there is none."""
    names = dataset.classes
    return decode_names(names[value]) if 0 <= value < len(names) else str(value)


def _short(text: str | None) -> str:
    text = text or ""
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"


def _values(dataset: shardio.ShardDataset, name: str, chosen: Sequence[int]) -> list[Any]:
    """Return the values of a field; an error about a value or its shard stands for it."""
    rows = np.asarray(chosen, np.int64)
    found: list[Any] = [None] * len(rows)
    shards = np.searchsorted(dataset.shard_starts, rows, side="right") - 1
    for shard in np.unique(shards).tolist():
        places = np.flatnonzero(shards == shard)
        local = rows[places] - int(dataset.shard_starts[shard])
        for place, value in zip(
            places.tolist(), _of_shard(dataset, name, shard, local), strict=True
        ):
            found[place] = value
    return found


def _of_shard(
    dataset: shardio.ShardDataset, name: str, shard: int, local: npt.NDArray[np.int64]
) -> list[Any]:
    """Return values of one shard: together, or one by one if one of them is damaged."""
    try:
        reader = dataset.reader(shard, name)
    except READ_ERRORS as error:
        return [error] * len(local)
    try:
        return _read(reader, name, local)
    except READ_ERRORS:
        return [_read_or_error(reader, name, local[i : i + 1]) for i in range(len(local))]


def _read(reader: shardio.ShardReader, name: str, local: npt.NDArray[np.int64]) -> list[Any]:
    if name not in reader.schema.columns:
        lengths = reader.lengths(name, local).tolist()
        return [
            reader.sample(row, [name])[name] if n <= _MAX_READ else f"{n:,} bytes of text"
            for row, n in zip(local.tolist(), lengths, strict=True)
        ]
    values = reader.column(name, local).tolist()
    is_there = reader.present(name, local).tolist()
    return [value if there else None for value, there in zip(values, is_there, strict=True)]


def _read_or_error(reader: shardio.ShardReader, name: str, local: npt.NDArray[np.int64]) -> Any:
    try:
        return _read(reader, name, local)[0]
    except READ_ERRORS as error:
        return error
