"""A slice of damaged inputs that C libraries parse, and that what compares them would notice."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from stress_tests import damage_inputs as tool


@pytest.mark.process
@pytest.mark.parametrize("suffix", ["parquet", "h5"])
def test_damaged_files_are_broken_or_have_the_values_that_the_library_reads(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "N_TOGETHER", 13)
    tally: Counter[str] = Counter()
    assert tool.try_files(suffix, random.Random(3), tmp_path, tally) == []
    assert tally[f"{suffix}: sound, converted"] == 2
    assert tally[f"{suffix}: damaged, broken"] > 2


def test_values_differ_unless_the_field_is_wider() -> None:
    same = tool.same
    assert same({"x": 1.0, "s.a": [1, 2], "gone": None}, {"x": 1, "s.a": [1.0, 2.0]})
    assert not same({"x": 1.5}, {"x": 1})
    assert not same({"x": 1}, {"x": 1, "y": 2})
    assert not same({"x": b"a"}, {"x": b"b"})
