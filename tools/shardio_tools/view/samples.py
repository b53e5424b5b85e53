"""One sample as JSON values: each field with its kind and its value, or links to its media."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

import numpy as np

from shardio import InvalidArgument
from shardio._base.progress import counted
from shardio.errors import UnsupportedEnvironment
from shardio.media import can_be_mp4, has_image_signature, keyframes_of, times_of
from shardio_tools.view.mp4 import media_type, sound_field
from shardio_tools.view.originals import max_bytes
from shardio_tools.view.rows import class_field, class_name
from shardio_tools.view.stored import (
    READ_ERRORS,
    StoredArray,
    as_numbers,
    has_heatmap,
    has_series,
    kind_of,
    locate,
    number,
    stored_value,
)

Json = dict[str, Any]

MAX_TEXT: Final = 100_000
MAX_JSON_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 100
MAX_TOKENS: Final = 2_000
MAX_HEX_BYTES: Final = 512
MAX_PREVIEW: Final = 64
MAX_ITEMS: Final = 50
MAX_KEYFRAMES: Final = 2_000
MAX_TIMES: Final = 20_000
"""The maximum number of characters of a text, of bytes and levels of JSON, of tokens, of bytes as
hex, of numbers of an array, of items of a list, and of keyframes and times of frames in a sample.
"""
_MAX_STATISTICS_BYTES: Final = 16 << 20
"""The maximum size of an array whose least and greatest numbers are in a sample."""
_RATE: Final = 25.0
"""The number of frames per second of frames without times."""


def load_tokenizer(path: str) -> Any:
    """Return the tokenizer in a file, such as `tokenizer.json`, for `describe_sample`.

    Raises:
        UnsupportedEnvironment: the package `tokenizers` is not installed.
        InvalidArgument: the file has no tokenizer.
    """
    try:
        module = importlib.import_module("tokenizers")
    except ImportError as error:
        raise UnsupportedEnvironment(
            "showing the text of tokens needs the package tokenizers: pip install tokenizers"
        ) from error
    try:
        return module.Tokenizer.from_file(path)
    except Exception as error:  # the package raises plain Exceptions
        raise InvalidArgument(f"{path}: cannot read a tokenizer: {error}") from error


def describe_sample(dataset: Any, row: int, *, tokenizer: Any = None) -> Json:
    """Return a sample as JSON values.

    A field that cannot be read has the text of its error as `damaged`, and so has the sample.
    `tokenizer` has the method `decode`, which returns the text of a list of tokens.

    Raises:
        InvalidArgument: there is no such sample.
    """
    shard, local = locate(dataset, row)
    made = [_describe_field(dataset, row, name, tokenizer) for name in dataset.schema]
    damaged = [each["damaged"] for each in made if each.get("damaged")]
    return {
        "row": row,
        "n": len(dataset),
        "shard": dataset.shards[shard].name,
        "index": local,
        "fields": made,
        "damaged": damaged[0] if damaged else None,
        "clip": _clip(dataset, row),
    }


def _clip(dataset: Any, row: int) -> Json | None:
    """Return the first clip that the default view of the dataset cuts from a sample's video."""
    view = dataset.view
    videos = [name for name, field in dataset.schema.items() if field.medium == "video"]
    if "frames" not in view or len(videos) != 1:
        return None
    try:
        video = stored_value(dataset, row, videos[0])
    except READ_ERRORS:
        return None
    n, stride, step = (int(view[name]) for name in ("frames", "stride", "step"))
    span = (n - 1) * stride + 1
    if video is None or video.n_frames < span:
        return None
    n_clips = -(-(video.n_frames - span + 1) // step)
    times = _seconds(video)
    end = float(video.duration * video.time_base)
    text = f"{counted(n_clips, 'clips')} of {counted(n, 'frames')}"
    return {
        "field": videos[0],
        "start": 0.0,
        "stop": float(times[span]) if span < len(times) else max(end, float(times[-1])),
        "n_frames": n,
        "text": text + (f", every {stride}th frame" if stride > 1 else ""),
    }


def _seconds(video: Any) -> Any:
    """Return the time of each frame since the first one, in seconds."""
    ticks = times_of(video)
    return (ticks - ticks[:1]) * float(video.time_base)


@dataclass(frozen=True)
class _Stored:
    """A value of a field that is present: an array as a `StoredArray`."""

    dataset: Any
    row: int
    name: str
    field: Any
    value: Any
    tokenizer: Any

    def link(self, route: str, rest: str = "") -> str:
        return _link(route, self.row, self.name, rest)


def _link(route: str, row: int, field: str, rest: str = "") -> str:
    """Return the address of a field of a sample, such as "/media/3/video"."""
    return f"/{route}/{row}/{quote(field, safe='')}{rest}"


def _describe_field(dataset: Any, row: int, name: str, tokenizer: Any) -> Json:
    field = dataset.schema[name]
    kind, array = kind_of(name, field), field.array
    made: Json = {
        "name": name,
        "kind": kind,
        "type": type(field).spec_name(),
        "dtype": None if array is None else array.dtype,
        "shape": None if array is None else list(array.shape),
        "original": _link("original", row, name),
    }
    try:
        value = _value(dataset, row, name, field)
        if value is None and (field.optional or not field.is_json):
            return made | {"missing": True, "n_bytes": 0, "original": None}
        stored = _Stored(dataset, row, name, field, value, tokenizer)
        made |= _DESCRIBERS[kind](stored)
    except READ_ERRORS as error:
        return made | {"damaged": str(error), "n_bytes": None, "original": None}
    if made["n_bytes"] > max_bytes(field):
        is_played = made.get("src") and kind in ("video", "audio")
        made["original"] = made["src"] if is_played else None
    return made


def _value(dataset: Any, row: int, name: str, field: Any) -> Any:
    if field.array is None or not field.array.shape:
        return stored_value(dataset, row, name)
    shard, local = locate(dataset, row)
    is_present = dataset.reader(shard, name).array_shape(name, local) is not None
    return StoredArray.of(dataset, row, name) if is_present else None


def _scalar(stored: _Stored) -> Json:
    value = as_numbers(np.asarray(stored.value), stored.field.array)[()]
    made: Json = {"value": number(value), "n_bytes": stored.field.array.numpy.itemsize}
    is_label = stored.name == class_field(stored.dataset)
    if is_label and 0 <= value < len(stored.dataset.classes):
        made["label"] = class_name(stored.dataset, int(value))
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
    try:
        value = _exact(stored.value)
    except RecursionError:
        return {"value": text[:MAX_TEXT], "truncated": True, "n_bytes": n_bytes}
    return {"value": value, "truncated": False, "n_bytes": n_bytes}


def _exact(value: Any, depth: int = 0) -> Any:
    """Return a value of JSON with each number as JavaScript shows it exactly.

    Raises RecursionError for values that are nested deeper than MAX_DEPTH.
    """
    if depth > MAX_DEPTH:
        raise RecursionError
    if isinstance(value, dict):
        return {key: _exact(each, depth + 1) for key, each in value.items()}
    if isinstance(value, list):
        return [_exact(each, depth + 1) for each in value]
    return number(value) if isinstance(value, int | float) else value


def _bytes(stored: _Stored) -> Json:
    value = stored.value
    is_picture = has_image_signature(value[:64])
    return {
        "hex": value[:MAX_HEX_BYTES].hex(),
        "n_bytes": len(value),
        "image": stored.link("media") if is_picture else None,
        "truncated": len(value) > MAX_HEX_BYTES,
    }


def _tokens(stored: _Stored) -> Json:
    array = stored.value
    shown = array.first(MAX_TOKENS).tolist()
    text = None if stored.tokenizer is None else _decoded(stored.tokenizer, shown)
    n = array.shape[0]
    return {
        "value": shown,
        "n": n,
        "text": text,
        "n_bytes": array.n_bytes,
        "truncated": n > len(shown),
    }


def _decoded(tokenizer: Any, tokens: list[int]) -> str:
    """Return the text of tokens, or why there is none, such as a padding token of -1."""
    try:
        return str(tokenizer.decode(tokens))
    except Exception as error:  # noqa: BLE001  # of the package, or of a user's tokenizer
        return f"the tokenizer cannot decode these tokens: {error}"


def _image(stored: _Stored) -> Json:
    value = stored.value
    if stored.field.medium != "image":
        made = _array(stored)
        src = stored.link("frame", "/0") if min(value.shape, default=0) > 0 else None
        shape = [n for n in value.shape if n not in (1, 3)] if len(value.shape) > 2 else value.shape
        size = dict(zip(("height", "width"), shape, strict=False)) if len(shape) == 2 else {}
        return made | {"src": src, "image": src} | size
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
    stream, row, name = stored.value, stored.row, stored.name
    seconds = float(stream.duration * stream.time_base)
    times = _seconds(stream) if stream.n_frames else np.zeros(0)
    steps = np.diff(times)
    is_even = not len(steps) or float(np.ptp(steps)) <= 1.5 * float(stream.time_base)
    mime = media_type(stored.dataset, row, name) if can_be_mp4(stream) else None
    keys = keyframes_of(stream)
    sound = sound_field(stored.dataset.schema, name)
    return {
        "src": None if mime is None else stored.link("media"),
        "mime": mime,
        "frames": stored.link("frame", "/{n}"),
        "fps": stream.n_frames / seconds if seconds > 0 else _RATE,
        "n_frames": stream.n_frames,
        "seconds": seconds or stream.n_frames / _RATE,
        "start": float(times_of(stream)[0] * stream.time_base) if stream.n_frames else 0.0,
        "times": None if is_even or len(times) > MAX_TIMES else np.round(times, 6).tolist(),
        "width": stream.width,
        "height": stream.height,
        "codec": str(stream.parameters.get("codec")),
        "keyframes": keys.tolist() if len(keys) <= MAX_KEYFRAMES else [],
        "audio": mime is not None and "," in mime and sound is not None,
        "n_bytes": len(stream.data),
    }


def _frames(stored: _Stored) -> Json:
    """Describe an array of frames, whose times may be in the fields `pts` and `time_base`."""
    n, height, width = stored.value.shape[:3]
    rate = _frame_rate(stored, n)
    return {
        "src": None,
        "mime": None,
        "frames": stored.link("frame", "/{n}"),
        "fps": rate,
        "n_frames": n,
        "seconds": n / rate,
        "width": width,
        "height": height,
        "codec": "raw",
        "keyframes": [],
        "audio": False,
    }


def _frame_rate(stored: _Stored, n: int) -> float:
    prefix = stored.name.rpartition(".")[0]
    names = [f"{prefix}.{each}" if prefix else each for each in ("pts", "time_base")]
    if n < 2 or any(name not in stored.dataset.schema for name in names):
        return _RATE
    try:
        pts, base = (stored_value(stored.dataset, stored.row, name) for name in names)
    except READ_ERRORS:
        return _RATE
    if np.shape(pts) != (n,) or np.shape(base) != (2,) or base[0] <= 0 or pts[-1] <= pts[0]:
        return _RATE
    seconds = float(pts[-1] - pts[0]) * float(base[0]) / max(1.0, float(base[1]))
    return (n - 1) / seconds


def _audio(stored: _Stored) -> Json:
    stream = stored.value
    return {
        "src": stored.link("media"),
        "mime": media_type(stored.dataset, stored.row, stored.name),
        "rate": stream.height,
        "channels": stream.width,
        "seconds": stream.n_frames / max(1, stream.height),
        "codec": str(stream.parameters.get("codec")),
        "waveform": stored.link("series"),
        "n_bytes": len(stream.data),
    }


def _array(stored: _Stored) -> Json:
    array = stored.value
    made: Json = {
        "shape": list(array.shape),
        "n_bytes": array.n_bytes,
        "min": None,
        "max": None,
        "preview": [number(each) for each in array.first(MAX_PREVIEW)],
        "series": stored.link("series") if has_series(array.shape) else None,
        "heatmap": stored.link("heatmap") if has_heatmap(array.shape) else None,
        "image": None,
    }
    if 0 < array.n_bytes <= _MAX_STATISTICS_BYTES and array.array.dtype != "bool":
        known = array.part(0, array.shape[0])
        finite = known[np.isfinite(known)] if known.dtype.kind == "f" else known
        if finite.size:
            made |= {"min": number(finite.min()), "max": number(finite.max())}
    return made


def _list(stored: _Stored) -> Json:
    value, item = stored.value, stored.field.item
    shown = [
        {
            "shape": list(each.shape),
            "preview": [number(n) for n in as_numbers(each, item).reshape(-1)[:MAX_PREVIEW]],
        }
        for each in value[:MAX_ITEMS]
    ]
    return {
        "dtype": item.dtype,
        "n": len(value),
        "items": shown,
        "truncated": len(value) > MAX_ITEMS,
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
