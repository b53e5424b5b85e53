"""Thumbnails of samples, and frames of videos: made on demand, and kept in a bounded cache."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Final

import numpy as np

import shardio
from shardio.media import StoredImage, fit, has_image_signature, preview_pixels, probe, to_jpeg
from shardio_tools.view.samples import stored_value

MIN_SIDE: Final = 64
MAX_SIDE: Final = 512
"""The minimum and the maximum size of a thumbnail, in pixels."""
CACHE_BYTES: Final = 64 << 20
_ENTRY_BYTES: Final = 500
"""The estimated size of an entry of the cache in addition to its bytes."""

Picture = tuple[bytes, str]
"""The bytes of a picture, and their media type."""


class PictureCache:
    """The pictures that were used last, of at most `max_bytes` in total. Thread-safe."""

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self.max_bytes = max_bytes
        self.n_bytes = 0
        self._lock = threading.Lock()
        self._pictures: OrderedDict[Hashable, Picture] = OrderedDict()

    def get(self, key: Hashable) -> Picture | None:
        """Return a picture, or None if the cache does not contain it."""
        with self._lock:
            found = self._pictures.get(key)
            if found is not None:
                self._pictures.move_to_end(key)
            return found

    def add(self, key: Hashable, picture: Picture) -> None:
        """Add a picture, and drop those that were not used for the longest time."""
        with self._lock:
            self._drop(key)
            self._pictures[key] = picture
            self.n_bytes += len(picture[0]) + _ENTRY_BYTES
            while self.n_bytes > self.max_bytes:
                self._drop(next(iter(self._pictures)))

    def _drop(self, key: Hashable) -> None:
        dropped = self._pictures.pop(key, None)
        if dropped is not None:
            self.n_bytes -= len(dropped[0]) + _ENTRY_BYTES


class Thumbnails:
    """Thumbnails of the samples of one dataset.

    `get` may be called by several threads if each passes its own dataset.
    """

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self._cache = PictureCache(max_bytes)

    @property
    def n_bytes(self) -> int:
        """The size of the cached thumbnails in bytes."""
        return self._cache.n_bytes

    def get(self, dataset: Any, row: int, field: str, size: int) -> Picture:
        """Return a thumbnail of a field of a sample, at most `size` pixels high and wide.

        Raises:
            InvalidArgument: there is no such sample or field, the size is invalid, or the value is
                missing or has no picture.
            ShardCorrupt, MediaError, …: the value is damaged.
        """
        if not MIN_SIDE <= size <= MAX_SIDE:
            raise shardio.InvalidArgument(
                f"the size of a thumbnail is {MIN_SIDE} to {MAX_SIDE} pixels; found {size}"
            )
        return self._cached((row, field, size), lambda: _thumbnail(dataset, row, field, size))

    def _cached(self, key: Hashable, make: Callable[[], Picture]) -> Picture:
        found = self._cache.get(key)
        if found is None:
            found = make()
            self._cache.add(key, found)
        return found


def _thumbnail(dataset: Any, row: int, name: str, size: int) -> Picture:
    value = stored_value(dataset, row, name)
    if isinstance(value, bytes) and has_image_signature(value[:64]):
        facts = probe(value)
        value = StoredImage(value, facts.height, facts.width, facts.channels)
    pixels = None if value is None else preview_pixels(value, size)
    if pixels is None:
        what = "is missing" if value is None else "has no picture"
        raise shardio.InvalidArgument(f"sample {row:,}: the field {name!r} {what}")
    return to_jpeg(fit(np.asarray(pixels), size)), "image/jpeg"
