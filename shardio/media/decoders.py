"""Open decoders from the parameters of a stream, without its container; decode planes.

Decoders use one thread, and all damage that they detect is an error. An unknown codec
or an invalid parameter causes a MediaError, because parameters come from files.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from shardio.errors import MediaError, ShardCorrupt
from shardio.format.types.streams import broken_rule, unpack_planes
from shardio.media.container import make_strict
from shardio.media.pixels import Pixels

if TYPE_CHECKING:
    from av import Packet
    from av.audio.codeccontext import AudioCodecContext
    from av.codec.context import CodecContext
    from av.video.codeccontext import VideoCodecContext

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

# Decoders to use instead of FFmpeg's own decoders. FFmpeg's own AV1 decoder needs hardware.
_PREFERRED = {"av1": "libdav1d", "opus": "libopus"}
_CONTEXT_ATTRIBUTES = tuple(
    "width height bits_per_coded_sample color_range colorspace color_primaries color_trc".split()
)
_KEY_PARAMETERS = ("codec", "pixel_format", "codec_tag", "reorder", *_CONTEXT_ATTRIBUTES)
_MAX_SIDE = 1 << 16
_MAX_REORDERED = 16


def decoder_parameters(codec: VideoCodecContext) -> dict[str, Any]:
    """Return the parameters that a decoder needs if it gets only packets, as JSON values."""
    found: dict[str, Any] = {"codec": codec.codec.canonical_name, "pixel_format": codec.pix_fmt}
    for name in _CONTEXT_ATTRIBUTES:
        if getattr(codec, name):
            found[name] = int(getattr(codec, name))
    if codec.reorder_depth:
        found["reorder"] = codec.reorder_depth
    tag = codec.codec_tag
    if tag.isascii() and tag.isprintable() and len(tag) == 4:
        found["codec_tag"] = tag
    return found


def decoder_key(parameters: Mapping[str, Any], extradata: bytes) -> tuple[object, ...]:
    """Return a key for the decoder of a stream. Streams with equal keys can share a decoder."""
    return bytes(extradata), *(repr(parameters.get(name)) for name in _KEY_PARAMETERS)


def open_video_decoder(
    parameters: Mapping[str, Any], extradata: bytes, *, loop_filter: bool = True
) -> VideoCodecContext:
    """Open a decoder for the packets of a video with these parameters.

    If `loop_filter` is False, the decoder skips its loop filter: deblocking and, in HEVC, sample
    adaptive offset. FFmpeg ignores the setting for codecs such as VP9, AV1 and MPEG-4.
    """
    from av.video.codeccontext import VideoCodecContext

    codec = _create_context(parameters)
    if not isinstance(codec, VideoCodecContext):
        raise MediaError(f"the codec {parameters.get('codec')!r} is not a video codec")
    try:
        for name in _CONTEXT_ATTRIBUTES:
            if parameters.get(name):
                setattr(codec, name, _int_parameter(parameters, name, _MAX_SIDE))
        if isinstance(parameters.get("pixel_format"), str):
            codec.pix_fmt = parameters["pixel_format"]
        if isinstance(parameters.get("codec_tag"), str):
            codec.codec_tag = parameters["codec_tag"]
    except ValueError as error:
        raise MediaError(f"a stream's parameters are not acceptable: {error}") from error
    _open_context(codec, extradata, {} if loop_filter else {"skip_loop_filter": "all"})
    codec.reorder_depth = _int_parameter(parameters, "reorder", _MAX_REORDERED)
    return codec


def open_audio_decoder(parameters: Mapping[str, Any], extradata: bytes) -> AudioCodecContext:
    """Open a decoder for the packets of an audio stream with these parameters."""
    from av.audio.codeccontext import AudioCodecContext

    codec = _create_context(parameters)
    if not isinstance(codec, AudioCodecContext):
        raise MediaError(f"the codec {parameters.get('codec')!r} is not an audio codec")
    try:
        codec.sample_rate = _int_parameter(parameters, "rate", 1 << 24)
        codec.layout = str(parameters.get("layout", "mono"))
        if isinstance(parameters.get("sample_format"), str):
            codec.format = parameters["sample_format"]
    except ValueError as error:
        raise MediaError(f"a stream's parameters are not acceptable: {error}") from error
    from av.codec.context import Flags2

    # Keep the decoder from dropping the padding before and after the audible samples. The module
    # `audio` drops the padding instead, because that module knows the index of each sample.
    codec.flags2 |= Flags2.skip_manual
    _open_context(codec, extradata)
    return codec


def fraction_parameter(parameters: Mapping[str, Any], name: str) -> Fraction:
    """Return a ratio such as "64:51" as a fraction; 0 if the parameter is missing."""
    text = parameters.get(name)
    if text is None:
        return Fraction(0)
    over, colon, under = str(text).partition(":")
    if not (colon and over.isdecimal() and under.isdecimal() and int(under)):
        raise MediaError(f"a stream's {name} is {text!r}: expected a ratio such as '64:51'")
    return Fraction(int(over), int(under))


def display_parameter(parameters: Mapping[str, Any]) -> bytes | None:
    """Return the display matrix in FFmpeg's form, as the bytes of nine int32; None if not set."""
    numbers = parameters.get("display")
    if numbers is None:
        return None
    try:
        if len(numbers) == 9:
            return b"".join(int(each).to_bytes(4, "little", signed=True) for each in numbers)
    except (TypeError, ValueError, OverflowError):
        pass
    raise MediaError(f"a stream's display is {numbers!r}: expected nine numbers of 32 bits")


