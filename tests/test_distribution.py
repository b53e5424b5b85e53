"""What is built for others is what was meant: three import packages, nothing beside them."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
IMPORT_PACKAGES = {"shardio", "shardio_converters", "shardio_tools"}

pytestmark = pytest.mark.skipif(find_spec("hatchling") is None, reason="hatchling is not installed")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    return folder


def _wheel_names(built: Path) -> list[str]:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_the_wheel_has_exactly_three_top_level_names(built: Path) -> None:
    tops = {name.partition("/")[0] for name in _wheel_names(built)}
    assert {top for top in tops if not top.endswith(".dist-info")} == IMPORT_PACKAGES


def test_the_wheel_carries_the_marker_of_typed_code_in_each_package(built: Path) -> None:
    assert {f"{package}/py.typed" for package in IMPORT_PACKAGES} <= set(_wheel_names(built))


def test_the_wheel_carries_the_license(built: Path) -> None:
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in _wheel_names(built))


def test_the_source_archive_holds_only_what_is_listed(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tops = {name.split("/")[1] for name in tar.getnames() if "/" in name}
    listed = {"shardio", "converters", "tools", "tests", "docs", "CHANGELOG.md", "LICENSE"}
    # hatchling adds its own record, and the list of what is ignored.
    assert tops <= listed | {"README.md", "pyproject.toml", "PKG-INFO", ".gitignore"}
    assert listed - {"docs"} <= tops
