"""The stores of videos hold the same clips: one training script goes with each."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio_tools import cli, sample_clips

pytestmark = pytest.mark.usefixtures("quick_disk")

STORES = ("raw", "jpeg", "h264", "packets")


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four videos of unequal lengths in two classes; one is shorter than a clip."""
    root = tmp_path_factory.mktemp("videos")
    for label, (name, motion) in enumerate(list(sample_clips.MOTIONS.items())[:2]):
        (root / name).mkdir()
        for i, n_frames in enumerate((23, 9 - 3 * label)):
            pictures = islice(sample_clips.frames(motion, np.random.default_rng([label, i])), 40)
            sample_clips.write_clip(root / name / f"{i}.mp4", islice(pictures, n_frames))
    return root


def epoch(folder: Path) -> tuple[int, list[Any]]:
    """Return the number of batches of the default view, and their content except pixels."""
    with shardio.ShardLoader(folder, 3, num_workers=0, output="numpy", shuffle=True) as loader:
        found = [
            (
                batch.indices.tolist(),
                batch["label"].tolist(),
                batch["source"],
                batch["frames"].shape,
            )
            for batch in loader
        ]
        return len(loader), found


def test_every_store_has_the_same_clips_in_the_same_order(videos: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"frames": 4, "stride": 2, "size": 16, "workers": 0}
    for store in STORES:
        shardio.convert(videos, tmp_path / store, store=store, **options)
    expected = epoch(tmp_path / "raw")
    assert sum(len(indices) for indices, *_ in expected[1]) == 7
    for store in STORES[1:]:
        assert epoch(tmp_path / store) == expected, store


def test_what_the_command_makes_by_default_is_inspected_verified_and_loaded(
    videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    options = ["--frames=4", "--size=16", "--workers=0"]
    assert cli.main(["convert", str(videos), out, *options]) == 0
    assert cli.main(["inspect", out]) == 0
    assert cli.main(["verify", out, "--workers=0"]) == 0
    said = capsys.readouterr().out
    assert "lossy: PSNR" in said and "where --store raw is exact" in said
    with shardio.ShardLoader(out, 2, num_workers=0, output="numpy") as loader:
        assert isinstance(loader.dataset.schema["frames"], shardio.Video)
        assert loader.dataset.converter["options"]["store"] == "h264"
        found = [batch["frames"] for batch in loader]
    assert sum(map(len, found)) == 5 + 2 + 5 + 1
    assert {(frames.dtype.name, *frames.shape[1:]) for frames in found} == {("uint8", 4, 16, 16, 3)}
