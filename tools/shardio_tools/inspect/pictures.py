"""Pictures that `shardio inspect` writes: of one sample (--image), or of many (--sheet).

Drawing needs Pillow, from the extra `images`. Damage becomes a finding, and is drawn as a cross.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import shardio
from shardio._base.progress import format_sides
from shardio.media import pillow_image
from shardio_tools.arguments import is_url
from shardio_tools.inspect.frames import (
    FrameSequence,
    Pixels,
    Size,
    can_hold_files,
    frames_of,
    holds_pictures,
    within,
)
from shardio_tools.inspect.report import Facts, Inspection, Samples
from shardio_tools.output import escaped, format_count, utf8_name

if TYPE_CHECKING:
    from PIL.Image import Image

N_TILES: Final = 24
N_FRAMES: Final = 240
"""The maximum number of frames of an animation. If there are more, every k-th frame is taken."""
TILE_SIDE: Final = 160
MOVING_SIDE: Final = 512
"""The maximum sides in pixels of a tile of a sheet, and of an animation."""
GAP: Final = 4
CAPTION: Final = 16
"""GAP is the space between tiles, CAPTION the height of a line of text; both in pixels."""
_MIN_SIDE: Final = 96
"""Minimum side of a tile, to fit its caption."""
_WIDE: Final = 1.5
"""Ratio of columns to rows in a sheet."""
_PAPER, _INK, _MARK, _EMPTY = (24, 24, 24), (225, 225, 225), (224, 64, 48), (60, 60, 60)
_FORMATS: Final = {".png": "PNG", ".webp": "WEBP", ".gif": "GIF", ".jpg": "JPEG", ".jpeg": "JPEG"}
_MAX_SIDES: Final = {"WEBP": 16_383, "GIF": 65_535, "JPEG": 65_500}  # PNG: 2^31 - 1
_SHORTEST_MS: Final = 10
"""The time unit of GIF, and the shortest duration of a frame."""
_EXISTS_MESSAGE: Final = "{}: already exists: pass --overwrite to replace a file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for pictures to the command's parser."""
    add = parser.add_argument_group("pictures, clips and videos").add_argument
    add("--image", metavar="FILE", help="write the sample's picture, or an animation of its frames")
    add("--frame", type=int, metavar="N", help="write one frame of a clip or video")
    add("--sheet", metavar="FILE", help="write a contact sheet of samples spread over the dataset")
    add(
        "--field",
        type=utf8_name,
        metavar="NAME",
        help="the field to show, if several hold pictures",
    )
    add("--overwrite", action="store_true", help="replace FILE if it exists")


def check_picture_options(options: argparse.Namespace) -> None:
    """Check the options for pictures before anything is read or written."""
    kinds = [kind for kind in ("image", "sheet") if getattr(options, kind) is not None]
    if options.frame is not None and options.image is None:
        raise shardio.InvalidArgument("--frame needs --image")
    for name in ("field", "overwrite"):
        if getattr(options, name) and not kinds:
            raise shardio.InvalidArgument(f"--{name} needs --image or --sheet")
    for kind in kinds:
        _check_target(kind, getattr(options, kind), options)
    if len({os.path.realpath(getattr(options, kind)) for kind in kinds}) < len(kinds):
        raise shardio.InvalidArgument(f"{options.image}: named by both --image and --sheet")
    if kinds:
        pillow_image()


def _check_target(kind: str, path: str, options: argparse.Namespace) -> None:
    if _suffix(path) not in _FORMATS:
        raise shardio.InvalidArgument(
            f"--{kind}: expected a file name that ends in {', '.join(_FORMATS)}; found {path!r}"
        )
    folder, source = Path(os.path.realpath(path)).parent, Path(os.path.realpath(options.path))
    for above in (folder, *folder.parents):
        if above == source or (above / "dataset.json").is_file():
            raise shardio.InvalidArgument(
                f"{path}: {above} is a dataset folder: name another folder"
            )
    if not folder.is_dir():
        raise shardio.InvalidArgument(f"{path}: folder {folder} not found")
    if os.path.isdir(path) or (os.path.lexists(path) and not options.overwrite):
        raise shardio.InvalidArgument(_EXISTS_MESSAGE.format(path))


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()


