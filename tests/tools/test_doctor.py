"""`shardio doctor`: the facts that it finds, its advice, and its exit codes."""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import sys
import tomllib
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import numpy as np
import pytest

import shardio
from shardio._workers.processes import linux
from shardio.errors import UnsupportedEnvironment
from shardio.measuring import machine_limits
from shardio_tools import cli, doctor
from tests.terminal import Terminal

# tinygrad runs clang for kernels that its cache in the home folder lacks.
pytestmark = pytest.mark.process

Capture = pytest.CaptureFixture[str]

ROOT = Path(__file__).resolve().parents[2]
NO_GPUS = {"GPUs": "none", "tinygrad": "0.14, default device CPU", "torch": "no", "jax": "no"}


@pytest.fixture(autouse=True)
def without_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not start an interpreter for each framework."""
    monkeypatch.setattr(doctor, "gpus", lambda: dict(NO_GPUS))


@pytest.mark.process  # the first call of platform.platform may run uname
def test_the_report_has_versions_extras_limits_and_gpus(capsys: Capture) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["shardio"], found["python"]) == (shardio.__version__, platform.python_version())
    numpy = found["packages"]["numpy"]
    assert (numpy["found"], numpy["is_fit"], numpy["note"]) == (np.__version__, True, None)
    assert found["packages"]["av"]["note"].startswith("FFmpeg's libavcodec ")
    assert [*found["extras"]] == [*doctor.EXTRAS]
    assert [*found["extras"]["images"]["packages"]] == ["pillow", "simplejpeg"]
    assert found["limits"]["n_usable_cpus"] >= 1 and found["gpus"] == NO_GPUS
    assert found["problems"] == []


def test_the_screen_fits_24_lines_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TERM", "xterm-256color"), ("COLUMNS", "80"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert cli.main(["doctor"]) == 0
    lines = re.sub("\x1b\\[[0-9;]*m", "", terminal.getvalue()).splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    labels = [line[2 : 2 + doctor.LABEL_WIDTH].strip() for line in lines]
    wanted = ["shardio", "packages", "extras", "CPUs", "memory", "open files", "memory maps"]
    assert [label for label in labels if label in wanted] == wanted
    assert f"numpy {np.__version__}" in " ".join(" ".join(lines).split())
    assert lines[-1].startswith("✓ checked this machine: everything is fine")


def test_quiet_prints_problems_only(capsys: Capture) -> None:
    assert cli.main(["doctor", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_extras_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert {*doctor.EXTRAS, "dev", "docs", "peers"} == set(project["optional-dependencies"])
    page = (ROOT / "docs" / "README.md").read_text("utf-8")
    assert all(f"`{name}`" in page for name in doctor.EXTRAS)
    assert "pip install '.[images,view]'" in (ROOT / "README.md").read_text("utf-8")


def test_what_is_missing_or_too_old_is_a_problem_or_has_a_hint(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    lines = ["numpy>=99", "no-such-package<3,>=2", 'pillow>=99; extra == "images"', "rich>=1"]
    more = ["ray>=2.40 ; extra == 'ray'", "pytest>=1; (sys_platform == 'linux') and extra == 'dev'"]
    monkeypatch.setattr(doctor, "requires", lambda _: [*lines, *more])
    assert cli.main(["doctor", "--json"]) == cli.ENVIRONMENT
    found = json.loads(capsys.readouterr().out)
    assert [*found["packages"]] == ["numpy", "no-such-package", "rich"]
    assert found["problems"] == [
        f"numpy: version {np.__version__}; shardio needs numpy>=99: pip install 'numpy>=99'",
        "no-such-package: not installed; shardio needs no-such-package<3,>=2: "
        "pip install 'no-such-package<3,>=2'",
    ]
    assert "does not fit (>=99): pip install '.[images]' in a checkout" in found["advice"][0]
    assert found["extras"]["images"]["is_installed"] is False
    assert cli.main(["doctor"]) == cli.ENVIRONMENT
    out = " ".join(capsys.readouterr().out.split())
    assert "problem: numpy: version" in out and "no-such-package missing" in out
    assert "ray (clusters)" in out and out.endswith("checked this machine: 2 problems")
    assert cli.main(["doctor", "--quiet"]) == cli.ENVIRONMENT
    assert capsys.readouterr().err.startswith("shardio: numpy: version ")


def test_shardio_that_was_not_installed_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def missing(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "requires", missing)
    assert cli.main(["doctor"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert " packages unknown " in out and " advice: shardio runs from a folder" in out


@pytest.mark.parametrize(
    ("found", "needs", "does"),
    [
        ("2.4.6", ">=2.4.6", True),
        ("2.4", ">=2.4.1", False),
        ("17.0", ">=17,<19", True),
        ("19.0.1", ">=17,<19", False),
        ("2.10.0+cu126", ">=2.3", True),
        ("0.8.0", "==0.8.0", True),
        ("0.8.1", "==0.8", False),
        ("3", "", True),
    ],
)
def test_versions_are_compared_as_numbers(found: str, needs: str, does: object) -> None:
    assert doctor.satisfies(found, needs) is does


def test_low_limits_get_advice(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    low = replace(
        machine_limits(),
        memory_bytes=5 << 20,
        memory_limit="the limit of a test",
        max_open_files=256,
        max_raised_open_files=4096,
        max_maps=1000,
        quota_cpus=1,
    )
    monkeypatch.setattr(doctor, "machine_limits", lambda: low)
    monkeypatch.setattr(doctor, "shared_memory", lambda: (64 << 20, 1 << 20))
    monkeypatch.setitem(NO_GPUS, "tinygrad", "0.14, fails: RuntimeError: no usable devices")
    monkeypatch.setenv("PATH", "")
    assert cli.main(["doctor"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "little memory is free (the limit of a test)" in out
    assert "run `ulimit -n 4096` first" in out and "open files 256 (can be raised to 4,096)" in out
    assert "sysctl -w vm.max_map_count=262144" in out and "--shm-size=8g" in out
    assert "on the CPU it needs clang" in out and "(a quota allows 1)" in out
    assert out.endswith("checked this machine: shardio works here; 5 pieces of advice")
    monkeypatch.setattr(
        doctor,
        "machine_limits",
        lambda: replace(low, max_open_files=256, max_raised_open_files=256),
    )
    cli.main(["doctor", "--json"])
    assert "ask for a higher hard limit (`ulimit -Hn`)" in capsys.readouterr().out


def test_a_missing_feature_of_the_kernel_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def refuse(pid: int) -> int:
        raise UnsupportedEnvironment("loaders need pidfd_open")

    monkeypatch.setattr(linux, "open_pidfd", refuse)
    assert cli.main(["doctor"]) == cli.ENVIRONMENT
    out = capsys.readouterr().out
    assert "problem: loaders need pidfd_open\n" in out and "start methods  thread\n" in out


def test_a_library_that_cannot_be_loaded_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def refuse() -> dict[str, str]:
        raise ImportError("libavcodec.so: no such file")

    monkeypatch.setattr(doctor, "library_versions", refuse)
    assert cli.main(["doctor", "--json"]) == cli.ENVIRONMENT
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert problems == ["av fails: libavcodec.so: no such file"]


def test_machine_limits_are_those_of_this_process() -> None:
    found = machine_limits()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert (found.max_open_files, found.max_raised_open_files) == (soft, hard)
    assert found.n_cpus == os.cpu_count() and 1 <= found.n_usable_cpus <= found.n_cpus
    assert found.memory_bytes > 0 and found.memory_limit and found.max_maps > 0
    assert found.missing == ()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        assert machine_limits().max_open_files == soft - 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_machine_without_shared_memory_has_none(tmp_path: Path) -> None:
    assert doctor.shared_memory(str(tmp_path / "no")) is None
    total, free = doctor.shared_memory(str(tmp_path)) or (0, 0)
    assert total >= free > 0


def test_gpus_are_those_whose_drivers_are_loaded(tmp_path: Path) -> None:
    assert doctor.visible_gpus(str(tmp_path)) == []
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "kfd"):
        (tmp_path / "dev" / name).touch()
    assert doctor.visible_gpus(str(tmp_path)) == ["NVIDIA", "NVIDIA", "AMD"]
    about = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0"
    about.mkdir(parents=True)
    (about / "information").write_text("Model: \t NVIDIA H100\nIRQ: 5\n")
    assert doctor.visible_gpus(str(tmp_path)) == ["NVIDIA H100", "AMD"]


def test_there_is_advice_if_torch_sees_no_gpu_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    advice = "torch sees no GPU: its version of CUDA may need a newer driver"
    for gpus, torch, is_given in (
        ("NVIDIA H100", "2.11.0, CUDA 13.0, 0 visible GPUs", True),
        ("NVIDIA H100", "2.11.0, CUDA 13.0, 1 visible GPUs", False),
        ("none", "2.11.0, CUDA 13.0, 0 visible GPUs", False),
    ):
        monkeypatch.setitem(NO_GPUS, "GPUs", gpus)
        monkeypatch.setitem(NO_GPUS, "torch", torch)
        assert cli.main(["doctor"]) == 0
        assert (advice in " ".join(capsys.readouterr().out.split())) == is_given


@pytest.mark.process
def test_a_probe_returns_the_last_line_of_a_program_or_of_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert doctor.probe("print('starting'); print('default device CPU')") == "default device CPU"
    assert doctor.probe("raise SystemExit('no device')") == "fails: no device"
    assert doctor.probe("import sys; sys.exit(7)") == "fails: exit code 7"
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert doctor.probe("pass").startswith("fails: [Errno 2]")


def test_frameworks_are_asked_only_if_they_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    versions = {"torch": "2.10.0", "jax": "0.8.0", "jax-cuda12-plugin": "0.8.0"}
    asked: list[str] = []
    monkeypatch.setattr(doctor, "found_version", versions.get)
    monkeypatch.setattr(doctor, "visible_gpus", lambda: ["NVIDIA H100"])

    def probe(code: str) -> str:
        asked.append(code)
        return "CUDA 12.6"

    monkeypatch.setattr(doctor, "probe", probe)
    assert doctor.gpus() == {
        "GPUs": "NVIDIA H100",
        "tinygrad": "not installed",
        "torch": "2.10.0, CUDA 12.6",
        "jax": "0.8.0, jax-cuda12-plugin",
    }
    assert asked == [doctor.PROBES["torch"]]


@pytest.mark.process
@pytest.mark.cpu_device
def test_the_probe_of_tinygrad_names_its_device() -> None:
    assert doctor.probe(doctor.PROBES["tinygrad"]).startswith("default device ")
