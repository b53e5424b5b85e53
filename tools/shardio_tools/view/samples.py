"""One sample as JSON values: each field with its kind and its value, or links to its media.

A dataset is borrowed, and is not thread-safe: callers use it in one thread at a time.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

import numpy as np

import shardio
from shardio.errors import ShardioError
from shardio.media import has_image_signature
from shardio_tools.inspect.frames import holds_pictures

Json = dict[str, Any]

ERRORS: Final = (ShardioError, OSError)
"""The errors of a value that cannot be read: they are shown, and the other values with them."""
MAX_TEXT: Final = 100_000
MAX_JSON_BYTES: Final = 1 << 20
MAX_TOKENS: Final = 2_000
MAX_HEX_BYTES: Final = 512
MAX_PREVIEW: Final = 64
MAX_LIST: Final = 50
"""The maximum number of characters, bytes, tokens, bytes, numbers and list items in a sample."""
MAX_READ_BYTES: Final = 64 << 20
"""The maximum size of an array that is read as a whole."""
_MAX_SAFE_INTEGER: Final = 1 << 53
_MAX_COLUMNS: Final = 64
_TITLES: Final = ("title", "name", "source", "key", "path", "file", "id")
_TOKENS: Final = re.compile(r"(^|[._])(tokens|input_ids|token_ids)$")


@dataclass(frozen=True)
class Links:
    """The addresses of a sample's media, relative to the page."""

    root: str = ""

    def of(self, route: str, row: int, field: str, rest: str = "") -> str:
        """Return the address of a field of a sample, such as "/media/3/video"."""
        return f"{self.root}/{route}/{row}/{quote(field, safe='')}{rest}"


def locate(dataset: Any, row: int) -> tuple[int, int]:
    """Return the shard of a sample, and the sample's row in the shard.

    Raises:
        InvalidArgument: there is no such sample.
    """
    n = len(dataset)
    if not 0 <= row < n:
        raise shardio.InvalidArgument(f"there is no sample {row:,}; the dataset has {n:,}")
    stored = dataset.rows.at(np.array([row]))
    shard = int(dataset.locate(stored)[0])
    return shard, int(stored[0] - dataset.shard_starts[shard])


def field_of(dataset: Any, name: str) -> Any:
    """Return a field's type; raise InvalidArgument if there is no such field."""
    field = dataset.schema.get(name)
    if field is None:
        known = ", ".join(dataset.schema)
        raise shardio.InvalidArgument(f"there is no field {name!r}; the fields are: {known}")
    return field


def stored_value(dataset: Any, row: int, name: str) -> Any:
    """Return the value of one field of a sample; None if the value is missing.

    Raises:
        InvalidArgument: there is no such sample or field.
        ShardCorrupt, …: the value is damaged.
    """
    field_of(dataset, name)
    shard, local = locate(dataset, row)
    return dataset.sample(shard, local, [name])[name]


def kind_of(name: str, field: Any) -> str:
    """Return the kind under which a field is shown, such as "video" or "scalar".

    Arrays of frames are shown as videos, and arrays of pixels as images.
    """
    if field.medium is not None:
        return str(field.medium)
    if field.is_json:
        return "json"
    if field.is_utf8:
        return "text"
    if field.is_opaque:
        return "bytes"
    array = field.array
    if array is None:
        return "list"
    if not array.shape:
        return "scalar"
    if len(array.shape) == 1 and array.dtype[-2:].isdigit() and _TOKENS.search(name):
        return "tokens" if "int" in array.dtype else "array"
    if is_clip(array):
        return "video"
    return "image" if holds_pictures(field) else "array"


def is_clip(array: Any) -> bool:
    """Return True for an array of frames: uint8, (frames, height, width, 1 or 3)."""
    return len(array.shape) == 4 and array.shape[3] in (1, 3) and bool(holds_pictures(array))


