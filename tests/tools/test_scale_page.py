"""The page about scale says what its tool works out; the costly tables are left to the tool."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.page_parts import markdown
from tests.docs.scale import scale_models, simulate_scale

TEXT = simulate_scale.PAGE.read_text("utf-8")


@pytest.mark.parametrize("table", [scale_models.requests_table, scale_models.failures_table])
def test_the_page_has_the_tables_that_are_worked_out(table: Callable[[], list[list[str]]]) -> None:
    assert markdown(table()) in TEXT


def test_every_plot_of_the_page_is_a_drawing() -> None:
    named = re.findall(r"!\[[^]]+\]\((scale/\w+\.svg)\)", TEXT)
    assert len(named) == 4
    for name in named:
        ElementTree.parse(simulate_scale.PAGE.parent / name)
    plot = Path(simulate_scale.PLOTS) / "failures.svg"
    assert simulate_scale.failures_plot() == plot.read_text()


def test_a_cache_downloads_what_it_had_to_let_go() -> None:
    assert scale_models._n_missed([[1, 2, 3, 1]], 3) == 3
    assert scale_models._n_missed([[1, 2, 3, 1]], 2) == 4
    assert scale_models._n_missed([[1, 2], [2, 1, 3]], 2) == 1


def test_ranks_that_fill_more_ahead_wait_less() -> None:
    found = [scale_models.utilisation(10, depth) for depth in (1, 4, 16)]
    assert 0 < found[0] < found[1] < found[2] <= 1
