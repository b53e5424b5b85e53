"""Makes the pictures that `inspect` is asked for: of one sample, or a sheet of many.

Whatever cannot be shown becomes a finding, and all else is shown nevertheless.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import shardio
from shardio_tools._look import FieldViewer
from shardio_tools._pictures import (
    COUNT,
    MAX_SIDE,
    MOST_PIXELS,
    MOVING_SIDE,
    TILE_SIDE,
    RenderOptions,
)
from shardio_tools._terminal import encode_for_terminal
from shardio_tools.frames import FrameSequence, Pixels, Size, open_samples, within
from shardio_tools.image_files import (
    MOVING,
    STILLS,
    Tile,
    draw_sheet,
    encoded_animation,
    encoded_still,
    placeholder,
    suffix_of,
    write_whole,
)
from shardio_tools.inspect_report import Facts, Inspection
from shardio_tools.output import escaped, format_count

N_FRAMES: Final = 240
"""Frames of an animation, unless others are asked for."""
_IN_TERMINAL: Final = 4


def add_pictures(inspection: Inspection, wish: RenderOptions) -> str:
    """Make the pictures that are wanted, and add to the facts what they are.

    Returns what the terminal is sent to show one; nothing if that is not wanted.

    Raises:
        InvalidArgument: there is no such picture.
        OSError: a file cannot be written.
    """
    facts = inspection.facts
    is_open = "generation" in facts or "sample" in facts or not inspection.findings
    facts |= {kind: None for kind in ("image", "sheet") if getattr(wish, kind)}
    if not wish.is_any or not is_open:
        return ""
    text = ""
    with open_samples(wish.path) as samples:
        look = FieldViewer(inspection, samples, wish)
        if wish.image or wish.is_shown:
            text = _render_sample(look, wish)
        if wish.sheet:
            facts["sheet"] = _write_sheet(look, wish, wish.sheet)
    return text


def describe_pictures(facts: Facts, wish: RenderOptions) -> Iterator[str]:
    """Say what was written."""
    for kind, path in (("image", wish.image), ("sheet", wish.sheet)):
        if path is None:
            continue
        found = facts.get(kind)
        yield _description(found) if found else f"{escaped(path)}: not written; see the damage"


def _description(found: Facts) -> str:
    said = f"wrote {escaped(found['path'])}: {found['width']:,} × {found['height']:,} pixels, "
    if "samples" in found:
        said += f"{format_count(len(found['samples']), 'sample')}"
    else:
        said += f"{escaped(found['field'])} of sample {found['sample']:,}"
        if (frames := found.get("frames")) is not None:
            said += f", {_frames_in_words(frames)} of {found['of_frames']:,}"
    if damaged := found["damaged"]:
        said += f"; damaged, and crossed out: {len(damaged):,}"
    return said


def _frames_in_words(frames: Sequence[int]) -> str:
    if len(frames) == 1:
        return f"frame {frames[0]:,}"
    return f"{len(frames):,} frames from {frames[0]:,} to {frames[-1]:,}"


def _render_sample(look: FieldViewer, wish: RenderOptions) -> str:
    """Write the picture or clip of the sample that is looked at, and give that for the terminal."""
    facts = look.inspection.facts
    if "sample" not in facts:
        raise shardio.InvalidArgument(f"{look.path}: there is no sample to show")
    number: int = facts["sample"]["sample"]
    frames = look.frames(number)
    if frames is None:
        return ""
    if not frames.n:
        raise shardio.InvalidArgument(
            f"{look.path}: sample {number} has nothing to show in field {look.name!r}"
        )
    numbers = _numbers(look, frames, wish)
    if wish.image:
        facts["image"] = _write_image(look, wish, number, frames, numbers)
    if not wish.is_shown:
        return ""
    taken = list(frames.take(spread(numbers, _IN_TERMINAL), within(frames.size, MOVING_SIDE)))
    sound = look.sound(number, taken)
    return (
        "" if not any(one is not None for one in sound) else encode_for_terminal(_with_marks(sound))
    )


def _numbers(look: FieldViewer, frames: FrameSequence, wish: RenderOptions) -> Sequence[int]:
    """Which frames are shown.

    Raises:
        InvalidArgument: there are no such frames.
    """
    n = frames.n
    if wish.frame is None and wish.clip is None:
        return range(0, n, -(-n // N_FRAMES))
    if frames.is_still:
        raise shardio.InvalidArgument(
            f"{look.path}: field {look.name!r} holds pictures; --frame and --clip are of clips and "
            "videos"
        )
    if wish.frame is not None:
        if not -n <= wish.frame < n:
            raise shardio.InvalidArgument(
                f"{look.path}: there is no frame {wish.frame}; the sample has {n:,}"
            )
        return [wish.frame % n]
    found = range(n)[wish.clip or slice(None)]
    if not found:
        raise shardio.InvalidArgument(
            f"{look.path}: --clip has none of the sample's {n:,} frames, 0 to {n - 1:,}"
        )
    return found


def _write_image(
    look: FieldViewer,
    wish: RenderOptions,
    number: int,
    frames: FrameSequence,
    numbers: Sequence[int],
) -> Facts | None:
    """Write frames of a sample as a picture, an animation or a strip; None if none is sound."""
    path = wish.image or ""
    suffix = suffix_of(path)
    is_still = frames.is_still or wish.frame is not None
    if is_still and suffix not in STILLS:
        raise shardio.InvalidArgument(
            f"{path}: one picture is written as one of {', '.join(STILLS)}"
        )
    if not is_still and suffix not in MOVING:
        numbers, side = spread(numbers, COUNT), wish.side or TILE_SIDE
    else:
        side = wish.side or (MAX_SIDE if is_still else MOVING_SIDE)
    size = _even(within(frames.size, side)) if suffix == ".mp4" else within(frames.size, side)
    if not is_still and len(numbers) * size[0] * size[1] > MOST_PIXELS:
        raise shardio.InvalidArgument(
            f"{path}: {len(numbers):,} frames of {size[1]} x {size[0]} pixels are more than fit in "
            f"memory, {MOST_PIXELS:,} pixels: take fewer by --clip START:STOP:STRIDE, or --side"
        )
    sound = look.sound(number, frames.take(numbers, size))
    if all(one is None for one in sound):
        return None
    if is_still:
        (pixels,) = _with_marks(sound)
        data = encoded_still(pixels, suffix)
    elif suffix in MOVING:
        data = encoded_animation(_with_marks(sound), frames.durations_s(numbers), suffix)
    else:
        tiles = [_tile(str(n), one) for n, one in zip(numbers, sound, strict=True)]
        pixels = draw_sheet(tiles, side)
        size, data = (pixels.shape[0], pixels.shape[1]), encoded_still(pixels, suffix)
    write_whole(path, data, may_replace=wish.may_replace)
    found: Facts = {"path": path, "field": look.name, "sample": number}
    if not frames.is_still:
        found |= {"frames": list(numbers), "of_frames": frames.n}
    damaged = [n for n, one in zip(numbers, sound, strict=True) if one is None]
    return found | {"height": size[0], "width": size[1], "damaged": damaged}


def _even(size: Size) -> Size:
    """The size of a film, whose colours have half the pixels."""
    return max(2, size[0] - size[0] % 2), max(2, size[1] - size[1] % 2)


def _with_marks(sound: Sequence[Pixels | None]) -> list[Pixels]:
    """Frames of one size, at least one of them sound, with a mark for every other."""
    height, width = next(one.shape[:2] for one in sound if one is not None)
    return [placeholder((height, width)) if one is None else one for one in sound]


def _tile(caption: str, pixels: Pixels | None) -> Tile:
    if pixels is None:
        return Tile(caption, note="damaged", is_damaged=True)
    return Tile(caption, pixels)


def _write_sheet(look: FieldViewer, wish: RenderOptions, path: str) -> Facts:
    """Write a sheet of samples from all over the dataset."""
    numbers = spread(range(len(look.samples)), wish.count)
    if not numbers:
        raise shardio.InvalidArgument(f"{look.path}: there is no sample to show")
    side = wish.side or TILE_SIDE
    tiles = [_sample_tile(look, number, side) for number in numbers]
    pixels = draw_sheet(tiles, side)
    write_whole(path, encoded_still(pixels, suffix_of(path)), may_replace=wish.may_replace)
    return {
        "path": path,
        "field": look.name,
        "samples": list(numbers),
        "height": pixels.shape[0],
        "width": pixels.shape[1],
        "damaged": [n for n, tile in zip(numbers, tiles, strict=True) if tile.is_damaged],
    }


def _sample_tile(look: FieldViewer, number: int, side: int) -> Tile:
    """Show a sample by its picture, or by the frame in the middle."""
    caption = look.caption(number)
    frames = look.frames(number)
    if frames is None:
        return _tile(caption, None)
    if not frames.n:
        return Tile(caption, note="none")
    (pixels,) = look.sound(number, frames.take([frames.n // 2], within(frames.size, side)))
    return _tile(caption, pixels)


def spread(items: Sequence[int], n: int) -> Sequence[int]:
    """At most `n` of them, evenly from first to last."""
    n = min(n, len(items))
    return [items[(2 * k + 1) * len(items) // (2 * n)] for k in range(n)]
