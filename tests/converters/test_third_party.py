"""A converter of somebody else's package is found and run as ours are, by the command line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardio
from tests.converters.helpers import write

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "converters" / "README.md"
MAX_LINES = 30


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text("utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the README's package as pip installs it: module and metadata."""
    (code,), (entry,) = blocks("python"), blocks("toml")
    folder = tmp_path_factory.mktemp("third") / "package"
    (folder / "my_package").mkdir(parents=True)
    (folder / "my_package" / "__init__.py").touch()
    (folder / "my_package" / "lines.py").write_text(code)
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        f'[project]\nname = "my_package"\nversion = "1.0"\n{entry}'
    )
    target = folder.parent / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    pip += ["--no-index", "--disable-pip-version-check", "--target", str(target), str(folder)]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


def test_the_converter_in_the_readme_has_30_lines() -> None:
    (code,) = blocks("python")
    assert len([line for line in code.splitlines() if line.strip()]) <= MAX_LINES


@pytest.mark.slow
def test_the_command_runs_an_installed_converter(installed: Path, tmp_path: Path) -> None:
    source = tmp_path / "texts"
    write(source, {"a/1.txt": "one\nit\n", "b/2.txt": "three\nfour\n", "b/no": "x"})
    write(source, {"b/broken.txt": b"good\n\xff\n"})
    places = [str(installed), *(str(ROOT / each) for each in (".", "converters", "tools"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    command = [sys.executable, "-m", "shardio", "convert", "texts", "out", "--kind", "lines"]

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *options],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    done = run("--workers", "2", "--json")
    assert done.returncode == 1, done.stderr  # one file is broken
    assert json.loads(done.stdout)["samples"] == 4
    with shardio.open(tmp_path / "out") as dataset:
        assert [sample["text"] for sample in dataset] == ["one", "it", "three", "four"]
        assert [int(sample["label"]) for sample in dataset] == [0, 0, 1, 1]
        assert dataset.converter["name"] == "lines"
    assert "not UTF-8" in done.stdout
    longer = run("--min-length", "4", "--overwrite", "--json", "--workers", "0")
    assert longer.returncode == 1 and json.loads(longer.stdout)["samples"] == 2
    refused = run("--min-length", "long", "--overwrite")
    assert (
        refused.returncode == 2
        and "argument --min-length: expected a whole number" in refused.stderr
    )
    command[-2:] = []
    without_kind = run("--min-length=4", "--overwrite")
    assert without_kind.returncode == 2
    assert "--min-length=4; an option of the kind 'lines': add --kind lines" in without_kind.stderr
    command += ["--kind", "lines"]
    options = " ".join(run("--help").stdout.split())
    assert "options of lines: --min-length N characters of the shortest line" in options
