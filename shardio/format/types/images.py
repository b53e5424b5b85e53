"""The field type of images, and the base class of the field types of all encoded media."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Final, Self

import numpy as np
import numpy.typing as npt

from shardio._base.callers import ANY_OPTION, refuses
from shardio.errors import SchemaError, ShardCorrupt
from shardio.format.layout import Required
from shardio.format.types.field import Content, Dims, Field, FieldType, check_options, type_mismatch

MAX_PICTURE_SIDE: Final = (1 << 31) - 1
"""The maximum height and width in pixels: PNG's limit, which no other format exceeds."""
MAX_CHANNELS: Final = 4


@dataclass(frozen=True, slots=True, repr=False)
class EncodedMedia(Field):
    """A field of encoded media, which are stored unchanged and not compressed again."""

    codec: ClassVar[str] = "raw"
    _: KW_ONLY
    optional: bool = False

    def __post_init__(self) -> None:
        check_options(self.codec, self.optional)

    @classmethod
    def parse(cls, name: object, entry: dict[str, Any], codec: str, *, optional: bool) -> Self:
        """Return the field; raise SchemaError if `codec` is not "raw"."""
        if codec != cls.codec:
            raise SchemaError(f"field {name!r}: {cls.__name__} is never compressed; found {codec}")
        return cls(optional=optional)


class EncodedImage(bytes):
    """The bytes of an image file with its dimensions.

    `height` and `width` are in pixels, as displayed (after rotation); `channels` is 1 to 4, as
    encoded.
    """

    height: int
    width: int
    channels: int

    def __new__(
        cls, data: bytes | bytearray | memoryview, height: int, width: int, channels: int
    ) -> Self:
        """Create the image from a copy of the data."""
        found = super().__new__(cls, data)
        found.height, found.width, found.channels = height, width, channels
        return found

    def __getnewargs__(self) -> tuple[bytes, int, int, int]:  # type: ignore[override]
        """Return the arguments with which pickle and copy create the new object."""
        return bytes(self), self.height, self.width, self.channels

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels, in the order of the decoded array."""
        return self.height, self.width, self.channels


@refuses(
    {
        ANY_OPTION: "an Image is a file of any size, and is stored as it is; pixels are "
        'Array("uint8", (height, width, 3))'
    }
)
@dataclass(frozen=True, slots=True, repr=False)
class Image(EncodedMedia):
    """A field of images. Each value is the bytes of an image file (JPEG, PNG, …).

    The height and width as displayed, and the number of channels, are stored too. See `Array` for
    `optional`.
    """

    code: ClassVar[int] = FieldType.IMAGE
    required: ClassVar[Required] = Required.IMAGES
    medium: ClassVar[str | None] = "image"
    things: ClassVar[str] = "encoded images"

    @property
    def stored_dims(self) -> tuple[int, ...]:
        """The positions of the stored dimensions: all three."""
        return (0, 1, 2)

    def _encode(self, name: str, value: object) -> tuple[memoryview, tuple[int, ...]]:
        if not isinstance(value, EncodedImage):
            raise type_mismatch(
                name,
                "a picture's bytes, such as path.read_bytes() or shardio.media.encode_jpeg(pixels)",
                value,
            )
        if not value or not is_picture(*value.shape):
            raise SchemaError(
                f"field {name!r}: invalid picture: {len(value)} bytes, height {value.height}, "
                f"width {value.width} and {value.channels} channels"
            )
        return memoryview(value), value.shape

    def shape_of(self, dims: Dims, n_bytes: int) -> tuple[int, ...]:
        """Return height, width and channels."""
        height, width, channels = dims.tolist()
        if not is_picture(height, width, channels):
            raise ShardCorrupt(
                "invalid height, width or number of channels of a picture",
                code="picture",
                expected=f"1 to {MAX_PICTURE_SIDE}, 1 to {MAX_PICTURE_SIDE}, 1 to {MAX_CHANNELS}",
                found=(height, width, channels),
            )
        return height, width, channels

    def decode(self, record: Content, shape: tuple[int, ...]) -> EncodedImage:
        """Return the bytes of the file together with the dimensions of the image."""
        height, width, channels = shape
        return EncodedImage(record, height, width, channels)

    def are_valid(self, dims: Dims) -> npt.NDArray[np.bool_]:
        """Return a mask of the images with valid dimensions; their bytes are not checked."""
        most = np.array([MAX_PICTURE_SIDE, MAX_PICTURE_SIDE, MAX_CHANNELS], np.uint64)
        found: npt.NDArray[np.bool_] = np.all((dims > 0) & (dims <= most), axis=1)
        return found

    def check_record(self, record: Content, dims: Dims) -> None:
        """Check that the record is not empty and that its dimensions are valid."""
        if not len(record):
            raise ShardCorrupt("an image that is present has no bytes", code="validity")
        self.shape_of(dims, len(record))


def is_picture(height: int, width: int, channels: int) -> bool:
    """Return True if an image can have these dimensions."""
    sides = 1 <= height <= MAX_PICTURE_SIDE and 1 <= width <= MAX_PICTURE_SIDE
    return sides and 1 <= channels <= MAX_CHANNELS
