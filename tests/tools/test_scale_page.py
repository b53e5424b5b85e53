"""The page about scale says what its tool works out; the costly tables are left to the tool."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dev import scale_models, simulate_scale
from dev.line_plots import Axis, plot

TEXT = simulate_scale.PAGE.read_text("utf-8")


@pytest.mark.parametrize("table", [scale_models.requests_table, scale_models.failures_table])
def test_the_page_has_the_tables_that_are_worked_out(table: Callable[[], list[list[str]]]) -> None:
    assert simulate_scale.markdown(table()) in TEXT


def test_every_plot_of_the_page_is_a_drawing() -> None:
    named = re.findall(r"!\[[^]]+\]\((scale/\w+\.svg)\)", TEXT)
    assert len(named) == 4
    for name in named:
        ElementTree.parse(simulate_scale.PAGE.parent / name)
    assert (
        simulate_scale.failures_plot() == (Path(simulate_scale.PLOTS) / "failures.svg").read_text()
    )


def test_a_table_without_a_place_is_an_error() -> None:
    with pytest.raises(SystemExit, match="expected one place for the table 'x'"):
        simulate_scale.filled("no such place", {"x": [["a"]]})


def test_a_cache_downloads_what_it_had_to_let_go() -> None:
    assert scale_models._n_missed([[1, 2, 3, 1]], 3) == 3
    assert scale_models._n_missed([[1, 2, 3, 1]], 2) == 4
    assert scale_models._n_missed([[1, 2], [2, 1, 3]], 2) == 1


def test_lines_are_drawn_between_the_ends_of_their_axes() -> None:
    x, y = Axis("x", [1, 100], is_log=True), Axis("y", [0, 2])
    drawn = ElementTree.fromstring(plot("t", x, y, {"a": [(1, 0), (10, 1), (1000, 5)]}))
    (line,) = (each for each in drawn if each.tag.endswith("polyline"))
    points = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x1 - x0 == pytest.approx(x2 - x1) and y1 - y0 == pytest.approx(y2 - y1)
    assert x0 < x2 and y0 > y2


def test_ranks_that_fill_more_ahead_wait_less() -> None:
    found = [scale_models.utilisation(10, depth) for depth in (1, 4, 16)]
    assert 0 < found[0] < found[1] < found[2] <= 1