def add_pictures(inspection: Inspection, options: argparse.Namespace) -> None:
    """Write the requested pictures, and add their description to the facts."""
    facts = inspection.facts
    is_open = "generation" in facts or "sample" in facts or not inspection.findings
    wanted = [kind for kind in ("image", "sheet") if getattr(options, kind)]
    facts |= dict.fromkeys(wanted)
    if not wanted or not is_open:
        return
    is_folder = is_url(options.path) or os.path.isdir(options.path)
    opened: Samples = (
        shardio.open(options.path, subset=options.subset)
        if is_folder
        else shardio.ShardReader(options.path)
    )
    with opened as samples:
        viewer = _FieldViewer(inspection, samples, options)
        if options.image:
            facts["image"] = _write_image(viewer, options)
        if options.sheet:
            facts["sheet"] = _write_sheet(viewer, options)


def describe_pictures(facts: Facts, options: argparse.Namespace) -> Iterator[str]:
    """Yield a line for each file written."""
    for kind in ("image", "sheet"):
        if (path := getattr(options, kind)) is not None:
            found = facts.get(kind)
            yield _description(found) if found else f"{escaped(path)}: not written; see the damage"


def _description(found: Facts) -> str:
    text = f"wrote {escaped(found['path'])}: {format_sides(found['height'], found['width'])}, "
    if "samples" in found:
        text += f"{format_count(len(found['samples']), 'sample')}"
    else:
        text += f"{escaped(found['field'])} of sample {found['sample']:,}"
        if (frames := found.get("frames")) is not None:
            text += f", {len(frames):,} of {format_count(found['of_frames'], 'frame')}"
    if damaged := found["damaged"]:
        text += f"; damaged, and crossed out: {len(damaged):,}"
    return text


class _FieldViewer:
    """A reader of one field of the samples that records damage as findings."""

    def __init__(
        self, inspection: Inspection, samples: Samples, options: argparse.Namespace
    ) -> None:
        self.inspection, self.samples, self.path = inspection, samples, options.path
        self.name = _chosen_field(options.path, samples.schema, options.field)

    def frames(self, number: int) -> FrameSequence | None:
        """Return the frames of a sample: no frames if it lacks the field, None if it is damaged."""
        kind = self.samples.schema[self.name]

        def show(value: Any) -> FrameSequence:
            if value is None:
                return FrameSequence(0, True, (0, 0), lambda numbers, size: iter(()))
            return frames_of(value, kind)

        found: FrameSequence | None = self.inspection.read(self.samples, number, self.name, show)
        return found

    def caption(self, number: int) -> str:
        """Return the number of a sample and its class."""
        if "label" not in self.samples.schema.columns:
            return f"{number}"
        label = self.inspection.read(self.samples, number, "label")
        if label is None or label.shape or label.dtype.kind not in "iu" or label == -1:
            return f"{number}"
        names: Sequence[str] = getattr(self.samples, "classes", ())  # a shard has none
        return f"{number}  {names[label] if 0 <= label < len(names) else label}"

    def take(
        self, number: int, frames: FrameSequence, numbers: Sequence[int], size: Size
    ) -> list[Pixels | None]:
        """Return frames of a sample, with None for damaged ones; record the first damage."""
        found = list(frames.take(numbers, size))
        errors = [frame for frame in found if isinstance(frame, shardio.DataError)]
        if errors:
            self.inspection.note_field(self.samples, number, self.name, errors[0])
        return [None if isinstance(frame, shardio.DataError) else frame for frame in found]


def _chosen_field(path: str, schema: shardio.Schema, requested: str | None) -> str:
    """Return the name of the field to show."""
    names = [name for name, kind in schema.items() if holds_pictures(kind)]
    known = ", ".join(names) or "none"
    if requested is not None:
        if requested in names or (requested in schema and can_hold_files(schema[requested])):
            return requested
        raise shardio.InvalidArgument(
            f"{path}: --field {requested}: not a field that can be shown; there are: {known}"
        )
    if len(names) != 1:
        way = "choose one with --field NAME"
        what = f"several fields hold pictures ({known}): {way}"
        if not names:
            files = [name for name, kind in schema.items() if can_hold_files(kind)]
            what = "no field holds pictures"
            what += f"; if {' or '.join(files)} has picture files, {way}" * bool(files)
        raise shardio.InvalidArgument(f"{path}: {what}")
    return names[0]


