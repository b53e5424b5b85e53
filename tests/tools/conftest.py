"""Videos and datasets that tests of several commands share, never to be changed: copy them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import shardio
from tests.media_made import scene, write_sound, write_video


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


@pytest.fixture(autouse=True, scope="session")
def _few_measured() -> Iterator[None]:
    """Measure the speed of converted datasets with 4 random samples, instead of up to 0.5 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardio.measuring.stored._MAX_SAMPLES", 4)
        yield
