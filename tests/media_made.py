"""Small media that tests make with PyAV, and the plain decode that they compare with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import av
import numpy as np
import numpy.typing as npt
from av import VideoStream
from av.video.reformatter import ColorRange, Colorspace, Interpolation, VideoReformatter

Image = npt.NDArray[np.uint8]

RED, GREEN, BLUE, WHITE = (200, 30, 30), (30, 200, 30), (30, 30, 200), (220, 220, 220)
EXACT = (
    Interpolation.BILINEAR
    | Interpolation.ACCURATE_RND
    | Interpolation.BITEXACT
    | Interpolation.FULL_CHR_H_INT
    | Interpolation.FULL_CHR_H_INP
)


def scene(n_frames: int, width: int = 96, height: int = 64) -> list[Image]:
    """Make frames with a bright bar that moves one step per frame over a gradient."""
    y, x = np.mgrid[0:height, 0:width]
    frames = []
    for n in range(n_frames):
        image = np.stack([x * 255 // width, y * 255 // height, (x + y + n * 7) % 256], axis=-1)
        image[:, (n * 5) % width : (n * 5) % width + 8] = (250, 250, 20)
        frames.append(image.astype(np.uint8))
    return frames


def quadrants(width: int, height: int) -> Image:
    """Make one image, red and green above blue and white: every turn and mirroring differs."""
    image = np.empty((height, width, 3), np.uint8)
    image[: height // 2, : width // 2], image[: height // 2, width // 2 :] = RED, GREEN
    image[height // 2 :, : width // 2], image[height // 2 :, width // 2 :] = BLUE, WHITE
    return image


def write_video(
    path: Path,
    images: Iterable[Image],
    *,
    codec: str = "libx264",
    pixel_format: str = "yuv420p",
    rate: int = 25,
    times: Sequence[int] | None = None,
    time_base: Fraction | None = None,
    full_range: bool = False,
    matrix: int = 5,
    rotation: int = 0,
    aspect: Fraction | None = None,
    codec_options: dict[str, str] | None = None,
    container: str | None = None,
    container_options: dict[str, str] | None = None,
    with_sound: bool = False,
    n_streams: int = 1,
) -> Path:
    """Encode images; `matrix` is FFmpeg's number (1: BT.709, 5: BT.601), `times` are pts."""
    images = list(images)
    options = dict(codec_options or {})
    if codec == "libx265":  # narrow pictures need it: see `encoding._X265_CUTREE_MIN_WIDTH`
        options["x265-params"] = f"{options.get('x265-params', 'log-level=none')}:cutree=0"
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", format=container, options=container_options or {}) as out:
        streams = []
        for n in range(n_streams):
            added = out.add_stream(codec, rate=rate, options=options)
            stream = cast(VideoStream, added)
            stream.height, stream.width = images[0].shape[0] >> n, images[0].shape[1] >> n
            stream.pix_fmt = pixel_format
            stream.thread_count = 1
            stream.codec_context.time_base = time_base or Fraction(1, rate)
            stream.codec_context.colorspace = matrix
            stream.codec_context.color_range = 2 if full_range else 1
            if aspect is not None:
                stream.codec_context.sample_aspect_ratio = aspect
            if rotation:
                stream.set_display_rotation(rotation)
            streams.append(stream)
        sound = out.add_stream("aac", rate=8000, layout="mono") if with_sound else None
        for n, image in enumerate(images):
            for stream in streams:
                frame = av.VideoFrame.from_ndarray(image, format="rgb24").reformat(
                    stream.width,
                    stream.height,
                    pixel_format,
                    dst_colorspace=Colorspace.ITU709 if matrix == 1 else Colorspace.ITU601,
                    dst_color_range=ColorRange.JPEG if full_range else ColorRange.MPEG,
                )
                frame.colorspace, frame.color_range = matrix, 2 if full_range else 1
                frame.pts = times[n] if times is not None else n
                frame.time_base = time_base or Fraction(1, rate)
                out.mux(stream.encode(frame))
        for stream in streams:
            out.mux(stream.encode())
        if sound is not None:
            _write_sound(out, sound)
    return path


def write_cut(path: Path, images: Sequence[Image], n_before: int, **options: Any) -> Path:
    """Encode images to Matroska as cutting by copy does: the first `n_before` are below time 0."""
    return write_video(
        path,
        images,
        times=range(-n_before, len(images) - n_before),
        container_options={"avoid_negative_ts": "disabled"},
        **options,
    )


def write_sound(path: Path) -> Path:
    with av.open(str(path), "w") as out:
        codec = "pcm_s16le" if path.suffix == ".wav" else "aac"
        _write_sound(out, out.add_stream(codec, rate=8000, layout="mono"))
    return path


def _write_sound(out: Any, stream: Any) -> None:
    wave = (np.sin(np.arange(8192) / 9) * 9000).astype(np.int16)
    stored = stream.codec_context.format.name
    for n in range(0, len(wave), 1024):
        samples = wave[None, n : n + 1024]
        if stored == "fltp":
            samples = (samples / 32768).astype(np.float32)
        frame = av.AudioFrame.from_ndarray(samples, format=stored, layout="mono")
        frame.sample_rate, frame.pts = 8000, n
        out.mux(stream.encode(frame))
    out.mux(stream.encode())


