"""Make the small LeRobot data set that tests of `--kind lerobot` read, with LeRobot itself.

    python tests/converters/made/make_lerobot.py tests/converters/made/lerobot/arm

Needs `lerobot`, and none of its packages for training: torchvision may be missing. What its own
reader gives goes into `values.json`, beside the folder.
"""

from __future__ import annotations

import importlib.machinery
import json
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np

FPS, SIDE = 10, 64
LENGTHS = (7, 12, 9)
TASKS = ("pick up the cube", "put it down \u2014 l\u00e4ngs")
CAMERAS = ("front", "wrist")
FEATURES: dict[str, dict[str, Any]] = {
    "observation.state": {"dtype": "float32", "shape": (3,), "names": ["x", "y", "grip"]},
    "action": {"dtype": "float32", "shape": (2,), "names": ["dx", "dy"]},
    "observation.force": {"dtype": "float64", "shape": (2, 3), "names": None},
    "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
    "next.done": {"dtype": "bool", "shape": (1,), "names": None},
    **{
        f"observation.images.{name}": {
            "dtype": "video",
            "shape": (SIDE, SIDE, 3),
            "names": ["height", "width", "channels"],
        }
        for name in CAMERAS
    },
}


def main(place: Path) -> None:
    """Record three episodes, and say what LeRobot reads of them."""
    _pretend_torchvision()
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    shutil.rmtree(place, ignore_errors=True)
    made = LeRobotDataset.create("made/arm", FPS, FEATURES, root=place, robot_type="arm")
    for episode, length in enumerate(LENGTHS):
        for frame in range(length):
            made.add_frame(_frame(episode, frame))
        made.save_episode()
    made.finalize()
    read = LeRobotDataset("made/arm", root=place)
    table = read.hf_dataset.with_format(None)
    values = {name: list(table[name]) for name in table.column_names}
    (place.parent / "values.json").write_text(json.dumps(values) + "\n", encoding="utf-8")


def _frame(episode: int, frame: int) -> dict[str, Any]:
    """One frame; the grey of the pictures rises with the time, so that each is told by it."""
    rng = np.random.default_rng((episode, frame))
    found: dict[str, Any] = {
        "observation.state": rng.random(3, "float32"),
        "action": rng.random(2, "float32"),
        "observation.force": rng.random((2, 3)),
        "next.reward": np.full(1, frame / 10, "float32"),
        "next.done": np.array([frame + 1 == LENGTHS[episode]]),
        "task": TASKS[episode == 1 and frame > 5],
    }
    for number, name in enumerate(CAMERAS):
        grey = 20 + 15 * frame + 5 * episode
        picture = np.full((SIDE, SIDE, 3), grey, "uint8")
        picture[: SIDE // 2, :, number] = 255 - grey
        found[f"observation.images.{name}"] = picture
    return found


def _pretend_torchvision() -> None:
    """Give LeRobot the names that it imports and that recording does not use."""
    v2 = types.ModuleType("torchvision.transforms.v2")
    v2.Transform = v2.functional = object  # type: ignore[attr-defined]
    transforms = types.ModuleType("torchvision.transforms")
    transforms.v2 = v2  # type: ignore[attr-defined]
    top = types.ModuleType("torchvision")
    top.transforms = transforms  # type: ignore[attr-defined]
    functional = types.ModuleType("torchvision.transforms.v2.functional")
    for one in (top, transforms, v2, functional):
        one.__spec__ = importlib.machinery.ModuleSpec(one.__name__, None)
        one.__path__ = []
        sys.modules[one.__name__] = one


if __name__ == "__main__":
    main(Path(sys.argv[1]))
