"""Which options go with which store of videos, and what they are where they are not given."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Final

from shardio import InvalidArgument
from shardio.media import MAX_SIDE

STORES: Final = ("raw", "jpeg", "h264", "packets")
CODECS: Final = {"h264": (19, 51), "hevc": (20, 51), "av1": (30, 63)}
"""By codec, the crf that is taken and the largest."""
JPEG_QUALITY: Final = 90
GOP: Final = 16

LIMITS: Final = {"frames": 1 << 31, "stride": 1 << 31, "step": 1 << 62, "size": MAX_SIDE}
"""The largest value of each number: a clip's span, their product, is counted in 64 bits."""
_STORES_OF: Final = {
    "codec": ("h264",),
    "gop": ("h264",),
    "quality": ("h264", "jpeg"),
    "check": ("packets",),
    "fps": ("raw", "jpeg", "h264"),
}
_MIN_CODED: Final = 16  # pixels: encoders refuse smaller pictures
_MAX_CODED: Final = 8192  # and those of 16384


def settled(options: Any) -> Mapping[str, Any]:
    """The options that were left open and what they are; those that say the same in one form.

    Raises:
        InvalidArgument: one is not acceptable, or not for the store.
    """
    found = {"step": options.step}
    if options.step is None:
        found["step"] = options.frames * options.stride
    for name, most in LIMITS.items():
        _check_number(name, found.get(name, getattr(options, name)), 1, most)
    store = options.store
    if store not in STORES:
        raise InvalidArgument(f"store is {store!r}; it must be one of {', '.join(STORES)}")
    for name, stores in _STORES_OF.items():
        if getattr(options, name) is not None and store not in stores:
            raise InvalidArgument(
                f"{name} is for store {' or '.join(map(repr, stores))}; found store {store!r}"
            )
    if options.fps is not None:
        found["fps"] = str(_rate(options.fps))
    for name in ("check", "audio"):
        if (value := getattr(options, name)) is not None and type(value) is not bool:
            raise InvalidArgument(f"{name} is {value!r}; it must be True or False")
    if options.audio is False:
        found["audio"] = None  # as if nothing had been said of it
    if store == "h264":
        found |= _coded(options)
    if store == "jpeg":
        found["quality"] = JPEG_QUALITY if options.quality is None else options.quality
        _check_number("quality", found["quality"], 1, 100)
    return found


def _coded(options: Any) -> dict[str, Any]:
    """The options of an encoder."""
    codec = options.codec or "h264"
    if codec not in CODECS:
        raise InvalidArgument(f"codec is {codec!r}; it must be one of {', '.join(CODECS)}")
    usual, most = CODECS[codec]
    gop = GOP if options.gop is None else options.gop
    quality = usual if options.quality is None else options.quality
    _check_number("gop", gop, 1, 1 << 16)
    _check_number("quality", quality, 0, most)
    if options.size % 2 or not _MIN_CODED <= options.size <= _MAX_CODED:
        raise InvalidArgument(
            f"size is {options.size}; for store 'h264' it must be even, from {_MIN_CODED} to "
            f"{_MAX_CODED}; store 'raw' (--store raw) takes any"
        )
    return {"codec": codec, "gop": gop, "quality": quality}


def _rate(fps: Any) -> Fraction:
    try:
        rate = Fraction(str(fps))
    except (ValueError, ZeroDivisionError):
        rate = Fraction(0)
    if not 0 < rate <= 1000 or isinstance(fps, bool):
        raise InvalidArgument(
            f"fps is {fps!r}; it must be a number of frames per second, up to 1000, such as 10, "
            "12.5 or '30000/1001'"
        )
    return rate


def _check_number(name: str, value: Any, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise InvalidArgument(
            f"{name} is {value!r}; it must be a whole number from {least} up to {most:,}"
        )
