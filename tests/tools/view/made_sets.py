"""Datasets that the viewer's page is tested with and shown with: pictures, episodes, every kind."""

from __future__ import annotations

import io
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import shardio
from shardio.media import demux
from tests.media_made import write_video

Picture = npt.NDArray[np.uint8]
CLASSES: Final = ("dunes", "rings", "ridge", "tiles", "waves")
HOSTILE: Final = '<img src="x" onerror="document.title=1"><script>document.title=2</script>'
_WORDS: Final = ("quiet", "bright", "gentle", "distant", "plain", "narrow", "second", "warm")
_PALETTES: Final = (
    ((20, 38, 66), (222, 141, 92), (250, 226, 180)),
    ((18, 62, 64), (108, 170, 140), (238, 240, 214)),
    ((54, 28, 64), (190, 84, 110), (252, 206, 150)),
    ((30, 44, 40), (136, 150, 92), (232, 220, 176)),
    ((16, 40, 84), (86, 140, 200), (230, 240, 246)),
)


def picture(kind: int, seed: int, width: int = 320, height: int = 240, at: float = 0.0) -> Picture:
    """Draw a picture of one of the classes; `at` moves it, from 0 to 1."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width] / height
    a, b, c = rng.uniform(0.6, 1.6, 3)
    dx, dy = rng.uniform(0.2, 0.8) * width / height, rng.uniform(0.3, 0.7)
    phase = 2 * np.pi * (at + rng.uniform())
    if kind == 0:
        level = y + 0.16 * np.sin(3 * a * x + phase) + 0.07 * np.sin(7 * b * x - phase)
    elif kind == 1:
        level = 0.5 + 0.5 * np.sin(18 * a * np.hypot(x - dx, y - dy) - phase)
    elif kind == 2:
        level = np.clip(1.6 * (y - 0.35 - 0.25 * np.abs(np.sin(2.2 * a * x + phase / 2))), 0, 1)
    elif kind == 3:
        turned = 0.3 * c
        u, v = x * np.cos(turned) - y * np.sin(turned), x * np.sin(turned) + y * np.cos(turned)
        level = ((np.floor(6 * a * u + at * 6) + np.floor(6 * a * v)) % 3) / 2
    else:
        level = 0.5 + 0.3 * np.sin(8 * a * y + 2.5 * np.sin(2 * b * x + phase)) + 0.2 * (y - 0.5)
    stops = np.array(_PALETTES[int(rng.integers(len(_PALETTES)))], np.float64)
    place = np.clip(level, 0, 1) * (len(stops) - 1)
    low = np.minimum(place.astype(int), len(stops) - 2)
    share = (place - low)[..., None]
    drawn = stops[low] * (1 - share) + stops[low + 1] * share
    pixels: Picture = drawn.round().clip(0, 255).astype(np.uint8)
    return pixels


def _jpeg(pixels: Picture) -> bytes:
    from PIL import Image

    made = io.BytesIO()
    Image.fromarray(pixels).save(made, "JPEG", quality=82)
    return made.getvalue()


def make_pictures(
    out: Path, n: int = 240, *, height: int = 240, hostile_row: int | None = None
) -> Path:
    """Make a dataset of labelled pictures with captions and numbers."""
    schema = shardio.Schema(
        {
            "image": shardio.Image(),
            "label": shardio.Array("int64"),
            "name": shardio.Text(),
            "caption": shardio.Text(),
            "brightness": shardio.Array("float32"),
            "width": shardio.Array("int32"),
        }
    )
    rng = np.random.default_rng(7)
    with shardio.DatasetWriter(out, schema, classes=CLASSES, shard_bytes=1 << 20) as writer:
        for i in range(n):
            label = int(rng.choice(len(CLASSES), p=(0.34, 0.26, 0.18, 0.13, 0.09)))
            width = int(rng.choice((3, 4, 5.333)) * height / 3)
            pixels = picture(label, i, width, height)
            words = " ".join(rng.choice(_WORDS, 3, replace=False))
            name = HOSTILE if i == hostile_row else f"{CLASSES[label]}-{i:04d}.jpg"
            caption = HOSTILE if i == hostile_row else f"A {words} picture of {CLASSES[label]}."
            writer.append(
                {
                    "image": _jpeg(pixels),
                    "label": label,
                    "name": name,
                    "caption": caption,
                    "brightness": np.float32(pixels.mean() / 255),
                    "width": width,
                }
            )
    return out


def make_episodes(
    out: Path, videos: Path, n: int = 4, *, n_frames: int = 90, width: int = 320
) -> Path:
    """Make robot episodes: two cameras, states and actions of 30 a second, and a task."""
    schema = shardio.Schema(
        {
            "observation.images.top": shardio.Video(),
            "observation.images.wrist": shardio.Video(),
            "observation.state": shardio.Array("float32", (None, 6)),
            "action": shardio.Array("float32", (None, 6)),
            "timestamp": shardio.Array("float32", (None,)),
            "task": shardio.Text(),
            "success": shardio.Array("bool"),
        }
    )
    tasks = ("Put the cup on the shelf.", "Open the drawer.", "Fold the towel.", "Sort the blocks.")
    seconds = np.arange(n_frames, dtype=np.float32) / 30
    with shardio.DatasetWriter(out, schema) as writer:
        for i in range(n):
            rng = np.random.default_rng(i)
            cameras = []
            for k, kind in enumerate((3, 1)):
                frames = [
                    picture(kind, 10 * i + k, width, width * 3 // 4, f / n_frames / 4)
                    for f in range(n_frames)
                ]
                path = videos / f"{i}-{k}.mp4"
                write_video(path, frames, rate=30, codec_options={"g": "30", "crf": "26"})
                cameras.append(demux(str(path)))
            speed = rng.uniform(0.5, 2, 6)
            state = np.sin(seconds[:, None] * speed + rng.uniform(0, 6, 6)) * rng.uniform(0.3, 1, 6)
            action = np.roll(state, -3, axis=0) + rng.normal(0, 0.02, state.shape)
            writer.append(
                {
                    "observation.images.top": cameras[0],
                    "observation.images.wrist": cameras[1],
                    "observation.state": state.astype(np.float32),
                    "action": action.astype(np.float32),
                    "timestamp": seconds,
                    "task": tasks[i % len(tasks)],
                    "success": i % 3 != 2,
                }
            )
    return out


def make_mixture(out: Path, hevc: Path, sound: Path, n: int = 3) -> Path:
    """Make samples of the kinds that the other datasets lack, HEVC and sound among them."""
    schema = shardio.Schema(
        {
            "video": shardio.Video(),
            "sound": shardio.Audio(),
            "frames": shardio.Array("uint8", (None, 48, 64, 3)),
            "mask": shardio.Array("uint8", (48, 64)),
            "attention": shardio.Array("float32", (40, 90)),
            "signal": shardio.Array("float32", (None,)),
            "tokens": shardio.Array("int32", (None,)),
            "meta": shardio.Json(),
            "blob": shardio.Bytes(),
            "text": shardio.Text(),
            "boxes": shardio.List(shardio.Array("float32", (4,))),
            "hint": shardio.Text(optional=True),
            "weight": shardio.Array("float64"),
        }
    )
    video, audio = demux(str(hevc)), demux(str(sound), "audio")
    y, x = np.mgrid[0:40, 0:90]
    with shardio.DatasetWriter(out, schema) as writer:
        for i in range(n):
            frames = np.stack([picture(4, i, 64, 48, f / 12) for f in range(12)])
            steps = np.arange(5000)
            signal = np.sin(steps / (40 + 10 * i)) * np.exp(-steps / 3000)
            writer.append(
                {
                    "video": video,
                    "sound": audio,
                    "frames": frames,
                    "mask": (picture(3, i, 64, 48)[..., 0] > 100).astype(np.uint8) * 255,
                    "attention": np.exp(-((x / 90 - y / 40 - 0.1 * i) ** 2) * 30).astype("f4"),
                    "signal": signal.astype(np.float32),
                    "tokens": (steps[:300] * 7919 % 50257).astype(np.int32),
                    "meta": {"camera": {"iso": 100 * (i + 1), "lens": "35 mm"}, "tags": ["a", "b"]},
                    "blob": bytes(range(256)) * 3,
                    "text": f"Sample {i}.\n{HOSTILE}" if i else "A sample of every other kind.",
                    "boxes": [np.array([0.1, 0.2, 0.5, 0.6], np.float32)] * (i + 1),
                    "hint": None,
                    "weight": i / 4,
                }
            )
    return out


def write_hevc(path: Path, n_frames: int = 24) -> Path:
    """Encode HEVC, which the Chromium of the tests does not play."""
    frames: Sequence[Picture] = [picture(0, 3, 320, 240, f / n_frames) for f in range(n_frames)]
    options = {"x265-params": "log-level=none"}
    return write_video(path, frames, codec="libx265", rate=24, codec_options=options)


def write_tone(path: Path, seconds: float = 2.0) -> Path:
    """Encode a tone that swells, as AAC in MP4."""
    import av

    rate = 48_000
    steps = np.arange(int(seconds * rate)) / rate
    wave = (np.sin(2 * np.pi * 330 * steps) * np.sin(np.pi * steps / seconds) ** 2 * 0.7)[None]
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as out:
        stream: Any = out.add_stream("aac", rate=rate, layout="mono")
        for start in range(0, wave.shape[1], 1024):
            part = np.ascontiguousarray(wave[:, start : start + 1024].astype(np.float32))
            frame = av.AudioFrame.from_ndarray(part, format="fltp", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = rate, start, Fraction(1, rate)
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return path
