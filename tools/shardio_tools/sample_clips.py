"""Draw a small folder of labelled video clips, as input for a first conversion.

    python -m shardio_tools.sample_clips FOLDER

Each class is one motion of a bright shape over a dim background; only the motion distinguishes the
classes. The output is deterministic.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardio_tools.output import escape_unwritable, escaped

N_CLIPS = 6
N_FRAMES = 96
RATE = 24
HEIGHT, WIDTH = 120, 160

Picture = npt.NDArray[np.uint8]
# Maps a time, 0 at the start of the clip and 1 at its end, to three numbers: the distances of the
# shape from the centre, to the right and down, in picture heights; and the scale of the shape.
Motion = Callable[[float], tuple[float, float, float]]


def _swing(share: float) -> float:
    """Return a number that swings from -1 to 1 and back, twice in a clip."""
    return float(np.sin(4 * np.pi * share))


MOTIONS: dict[str, Motion] = {
    "across": lambda share: (0.5 * _swing(share), 0.0, 1.0),
    "around": lambda share: (0.3 * _swing(share), 0.3 * _swing(share + 0.125), 1.0),
    "pulse": lambda share: (0.0, 0.0, 1.0 + 0.7 * _swing(share)),
    "updown": lambda share: (0.0, 0.35 * _swing(share), 1.0),
}


def frames(motion: Motion, rng: np.random.Generator) -> Iterator[Picture]:
    """Draw one clip: N_FRAMES pictures of HEIGHT x WIDTH x 3."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH] / HEIGHT
    x, y = x - WIDTH / HEIGHT / 2, y - 0.5
    slope = rng.uniform(-40, 40, 2)
    background = 60 + slope[0] * x[..., None] + slope[1] * y[..., None] + rng.uniform(-15, 15, 3)
    colour = rng.uniform(150, 255, 3)
    radius, start = rng.uniform(0.09, 0.15), rng.uniform()
    centre_x, centre_y = rng.uniform(-0.1, 0.1, 2)
    is_round = rng.uniform() < 0.5
    backdrop = _pixels(background)
    for i in range(N_FRAMES):
        right, down, scale = motion(start + i / N_FRAMES)
        across, below = np.abs(x - centre_x - right), np.abs(y - centre_y - down)
        # Draw only the rectangle around the shape, with one pixel to spare: the edge is blended
        # over half a pixel beyond the shape.
        reach = radius * scale + 1 / HEIGHT
        place = np.ix_(below[:, 0] < reach, across[0] < reach)
        across, below = across[place], below[place]
        distance = np.hypot(across, below) if is_round else np.maximum(across, below)
        # Blend over one pixel, like a lens.
        cover = np.clip((radius * scale - distance) * HEIGHT + 0.5, 0, 1)[..., None]
        picture = backdrop.copy()
        picture[place] = _pixels(background[place] * (1 - cover) + colour * cover)
        yield picture


def _pixels(levels: npt.NDArray[np.float64]) -> Picture:
    return levels.round().clip(0, 255).astype(np.uint8)


def write_clip(path: Path, pictures: Iterator[Picture]) -> None:
    """Encode pictures as H.264 in MP4, or as MPEG-4 where FFmpeg was built without x264."""
    import av

    with av.open(str(path), "w") as container:
        if "libx264" in av.codecs_available:
            # With AVX-512, x264's macroblock tree is not deterministic.
            options = {"x264-params": "mbtree=0"}
            stream = container.add_stream("libx264", rate=RATE, options=options)
        else:
            stream = container.add_stream("mpeg4", rate=RATE)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        # With several encoder threads, the bytes would depend on their number.
        stream.codec_context.thread_count = 1
        for picture in pictures:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))


def write_clips(folder: Path, *, n_clips: int = N_CLIPS) -> int:
    """Write `n_clips` clips per class below `folder`, replacing files; return the total number."""
    for label, (name, motion) in enumerate(MOTIONS.items()):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(n_clips):
            rng = np.random.default_rng([label, i])
            write_clip(folder / name / f"{name}-{i}.mp4", frames(motion, rng))
    return n_clips * len(MOTIONS)


def main(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m shardio_tools.sample_clips FOLDER", file=sys.stderr)
        return 2
    escape_unwritable()
    folder = Path(arguments[0])
    n_clips = write_clips(folder)
    place = escaped(str(folder))
    print(f"{n_clips} clips of {N_FRAMES} frames in {len(MOTIONS)} classes below {place}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
