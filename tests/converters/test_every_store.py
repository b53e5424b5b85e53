"""The stores of videos hold the same clips: one training script goes with each."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio_tools import sample_clips

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
