"""`shardio demo`: its files and figures, its two networks, and the folders that it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio._base.statistics import LoaderStats, LoadingStats
from shardio.errors import UnsupportedEnvironment
from shardio_tools import cli, demo, sample_clips
from shardio_tools.inspect import pictures
from shardio_tools.screen import Done

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("shared_zygote")]

Capture = pytest.CaptureFixture[str]
Network = type[demo.NumpyNetwork] | type[demo.TinygradNetwork]

NETWORKS = [
    pytest.param(demo.NumpyNetwork, id="numpy"),
    pytest.param(demo.TinygradNetwork, id="tinygrad", marks=pytest.mark.cpu_device),
]


@pytest.fixture
def is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw two videos of 48 frames of each class, and train for two epochs on NumPy."""
    monkeypatch.setattr(demo, "N_VIDEOS", 2)
    monkeypatch.setattr(sample_clips, "N_FRAMES", 48)
    monkeypatch.setattr(demo, "MAX_EPOCHS", 2)
    monkeypatch.setattr(demo, "tinygrad_problem", lambda: "no device")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drawn")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_clips, "N_FRAMES", 48)
        sample_clips.write_clips(folder, n_clips=2)
    return folder


@pytest.mark.usefixtures("is_small")
def test_a_demo_draws_converts_trains_and_reports(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "new" / "demo"
    assert cli.main(["demo", str(out), "--seconds", "3", "--json"]) == 0
    said, errors = capsys.readouterr()
    report = json.loads(said)
    assert report == json.loads((out / demo.REPORT).read_text()) and errors == ""
    assert report["n_videos"] == dict.fromkeys(sample_clips.MOTIONS, 2)
    assert (report["network"], report["n_tested"]) == ("NumPy", 2 * 3)
    assert 1 <= report["n_epochs"] <= 2 and 0 <= report["waiting_share"] <= 1
    assert report["n_workers"] >= 1 and report["samples_per_s"] > 0 and report["step_s"] > 0
    assert 0 <= report["accuracy"] <= 1 and 0 < report["guess"] <= 1
    assert Path(report["sheet"]).read_bytes().startswith(b"\x89PNG")
    assert len([*Path(report["videos"]).rglob("*.mp4")]) == 8
    with shardio.open(report["dataset"]) as dataset:
        assert len(dataset) == 8 and {*dataset.subsets} == {"train", "test"}


@pytest.mark.slow
@pytest.mark.usefixtures("is_small")
def test_a_demo_says_each_step_and_runs_again(
    tmp_path: Path, drawn: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    videos = tmp_path / "videos"
    shutil.copytree(drawn, videos)
    shutil.copy(drawn / "pulse" / "pulse-0.mp4", videos)  # of no class
    before = {path: path.read_bytes() for path in videos.rglob("*.mp4")}
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert cli.main(["demo", "--videos", "videos", "--seconds", "3"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "$ shardio convert videos shardio-demo/dataset"
        assert "$ shardio inspect shardio-demo/dataset --sheet shardio-demo/sheet.png" in lines
        assert "wrote shardio-demo/sheet.png" in lines
        assert any("needs clang" in line for line in lines)
        assert any(line.startswith("  epoch 1  loss ") for line in lines)
        assert any("worker" in line and " loaded " in line and " clips/s" in line for line in lines)
        assert (
            f"some classes have fewer than {demo.FEW_VIDEOS} videos: too few to learn from" in lines
        )
        assert lines[-1].startswith("accuracy ") and lines[-1].endswith("%)")
        assert "of the other videos (always guessing the most frequent class: " in lines[-1]
    assert {path: path.read_bytes() for path in videos.rglob("*.mp4")} == before
    assert sorted(path.name for path in (tmp_path / "shardio-demo").iterdir()) == [
        *("dataset", demo.REPORT, "sheet.png")
    ]
    report = json.loads((tmp_path / "shardio-demo" / demo.REPORT).read_text())
    assert report["n_videos"] == dict.fromkeys(sample_clips.MOTIONS, 2)  # and one without class


FIGURES = {
    "network": "none",
    "n_epochs": 1,
    "training_s": 1.5,
    "accuracy": 0.5,
    "guess": 0.25,
    "n_tested": 4,
    "n_workers": 2,
    "samples_per_s": 1234.5,
    "step_s": 0.0025,
    "waiting_share": 0.125,
}


@pytest.mark.parametrize(
    ("accuracy", "n_epochs", "warned"), [(0.3, 1, True), (0.3, 8, False), (0.5, 1, False)]
)
def test_a_demo_that_was_too_short_says_so(
    tmp_path: Path,
    drawn: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    accuracy: float,
    n_epochs: int,
    warned: bool,
) -> None:
    figures = FIGURES | {"accuracy": accuracy, "n_epochs": n_epochs}
    monkeypatch.setattr(demo, "_train", lambda *_: figures)
    elements: list[Any] = []
    monkeypatch.setattr(
        demo, "print_result", lambda _report, _options, found: elements.extend(found)
    )
    assert cli.main(["demo", str(tmp_path / "out"), "--videos", str(drawn)]) == 0
    assert ("too short to learn: give it more --seconds" in elements) == warned
    (done,) = (each for each in elements if isinstance(each, Done))
    assert done.role == ("good" if accuracy == 0.5 else "warning")


def test_quiet_prints_nothing(
    tmp_path: Path, drawn: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "_train", lambda *_: FIGURES)
    given = ["demo", str(tmp_path / "out"), "--videos", str(drawn), "--quiet"]
    assert cli.main(given) == 0
    assert capsys.readouterr() == ("", "")


def test_figures_leave_out_the_first_epoch(
    drawn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "tinygrad_problem", lambda: "no device")
    monkeypatch.setattr(demo, "MAX_EPOCHS", 3)
    epochs = [LoadingStats(9.0, 8.0, n_samples=5, n_batches=1)]
    epochs += [LoadingStats(1.0, w, n_samples=100, n_batches=10) for w in (0.25, 0.75)]

    class Loader:
        """The loader of the demo, with invented figures."""

        def __init__(self, loader: shardio.ShardLoader) -> None:
            self._loader, self._left = loader, iter(epochs)
            self.dataset, self.view = loader.dataset, loader.view

        def __iter__(self) -> Any:
            return iter(self._loader)

        def stats(self) -> LoaderStats:
            latest = next(self._left, epochs[-1])
            return LoaderStats(0, 2, latest, latest)

    make = demo._loader
    monkeypatch.setattr(demo, "_loader", lambda *given: Loader(make(*given)))
    shardio.convert(drawn, tmp_path / "set", workers=0)
    figures = demo._train(tmp_path / "set", 60, lambda _: None)
    assert (figures["n_epochs"], figures["n_workers"]) == (3, 2)
    assert (figures["samples_per_s"], figures["waiting_share"]) == (100, 0.5)
    assert figures["step_s"] == pytest.approx(0.05)
    report = demo.DemoReport("", "out", None, {"a": 9}, **(figures | {"waiting_share": 0.05}))
    lines = [*demo._conclusion(report)]
    assert "; 2 workers loaded 100 clips/s, after the first epoch" in str(lines[0])
    assert lines[1] == "decoding keeps up with the network (50 ms a step)"
    slow_figures: dict[str, Any] = FIGURES | {"step_s": 10.2}
    slow = demo.DemoReport("", "out", None, {"a": 9}, **slow_figures)
    assert "(10,200 ms a step)" in str([*demo._conclusion(slow)][1])


@pytest.mark.parametrize("side", [14, 30, 112, 3584])
def test_features_are_means_of_blocks(side: int) -> None:
    noise = np.random.default_rng(side).bytes(2 * side * (side + 3) * 3)
    frames = np.frombuffer(noise, np.uint8).reshape(2, side, side + 3, 3)
    found = demo.features({"frames": frames, "label": 1})["pictures"]
    k = side // demo.PICTURE_SIDE
    rows, columns = (n // k for n in frames.shape[1:3])
    blocks = frames[:, : rows * k, : columns * k].reshape(2, rows, k, columns, k, 3)
    small = blocks.mean((2, 4), dtype=np.float64) / 255
    expected = np.stack([small.mean(0) - 0.5, 4 * small.std(0)]).reshape(-1)
    assert found.dtype == np.float32 and np.abs(found - expected).max() < 1e-4


def test_a_folder_without_videos_is_answered_for_the_demo(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "csvs").mkdir()
    (tmp_path / "csvs" / "a.csv").write_text("a\n1\n")
    given = ["demo", str(tmp_path / "out"), "--videos", str(tmp_path / "csvs"), "--quiet"]
    assert cli.main(given) == 2
    err = capsys.readouterr().err
    assert err == f"shardio: {tmp_path / 'csvs'}: holds no video; {demo._VIDEOS_WANTED}\n"


def test_without_pillow_there_is_no_sheet(
    tmp_path: Path, drawn: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> Any:
        raise UnsupportedEnvironment("pictures need Pillow: pip install '.[images]'")

    monkeypatch.setattr(pictures, "pillow_image", missing)
    monkeypatch.setattr(demo, "_train", lambda *_: FIGURES)
    out = tmp_path / "out"
    assert cli.main(["demo", str(out), "--videos", str(drawn)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        "accuracy 50.0% on 4 clips of the other videos "
        "(always guessing the most frequent class: 25.0%)" in lines
    )
    assert "trained 1 epoch in 1.5 s; 2 workers loaded 1,234 clips/s" in lines
    assert (
        "the network is small (2.5 ms a step), so decoding sets the pace: clips/s depend on the "
        "CPUs and the size of the frames" in lines
    )
    assert "no contact sheet: pictures need Pillow: pip install '.[images]'" in lines
    assert json.loads((out / demo.REPORT).read_text())["sheet"] is None


def test_a_folder_of_something_else_is_refused(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "notes.txt").touch()
    for out in (tmp_path, tmp_path / "notes.txt"):
        assert cli.main(["demo", str(out)]) == cli.USAGE
        assert f"{out}: not an empty folder or an earlier demo" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("seconds", ["0", "-1", "nan"])
def test_a_training_takes_time(seconds: str, tmp_path: Path, capsys: Capture) -> None:
    assert cli.main(["demo", str(tmp_path), "--seconds", seconds]) == cli.USAGE
    assert f"--seconds is {seconds}; it must be more than 0" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["across/across-0", "across/across-1"], "found 2 videos of 1 class"),
        (["across/across-0", "pulse/pulse-0"], "found 2 videos of 2 classes"),
    ],
)
def test_videos_that_no_network_can_learn_from_are_refused(
    names: list[str], found: str, drawn: Path, tmp_path: Path, capsys: Capture
) -> None:
    for name in names:
        (tmp_path / "videos" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(drawn / f"{name}.mp4", tmp_path / "videos" / name)
    given = ["demo", str(tmp_path / "out"), "--videos", str(tmp_path / "videos"), "--quiet"]
    assert cli.main(given) == cli.USAGE
    assert found in capsys.readouterr().err


def test_features_are_the_mean_picture_and_the_motion() -> None:
    frames = np.full((4, 28, 30, 3), 255, np.uint8)
    sample = {"frames": frames, "label": np.int64(2)}
    still = demo.features(sample)
    assert still["label"] == 2 and still["pictures"].dtype == np.float32
    mean, motion = still["pictures"].reshape(2, 14, 15, 3)
    assert np.allclose(mean, 0.5) and np.allclose(motion, 0)
    frames[::2, :2, :2] = 0  # flickers in a corner
    mean, motion = demo.features(sample)["pictures"].reshape(2, 14, 15, 3)
    assert np.allclose(mean[0, 0], 0) and np.allclose(motion[0, 0], 2)
    assert np.allclose(motion[1:], 0) and np.allclose(motion[0, 1:], 0)


def batch_of(n: int) -> Any:
    """Return clips whose first feature tells the class, as numbers and as a batch of tinygrad."""
    rng = np.random.default_rng(0)
    labels = np.arange(n) % 3
    features = rng.normal(0, 0.1, (n, 6)).astype(np.float32)
    features[:, 0] += labels
    return {"pictures": features, "label": labels}


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_network_learns(kind: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "LEARNING_RATE", 0.02)
    batch = given = batch_of(12)
    if kind is demo.TinygradNetwork:
        from tinygrad.tensor import Tensor

        given = {name: Tensor(values) for name, values in batch.items()}
    network = kind(6, 3)
    results = [network.step(given) for _ in range(60)]
    assert results[-1][0] < 0.5 * results[0][0] and results[-1][1] == 1.0
    assert np.array_equal(network.classes_of(given), batch["label"])


def test_the_gradients_by_hand_are_those_of_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(5)
    network = demo.NumpyNetwork(6, 3)
    network._weights = [weight.astype(np.float64) for weight in network._weights]
    found: list[Any] = []
    monkeypatch.setattr(network, "_update", found.append)
    network.step(batch)
    gradients = found[0]
    for weight, gradient in zip(network._weights, gradients, strict=True):
        for place in [(0,) * weight.ndim, tuple(n - 1 for n in weight.shape)]:
            losses = []
            for change in (1e-6, -1e-6):
                weight[place] += change
                losses.append(network.step(batch)[0])
                weight[place] -= change
            assert (losses[0] - losses[1]) / 2e-6 == pytest.approx(gradient[place], abs=1e-6)


@pytest.mark.slow
@pytest.mark.cpu_device
@pytest.mark.usefixtures("is_small")
def test_tinygrad_trains_where_it_has_a_device(
    tmp_path: Path, drawn: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "tinygrad_problem", lambda: None)
    given = ["demo", str(tmp_path / "out"), "--videos", str(drawn), "--seconds", "3", "--json"]
    assert cli.main(given) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["network"].startswith("tinygrad, device ") and report["n_tested"] == 6


@pytest.mark.cpu_device
def test_a_device_that_computes_is_no_problem() -> None:
    assert demo.tinygrad_problem() is None
