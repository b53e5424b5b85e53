"""The pictures that `shardio inspect` writes, of one sample or of many, and their options.

Options are checked before anything is read. Damage becomes a finding; the readable parts are shown.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

import shardio
from shardio.media import pillow_image
from shardio_tools.inspect.frames import (
    Frame,
    FrameSequence,
    Pixels,
    Samples,
    Size,
    can_hold_files,
    clip_rate,
    frames_of,
    holds_pictures,
    open_samples,
    place_of,
    value_of,
    within,
)
from shardio_tools.inspect.image_files import (
    MOVING,
    STILLS,
    check_target,
    draw_sheet,
    encoded_animation,
    encoded_still,
    placeholder,
    suffix_of,
    write_whole,
)
from shardio_tools.inspect.report import READING, Facts, Inspection
from shardio_tools.output import escaped, format_count, utf8_name

COUNT: Final = 24
"""Number of tiles of a sheet."""
TILE_SIDE: Final = 160
MOVING_SIDE: Final = 512
MAX_SIDE: Final = 16384
MAX_PIXELS: Final = 1 << 27
"""Limit for a sheet or all frames of an animation; a pixel takes several bytes of memory."""

_NEEDS: Final = {
    ("frame", "clip"): ("image",),
    ("count",): ("sheet",),
    ("field", "side", "overwrite"): ("image", "sheet"),
}
"""Options for pictures: each option in a key needs one of the options in the value."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for pictures to the command's parser."""
    add = parser.add_argument_group("pictures, clips and videos").add_argument
    add(
        "--image",
        metavar="FILE",
        help="write the sample's picture or clip; the suffix determines the format",
    )
    add("--frame", type=int, metavar="N", help="one frame of a clip or video")
    add("--clip", metavar="START:STOP[:STRIDE]", help="a range of frames of a clip or video")
    add("--sheet", metavar="FILE", help="write a contact sheet of samples spread over the dataset")
    add("--count", type=int, metavar="N", help=f"samples on the sheet (default: {COUNT})")
    add(
        "--field",
        type=utf8_name,
        metavar="NAME",
        help="the field to show, if several hold pictures",
    )
    add(
        "--side",
        type=int,
        metavar="N",
        help="limit of the longest side in pixels "
        f"(default: {TILE_SIDE} for the tiles of a sheet, {MOVING_SIDE} for animations)",
    )
    add("--overwrite", action="store_true", help="replace FILE if it exists")


def check_picture_options(options: argparse.Namespace) -> None:
    """Check the options for pictures, and fill in their defaults."""
    _check_together(options)
    options.clip = None if options.clip is None else _parse_slice(options.clip)
    options.count = COUNT if options.count is None else options.count
    if options.side is not None and not 8 <= options.side <= MAX_SIDE:
        raise shardio.InvalidArgument(f"--side must be from 8 to {MAX_SIDE}; found {options.side}")
    most = MAX_PIXELS // (options.side or TILE_SIDE) ** 2
    if options.sheet is not None and not 1 <= options.count <= most:
        raise shardio.InvalidArgument(
            f"--count must be from 1 to {most:,} for tiles of this --side; found {options.count}"
        )
    targets = [path for path in (options.image, options.sheet) if path is not None]
    for target in targets:
        check_target(target, options.path, may_replace=options.overwrite)
    if options.sheet is not None and suffix_of(options.sheet) not in STILLS:
        raise shardio.InvalidArgument(
            f"{options.sheet}: a sheet must be one of {', '.join(STILLS)}"
        )
    if targets:
        pillow_image()


def _check_together(options: argparse.Namespace) -> None:
    """Check that options do not exclude each other, and that each has an option that it needs."""
    for names, needed in _NEEDS.items():
        is_met = any(getattr(options, other) for other in needed)
        for name in () if is_met else names:
            value = getattr(options, name)
            if value is not None and value is not False:
                targets = " or ".join(f"--{other}" for other in needed)
                raise shardio.InvalidArgument(f"--{name} needs {targets}")
    if options.frame is not None and options.clip is not None:
        raise shardio.InvalidArgument("--frame and --clip exclude each other")


def _parse_slice(text: str) -> slice:
    """Parse START:STOP[:STRIDE], each part optional, as in Python."""
    parts = text.split(":")
    try:
        numbers = [int(part) if part.strip() else None for part in parts]
    except ValueError:
        numbers = []
    strides = [number for number in numbers[2:] if number is not None]
    if len(numbers) not in (2, 3) or any(stride < 1 for stride in strides):
        raise shardio.InvalidArgument(
            f"--clip must be START:STOP or START:STOP:STRIDE, such as 0:64:2; found {text!r}"
        )
    return slice(*numbers)


