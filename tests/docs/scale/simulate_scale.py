"""Work out what 10^9 samples on 1,000 ranks mean; fill the page, its tables and plots.

    python -m tests.docs.scale.simulate_scale [--check]

The tables of docs/explanation/scale.md stand between comments that name them; plots lie in
docs/explanation/scale/. With --check nothing is written: it exits with 1 where the page, or a plot,
has anything else than what is worked out now. Models are in `scale_models`, orders are those of the
library, and whatever is drawn by chance comes from a fixed key.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from benchmarks.page_parts import filled, markdown
from benchmarks.svg_plots import Axis, plot
from tests.docs.scale import measure_shuffle, scale_models

PAGE: Final = Path(__file__).resolve().parents[3] / "docs" / "explanation" / "scale.md"
PLOTS: Final = PAGE.with_suffix("")


def shuffle_plot() -> str:
    """Class balance of batches, sorted by class, against how many shards make a window."""
    points = scale_models.balance_by_window()
    lines = {"shards": points, "full": [(points[0][0], 1.0), (points[-1][0], 1.0)]}
    x = Axis("shards in a window", [1, 2, 4, 8, 16, 32, 64, 128], is_log=True)
    y = Axis(
        "χ² of classes in a batch, 1 by chance",
        [0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256],
        is_log=True,
    )
    return plot("Sorted by class: how uneven batches are", x, y, lines)


def cache_plot() -> str:
    """Bytes downloaded in an epoch against the size of the cache."""
    x = Axis("shards that the cache holds, of 1,024", [1, 4, 16, 64, 256, 1024], is_log=True)
    y = Axis(
        "downloaded in an epoch, in data sets; 0 at the bottom", [0.1, 1, 10, 100], is_log=True
    )
    return plot("Whole shards, downloaded when needed", x, y, scale_models.downloads())


def failures_plot() -> str:
    """Return the share of time that failures cost against how often a state is kept."""
    x = Axis("minutes between two states", [1, 3, 10, 30, 100, 300], is_log=True)
    y = Axis("time lost, %", [0, 10, 20, 30, 40, 50])
    lines = {
        f"a node fails every {days} days": [
            (minutes, 100 * scale_models.lost_share(minutes, days))
            for minutes in scale_models.INTERVALS
        ]
        for days in scale_models.MTBF_DAYS
    }
    return plot("125 nodes: what failures cost", x, y, lines)


def stragglers_plot() -> str:
    """Utilisation against how many batches are ready ahead."""
    x = Axis("batches that are filled ahead", [1, 2, 4, 8, 16, 32, 64], is_log=True)
    y = Axis("steps' share of the time, %", [0, 20, 40, 60, 80, 100])
    lines = {
        f"{ranks:,} rank{'s' if ranks > 1 else ''}": [
            (depth, 100 * scale_models.utilisation(ranks, depth)) for depth in scale_models.DEPTHS
        ]
        for ranks in scale_models.RANKS
    }
    return plot("One batch in 200 takes 20 times as long", x, y, lines)


def made() -> tuple[dict[str, list[list[str]]], dict[str, str]]:
    """Return the tables and plots of the page, by name."""
    tables = {
        "shuffle": measure_shuffle.table(),
        "requests": scale_models.requests_table(),
        "cache": scale_models.cache_table(),
        "failures": scale_models.failures_table(),
        "stragglers": scale_models.stragglers_table(),
    }
    plots = {
        "shuffle": shuffle_plot(),
        "cache": cache_plot(),
        "failures": failures_plot(),
        "stragglers": stragglers_plot(),
    }
    return tables, plots


def main() -> int:
    """Write the page and its plots, or compare them; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check = parser.parse_args().check
    tables, plots = made()
    wanted = {PAGE: filled(PAGE, {name: markdown(rows) for name, rows in tables.items()})}
    wanted |= {PLOTS / f"{name}.svg": text for name, text in plots.items()}
    stale = [p for p, text in wanted.items() if not p.exists() or p.read_text("utf-8") != text]
    for place in stale:
        print(f"{place}: {'is not' if check else 'was not'} what is worked out now")
        if not check:
            place.parent.mkdir(exist_ok=True)
            place.write_text(wanted[place], "utf-8")
    if not stale:
        print("the page and its plots are what is worked out now")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
