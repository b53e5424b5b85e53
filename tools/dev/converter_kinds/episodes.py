"""Episodes of robots, as LeRobot loads them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from dev.converter_kinds.kind import Kind


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


def _load_episodes(path: str) -> Iterator[Any]:
    if not path.endswith("info.json"):
        return
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    yield from LeRobotDataset("made/episodes", root=Path(path).parents[1]).hf_dataset


KINDS: Final = {"lerobot": Kind("lerobot", _make_episodes, _load_episodes)}
