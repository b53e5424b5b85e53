"""Which pictures `inspect` is asked for: options that are checked before anything is read."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import Final

import shardio
from shardio.media import pillow_image
from shardio_tools._terminal import check_terminal
from shardio_tools.image_files import STILLS, check_target, suffix_of
from shardio_tools.output import utf8_name

COUNT: Final = 24
"""Tiles of a sheet."""
TILE_SIDE: Final = 160
MOVING_SIDE: Final = 512
MAX_SIDE: Final = 16384
MOST_PIXELS: Final = 1 << 27
"""Of a sheet or of all frames of an animation: each takes several bytes of memory."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options about pictures to the command's parser."""
    add = parser.add_argument_group("pictures, clips and videos").add_argument
    add("--image", metavar="FILE", help="write the sample's picture or clip: its ending says how")
    add("--show", action="store_true", help="show the sample's picture in the terminal")
    add("--frame", type=int, metavar="N", help="one frame of a clip or video")
    add("--clip", metavar="START:STOP[:STRIDE]", help="these frames of a clip or video")
    add("--sheet", metavar="FILE", help="write samples from all over the dataset on one sheet")
    add("--count", type=int, metavar="N", help=f"samples of a sheet (default: {COUNT})")
    add(
        "--field",
        type=utf8_name,
        metavar="NAME",
        help="the field to show, where several hold pictures",
    )
    add(
        "--side",
        type=int,
        metavar="N",
        help="pixels of the longest side, at most; of a sheet's tiles (default: "
        f"{TILE_SIDE}; of animations {MOVING_SIDE})",
    )
    add("--overwrite", action="store_true", help="replace FILE if it is there")


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """Which pictures are wanted, of what lies at `path`: checked before anything is read."""

    path: str
    image: str | None
    sheet: str | None
    is_shown: bool
    frame: int | None
    clip: slice | None
    count: int
    field: str | None
    side: int | None
    may_replace: bool

    @property
    def is_any(self) -> bool:
        """Whether a picture is wanted at all."""
        return bool(self.image or self.sheet or self.is_shown)


def parse_render_options(options: argparse.Namespace) -> RenderOptions:
    """Check the options about pictures.

    Raises:
        InvalidArgument: one does not make sense, or not together with another.
        UnsupportedEnvironment: pictures are wanted, and Pillow is not installed.
    """
    wish = RenderOptions(
        path=options.path,
        image=options.image,
        sheet=options.sheet,
        is_shown=options.show,
        frame=options.frame,
        clip=None if options.clip is None else _parse_slice(options.clip),
        count=COUNT if options.count is None else options.count,
        field=options.field,
        side=options.side,
        may_replace=options.overwrite,
    )
    _check_together(wish, options)
    for name, target in (("--image", wish.image), ("--sheet", wish.sheet)):
        if target == "":
            raise shardio.InvalidArgument(f"{name}: expected the name of a file, found none")
    for target in filter(None, (wish.image, wish.sheet)):
        check_target(target, options.path, may_replace=wish.may_replace)
    if wish.sheet and suffix_of(wish.sheet) not in STILLS:
        raise shardio.InvalidArgument(
            f"{wish.sheet}: a sheet is one of {', '.join(STILLS)}, which hold still pictures"
        )
    if wish.is_shown:
        check_terminal()
    if wish.is_any:
        pillow_image()
    return wish


def _check_together(wish: RenderOptions, options: argparse.Namespace) -> None:
    """Refuse options that another one needs, or excludes."""
    is_of_sample = bool(wish.image or wish.is_shown)
    needs = [
        ("--frame", wish.frame is not None, is_of_sample, "--image or --show"),
        ("--clip", wish.clip is not None, is_of_sample, "--image or --show"),
        ("--count", options.count is not None, bool(wish.sheet), "--sheet"),
        ("--field", wish.field is not None, wish.is_any, "--image, --show or --sheet"),
        ("--side", wish.side is not None, bool(wish.image or wish.sheet), "--image or --sheet"),
        ("--overwrite", wish.may_replace, bool(wish.image or wish.sheet), "--image or --sheet"),
    ]
    for name, is_given, is_met, other in needs:
        if is_given and not is_met:
            raise shardio.InvalidArgument(f"{name} needs {other}")
    if wish.frame is not None and wish.clip is not None:
        raise shardio.InvalidArgument("--frame and --clip exclude each other")
    if wish.is_shown and options.json:
        raise shardio.InvalidArgument("--show and --json exclude each other: JSON is for programs")
    if wish.image and wish.sheet and os.path.realpath(wish.image) == os.path.realpath(wish.sheet):
        raise shardio.InvalidArgument(f"{wish.image}: named by --image and by --sheet")
    if wish.side is not None and not 8 <= wish.side <= MAX_SIDE:
        raise shardio.InvalidArgument(f"--side must be from 8 to {MAX_SIDE}; found {wish.side}")
    most = MOST_PIXELS // (wish.side or TILE_SIDE) ** 2
    if wish.sheet and not 1 <= wish.count <= most:
        raise shardio.InvalidArgument(
            f"--count must be from 1 to {most:,} for tiles of this --side; found {wish.count}"
        )


def _parse_slice(text: str) -> slice:
    """Understand START:STOP[:STRIDE], of which each may be left out, as Python does."""
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
