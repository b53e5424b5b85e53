"""The built distribution holds three import packages and nothing else."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tarfile
import tomllib
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


# The index has a package of another project under the name of our import package.
TAKEN = re.compile(
    r"\bshardio\\?\[[a-z]"
    r"|\b(?:pip3?\s+install|uv\s+add)\s+(?:-\S+\s+)*['\"]?shardio(?![\w/-])"
)


def _texts() -> dict[str, str]:
    """Return every text file of the source archive and of continuous integration."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    listed = project["tool"]["hatch"]["build"]["targets"]["sdist"]["only-include"]
    found = {}
    for top in (ROOT / name for name in [*listed, ".ci"]):
        for path in [top] if top.is_file() else top.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                with contextlib.suppress(UnicodeDecodeError):  # binary
                    found[str(path.relative_to(ROOT))] = path.read_text("utf-8")
    return found


def test_nothing_tells_users_to_install_the_other_project() -> None:
    texts = _texts()
    assert {"README.md", "pyproject.toml", "tools/_setup.sh", "docs/tutorial.md"} <= texts.keys()
    offences = [
        f"{name}:{number}: {line.strip()}"
        for name, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        if TAKEN.search(line)
    ]
    assert offences == []


def test_the_wheel_has_a_name_of_its_own_three_typed_packages_and_the_license(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert wheel.name.startswith("shardio_loader-")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == IMPORT_PACKAGES
    assert {f"{package}/py.typed" for package in IMPORT_PACKAGES} <= set(names)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_source_archive_holds_only_what_is_listed(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tops = {name.split("/")[1] for name in tar.getnames() if "/" in name}
    listed = {"shardio", "converters", "tools", "tests", "docs", "CHANGELOG.md", "LICENSE"}
    # hatchling adds its own record, and the list of what is ignored.
    assert tops <= listed | {"README.md", "pyproject.toml", "PKG-INFO", ".gitignore"}
    assert listed - {"docs"} <= tops
