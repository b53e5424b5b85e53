"""A value of a sample as a few facts that JSON can say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import shardio

N_VALUES: Final = 8
"""How many values of an array are shown."""


def value_facts(value: Any, kind: Any) -> dict[str, Any]:
    """Give a value as a few facts: of an array dtype, shape, range and first values."""
    if value is None and kind.optional:
        return {"type": type(kind).__name__, "absent": True}
    if isinstance(kind, shardio.List):
        shapes = [list(np.shape(array)) for array in value[:N_VALUES]]
        return {"type": "List", "dtype": kind.element.dtype, "arrays": len(value), "first": shapes}
    if isinstance(kind, shardio.Text):
        return {"type": "Text", "characters": len(value), "value": value}
    if isinstance(kind, shardio.Bytes):
        return {"type": "Bytes", "bytes": len(value), "first": value[: 2 * N_VALUES].hex(" ")}
    if isinstance(kind, shardio.Image):
        sides = {name: getattr(value, name) for name in ("height", "width", "channels")}
        return {"type": "Image", "bytes": len(value), **sides}
    if isinstance(kind, shardio.Video | shardio.Audio):
        return _stream_facts(value, type(kind).__name__)
    if isinstance(kind, shardio.Json):
        return {"type": "Json", "value": value}
    numbers = np.asarray(value)
    if kind.dtype == "bfloat16":  # held as the upper halves of float32
        numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
    facts = {"type": "Array", "dtype": kind.dtype, "shape": list(numbers.shape)}
    if numbers.size:
        facts |= _range(numbers)
    return facts


def _stream_facts(stream: shardio.EncodedStream, kind: str) -> dict[str, Any]:
    """Give codec, sizes and length of a stream; of its packets nothing is read."""
    names = ("width", "height") if kind == "Video" else ("channels", "rate")
    return {
        "type": kind,
        "bytes": len(stream.data),
        "codec": stream.parameters["codec"],
        "packets": len(stream.packets),
        "frames" if kind == "Video" else "samples": stream.n_frames,
        names[0]: stream.width,
        names[1]: stream.height,
        "seconds": float(stream.duration * stream.time_base) if stream.duration else None,
    }


def _range(numbers: npt.NDArray[Any]) -> Mapping[str, Any]:
    with np.errstate(all="ignore"):  # infinities have no mean, and what is no number no order
        return {
            "min": numbers.min().item(),
            "max": numbers.max().item(),
            "mean": float(numbers.astype(np.float64).mean()),
            "first": numbers.reshape(-1)[:N_VALUES].tolist(),
        }
