"""Images and videos as values of stored samples, which decode and show themselves; thumbnails."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn

import numpy as np
import numpy.typing as npt

from shardio._base.callers import missing_attribute, refuses
from shardio._base.html import format_shape, fragment, pictures
from shardio._base.progress import counted, format_sides
from shardio.errors import InvalidArgument
from shardio.format.types.field import Content, Field
from shardio.format.types.images import EncodedImage
from shardio.format.types.streams import EncodedStream, stream_text
from shardio.media.clip_decoder import ClipDecoder, keyframes_of
from shardio.media.image import decode_image
from shardio.media.pillow import pillow_image
from shardio.media.pixels import Pixels

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage

_THUMBNAIL_SIDE: Final = 96
_THUMBNAIL_BYTES: Final = 1_400
_QUALITIES: Final = (4, 8, 16, 31)
"""The quantizers of a thumbnail, from the best to the worst. The first whose JPEG has at most
_THUMBNAIL_BYTES is used; with the last one, the JPEG may have twice this size."""
_MIN_SIDE: Final = 8
"""The minimum height and width of an array that counts as a picture."""
_MIN_SIDE_OF_FLOATS: Final = 24
"""The minimum of an array of floats, so that a sequence of points, (n, 17, 3), is no picture."""
_MAX_NUMBERS_SHOWN: Final = 4
_STRIP_FRAMES: Final = 8
_STRIP_HEIGHT: Final = 160


_IMAGE_ADVICE: Final = {
    **dict.fromkeys(
        "astype float mean numpy permute pixels to_numpy to_tensor transpose".split(),
        "write image.decode()",
    ),
    **dict.fromkeys(
        ("__array_interface__", "convert", "crop", "mode", "resize", "save", "size"),
        "write image.to_pil(), an image of Pillow",
    ),
}


class StoredImage(EncodedImage):
    """An image of a stored sample: the bytes of its file, which can be decoded and shown.

    NumPy and Pillow cannot convert subclasses of bytes: use `decode` for an array, and `to_pil` in
    place of `PIL.Image.open` and `PIL.Image.fromarray`.
    """

    if not TYPE_CHECKING:  # for type checkers, an image would have every attribute

        def __getattr__(self, name: str) -> Any:
            return missing_attribute(self, name, _IMAGE_ADVICE)

    def decode(self, mode: Literal["rgb", "grey"] = "rgb") -> Pixels:  # type: ignore[override]
        """Decode the image to uint8 of (height, width, 3), or of (height, width, 1) for "grey".

        Raises:
            MediaError: the image is damaged.
            UnsupportedEnvironment: the package that decodes the format is not installed.
        """
        return decode_image(self, mode=mode)

    def to_pil(self) -> PilImage:
        """Return the decoded image as an RGB image of Pillow.

        Raises MediaError and UnsupportedEnvironment as `decode` does, and UnsupportedEnvironment if
        Pillow is not installed.
        """
        return _pil_image(self.decode())

    def show(self) -> None:
        """Show the image in the notebook, or else with Pillow's viewer.

        Raises the errors of `to_pil`.
        """
        _show(self.to_pil())

    def __int__(self) -> NoReturn:
        # NumPy calls this method for np.asarray(value), and never `__array__`.
        raise TypeError(
            "an encoded image is neither a number nor an array: value.decode() returns its "
            "pixels, and np.frombuffer(value, np.uint8) the bytes of its file"
        )

    def __repr__(self) -> str:
        return f"StoredImage({_image_text(self)}, {len(self):,} bytes)"

    def __str__(self) -> str:  # the method of `bytes` would return the whole file
        return repr(self)

    def _repr_html_(self) -> str:
        facts = _image_text(self), f"{len(self):,} bytes"
        return fragment("StoredImage", "", facts, pictures([(thumbnail(self), "")]))


_BY_INDEX: Final = "video.decode(frames=[…])"
_VIDEO_ADVICE: Final = {
    "__array_interface__": "write video.to_pil(frame), an image of Pillow",
    **dict.fromkeys(("frames", "numpy", "read", "to_numpy"), "write video.decode()"),
    **dict.fromkeys(
        ("get_batch", "get_frame", "get_frame_at", "get_frames_at"), f"write {_BY_INDEX}"
    ),
    "dtype": "decoded frames are uint8: write video.decode()",
    "fps": "write video.n_frames / float(video.duration * video.time_base)",
    "num_frames": "write video.n_frames",
    "duration_s": "write float(video.duration * video.time_base)",
    "shape": "write (video.n_frames, video.height, video.width, 3), or video.decode().shape",
}


class StoredVideo(EncodedStream):
    """A video of a stored sample: the packets of its stream, which can be decoded and shown."""

    __slots__ = ()

    if not TYPE_CHECKING:  # otherwise, a video has every attribute for type checkers

        def __getattr__(self, name: str) -> Any:
            return missing_attribute(self, name, _VIDEO_ADVICE)

        def __getitem__(self, index: object) -> NoReturn:
            raise TypeError(
                "a stored video has no index: write video.decode(start, stop, step), or "
                f"{_BY_INDEX}; found {index!r}"
            )

        def __len__(self) -> NoReturn:
            raise TypeError("a stored video has no length: write video.n_frames")

        def __bool__(self) -> bool:  # otherwise, Python would call `__len__`
            return True

    @refuses(
        dict.fromkeys(("end", "end_frame"), "write stop=")
        | dict.fromkeys(("frame", "index", "indices"), f"write {_BY_INDEX}")
        | dict.fromkeys(("num_frames", "n_frames"), "write video.decode(start, start + n)")
        | {"fps": "write dataset.clips(fps=…)"},
        "video.decode",
    )
    def decode(
        self,
        start: int | None = None,
        stop: int | None = None,
        step: int | None = None,
        *,
        frames: Sequence[int] | npt.NDArray[np.integer[Any]] | None = None,
        size: tuple[int, int] | None = None,
    ) -> Pixels:
        """Decode frames to uint8 of (frames, height, width, 3); by default all frames.

        Args:
            start, stop, step: the frames of a slice, as in `list[start:stop:step]`: `decode(5)` is
                all frames from frame 5 on. Frame 5 alone is `decode(frames=[5])`.
            frames: the indices of the frames instead, in any order.
            size: the (height, width) to which frames are scaled and cropped.

        Raises:
            InvalidArgument: there is no such frame, an argument is invalid, or a slice and `frames`
                are given.
            MediaError: the video is damaged.
            ClosedError: the dataset is closed.
        """
        numbers = self._frame_numbers(start, stop, step, frames)
        if size is not None and np.shape(size) != (2,):
            raise InvalidArgument(f"size must be (height, width); found {size!r}")
        out = np.empty((len(numbers), *(size or (self.height, self.width)), 3), np.uint8)
        with ClipDecoder() as decoder:
            decoder.decode(self, numbers, out)
        return out

    def _frame_numbers(
        self, start: Any, stop: Any, step: Any, frames: Any
    ) -> npt.NDArray[np.int64]:
        n = self.n_frames
        if frames is None:
            try:
                return np.arange(*slice(start, stop, step).indices(n))
            except ValueError:
                raise InvalidArgument("step must not be 0") from None
            except TypeError as error:
                found = ", ".join(repr(each) for each in (start, stop, step) if each is not None)
                raise InvalidArgument(
                    "decode takes integers, as video.decode(start, stop, step), or the indices of "
                    f"frames, as {_BY_INDEX}; found {found:.80}"
                ) from error
        if any(each is not None for each in (start, stop, step)):
            raise InvalidArgument("decode takes start, stop and step, or frames; found both")
        numbers = np.asarray(frames)
        if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
            raise InvalidArgument(
                f"frames must be a list of indices, such as [0, 5]; found {frames!r:.80}"
            )
        chosen = np.where(numbers < 0, numbers + n, numbers).astype(np.int64)
        if np.any(missing := (chosen < 0) | (chosen >= n)):
            raise InvalidArgument(f"no frame {numbers[missing][0]}; the video has {n} frames")
        return chosen

    def to_pil(self, frame: int = 0) -> PilImage:
        """Return a frame, by default the first, as an RGB image of Pillow.

        Raises the errors of `decode`, and UnsupportedEnvironment without Pillow.
        """
        return _pil_image(self.decode(frames=[frame])[0])

    def show(self) -> None:
        """Show up to 8 frames side by side, in the notebook, or else with Pillow's viewer.

        Raises the errors of `to_pil`.
        """
        numbers = np.linspace(0, self.n_frames - 1, min(_STRIP_FRAMES, self.n_frames)).astype(int)
        height = min(self.height, _STRIP_HEIGHT)
        size = height, max(1, round(self.width * height / self.height))
        _show(_pil_image(np.hstack(list(self.decode(frames=numbers, size=size)))))

    def __array__(
        self,
        dtype: Any = None,
        copy: bool | None = None,  # noqa: FBT001
    ) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("the frames of a video are decoded into a new array")
        return self.decode().astype(np.uint8 if dtype is None else dtype, copy=False)

    def _repr_html_(self) -> str:
        facts = (stream_text(self),)
        return fragment("StoredVideo", "", facts, pictures([(thumbnail(self), "")]))


def value_decoder(field: Field) -> Callable[[Content, tuple[int, ...]], Any]:
    """Return f(record, shape), which decodes a record of the field; images are `StoredImage`s."""
    if field.medium == "image":
        return lambda record, shape: StoredImage(record, *shape)
    return field.decode


def describe(value: Any) -> str:
    """Return a short text about a value of a sample: its shape, size or codec, or the value."""
    if value is None:
        return "–"
    if isinstance(value, EncodedImage):
        return _image_text(value)
    if isinstance(value, EncodedStream):
        return stream_text(value)
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    if isinstance(value, np.ndarray | np.generic):
        is_short = value.ndim < 2 and value.size <= _MAX_NUMBERS_SHOWN
        return str(value) if is_short else format_shape(value.shape)
    if isinstance(value, list) and value and isinstance(value[0], np.ndarray):
        return f"{len(value):,} arrays"
    return value if isinstance(value, str) else reprlib.repr(value)


def _image_text(image: EncodedImage) -> str:
    height, width, n_channels = image.shape
    return f"{format_sides(height, width)}, {counted(n_channels, 'channels')}"


def thumbnail(value: Any) -> bytes | None:
    """Return a small JPEG of an encoded image or video, or of pixels; None if that is impossible.

    Pixels are uint8 with the axes of a grey or colour picture, or of a clip of colour pictures; or
    floats with an axis of 1 or 3 channels. Floats from 0 to 1 are levels from black to white; of
    others, such as normalized ones, the least becomes black and the greatest white.
    """
    try:
        pixels = preview_pixels(value)
        return None if pixels is None else _small_jpeg(pixels)
    except Exception:  # noqa: BLE001  # a damaged value must not hide the rest of a fragment
        return None


def preview_pixels(value: Any, side: int = _THUMBNAIL_SIDE) -> Pixels | None:
    """Return RGB pixels that show a value, for a picture of `side` pixels; None if there are none.

    The pixels may be larger than `side`, except for a video: its keyframe nearest to the middle is
    the only frame that is decoded, and is scaled down to `side`. See `thumbnail` for arrays.

    Raises:
        MediaError: the image or the frame is damaged.
        UnsupportedEnvironment: the package that decodes the image is not installed.
    """
    if isinstance(value, EncodedImage):
        return decode_image(value, min_size=(side, side))
    if isinstance(value, EncodedStream):
        is_sound = "rate" in value.parameters
        return None if is_sound or not value.n_frames else _middle_keyframe(value, side)
    if not isinstance(value, np.ndarray) or not 2 <= value.ndim <= 4 or not value.size:
        return None
    is_float = value.dtype.kind == "f"
    if value.ndim < 2 + is_float or not (is_float or value.dtype == np.uint8):
        return None
    pixels = value[len(value) // 2] if value.ndim == 4 else value
    if pixels.ndim == 2:
        pixels = pixels[..., np.newaxis]
    elif pixels.shape[2] not in (1, 3) and pixels.shape[0] in (1, 3):
        pixels = pixels.transpose(1, 2, 0)
    height, width, channels = pixels.shape
    least = _MIN_SIDE_OF_FLOATS if is_float else _MIN_SIDE
    if min(height, width) < least or channels not in (1, 3):
        return None
    return np.broadcast_to(_levels(pixels) if is_float else pixels, (height, width, 3))


def _levels(pixels: npt.NDArray[np.floating[Any]]) -> Pixels:
    """Map floats to uint8 as `thumbnail` describes; NaN and infinity become black or white."""
    known = pixels[np.isfinite(pixels)].astype(np.float64)
    low, high = (known.min(), known.max()) if known.size else (0.0, 1.0)
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    scaled = (pixels.astype(np.float64) - low) / (high - low or 1.0)
    levels: Pixels = np.nan_to_num(scaled.clip(0, 1) * 255).round().astype(np.uint8)
    return levels


def _middle_keyframe(stream: EncodedStream, side: int) -> Pixels:
    """Decode the keyframe nearest to the middle of a video, scaled down to `side` pixels."""
    keys = keyframes_of(stream)
    middle = keys[np.argmin(np.abs(keys - stream.n_frames // 2))]
    scale = min(1, side / max(stream.height, stream.width))
    size = max(1, round(stream.height * scale)), max(1, round(stream.width * scale))
    out = np.empty((1, *size, 3), np.uint8)
    with ClipDecoder() as decoder:
        decoder.decode(stream, [middle], out)
    picture: Pixels = out[0]
    return picture


def _small_jpeg(pixels: Pixels) -> bytes | None:
    """Encode RGB pixels, scaled to the size of a thumbnail; None if the JPEG is too large."""
    from av import CodecContext, VideoFrame

    factor = max(1, _THUMBNAIL_SIDE // max(pixels.shape[:2]))
    pixels = pixels.repeat(factor, axis=0).repeat(factor, axis=1)  # sharp, not blurred
    scale = min(1, _THUMBNAIL_SIDE / max(pixels.shape[:2]))
    height, width = (max(1, round(side * scale)) for side in pixels.shape[:2])
    frame = VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
    small = frame.reformat(width, height, "yuvj420p", interpolation="AREA", dst_color_range="JPEG")
    for quality in _QUALITIES:
        encoder = CodecContext.create("mjpeg", "w")
        encoder.width, encoder.height, encoder.pix_fmt = width, height, "yuvj420p"
        encoder.framerate, encoder.qmin, encoder.qmax = Fraction(25), quality, quality
        found = b"".join(map(bytes, [*encoder.encode(small), *encoder.encode(None)]))
        if len(found) <= _THUMBNAIL_BYTES * (2 if quality == _QUALITIES[-1] else 1):
            return found
    return None


def _pil_image(pixels: Pixels) -> PilImage:
    found: PilImage = pillow_image().fromarray(pixels)
    return found


def _show(picture: PilImage) -> None:
    """Display a picture in the notebook that runs this code, or else show it with Pillow."""
    shell, display = sys.modules.get("IPython"), sys.modules.get("IPython.display")
    if shell is not None and display is not None and shell.get_ipython() is not None:
        display.display(picture)
    else:
        picture.show()