def _write_image(viewer: _FieldViewer, options: argparse.Namespace) -> Facts | None:
    """Write the picture or frames of the inspected sample; return None if all are damaged."""
    facts, path = viewer.inspection.facts, options.image
    if "sample" not in facts:
        raise shardio.InvalidArgument(f"{viewer.path}: there is no sample to show")
    number: int = facts["sample"]["sample"]
    frames = viewer.frames(number)
    if frames is None:
        return None
    if not frames.n:
        raise shardio.InvalidArgument(
            f"{viewer.path}: sample {number} has nothing to show in field {viewer.name!r}"
        )
    is_still = frames.is_still or options.frame is not None
    if not is_still and _FORMATS[_suffix(path)] == "JPEG":
        raise shardio.InvalidArgument(
            f"{path}: JPEG holds no animation: name a .png, .webp or .gif, or one frame: --frame N"
        )
    numbers = _numbers(viewer, frames, options.frame)
    size = frames.size if is_still else within(frames.size, MOVING_SIDE)
    intact = viewer.take(number, frames, numbers, size)
    if all(one is None for one in intact):
        return None
    stride = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    duration_ms = max(_SHORTEST_MS, round(1000 * stride / frames.rate))
    drawn = [_placeholder(size) if one is None else one for one in intact]
    moving = {} if is_still else {"save_all": True, "duration": duration_ms, "loop": 0}
    _write(path, drawn, moving, may_replace=options.overwrite)
    found: Facts = {"path": path, "field": viewer.name, "sample": number}
    if not frames.is_still:
        found |= {"frames": list(numbers), "of_frames": frames.n}
    damaged = [n for n, one in zip(numbers, intact, strict=True) if one is None]
    return found | {"height": size[0], "width": size[1], "damaged": damaged}


