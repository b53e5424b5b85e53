from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import pytest

from shardio_tools import sample_clips


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clips")
    assert sample_clips.write_clips(folder, n_clips=1) == len(sample_clips.MOTIONS)
    return folder


def _pictures(name: str, i: int) -> np.ndarray:
    rng = np.random.default_rng([list(sample_clips.MOTIONS).index(name), i])
    return np.stack(list(sample_clips.frames(sample_clips.MOTIONS[name], rng)))


@pytest.mark.parametrize("name", sorted(sample_clips.MOTIONS))
def test_a_clip_decodes_to_what_was_drawn(folder: Path, name: str) -> None:
    with av.open(str(folder / name / f"{name}-0.mp4")) as container:
        decoded = np.stack([f.to_ndarray(format="rgb24") for f in container.decode(video=0)])
    drawn = _pictures(name, 0)
    assert decoded.shape == drawn.shape == (96, 120, 160, 3)
    # H.264 with halved colour planes loses little in pictures this smooth.
    assert np.abs(decoded.astype(int) - drawn).mean() < 4


def test_the_same_call_draws_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    sample_clips.write_clips(tmp_path, n_clips=1)
    assert sorted(path.name for path in folder.iterdir()) == ["across", "around", "pulse", "updown"]
    for path in folder.rglob("*.mp4"):
        assert (tmp_path / path.relative_to(folder)).read_bytes() == path.read_bytes()
