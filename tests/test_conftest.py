"""Without clang the rest of the suite runs and ends with the list of what did not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

SUITE = """
import os
import pytest

@pytest.mark.cpu_device
def test_on_the_cpu():
    pass

def test_elsewhere():
    assert os.environ["DEV"] == "PYTHON"

def test_real_media(media_root):
    pass
"""


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Run a suite of three tests where there is neither clang nor media; return what it prints."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "test_three.py").write_text(SUITE)
    dropped = {"DEV", "SHARDIO_TEST_MEDIA", "PYTEST_ADDOPTS"}
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml")]
    command += ["--rootdir", str(folder), "-p", "tests.conftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(folder)],
        cwd=ROOT,
        env=environment | {"CC": str(folder / "no-compiler")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_a_test_for_the_cpu_device_is_skipped_and_listed_at_the_end(output: list[str]) -> None:
    (heading,) = (i for i, line in enumerate(output) if "1 tests did not run" in line)
    assert output[heading + 1].endswith("test_three.py::test_on_the_cpu")


def test_the_others_run_and_missing_media_is_named(output: list[str]) -> None:
    assert "1 passed, 2 skipped" in output[-1]
    assert any("SHARDIO_TEST_MEDIA names no folder" in line for line in output)
