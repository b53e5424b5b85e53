"""LeRobot, whose datasets have videos of episodes, in torch's DataLoader."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.racers.workloads import (
    CLIP_FRAMES,
    CLIP_SIDE,
    VIDEO_FRAMES,
    VIDEO_RATE,
    Epochs,
    Workload,
)

KEY: Final = "observation.image"
NAME: Final = "race/clips"


class Starts:
    """A sampler that draws a random first frame of each episode, in a new order in each epoch."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.epoch = 0

    def __len__(self) -> int:
        return self.workload.n_samples

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        episodes = self.workload.order(self.epoch)
        n_starts = VIDEO_FRAMES - CLIP_FRAMES + 1
        starts = np.random.default_rng(self.epoch).integers(0, n_starts, len(episodes))
        return iter((episodes * VIDEO_FRAMES + starts).tolist())


def lerobot(workload: Workload, workers: int) -> Epochs:
    """Load clips of 16 frames from a dataset of LeRobot."""
    import torch
    from lerobot.datasets.lerobot_dataset import LeRobotDataset
    from torch.utils.data import DataLoader

    folder = workload.made("lerobot", lambda folder: _write(workload, folder))
    dataset = LeRobotDataset(
        NAME,
        root=folder,
        delta_timestamps={KEY: [n / VIDEO_RATE for n in range(CLIP_FRAMES)]},
        image_transforms=_bytes,
        video_backend="torchcodec",
    )

    def clips(items: Any) -> Any:
        return torch.stack([item[KEY] for item in items])

    options: dict[str, Any] = {"persistent_workers": True, "prefetch_factor": 4}
    options |= {"sampler": Starts(workload), "collate_fn": clips}
    loader = DataLoader(dataset, workload.batch_size, num_workers=workers, **options)
    return lambda epoch: (batch.numpy() for batch in loader)


def _bytes(frames: Any) -> Any:
    """Return frames of float32 with channels first as bytes with channels last."""
    import torch

    return frames.mul_(255).round_().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


class VideoCopier:
    """A stand-in for LeRobot's video encoder: it returns copies of videos, without statistics."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = iter(paths)
        self._folder = Path()

    def start_episode(self, video_keys: list[str], temp_dir: Path) -> None:
        """Keep the folder of temporary files."""
        self._folder = temp_dir

    def feed_frame(self, key: str, frame: Any) -> None:
        """Ignore a frame."""

    def finish_episode(self) -> Any:
        """Return a copy of the next video, which the writer moves or appends to its file."""
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        return {KEY: (Path(shutil.copy(next(self._paths), folder)), None)}

    def cancel_episode(self) -> None:
        """Do nothing: every episode has been finished."""

    def close(self) -> None:
        """Do nothing."""


def _write(workload: Workload, folder: Path) -> None:
    """Write an episode for each video, with its stream of H.264 as it is."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    shape = (CLIP_SIDE, CLIP_SIDE, 3)
    names = ["height", "width", "channels"]
    features = {KEY: {"dtype": "video", "shape": shape, "names": names}}
    dataset = LeRobotDataset.create(NAME, VIDEO_RATE, features, root=folder, vcodec="h264")
    dataset._streaming_encoder = VideoCopier(workload.files())
    nothing = np.zeros(shape, np.uint8)
    for _ in range(workload.n_samples):
        for _ in range(VIDEO_FRAMES):
            dataset.add_frame({KEY: nothing, "task": "none"})
        dataset.save_episode()
    dataset.finalize()