def thumbnail_fields(schema: Mapping[str, Any]) -> list[str]:
    """Return the fields that have thumbnails: images and videos first, then arrays and sound."""
    ranks = {"image": 0, "video": 0, "array": 1, "audio": 2}
    kinds = {name: kind_of(name, field) for name, field in schema.items()}
    return sorted((name for name in kinds if kinds[name] in ranks), key=lambda n: ranks[kinds[n]])


def describe_sample(dataset: Any, row: int, links: Links | None = None) -> Json:
    """Return a sample as JSON values.

    A field that cannot be read has the error as `damaged`, and the sample has the first of them.

    Raises:
        InvalidArgument: there is no such sample.
    """
    shard, local = locate(dataset, row)
    made = [_describe_field(dataset, row, name, links or Links()) for name in dataset.schema]
    damaged = [each["damaged"] for each in made if each.get("damaged")]
    return {
        "row": row,
        "n": len(dataset),
        "title": _title(made) or f"sample {row:,}",
        "shard": dataset.shards[shard].name,
        "index": local,
        "fields": made,
        "damaged": damaged[0] if damaged else None,
        "clip": None,
    }


def _title(fields: list[Json]) -> str | None:
    texts = {each["name"]: each.get("value") or "" for each in fields if each["kind"] == "text"}
    return next((str(texts[name])[:200] for name in _TITLES if texts.get(name)), None)


def _describe_field(dataset: Any, row: int, name: str, links: Links) -> Json:
    field = dataset.schema[name]
    kind = kind_of(name, field)
    array = field.array
    made: Json = {"name": name, "kind": kind, "type": type(field).spec_name()}
    made["dtype"] = None if array is None else array.dtype
    made["shape"] = None if array is None else list(array.shape)
    made["original"] = links.of("original", row, name)
    try:
        value = stored_value(dataset, row, name)
        if value is None and not field.is_json:
            return made | {"missing": True, "n_bytes": 0, "original": None}
        return made | _DESCRIBERS[kind](_Stored(dataset, row, name, field, value, links))
    except ERRORS as error:
        return made | {"damaged": str(error), "n_bytes": None}


@dataclass(frozen=True)
class _Stored:
    dataset: Any
    row: int
    name: str
    field: Any
    value: Any
    links: Links

    def link(self, route: str, rest: str = "") -> str:
        return self.links.of(route, self.row, self.name, rest)