class FieldViewer:
    """A reader of one field of the samples that records damage as findings."""

    def __init__(
        self, inspection: Inspection, samples: Samples, options: argparse.Namespace
    ) -> None:
        self.inspection, self.samples, self.path = inspection, samples, options.path
        self.name = _chosen_field(options.path, samples.schema, options.field)

    def frames(self, number: int) -> FrameSequence | None:
        """Return the frames of a sample: no frames if it lacks the field, None if it is damaged."""
        found: FrameSequence | None = self._read(number, self.name, partial(self._frames, number))
        return found

    def _frames(self, number: int) -> FrameSequence:
        value = value_of(self.samples, number, self.name)
        if value is None:
            return FrameSequence(0, True, (0, 0), lambda numbers, size: iter(()))
        rate = clip_rate(*(self._other_field(number, name) for name in ("pts", "time_base")))
        return frames_of(value, self.samples.schema[self.name], rate)

    def _other_field(self, number: int, name: str) -> Any:
        """Return another field of a sample; None if missing or damaged."""
        if name not in self.samples.schema.columns:
            return None
        return self._read(number, name, partial(value_of, self.samples, number, name))

    def _read(self, number: int, name: str, read: Callable[[], Any]) -> Any:
        """Return the result of `read`; if the field of the sample is damaged, record a finding."""
        path, row = place_of(self.samples, number, name)
        if path not in self.inspection.bad_files:
            try:
                return read()
            except READING as error:
                self.inspection.note(path, error, field=name, sample=row)
        return None

    def caption(self, number: int) -> str:
        """Return the number of a sample and its class."""
        label = self._other_field(number, "label")
        if label is None or label.shape or label.dtype.kind not in "iu" or label == -1:
            return f"{number}"
        names: Sequence[str] = getattr(self.samples, "classes", ())  # a shard has none
        return f"{number}  {names[label] if 0 <= label < len(names) else label}"

    def intact(self, number: int, taken: Iterable[Frame]) -> list[Pixels | None]:
        """Return the frames in `taken`, with None for damaged ones; record the first damage."""
        frames = list(taken)
        errors = [frame for frame in frames if isinstance(frame, shardio.DataError)]
        if errors:
            path, row = place_of(self.samples, number, self.name)
            self.inspection.note(path, errors[0], field=self.name, sample=row)
        return [None if isinstance(frame, shardio.DataError) else frame for frame in frames]


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
        what = "several fields hold" if names else "no field holds"
        way = "choose one with --field NAME, or a field whose bytes are picture files"
        raise shardio.InvalidArgument(f"{path}: {what} pictures ({known}): {way}")
    return names[0]


N_FRAMES: Final = 240
"""Default number of frames of an animation."""


def add_pictures(inspection: Inspection, options: argparse.Namespace) -> None:
    """Write the requested pictures, and add their description to the facts."""
    facts = inspection.facts
    is_open = "generation" in facts or "sample" in facts or not inspection.findings
    wanted = [kind for kind in ("image", "sheet") if getattr(options, kind)]
    facts |= dict.fromkeys(wanted)
    if not wanted or not is_open:
        return
    with open_samples(options.path) as samples:
        viewer = FieldViewer(inspection, samples, options)
        if options.image:
            facts["image"] = _render_sample(viewer, options)
        if options.sheet:
            facts["sheet"] = _write_sheet(viewer, options, options.sheet)


def describe_pictures(facts: Facts, options: argparse.Namespace) -> Iterator[str]:
    """Yield a line for each file written."""
    for kind, path in (("image", options.image), ("sheet", options.sheet)):
        if path is None:
            continue
        found = facts.get(kind)
        yield _description(found) if found else f"{escaped(path)}: not written; see the damage"


def _description(found: Facts) -> str:
    text = f"wrote {escaped(found['path'])}: {found['width']:,} × {found['height']:,} pixels, "
    if "samples" in found:
        text += f"{format_count(len(found['samples']), 'sample')}"
    else:
        text += f"{escaped(found['field'])} of sample {found['sample']:,}"
        if (frames := found.get("frames")) is not None:
            text += f", {_frames_in_words(frames)} of {found['of_frames']:,}"
    if damaged := found["damaged"]:
        text += f"; damaged, and crossed out: {len(damaged):,}"
    return text


def _frames_in_words(frames: Sequence[int]) -> str:
    if len(frames) == 1:
        return f"frame {frames[0]:,}"
    return f"{len(frames):,} frames from {frames[0]:,} to {frames[-1]:,}"


def _render_sample(viewer: FieldViewer, options: argparse.Namespace) -> Facts | None:
    """Write the picture or clip of the inspected sample; return the facts about the file."""
    facts = viewer.inspection.facts
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
    numbers = _numbers(viewer, frames, options)
    return _write_image(viewer, options, number, frames, numbers)