def lead_in(parameters: Mapping[str, Any]) -> bytes:
    """Return the bytes that must be prepended to the first packet after the decoder is flushed."""
    try:
        return bytes.fromhex(parameters.get("lead_in", ""))
    except (TypeError, ValueError) as error:
        raise MediaError(f"a stream's lead_in is not hexadecimal text: {error}") from error


def numbered_packet(
    number: int, part: bytes | memoryview, lead: bytes = b"", *, is_key: bool = False
) -> Packet[Any]:
    """Return a packet for a decoder: a copy of `lead` and `part`, with `number` as its time.

    The decoder copies the time to the frame. Some decoders use the keyframe flag: without it, the
    PNG decoder draws each picture over the previous picture.
    """
    import av  # `from av import Packet` would take a fifth of this function's time

    if lead:
        part = lead + bytes(part)
    packet: Packet[Any] = av.Packet(len(part))
    packet.update(part)  # type: ignore[arg-type]  # PyAV takes any buffer
    packet.pts = number
    if is_key:
        packet.is_keyframe = True
    return packet


def decode_planes(
    packets: Sequence[memoryview], is_key: Sequence[bool], shape: tuple[int, int], first: int
) -> Iterator[Pixels]:
    """Yield the picture of each packet of planes; the first packet must be a keyframe.

    Pictures are uint8 of `shape`, and may be read-only. `first` is the index of the first packet,
    for errors.

    Raises:
        MediaError: a packet cannot be decompressed to a picture of `shape`.
    """
    picture, n_bytes = np.empty(shape, np.uint8), math.prod(shape)
    for i, packet in enumerate(packets):
        try:
            found = np.frombuffer(unpack_planes(packet, n_bytes), np.uint8).reshape(shape)
        except ShardCorrupt as error:
            what = broken_rule(error.what, error.expected, error.found)
            raise MediaError(f"packet {first + i} of planes: {what}") from error
        picture = found if is_key[i] else found + picture
        yield picture


def get_or_create(
    cache: OrderedDict[_Key, _Value], key: _Key, max_values: int, create: Callable[[], _Value]
) -> _Value:
    """Return a key's value from an LRU cache of at most `max_values`; `create` a missing one."""
    found = cache.get(key)
    if found is None:
        found = cache[key] = create()
        if len(cache) > max_values:
            cache.popitem(last=False)
    else:
        cache.move_to_end(key)
    return found


def _create_context(parameters: Mapping[str, Any]) -> CodecContext:
    import av

    name = parameters.get("codec")
    for each in (_PREFERRED.get(str(name)), name):
        if isinstance(each, str):
            try:
                return av.CodecContext.create(each, "r")
            except (ValueError, av.FFmpegError):
                continue
    raise MediaError(f"FFmpeg has no decoder {name!r} here")


def _open_context(
    codec: VideoCodecContext | AudioCodecContext,
    extradata: bytes,
    options: Mapping[str, str] | None = None,
) -> None:
    import av

    if extradata:
        codec.extradata = bytes(extradata)
    make_strict(codec, options)
    try:
        codec.open(strict=False)
    except (ValueError, av.FFmpegError) as error:
        reason = getattr(error, "strerror", None) or error
        raise MediaError(f"the decoder {codec.name} does not open: {reason}") from error


def _int_parameter(parameters: Mapping[str, Any], name: str, max_value: int) -> int:
    value = parameters.get(name, 0)
    if not isinstance(value, int) or not 0 <= value <= max_value:
        raise MediaError(f"a stream's {name} is {value!r}: expected a number up to {max_value}")
    return value
