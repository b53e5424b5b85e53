"""Videos and datasets that tests of several commands share, never to be changed: copy them."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import shardio
from shardio import Array, Video
from shardio.media import StreamEncoder
from tests.media_made import scene, write_sound, write_video
from tests.pictures_seen import N_CLIPS, clip, write


@pytest.fixture(scope="session")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes with clips, one without, and a file of every other outcome."""
    root = tmp_path_factory.mktemp("videos")
    for name, n_frames in (("cats/a.mp4", 9), ("cats/b.mp4", 4), ("dogs/c.mp4", 8)):
        (root / name).parent.mkdir(exist_ok=True)
        write_video(root / name, scene(n_frames))
    (root / "fish").mkdir()
    write_video(root / "fish" / "short.mp4", scene(3))
    write_sound(root / "fish" / "song.wav")
    (root / "cats" / "notes.txt").write_text("not a video")
    return root


@pytest.fixture(scope="session")
def dataset(videos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the videos as clips of four frames of 16 x 16 pixels: five, in three shards."""
    out = tmp_path_factory.mktemp("dataset") / "out"
    shardio.convert(videos, out, workers=0, store="raw", frames=4, size=16, shard_bytes=5000)
    return out


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    """Clips as a conversion stores them: at five frames per second, in two classes."""
    fields = {
        "frames": Array("uint8", (6, 16, 24, 3)),
        "label": Array("int64"),
        "pts": Array("int64", (6,)),
        "time_base": Array("int64", (2,)),
    }
    beside = {"pts": np.arange(100, 106), "time_base": np.array([1, 5])}
    samples = [{"frames": clip(i), "label": i % 2, **beside} for i in range(N_CLIPS)]
    return write(tmp_path / "clips", fields, samples)


@pytest.fixture
def video(tmp_path: Path) -> Path:
    """One video of 30 frames, with a keyframe in every ten; ten frames per second."""
    encoder = StreamEncoder(32, 16, Fraction(1, 10), gop=10, crf=10)
    rng = np.random.default_rng(0)
    for i in range(30):
        picture = np.full((16, 32, 3), 8 * i, np.uint8)
        picture[4:12, 4:28] = rng.integers(0, 255, (8, 24, 3))
        encoder.add(i, picture)
    encoded = encoder.finish()
    return write(tmp_path / "video", {"video": Video()}, [{"video": encoded}])