def _numbers(
    viewer: FieldViewer, frames: FrameSequence, options: argparse.Namespace
) -> Sequence[int]:
    """Return the numbers of the frames to show."""
    n = frames.n
    if options.frame is None and options.clip is None:
        return range(0, n, -(-n // N_FRAMES))
    if frames.is_still:
        raise shardio.InvalidArgument(
            f"{viewer.path}: field {viewer.name!r} holds pictures; --frame and --clip are for "
            "clips and videos"
        )
    if options.frame is not None:
        if not -n <= options.frame < n:
            raise shardio.InvalidArgument(
                f"{viewer.path}: there is no frame {options.frame}; the sample has {n:,}"
            )
        return [options.frame % n]
    found = range(n)[options.clip or slice(None)]
    if not found:
        raise shardio.InvalidArgument(
            f"{viewer.path}: --clip selects none of the sample's {n:,} frames, 0 to {n - 1:,}"
        )
    return found


def _write_image(
    viewer: FieldViewer,
    options: argparse.Namespace,
    number: int,
    frames: FrameSequence,
    numbers: Sequence[int],
) -> Facts | None:
    """Write frames of a sample as a picture or animation; return None if all are damaged."""
    path, suffix = options.image, suffix_of(options.image)
    is_still = frames.is_still or options.frame is not None
    if suffix not in (STILLS if is_still else MOVING):
        raise shardio.InvalidArgument(
            f"{path}: a single picture must be one of {', '.join(STILLS)}"
            if is_still
            else f"{path}: an animation must be one of {', '.join(MOVING)}; --frame N writes one "
            "picture"
        )
    side = options.side or (MAX_SIDE if is_still else MOVING_SIDE)
    size = _even(within(frames.size, side)) if suffix == ".mp4" else within(frames.size, side)
    if not is_still and len(numbers) * size[0] * size[1] > MAX_PIXELS:
        raise shardio.InvalidArgument(
            f"{path}: {len(numbers):,} frames of {size[1]} x {size[0]} pixels are more than fit in "
            f"memory, {MAX_PIXELS:,} pixels: take fewer by --clip START:STOP:STRIDE, or --side"
        )
    intact = viewer.intact(number, frames.take(numbers, size))
    if all(one is None for one in intact):
        return None
    drawn = [placeholder(size) if one is None else one for one in intact]
    if is_still:
        data = encoded_still(drawn[0], suffix)
    else:
        stride = numbers[1] - numbers[0] if len(numbers) > 1 else 1
        data = encoded_animation(drawn, frames.rate / stride, suffix)
    write_whole(path, data, may_replace=options.overwrite)
    found: Facts = {"path": path, "field": viewer.name, "sample": number}
    if not frames.is_still:
        found |= {"frames": list(numbers), "of_frames": frames.n}
    damaged = [n for n, one in zip(numbers, intact, strict=True) if one is None]
    return found | {"height": size[0], "width": size[1], "damaged": damaged}


def _even(size: Size) -> Size:
    """Return a size with even sides, as chroma subsampling requires."""
    return max(2, size[0] - size[0] % 2), max(2, size[1] - size[1] % 2)


def _write_sheet(viewer: FieldViewer, options: argparse.Namespace, path: str) -> Facts:
    numbers = spread(range(len(viewer.samples)), options.count)
    if not numbers:
        raise shardio.InvalidArgument(f"{viewer.path}: there is no sample to show")
    side = options.side or TILE_SIDE
    tiles = [_sample_tile(viewer, number, side) for number in numbers]
    pixels = draw_sheet(tiles, side)
    write_whole(path, encoded_still(pixels, suffix_of(path)), may_replace=options.overwrite)
    return {
        "path": path,
        "field": viewer.name,
        "samples": list(numbers),
        "height": pixels.shape[0],
        "width": pixels.shape[1],
        "damaged": [n for n, (_, one) in zip(numbers, tiles, strict=True) if one is None],
    }


def _sample_tile(viewer: FieldViewer, number: int, side: int) -> tuple[str, Pixels | None]:
    """Return the caption of a sample and its picture or middle frame; None if it is damaged."""
    caption = viewer.caption(number)
    frames = viewer.frames(number)
    if frames is None:
        return caption, None
    if not frames.n:
        return f"{caption}  none", np.zeros((1, 1, 3), np.uint8)
    (pixels,) = viewer.intact(number, frames.take([frames.n // 2], within(frames.size, side)))
    return caption, pixels


def spread(items: Sequence[int], n: int) -> Sequence[int]:
    """Return at most `n` of the items, evenly spaced."""
    n = min(n, len(items))
    return [items[(2 * k + 1) * len(items) // (2 * n)] for k in range(n)]