def _numbers(viewer: _FieldViewer, frames: FrameSequence, frame: int | None) -> Sequence[int]:
    """Return the numbers of the frames to show."""
    n = frames.n
    if frame is None:
        return range(0, n, -(-n // N_FRAMES))
    if frames.is_still:
        raise shardio.InvalidArgument(
            f"{viewer.path}: field {viewer.name!r} holds pictures; --frame is for clips and videos"
        )
    if not -n <= frame < n:
        raise shardio.InvalidArgument(
            f"{viewer.path}: there is no frame {frame}; the sample has {n:,}"
        )
    return [frame % n]


def _write_sheet(viewer: _FieldViewer, options: argparse.Namespace) -> Facts:
    n_samples, path = len(viewer.samples), options.sheet
    n_tiles = min(N_TILES, n_samples)
    if not n_tiles:
        raise shardio.InvalidArgument(f"{viewer.path}: there is no sample to show")
    numbers = [(2 * k + 1) * n_samples // (2 * n_tiles) for k in range(n_tiles)]
    tiles = [_sample_tile(viewer, number) for number in numbers]
    pixels = draw_sheet(tiles)
    _write(path, [pixels], {}, may_replace=options.overwrite)
    return {
        "path": path,
        "field": viewer.name,
        "samples": numbers,
        "height": pixels.shape[0],
        "width": pixels.shape[1],
        "damaged": [n for n, (_, one) in zip(numbers, tiles, strict=True) if one is None],
    }


def _sample_tile(viewer: _FieldViewer, number: int) -> tuple[str, Pixels | None]:
    """Return the caption of a sample and its picture or middle frame; None if it is damaged."""
    caption = viewer.caption(number)
    frames = viewer.frames(number)
    if frames is None:
        return caption, None
    if not frames.n:
        return f"{caption}  none", np.zeros((1, 1, 3), np.uint8)
    size = within(frames.size, TILE_SIDE)
    (pixels,) = viewer.take(number, frames, [frames.n // 2], size)
    return caption, pixels


def draw_sheet(tiles: Sequence[tuple[str, Pixels | None]]) -> Pixels:
    """Draw tiles, of at most TILE_SIDE x TILE_SIDE pixels, in rows; return RGB pixels.

    A tile is a caption and a picture; None is drawn as a crossed-out picture. Small pictures are
    enlarged by an integer factor; all tiles are as large as the largest picture or _MIN_SIDE.
    """
    image = pillow_image()
    from PIL import ImageDraw, ImageFont

    font = ImageFont.load_default()
    pictures = [None if pixels is None else _enlarged(pixels) for _, pixels in tiles]
    side = max((max(one.shape[:2]) for one in pictures if one is not None), default=0)
    side = max(side, _MIN_SIDE)
    n_columns = min(len(tiles), math.ceil(math.sqrt(len(tiles) * _WIDE)))
    n_rows = -(-len(tiles) // n_columns)
    step = side + GAP, side + GAP + CAPTION
    canvas = image.new("RGB", (GAP + n_columns * step[0], GAP + n_rows * step[1]), _PAPER)
    for i, ((caption, _), found) in enumerate(zip(tiles, pictures, strict=True)):
        pixels = _placeholder((side, side)) if found is None else found
        left, top = GAP + i % n_columns * step[0], GAP + i // n_columns * step[1]
        height, width = pixels.shape[:2]
        canvas.paste(_image(pixels), (left + (side - width) // 2, top + (side - height) // 2))
        line = image.new("RGB", (side, CAPTION), _PAPER)  # clips the caption
        text = escaped(caption).encode("ascii", "backslashreplace").decode()
        ImageDraw.Draw(line).text((0, 1), text, _INK, font)
        canvas.paste(line, (left, top + side))
    return np.asarray(canvas)


def _enlarged(pixels: Pixels) -> Pixels:
    factor = max(1, TILE_SIDE // max(pixels.shape[:2]))
    return pixels.repeat(factor, axis=0).repeat(factor, axis=1)


def _placeholder(size: Size) -> Pixels:
    """Draw the placeholder for a frame that cannot be shown, a crossed-out picture."""
    canvas = pillow_image().new("RGB", (size[1], size[0]), _EMPTY)
    from PIL import ImageDraw

    draw, right, bottom = ImageDraw.Draw(canvas), size[1] - 1, size[0] - 1
    width = max(1, min(right, bottom) // 40)
    draw.line((0, 0, right, bottom), fill=_MARK, width=width)
    draw.line((0, bottom, right, 0), fill=_MARK, width=width)
    draw.rectangle((0, 0, right, bottom), outline=_MARK, width=width)
    return np.asarray(canvas)


def _image(pixels: Pixels) -> Image:
    found: Image = pillow_image().fromarray(np.ascontiguousarray(pixels))
    return found


def _write(
    path: str, frames: Sequence[Pixels], moving: dict[str, Any], *, may_replace: bool
) -> None:
    """Write a picture or, with the options `moving`, an animation.

    The file appears under its name only when it is complete.
    """
    kind = _FORMATS[_suffix(path)]
    height, width = frames[0].shape[:2]
    if max(height, width) > (most := _MAX_SIDES.get(kind, max(height, width))):
        raise shardio.InvalidArgument(
            f"{path}: {kind} holds at most {most:,} x {most:,} pixels, and the picture has "
            f"{width:,} x {height:,}: name a .png"
        )
    images = [_image(pixels) for pixels in frames]
    if moving and kind == "GIF":
        # FASTOCTREE is 50 times as fast as Pillow's default, and 1 dB worse.
        method = pillow_image().Quantize.FASTOCTREE
        images = [image.quantize(256, method=method) for image in images]
    if moving:
        moving = {**moving, "append_images": images[1:]}
    quality = {"quality": 92} if kind in ("JPEG", "WEBP") else {}
    out, part = io.BytesIO(), f"{path}.{secrets.token_hex(4)}.part"
    images[0].save(out, kind, **quality, **moving)
    try:
        with open(part, "xb") as file:
            file.write(out.getvalue())
        if not may_replace:
            with open(path, "xb"):  # reserve the name: another process may have taken it
                pass
        os.replace(part, path)
    except FileExistsError as error:
        raise shardio.InvalidArgument(_EXISTS_MESSAGE.format(path)) from error
    except OSError as error:
        error.filename = path
        raise
    finally:
        with contextlib.suppress(OSError):
            os.unlink(part)
