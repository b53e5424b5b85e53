"""The core without extras stays small: everything else is an extra."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PROJECT = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text())["project"]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!~; ]", each, maxsplit=1)[0] for each in requirements}


def test_the_core_needs_seven_packages() -> None:
    core = {"av", "cloudpickle", "numpy", "rich", "tinygrad", "xxhash", "zstandard"}
    assert names(PROJECT["dependencies"]) == core


def test_no_extra_repeats_the_core() -> None:
    for extra, requirements in PROJECT["optional-dependencies"].items():
        assert not names(requirements) & names(PROJECT["dependencies"]), extra
