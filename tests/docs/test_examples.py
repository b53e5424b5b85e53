"""Run the examples as a user does, on small datasets."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import Array, Schema, Video
from shardio_tools import sample_clips

Capture = pytest.CaptureFixture[str]

ROOT = Path(__file__).resolve().parents[2]
TRAIN_CLIPS = ROOT / "docs" / "examples" / "train_clips.py"
LINE = re.compile(
    r"epoch (\d+)  loss (\S+)  accuracy (\S+)%  (\S+) samples/s  waiting for data (\S+)%  \("
)


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make forty clips of 8 frames of 28 x 28 pixels; motion alone tells the four classes apart."""
    root = tmp_path_factory.mktemp("clips")
    for label, (name, motion) in enumerate(sample_clips.MOTIONS.items()):
        (root / "videos" / name).mkdir(parents=True)
        for i in range(2):
            rng = np.random.default_rng([label, i])
            pictures = islice(sample_clips.frames(motion, rng), 40)
            sample_clips.write_clip(root / "videos" / name / f"{i}.mp4", pictures)
    shardio.convert(root / "videos", root / "out", workers=0, frames=8, size=28)
    return root / "out"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_clips", TRAIN_CLIPS)
    if spec is None or spec.loader is None:
        pytest.fail(f"cannot load {TRAIN_CLIPS}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*arguments: object, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run the example, without tinygrad's self-checks, metadata and search for faster kernels."""
    without = dict.fromkeys(("SPEC", "TRACEMETA"), "0") | {"NOOPT": "1"}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **without, **settings}
    command = [sys.executable, str(TRAIN_CLIPS), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def epochs(said: str) -> list[tuple[float, float]]:
    """Read loss and accuracy in percent of each epoch from what the example printed."""
    found = [LINE.match(line) for line in said.splitlines() if line.startswith("epoch")]
    assert None not in found, said
    return [(float(m[2]), float(m[3])) for m in found if m]


def write(
    path: Path, labels: list[int], classes: list[str], shape: tuple[int, ...] = (2, 8, 8, 3)
) -> Path:
    schema = Schema({"frames": Array("uint8", shape), "label": Array("int64")})
    with shardio.DatasetWriter(path, schema, classes=classes) as writer:
        for label in labels:
            writer.append({"frames": np.full(shape, label % 256, np.uint8), "label": label})
    return path


@pytest.mark.slow
@pytest.mark.cpu_device
def test_training_on_sample_clips_learns_to_tell_the_motions_apart(clips: Path) -> None:
    done = run(clips, "--epochs", 3, "--batch-size", 8, "--workers", 2)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "40 clips, 4 classes (across, around, pulse, updown), CPU"
    (first_loss, _), *_, (last_loss, last_accuracy) = epochs(done.stdout)
    assert last_loss < 0.7 * first_loss
    assert last_accuracy > 60  # a guess is right in 25 of 100 cases


@pytest.mark.slow
def test_two_tiny_steps_need_no_compiler(tmp_path: Path) -> None:
    out = write(tmp_path / "out", [0, 1, 0, 1], ["a", "b"], (4, 4, 4, 3))
    no_clang = {"PATH": str(tmp_path), "CC": str(tmp_path / "clang")}
    done = run(out, "--tiny", "--workers", 0, XDG_CACHE_HOME=str(tmp_path), **no_clang)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].endswith(", PYTHON")
    ((loss, accuracy),) = epochs(done.stdout)
    assert np.isfinite(loss) and 0 <= accuracy <= 100
    assert "for the first 2 steps" in done.stdout


def test_stored_videos_and_pixels_agree(clips: Path, tmp_path: Path, example: ModuleType) -> None:
    options: dict[str, Any] = {"workers": 0, "frames": 8, "size": 28, "store": "raw"}
    shardio.convert(clips.parent / "videos", tmp_path / "out", **options)
    for folder, kind in ((clips, Video), (tmp_path / "out", Array)):
        with shardio.open(folder) as dataset:
            assert isinstance(dataset.schema["frames"], kind)
            assert example.problem_with(dataset) is None
            assert example.look_at(dataset, shrunk=False) == (40, (8, 28, 28, 3))
            assert example.look_at(dataset, shrunk=True) == (40, (2, 10, 10, 3))


def test_a_dataset_that_does_not_exist_is_one_line(tmp_path: Path) -> None:
    done = run(tmp_path / "no")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"{tmp_path / 'no'}: there is no such folder\n"


@pytest.mark.parametrize(
    ("labels", "classes", "words"),
    [
        ([], ["a", "b"], "holds no clip"),
        ([0, -1, 1, -1], ["a", "b"], "has 2 samples of 4 without a class (label -1)"),
        ([0, 0], ["a"], "has one class only"),
    ],
)
def test_what_cannot_be_trained_on_is_one_line_that_says_why(
    labels: list[int],
    classes: list[str],
    words: str,
    example: ModuleType,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    out = write(tmp_path / "out", labels, classes)
    assert example.main([str(out)]) == 1
    said, complaint = capsys.readouterr()
    assert said == "" and complaint.startswith(f"{out} {words}") and complaint.count("\n") == 1


def test_other_datasets_are_refused(example: ModuleType, tmp_path: Path, capsys: Capture) -> None:
    with shardio.DatasetWriter(tmp_path / "out", Schema({"x": Array("int64")})) as writer:
        writer.append({"x": 1})
    assert example.main([str(tmp_path / "out")]) == 1
    assert "has no field frames or label" in capsys.readouterr().err


def test_undecodable_clips_are_counted(clips: Path, tmp_path: Path, example: ModuleType) -> None:
    videos = tmp_path / "videos"
    shutil.copytree(clips.parent / "videos", videos)
    damaged = next(videos.rglob("1.mp4"))
    data = bytearray(damaged.read_bytes())
    middle = data.index(b"mdat") + 2 * len(data) // 3
    data[middle : middle + 100] = bytes(100)
    damaged.write_bytes(data)
    shardio.convert(videos, tmp_path / "out", workers=0, frames=8, size=28, store="packets")
    options: dict[str, Any] = {"num_workers": 0, "output": "numpy", **example.MAY_SKIP}
    with shardio.ShardLoader(tmp_path / "out", 4, **options) as loader:
        said = example.train_epoch(loader, lambda *_: np.zeros(2), None)
    assert re.search(r"  skipped, as they do not decode: [1-5]$", said)


@pytest.mark.parametrize(
    "shape", [(16, 112, 112, 3), (1, 8, 8, 3), (5, 30, 61, 1), (8, 256, 340, 3)]
)
def test_the_model_takes_clips_of_any_shape(shape: tuple[int, ...], example: ModuleType) -> None:
    from tinygrad.tensor import Tensor

    clips = Tensor.empty(2, *shape, dtype="uint8")  # nothing is computed
    assert tuple(example.ClipNet(shape, 3, width=4)(clips).shape) == (2, 3)
