"""The notebooks among the examples run, and print what they show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "examples").glob("*.ipynb"))

# Runs cells as a notebook does, one after the other in one namespace.
RUN = """
import contextlib, io, json, sys

namespace, printed = {"__name__": "__main__"}, []
for source in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(source, "cell", "exec"), namespace)
    printed.append(output.getvalue())
json.dump(printed, sys.stdout)
"""


def code_cells(notebook: Path) -> list[dict[str, Any]]:
    cells = json.loads(notebook.read_text("utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def printed_in(cell: dict[str, Any]) -> str:
    streams = [each["text"] for each in cell["outputs"] if each["output_type"] == "stream"]
    return "".join(line for lines in streams for line in lines)


def test_there_is_a_notebook() -> None:
    assert NOTEBOOKS


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_it_shows(notebook: Path, tmp_path: Path) -> None:
    cells = code_cells(notebook)
    places = [str(ROOT), str(ROOT / "converters"), str(ROOT / "tools")]
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps(["".join(cell["source"]) for cell in cells]),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places), "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == [printed_in(cell) for cell in cells]
