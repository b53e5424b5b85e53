"""The golden files of media, which `make_golden.py` writes: their schemas and samples."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np

from shardio import Array, Audio, EncodedStream, Image, Schema, Text, Video
from shardio.format.types import EncodedImage
from shardio.format.types.streams import pack_packets
from shardio.media import PlanesEncoder

__all__ = ["media", "planes", "planes_picture"]

Samples = list[dict[str, Any]]


def _stream(codec: str, i: int, n_packets: int, n_bytes: int) -> EncodedStream:
    """Return a stream of packets of growing sizes; the third, where there is one, is hidden."""
    sizes = [n_bytes + k for k in range(n_packets)]
    flags = [1 if k % 5 == 0 else 6 if k == 2 else 4 * (k % 2) for k in range(n_packets)]
    order = [k ^ 1 for k in range(n_packets)]  # as of frames that are shown in another order
    return EncodedStream(
        parameters={"codec": codec, "range": "tv", "ü": [1, None]},
        extradata=bytes(range(i)),
        packets=pack_packets(sizes, flags, [1001 * k - 2002 for k in order], [1001] * n_packets),
        data=bytes((7 * k + i) % 256 for k in range(sum(sizes))),
        time_base=Fraction(1, 30_000 + i),
        n_frames=n_packets - (n_packets > 2),
        width=64 + i,
        height=48,
        duration=1001 * n_packets if i % 2 else 0,
    )


def _videos() -> tuple[Schema, Samples]:
    schema = Schema({"label": Array("int64"), "video": Video()})
    return schema, [
        {"label": np.int64(i), "video": _stream("h264", i, 4 * i, 9 + i)} for i in range(5)
    ]


def _long_video() -> tuple[Schema, Samples]:
    return Schema({"video": Video()}), [
        {"video": _stream("av1", i, 150 - 147 * i, 370)} for i in (0, 1)
    ]


def _pictures() -> tuple[Schema, Samples]:
    return Schema({"image": Image(), "note": Text()}), [
        {"image": EncodedImage(b"a picture" * i, 3 * i, 4, 1 + i % 4), "note": "n" * i}
        for i in range(1, 6)
    ]


def _missing_media() -> tuple[Schema, Samples]:
    schema = Schema(
        {
            "clip.video": Video(optional=True),
            "clip.sound": Audio(optional=True),
            "picture": Image(optional=True),
        }
    )
    full = {
        "clip.video": _stream("hevc", 2, 7, 20),
        "clip.sound": _stream("aac", 3, 3, 5),
        "picture": EncodedImage(b"picture", 1, 2, 3),
    }
    return schema, [
        {name: value if i >> k & 1 else None for k, (name, value) in enumerate(full.items())}
        for i in range(8)
    ]


def media() -> Iterator[tuple[str, Schema, Samples]]:
    """Every golden file of media: its name, its schema, its samples."""
    cases = {
        "videos": _videos(),
        "long_video": _long_video(),
        "pictures": _pictures(),
        "missing_media": _missing_media(),
    }
    for name, (schema, samples) in cases.items():
        yield name, schema, samples
    yield "missing_media_no_sample", cases["missing_media"][0], []


def planes_picture(i: int, k: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return picture k of video i of the golden file of planes; in video 2 it is noise."""
    height, width = 4 + 2 * i, 6 + 2 * i
    down, right = np.ogrid[: height * 3 // 2, :width]
    n = down * width + right
    value = n * n * 2_654_435_761 + k * 40_503 >> 7 if i == 2 else 3 * down + right + 7 * k
    return (value % 256).astype(np.uint8)


def planes() -> Iterator[tuple[str, Schema, Samples]]:
    """Yield the golden file of planes: compressed, not compressed, noise, and of another codec."""
    found: Samples = []
    ways: list[dict[str, Any]] = [{"gop": 3}, {"codec": "raw", "gop": 1}, {"gop": 2}]
    for i, options in enumerate(ways):
        height, width = planes_picture(i, 0).shape
        encoder = PlanesEncoder(width, height * 2 // 3, Fraction(1, 90_000), **options)
        for k in range(5):
            encoder.add(k * k * 100 - 50, planes_picture(i, k))
        found.append({"video": encoder.finish()})
    found.append({"video": _stream("h264", 1, 3, 9)})
    yield "planes", Schema({"video": Video()}), found