def number(value: Any) -> Any:
    """Return a number as JSON shows it exactly; a large integer, NaN or infinity as a text."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) < _MAX_SAFE_INTEGER else str(value)
    return value if math.isfinite(value) else str(value)


def as_numbers(value: Any, array: Any) -> Any:
    """Return an array in a dtype of NumPy: bfloat16 is stored as the bits of the numbers."""
    if array.dtype != "bfloat16":
        return value
    return (np.asarray(value).astype(np.uint32) << 16).view(np.float32)


def _scalar(stored: _Stored) -> Json:
    value = as_numbers(np.asarray(stored.value), stored.field.array)[()]
    made: Json = {"value": number(value), "n_bytes": stored.field.array.numpy.itemsize}
    classes = stored.dataset.classes
    if stored.name == "label" and isinstance(value, np.integer) and 0 <= value < len(classes):
        made["label"] = classes[int(value)]
    return made


def _text(stored: _Stored) -> Json:
    text = stored.value
    is_long = len(text) > MAX_TEXT
    return {"value": text[:MAX_TEXT], "truncated": is_long, "n_bytes": len(text.encode())}


def _json(stored: _Stored) -> Json:
    text = json.dumps(stored.value, ensure_ascii=False)
    n_bytes = len(text.encode())
    if n_bytes > MAX_JSON_BYTES:
        return {"value": text[:MAX_TEXT], "truncated": True, "n_bytes": n_bytes}
    return {"value": stored.value, "truncated": False, "n_bytes": n_bytes}


def _bytes(stored: _Stored) -> Json:
    value = stored.value
    is_picture = has_image_signature(value[:64])
    return {
        "hex": value[:MAX_HEX_BYTES].hex(),
        "n_bytes": len(value),
        "image": stored.link("thumbnail", "?size=512") if is_picture else None,
    }


def _tokens(stored: _Stored) -> Json:
    value = stored.value
    return {
        "value": value[:MAX_TOKENS].tolist(),
        "n": len(value),
        "text": None,
        "n_bytes": value.nbytes,
        "truncated": len(value) > MAX_TOKENS,
    }


def _image(stored: _Stored) -> Json:
    value = stored.value
    if stored.field.medium != "image":
        return _array(stored) | {"src": stored.link("frame", "/0")}
    return {
        "height": value.height,
        "width": value.width,
        "channels": value.channels,
        "src": stored.link("media"),
        "n_bytes": len(value),
    }


def _video(stored: _Stored) -> Json:
    if stored.field.medium != "video":
        return _array(stored) | _frames(stored)
    stream = stored.value
    seconds = float(stream.duration * stream.time_base)
    return {
        "src": stored.link("media"),
        "frames": stored.link("frame", "/{n}"),
        "fps": stream.n_frames / seconds if seconds > 0 else 25.0,
        "n_frames": stream.n_frames,
        "seconds": seconds,
        "width": stream.width,
        "height": stream.height,
        "codec": str(stream.parameters.get("codec")),
        "n_bytes": len(stream.data),
    }


def _frames(stored: _Stored) -> Json:
    n, height, width = stored.value.shape[:3]
    return {
        "src": None,
        "frames": stored.link("frame", "/{n}"),
        "fps": 25.0,
        "n_frames": n,
        "seconds": n / 25.0,
        "width": width,
        "height": height,
        "codec": "raw",
        "mime": None,
        "keyframes": [],
        "audio": False,
    }


def _audio(stored: _Stored) -> Json:
    stream = stored.value
    return {
        "src": stored.link("media"),
        "rate": stream.height,
        "channels": stream.width,
        "seconds": stream.n_frames / max(1, stream.height),
        "codec": str(stream.parameters.get("codec")),
        "waveform": stored.link("series"),
        "n_bytes": len(stream.data),
    }


def _array(stored: _Stored) -> Json:
    array, value = stored.field.array, np.asarray(stored.value)
    known = as_numbers(value, array)
    is_numeric = known.dtype != np.bool_ and known.size > 0
    finite = known[np.isfinite(known)] if is_numeric else known[:0]
    return {
        "shape": list(value.shape),
        "n_bytes": value.nbytes,
        "min": number(finite.min()) if finite.size else None,
        "max": number(finite.max()) if finite.size else None,
        "preview": [number(each) for each in known.reshape(-1)[:MAX_PREVIEW]],
        "series": stored.link("series") if has_series(value.shape) else None,
        "heatmap": stored.link("heatmap") if has_heatmap(value.shape) else None,
        "image": None,
    }


def has_series(shape: tuple[int, ...]) -> bool:
    """Return True for an array that is shown as line charts: (steps,) or (steps, columns)."""
    return len(shape) in (1, 2) and shape[0] > 1 and all(n <= _MAX_COLUMNS for n in shape[1:])


def has_heatmap(shape: tuple[int, ...]) -> bool:
    """Return True for an array that is shown as a heat map: any matrix."""
    return len(shape) == 2 and min(shape) > 1


def _list(stored: _Stored) -> Json:
    value, item = stored.value, stored.field.item
    shown = [
        {
            "shape": list(each.shape),
            "preview": [number(n) for n in as_numbers(each, item).reshape(-1)[:MAX_PREVIEW]],
        }
        for each in value[:MAX_LIST]
    ]
    return {
        "dtype": item.dtype,
        "n": len(value),
        "items": shown,
        "truncated": len(value) > MAX_LIST,
        "n_bytes": sum(each.nbytes for each in value),
    }


_DESCRIBERS: Final[dict[str, Callable[[_Stored], Json]]] = {
    "array": _array,
    "audio": _audio,
    "bytes": _bytes,
    "image": _image,
    "json": _json,
    "list": _list,
    "scalar": _scalar,
    "text": _text,
    "tokens": _tokens,
    "video": _video,
}
