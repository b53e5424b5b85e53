"""Pictures in the terminal, by a graphics protocol or as coloured half blocks.

The protocol is chosen from the environment alone: a terminal may not answer a query, and an answer
may end up in the shell's next line.
"""

from __future__ import annotations

import base64
import fcntl
import os
import struct
import sys
import termios
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import numpy as np

import shardio
from shardio_tools.inspect.frames import Pixels, Size, fitted
from shardio_tools.inspect.image_files import encoded_still, enlarged

Protocol = Literal["kitty", "iterm2", "blocks"]

_KITTY: Final = ("xterm-kitty", "xterm-ghostty")
_ITERM: Final = ("iTerm.app", "WezTerm")
_MULTIPLEXERS: Final = ("screen", "tmux")
_CHUNK: Final = 4096
"""Maximum bytes of text per kitty escape sequence."""
_CELL: Final = (16, 8)
"""Assumed height and width of a character in pixels."""
_LINES, _COLUMNS = 24, 80
_UPPER_HALF: Final = "▀"
_SMALL: Final = 240
_SMALL_IN_BLOCKS: Final = 32
"""Size in pixels up to which pictures are enlarged."""


def check_terminal() -> None:
    """Require standard output to be a terminal that can show a picture.

    Raises:
        InvalidArgument: it is not a terminal, or shows neither colours nor half blocks.
    """
    if not sys.stdout.isatty():
        raise shardio.InvalidArgument(
            "--show: standard output is not a terminal; write the picture with --image FILE"
        )
    if protocol_of(os.environ) != "blocks":
        return
    way = "write the picture with --image FILE"
    if os.environ.get("TERM", "dumb") == "dumb" or os.environ.get("NO_COLOR"):
        raise shardio.InvalidArgument(f"--show: no colours (TERM=dumb or NO_COLOR is set); {way}")
    try:
        _UPPER_HALF.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError as error:
        raise shardio.InvalidArgument(
            f"--show: half blocks need UTF-8, and standard output is {sys.stdout.encoding}; {way}"
        ) from error


def protocol_of(environment: Mapping[str, str]) -> Protocol:
    """Return a terminal's graphics protocol, from the environment variables that it sets."""
    term = environment.get("TERM", "")
    if "TMUX" in environment or term.startswith(_MULTIPLEXERS):
        return "blocks"  # a terminal multiplexer passes no pictures on
    if term in _KITTY:
        return "kitty"
    if environment.get("TERM_PROGRAM") in _ITERM or environment.get("LC_TERMINAL") == "iTerm2":
        return "iterm2"
    return "blocks"


def encode_for_terminal(pictures: Sequence[Pixels]) -> str:
    """Return the text that shows RGB pictures of one height side by side.

    They are shrunk to fit the terminal; small ones are enlarged by an integer factor.
    """
    protocol = protocol_of(os.environ)
    if protocol == "blocks":
        return _as_blocks(pictures)
    height, width = _room()
    row = _side_by_side([enlarged(one, _SMALL) for one in pictures])
    data = encoded_still(fitted(row, _fitting(row.shape[:2], height, width)), ".png")
    return _for_kitty(data) if protocol == "kitty" else _for_iterm2(data)


def _side_by_side(pictures: Sequence[Pixels]) -> Pixels:
    return np.concatenate(pictures, axis=1)


def _fitting(size: Size, height: int, width: int) -> Size:
    """Return a size scaled down to fit."""
    scale = min(1.0, height / size[0], width / size[1])
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def _room() -> Size:
    """Return height and width of the terminal in pixels."""
    try:
        answer = fcntl.ioctl(sys.stdout.fileno(), termios.TIOCGWINSZ, bytes(8))
    except (OSError, ValueError):  # a stream without a descriptor, or one that is not a terminal
        answer = bytes(8)
    lines, columns, width, height = struct.unpack("HHHH", answer)
    lines, columns = lines or _LINES, columns or _COLUMNS
    # One line is left for the text about the picture.
    return (height or lines * _CELL[0]) * (lines - 1) // lines or 1, width or columns * _CELL[1]


def _for_kitty(png: bytes) -> str:
    """Encode a PNG for kitty's protocol; `q=2` suppresses answers."""
    text = base64.standard_b64encode(png).decode()
    parts = [text[i : i + _CHUNK] for i in range(0, len(text), _CHUNK)]
    heads = ["a=T,f=100,q=2,"] + [""] * (len(parts) - 1)
    chunks = [
        f"\033_G{head}m={int(i < len(parts))};{part}\033\\"
        for i, (head, part) in enumerate(zip(heads, parts, strict=True), 1)
    ]
    return "".join(chunks)


def _for_iterm2(png: bytes) -> str:
    """Encode a PNG for iTerm2's protocol."""
    text = base64.standard_b64encode(png).decode()
    return f"\033]1337;File=inline=1;size={len(png)}:{text}\a"


def _as_blocks(pictures: Sequence[Pixels]) -> str:
    """Draw two pixel rows per line, in the colours that the terminal supports."""
    from rich.color import Color
    from rich.console import Console
    from rich.style import Style
    from rich.text import Text

    console = Console(file=sys.stdout)
    row = _side_by_side([enlarged(one, _SMALL_IN_BLOCKS) for one in pictures])
    height, width = _fitting(row.shape[:2], 2 * max(1, console.height - 1), console.width)
    pixels = fitted(row, (height + height % 2, width))
    with console.capture() as capture:
        for upper, lower in zip(pixels[::2].tolist(), pixels[1::2].tolist(), strict=True):
            line = Text(no_wrap=True)
            for above, below in zip(upper, lower, strict=True):
                style = Style(color=Color.from_rgb(*above), bgcolor=Color.from_rgb(*below))
                line.append(_UPPER_HALF, style)
            console.print(line)
    return capture.get().rstrip("\n")
