"""The group gpu of `tools/bench`: small runs on the CPU, and what it says without a GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.__main__ import load_groups, main
from benchmarks.harness import CASES

pytestmark = pytest.mark.process

CPU = {"tinygrad": "PYTHON", "torch": "cpu", "jax": "cpu"}
FRAMEWORKS = pytest.mark.parametrize("name", CPU)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the steps be as small as possible, and the epochs short."""
    monkeypatch.setattr(gpu, "N_BATCHES", 4)
    monkeypatch.setattr(gpu, "N_SAMPLES", 2)
    monkeypatch.setattr(gpu, "MULTIPLE", 1)
    monkeypatch.setattr(gpu, "MAX_SIZE", 4)


@FRAMEWORKS
def test_a_case_runs_on_the_cpu(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"needs {name}")
    options = [f"--set=device={CPU[name]}", "--set=batch=1", "--set=seconds=0.001"]
    assert main([f"gpu.{name}", "--rounds=1", f"--folder={tmp_path}", *options]) == 0
    out = capsys.readouterr().out
    for lane in ("bare copy", "loader, reuse=True", "NumPy arrays, each uploaded"):
        assert f"host's own, {lane}  " in out
    for unit in ("share hidden", "share waiting"):
        assert out.count(unit) == 3
    assert "ok" not in out and "MISSED" not in out, "the limits are those of a GPU"


@FRAMEWORKS
def test_a_case_names_what_is_missing(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load_groups()
    assert CASES[f"gpu.{name}"].parameters["device"] in ("CUDA", "cuda", "gpu")
    missing = "CUDA:99" if name == "tinygrad" else "nothing"
    assert main([f"gpu.{name}", f"--folder={tmp_path}", f"--set=device={missing}"]) == 3
    assert "not measured: " in (out := capsys.readouterr().out)
    assert "--set device=NAME measures another device" in out
    assert not list(tmp_path.iterdir()), "no dataset is written in vain"
