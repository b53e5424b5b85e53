"""Stored values of single samples: found by row, read only as far as needed.

A dataset is borrowed, and is not thread-safe: callers use it in one thread at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

import shardio
from shardio._base.progress import format_sides
from shardio.errors import ShardioError
from shardio.media import AudioDecoder
from shardio_tools.inspect.frames import holds_pictures

READ_ERRORS: Final = (ShardioError, OSError)
"""The errors of a value that cannot be read: they are shown, and the other values with them."""
MAX_READ_BYTES: Final = 64 << 20
"""The maximum size of an array that is read as a whole, and verified; of larger ones, parts are."""
_MAX_JSON_BYTES: Final = 8 << 20
"""The maximum size of JSON that is parsed: its values take many times as much memory."""
MAX_PIXELS: Final = 50_000_000
"""The maximum number of pixels of an image that is decoded; a JPEG may have more."""
MAX_COLUMNS: Final = 64
"""The maximum number of curves of an array."""
_MAX_SAFE_INTEGER: Final = 1 << 53
_TOKENS: Final = re.compile(r"(^|[._])(tokens|input_ids|token_ids)$")
_CHANNELS: Final = (1, 3)
_MAX_RATE: Final = 768_000
_MAX_CHANNELS: Final = 64


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
    found = dataset.schema.get(name)
    if found is None:
        known = ", ".join(dataset.schema)
        raise shardio.InvalidArgument(f"there is no field {name!r}; the fields are: {known}")
    return found


def stored_value(dataset: Any, row: int, name: str) -> Any:
    """Return the value of one field of a sample; None if the value is missing.

    Raises:
        InvalidArgument: there is no such sample or field, or the value is too large to be read.
        ShardCorrupt, …: the value is damaged.
    """
    kind, (shard, local) = field_of(dataset, name), locate(dataset, row)
    if kind.medium is None and kind.array is None:
        n_bytes = int(dataset.reader(shard, name).lengths(name, [local])[0])
        most = _MAX_JSON_BYTES if kind.is_json else MAX_READ_BYTES
        if n_bytes > most:
            raise shardio.InvalidArgument(
                f"sample {row:,}: the field {name!r} has {n_bytes:,} bytes: at most {most:,} are "
                "read"
            )
    return dataset.sample(shard, local, [name])[name]


def present_value(dataset: Any, row: int, name: str) -> Any:
    """Return the value of one field of a sample; raise InvalidArgument if it is missing, too."""
    found = stored_value(dataset, row, name)
    if found is None:
        raise shardio.InvalidArgument(f"sample {row:,}: the field {name!r} is missing")
    return found


def parse_count(
    text: str | None, name: str, low: int, high: int, default: int | None = None
) -> int:
    """Return a decimal integer of a request; `default` if the request has none.

    Raises:
        InvalidArgument: the text is no integer, or is not in the range.
    """
    if text is None and default is not None:
        return default
    is_number = text is not None and text.isascii() and text.isdigit() and len(text) <= 19
    if not is_number or not low <= (found := int(text or "")) <= high:
        raise shardio.InvalidArgument(
            f"{name} must be an integer from {low} to {high}; found {text!r:.40}"
        )
    return found


def check_pixels(facts: Any) -> None:
    """Raise InvalidArgument if decoding an image, as `probe` found it, takes too much memory."""
    if facts.format != "JPEG" and facts.height * facts.width > MAX_PIXELS:
        raise shardio.InvalidArgument(
            f"an image of {format_sides(facts.height, facts.width)} pixels: at most "
            f"{MAX_PIXELS:,} are decoded, except for JPEG"
        )


def sound_format(sound: Any) -> tuple[int, int]:
    """Return the sample rate and the number of channels of a sound.

    Raises MediaError if they are not those of a sound that can be shown: tables may be damaged.
    """
    rate, n_channels = sound.parameters.get("rate"), sound.width
    if not isinstance(rate, int) or not 0 < rate <= _MAX_RATE or n_channels > _MAX_CHANNELS:
        raise shardio.MediaError(
            f"invalid audio format: {rate!r} Hz, {n_channels:,} channels; expected at most "
            f"{_MAX_RATE:,} Hz and {_MAX_CHANNELS} channels"
        )
    return rate, n_channels


def decode_sound(decoder: AudioDecoder, sound: Any, start: int, stop: int) -> Any:
    """Decode samples `start` to `stop` as float32 of (samples, channels).

    Raises MediaError if the sound is damaged.
    """
    samples = decoder.decode(sound, start, stop)
    if samples.shape[1] != sound.width:
        raise shardio.MediaError(
            f"expected {sound.width} channels, as in its table; found {samples.shape[1]}"
        )
    return samples


@dataclass(frozen=True)
class StoredArray:
    """An array of a sample whose parts are read along its first axis.

    Arrays of up to 64 MiB are read and verified as a whole; of larger ones, parts are read, which
    cannot be verified.
    """

    array: Any
    shape: tuple[int, ...]
    _reader: Any = field(repr=False)
    _place: tuple[str, int]
    _whole: Any = field(repr=False, default=None)

    @classmethod
    def of(cls, dataset: Any, row: int, name: str) -> Self:
        """Return the array of a field of a sample.

        Raises:
            InvalidArgument: there is no such sample or field, or it has no array; the array is
                missing, or it is both large and compressed.
            ShardCorrupt, …: the array is damaged.
        """
        array, (shard, local) = field_of(dataset, name).array, locate(dataset, row)
        where = f"sample {row:,}: the field {name!r}"
        if array is None:
            raise shardio.InvalidArgument(f"{where} has no array")
        reader = dataset.reader(shard, name)
        shape = reader.array_shape(name, local)
        if shape is None:
            raise shardio.InvalidArgument(f"{where} is missing")
        found = cls(array, shape, reader, (name, local))
        if found.is_large and (array.codec != "raw" or not shape):
            raise shardio.InvalidArgument(
                f"{where} has {found.n_bytes:,} bytes, compressed: at most {MAX_READ_BYTES:,} "
                "are read"
            )
        if found.is_large:
            return found
        return cls(array, shape, reader, (name, local), stored_value(dataset, row, name))

    @property
    def n_bytes(self) -> int:
        """The size of the array in bytes."""
        return math.prod(self.shape) * self.itemsize

    @property
    def itemsize(self) -> int:
        """The size of a number in bytes."""
        return int(self.array.numpy.itemsize)

    @property
    def is_large(self) -> bool:
        """True if only parts of the array are read."""
        return self.n_bytes > MAX_READ_BYTES

    def part(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Return elements `start` to `stop` along the first axis."""
        if self._whole is not None:
            return as_numbers(np.asarray(self._whole)[start:stop], self.array)
        name, row = self._place
        return as_numbers(self._reader.array_part(name, row, start, stop), self.array)

    def first(self, n: int) -> npt.NDArray[Any]:
        """Return the first `n` numbers, in one dimension."""
        if not self.shape:
            return as_numbers(np.asarray(self._whole).reshape(1), self.array)
        per_element = max(1, math.prod(self.shape[1:]))
        return self.part(0, min(self.shape[0], -(-n // per_element))).reshape(-1)[:n]


def as_numbers(value: npt.NDArray[Any], array: Any) -> npt.NDArray[Any]:
    """Return an array in a dtype of NumPy: bfloat16 is stored as the bits of the numbers."""
    if array.dtype != "bfloat16":
        return value
    return (value.astype(np.uint32) << 16).view(np.float32)


def number(value: Any) -> Any:
    """Return a number as JSON shows it exactly; a large integer, NaN or infinity as a text."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) < _MAX_SAFE_INTEGER else str(value)
    return value if math.isfinite(value) else str(value)


def kind_of(name: str, field: Any) -> str:
    """Return the kind under which a field is shown, such as "video" or "scalar".

    Arrays of frames are shown as videos, and arrays of pixels as images.
    """
    if field.medium is not None:
        return str(field.medium)
    for kind, is_kind in (
        ("json", field.is_json),
        ("text", field.is_utf8),
        ("bytes", field.is_opaque),
        ("list", field.array is None),
    ):
        if is_kind:
            return kind
    array = field.array
    if not array.shape:
        return "scalar"
    if len(array.shape) == 1 and "int" in array.dtype and _TOKENS.search(name):
        return "tokens"
    if len(array.shape) == 4 and array.shape[3] in _CHANNELS and holds_pictures(field):
        return "video"
    return "image" if is_picture(array) else "array"


def is_picture(array: Any) -> bool:
    """Return True for an array of uint8 with the axes of a grey or a colour picture."""
    shape = array.shape
    if array.dtype != "uint8" or not holds_pictures(array):
        return False
    return len(shape) == 2 or (len(shape) == 3 and (shape[2] in _CHANNELS or shape[0] in _CHANNELS))


def thumbnail_fields(schema: Mapping[str, Any]) -> list[str]:
    """Return the fields that have thumbnails: images and videos first, then arrays and sound."""
    ranks = {"image": 0, "video": 0, "array": 1, "audio": 2}
    kinds = {name: kind_of(name, field) for name, field in schema.items()}
    return sorted((name for name in kinds if kinds[name] in ranks), key=lambda n: ranks[kinds[n]])


def n_columns(shape: tuple[int, ...]) -> int:
    """Return the number of curves of an array: the numbers of one element of its first axis."""
    return math.prod(shape[1:])


def has_series(shape: tuple[int, ...]) -> bool:
    """Return True for an array that is shown as curves, such as (steps,) or (steps, columns)."""
    return len(shape) > 0 and shape[0] > 1 and 1 <= n_columns(shape) <= MAX_COLUMNS


def has_heatmap(shape: tuple[int, ...]) -> bool:
    """Return True for an array that is shown as a heat map: any matrix."""
    return len(shape) == 2 and min(shape) > 1
