"""Episodes of robots, as LeRobot loads them.

lerobot 0.4 requires PyAV below 16, with which shardio does not work; with PyAV 18, both work.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.converter_kinds.kind import Kind


def _make_episodes(place: Path) -> None:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    features = {
        name: {"dtype": "float32", "shape": (14,), "names": None}
        for name in ("observation.state", "action")
    }
    made = LeRobotDataset.create("made/episodes", 30, features, root=place / "set")
    for _ in range(20):
        for _ in range(300):
            made.add_frame({name: np.zeros(14, "float32") for name in features} | {"task": "x"})
        made.save_episode()
    made.finalize()


def _make_cameras(place: Path) -> None:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    camera = {"dtype": "video", "shape": (96, 128, 3), "names": ["height", "width", "channels"]}
    features = {
        "observation.state": {"dtype": "float32", "shape": (14,), "names": None},
        **{f"observation.images.{name}": camera for name in ("front", "wrist")},
    }
    made = LeRobotDataset.create("made/episodes", 30, features, root=place / "set")
    rng = np.random.default_rng(0)
    for _ in range(2):
        small = rng.integers(0, 255, (12, 16, 3), "uint8")
        for number in range(40):
            picture = np.roll(small.repeat(8, 0).repeat(8, 1), number, 1)
            made.add_frame(
                {name: picture for name in features if "images" in name}
                | {"observation.state": np.zeros(14, "float32"), "task": "x"}
            )
        made.save_episode()
    made.finalize()


def _load_episodes(path: str) -> Iterator[Any]:
    if not path.endswith("info.json"):
        return
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    yield from LeRobotDataset("made/episodes", root=Path(path).parents[1]).hf_dataset


def _load_cameras(path: str) -> Iterator[Any]:
    if not path.endswith("info.json"):
        return
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    dataset = LeRobotDataset("made/episodes", root=Path(path).parents[1], video_backend="pyav")
    yield from (dataset[number] for number in range(len(dataset)))


KINDS: Final = {
    "lerobot": Kind("lerobot", _make_episodes, _load_episodes),
    "lerobot videos": Kind("lerobot", _make_cameras, _load_cameras),
    "lerobot checked": Kind("lerobot", _make_cameras, _load_cameras, {"check": True}),
}
