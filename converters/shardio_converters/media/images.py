"""The converter of images, which stores the original files, new JPEGs, or decoded pixels."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from shardio import Array, Converter, Image, Input, InvalidArgument, Outcome, Schema, Text, media
from shardio_converters.files import open_media
from shardio_converters.options import check_choice, check_number

STORES: Final = ("original", "jpeg", "raw")
JPEG_QUALITY: Final = 90
_HEAD_BYTES: Final = 16


@dataclass(frozen=True, kw_only=True)
class Images(Converter):
    """A converter that makes one sample from each image; every image is decoded once.

    With `size`, the short side is scaled to `size` pixels, and the central square is stored. The
    field `image` holds the file (store `original`), a JPEG (`jpeg`), or RGB pixels (`raw`).
    """

    kind: ClassVar[str] = "images"
    version: ClassVar[str] = "1"

    store: str = field(default="original", metadata={"metavar": "NAME"})
    """Original (default), jpeg, raw."""
    size: int | None = None
    """Height and width of a picture (default: unchanged)."""
    quality: int | None = None
    """JPEG quality for --store jpeg, 1 to 100 (default: 90)."""

    def __post_init__(self) -> None:
        check_choice("store", self.store, STORES)
        if self.size is not None:
            if self.store == "original":
                raise InvalidArgument(
                    "size is for store 'jpeg' or 'raw', not for originals: to scale pictures, add "
                    "store='jpeg' (--store jpeg)"
                )
            check_number("size", self.size, 1, media.MAX_SIDE)
        if self.store == "jpeg":
            quality = JPEG_QUALITY if self.quality is None else self.quality
            object.__setattr__(self, "quality", quality)
            check_number("quality", quality, 1, 100)
        elif self.quality is not None:
            raise InvalidArgument(f"quality is for store 'jpeg'; found store {self.store!r}")

    def schema(self) -> Schema:
        """Return the fields of a sample."""
        image = Array("uint8", (self.size, self.size, 3)) if self.store == "raw" else Image()
        return Schema({"image": image, "label": Array("int64"), "source": Text()})

    def label_is_class(self) -> bool:
        """Return True: each sample has the label of its input."""
        return True

    def libraries(self) -> Mapping[str, str]:
        """Return the versions of the libraries that decode images."""
        return {name: version(name) for name in ("pillow", "simplejpeg")}

    def samples(self, source: Input) -> Generator[Mapping[str, Any], None, Outcome]:
        """Yield the sample of a file."""
        data = _read(source)
        if data is None:
            return Outcome("unsupported", "not a picture")
        facts = media.probe(data)
        image: Any = self._pixels(data, facts)
        if self.store == "original":
            image = data
        elif self.quality is not None:
            image = media.encode_jpeg(image, quality=self.quality)
        yield {"image": image, "label": source.label, "source": source.name}
        return Outcome("converted", detail=asdict(facts))

    def error(self, source: Input, sample: Mapping[str, Any]) -> tuple[float, int] | None:
        """Return the sum and the number of squared differences between stored and original pixels.

        Return None if the image is stored without loss.
        """
        if self.store != "jpeg" or (data := _read(source)) is None:
            return None
        wanted = self._pixels(data, media.probe(data))
        difference = media.decode_image(sample["image"]).astype(np.int64) - wanted
        return float((difference**2).sum()), wanted.size

    def _pixels(self, data: bytes, facts: media.ImageFacts) -> npt.NDArray[np.uint8]:
        if self.store == "original":
            # These pixels are not stored: the file is decoded only to find damage. Decoding to an
            # eighth of the size also reads all bits of a JPEG, in 60 % of the time.
            return media.decode_image(data, min_size=(1, 1))
        if self.size is None:
            return media.decode_image(data)
        side = min(facts.height, facts.width)
        box = ((facts.height - side) // 2, (facts.width - side) // 2, side, side)
        return media.decode_crop(data, box, (self.size, self.size))


def _read(source: Input) -> bytes | None:
    """Return a file's bytes; None if neither its suffix nor its first bytes are an image's."""
    has_suffix = media.has_image_suffix(source.name)
    with open_media(source, has_suffix=has_suffix) as file:
        head = file.read(_HEAD_BYTES)
        return head + file.read() if has_suffix or media.has_image_signature(head) else None