def write_flash(
    path: Path,
    *,
    codec: str = "pcm_s16le",
    rate: int = 16_000,
    layouts: Sequence[str] = ("mono",),
    at: Fraction = Fraction(1),
    sound_from: Fraction = Fraction(0),
    seconds: Fraction = Fraction(2),
    n_frames: int = 50,
    frame_rate: int = 25,
) -> Path:
    """Write a video of dark frames with a white one at a time, when a click is heard over a tone.

    The tone begins at `sound_from` and lasts `seconds`; `layouts` are those of the streams. A
    channel is half as loud as the one before it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    packets = []
    with av.open(str(path), "w") as out:
        video = out.add_stream("libx264", rate=frame_rate, options={"g": "12"})
        video.width = video.height = 32
        video.pix_fmt, video.thread_count = "yuv420p", 1
        sounds: list[Any] = [out.add_stream(codec, rate=rate, layout=each) for each in layouts]
        for n in range(n_frames):
            shade = 255 if n == at * frame_rate else 20
            picture = av.VideoFrame.from_ndarray(np.full((32, 32, 3), shade, np.uint8), "rgb24")
            picture.pts, picture.time_base = n, Fraction(1, frame_rate)
            packets += video.encode(picture)
        packets += video.encode()
        for sound in sounds:
            packets += _clicking(sound, rate, int(sound_from * rate), int(seconds * rate), at)
        for packet in sorted(packets, key=_sent_at):
            out.mux(packet)
    return path


def _sent_at(packet: Any) -> Fraction:
    time = packet.pts if packet.dts is None else packet.dts
    return cast(Fraction, time * packet.time_base)


def _clicking(sound: Any, rate: int, first: int, n_samples: int, at: Fraction) -> list[Any]:
    """Yield the packets of a tone with a click of 8 samples, from sample `first` on."""
    wave = 0.05 * np.sin((np.arange(n_samples) + first) / 20)
    wave[int(at * rate) - first :][:8] = 0.9
    channels = [wave / 2**n for n in range(len(av.AudioLayout(sound.layout.name).channels))]
    stored, packets = sound.codec_context.format, []
    size = sound.codec_context.frame_size or 960
    for begin in range(0, n_samples, size):
        values = np.stack([each[begin : begin + size] for each in channels]).astype(np.float32)
        if stored.name.startswith("s16"):
            values = (values * 32767).astype(np.int16)
        if not stored.is_planar:
            values = np.ascontiguousarray(values.T.reshape(1, -1))
        frame = av.AudioFrame.from_ndarray(values, format=stored.name, layout=sound.layout.name)
        frame.sample_rate, frame.pts, frame.time_base = rate, begin + first, Fraction(1, rate)
        packets += sound.encode(frame)
    return [*packets, *sound.encode()]


def write_gif(path: Path, images: Iterable[npt.NDArray[np.uint8]], delays: Sequence[int]) -> Path:
    """Write a GIF byte by byte: images of palette indexes 0..3, where 3 is transparent.

    The palette is black, red, green, and a white that must never be seen. LZW codes are
    uncompressed.
    """
    images = list(images)
    height, width = images[0].shape
    palette = bytes([0, 0, 0, 255, 0, 0, 0, 255, 0, 255, 255, 255])
    size = width.to_bytes(2, "little") + height.to_bytes(2, "little")
    data = b"GIF89a" + size + b"\x91\0\0" + palette
    for image, delay in zip(images, delays, strict=True):
        # Dispose to background; transparent index 3.
        data += b"\x21\xf9\x04\x09" + delay.to_bytes(2, "little") + b"\x03\0"
        data += b"\x2c\0\0\0\0" + size + b"\0\x02" + _uncompressed_lzw(image.ravel().tolist())
    path.write_bytes(data + b";")
    return path


def _uncompressed_lzw(indexes: Sequence[int]) -> bytes:
    """Return codes of 3 bits with a clear code before every second one: the width never grows."""
    codes = []
    for n, index in enumerate(indexes):
        codes += [4, index] if n % 2 == 0 else [index]
    bits = 0
    for n, code in enumerate([*codes, 5]):
        bits |= code << 3 * n
    raw = bits.to_bytes((3 * (len(codes) + 1) + 7) // 8, "little")
    blocks = [raw[n : n + 255] for n in range(0, len(raw), 255)]
    return b"".join(bytes([len(block)]) + block for block in blocks) + b"\0"


def plain_decode(path: Path | str, size: int) -> tuple[list[Image], list[int | None], Fraction]:
    """Decode the first video stream in the plainest way: pictures, times, time base.

    One new swscale context per frame; turned with np.rot90; cropped last.
    """
    pictures: list[Image] = []
    times: list[int | None] = []
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        for frame in container.decode(stream):
            wide = frame.width * (stream.sample_aspect_ratio or 1)
            scale = Fraction(size) / min(wide, Fraction(frame.height))
            width, height = (int(side * scale + Fraction(1, 2)) for side in (wide, frame.height))
            scaled = VideoReformatter().reformat(frame, width, height, "rgb24", interpolation=EXACT)
            rgb = np.rot90(cast(Image, scaled.to_ndarray()), round(frame.rotation / 90))
            top, left = (rgb.shape[0] - size) // 2, (rgb.shape[1] - size) // 2
            pictures.append(rgb[top : top + size, left : left + size])
            times.append(frame.pts)
        time_base = stream.time_base
    if time_base is None:
        raise ValueError(f"{path}: no time base")
    return pictures, times, time_base
