"""Render the pages that show the race: tables and plots, all from the JSON of one run.

`tools/bench race --json docs/explanation/benchmarks.json` writes the JSON, and `tools/bench --page`
the generated parts of docs/explanation/benchmarks.md, its plots, and the table of README.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.child import ROOT
from benchmarks.page_parts import filled, markdown
from benchmarks.race_faults import FAULTS
from benchmarks.racers.peers import PEERS, peers_of
from benchmarks.racers.workloads import WORKLOADS
from benchmarks.svg_plots import Axis, Dot, dots

README: Final = ROOT / "README.md"
PAGE: Final = ROOT / "docs" / "explanation" / "benchmarks.md"
FIGURES: Final = PAGE.with_suffix(".json")
PLOTS: Final = PAGE.with_suffix("")

STREAM: Final = "samples of a stream/s"
FIRST: Final = "samples of the first epoch/s"
COLUMNS: Final = {
    STREAM: "stream, samples/s",
    "samples/s": "best epoch, samples/s",
    FIRST: "first epoch, samples/s",
    "s from start to first batch": "first batch after, s",
    "s from start to end of epoch": "first epoch after, s",
    "CPU µs/sample": "CPU, µs/sample",
    "MB of memory": "memory, MB",
    "requests of the first epoch": "requests",
    "MB of the first epoch": "fetched, MB",
}
"""The headings of figures, by their units."""
RATES: Final = (STREAM, "samples/s", FIRST, "CPU µs/sample")
REMOTE: Final = (
    FIRST,
    "s from start to first batch",
    "s from start to end of epoch",
    "samples/s",
    "requests of the first epoch",
    "MB of the first epoch",
)
COSTS: Final = ("s from start to first batch", "s from start to end of epoch", "MB of memory")
TITLES: Final = {
    "frames": "Frames of 224×224×3 bytes, in random order",
    "tokens": "Rows of 1,024 tokens, in random order",
    "tokens400": "Rows of 1,024 tokens, shardio's in 400 shards",
    "augment": "Frames with a random crop and flip",
    "jpeg": "JPEGs, decoded to 224×224×3",
    "clips": "Random clips of 16 frames of 112×112, decoded from H.264",
    "remote": "Frames in an object store, with an empty cache",
}
SHOWN: Final = dict.fromkeys(TITLES, RATES) | {"remote": REMOTE}
"""The units of each workload's table; the peers are sorted by the first, which the plot shows."""
AXES: Final = {
    STREAM: "samples per second in a stream of epochs",
    FIRST: "samples per second in the first epoch",
}
README_HEADINGS: Final = {
    "frames": "frames 224×224×3",
    "tokens": "tokens 1,024×u16",
    "tokens400": "in 400 shards",
}

MIN_GAIN: Final = 1.01
"""The minimum factor by which a better figure is listed; smaller differences are noise."""
NOT_RUN: Final = "not in this run"
README_WITHOUT: Final = frozenset({"hdf5", "energon", "tinyloader"})
"""The loaders that the README's table of rates leaves out."""
README_FAULTS: Final = ("shardio", "torchdl", "wds", "mds", "litdata", "grain")
"""The loaders in the README's table of faults."""

Figure = Mapping[str, Any]
"""The minimum, median and maximum of all rounds."""


class Case:
    """The figures of one workload, by peer and unit."""

    def __init__(self, found: Mapping[str, Any]) -> None:
        self.notes: list[str] = found["notes"]
        self.versions: Mapping[str, Mapping[str, str]] = found.get("versions", {})
        self.rounds: int = found["rounds"]
        self.commit: str = found.get("commit", "")  # of a case that was taken from another run
        self._figures: dict[str, dict[str, Figure]] = {}
        for each in found["figures"]:
            self._figures.setdefault(each["lane"], {})[each["unit"]] = each

    def figure(self, peer: str, unit: str) -> Figure | None:
        """Return a figure; None if the peer does not have it."""
        return self._figures.get(peer, {}).get(unit)

    def units(self) -> set[str]:
        """Return the units of all figures."""
        return {unit for figures in self._figures.values() for unit in figures}

    def ranked(self, unit: str) -> list[str]:
        """Return the peers that have a figure in a unit, the best first."""
        medians = {p: found[unit]["median"] for p, found in self._figures.items() if unit in found}
        return sorted(medians, key=medians.__getitem__, reverse=unit.endswith("/s"))

    def gain(self, peer: str, unit: str) -> float:
        """Return the factor by which the median of a peer is better than that of shardio."""
        theirs = self._figures[peer][unit]["median"]
        ours = self._figures["shardio"][unit]["median"]
        return float(theirs / ours if unit.endswith("/s") else ours / theirs)


def render(found: Mapping[str, Any]) -> dict[Path, str]:
    """Return the texts of all files that show a run, which is given as its JSON."""
    cases = {
        name.partition(".")[2]: Case(each)
        for name, each in found["cases"].items()
        if each["group"] == "race" and each["figures"]
    }
    cases = {name: cases[name] for name in WORKLOADS if name in cases}
    outcomes = found["cases"].get("race.faults", {}).get("outcomes", {})
    tables = {
        "machine": _machine(found, cases),
        "behind": _behind(cases),
        "start": _figures(cases["frames"], COSTS),
        "faults": _faults(outcomes),
        "missing": _missing(cases),
        "peers": _peers(cases),
    }
    page = filled(PAGE, {name: markdown(rows) for name, rows in tables.items()} | _workloads(cases))
    short = {"speed": _speed(cases), "faults": _short_faults(outcomes, cases)}
    readme = filled(README, {name: markdown(rows) for name, rows in short.items()})
    texts = {PAGE: page, README: readme}
    return texts | {PLOTS / f"{name}.svg": _plot(name, case) for name, case in cases.items()}


def write_stale(texts: Mapping[Path, str]) -> list[Path]:
    """Write the files that are missing or have other texts; return their paths."""
    stale = [
        path for path, text in texts.items() if not path.exists() or path.read_text("utf-8") != text
    ]
    for path in stale:
        path.parent.mkdir(exist_ok=True)
        path.write_text(texts[path], "utf-8")
    return stale


def rounded(value: float) -> str:
    """Return a number with three significant digits."""
    shown = float(f"{value:.3g}")
    return f"{shown:,.0f}" if shown >= 100 else f"{shown:.3g}"


# Tables.


def _title(peer: str) -> str:
    return PEERS[peer].title if peer in PEERS else peer


def _name(peer: str) -> str:
    """Return the title of a peer, marked if it is shardio or a baseline."""
    if peer == "shardio":
        return f"**{_title(peer)}**"
    return f"*{_title(peer)}*" if peer in PEERS and PEERS[peer].is_baseline else _title(peer)


def _ranged(figure: Figure | None) -> str:
    if figure is None:
        return ""
    low, median, high = (rounded(figure[key]) for key in ("min", "median", "max"))
    return median if low == high else f"{median} ({low}–{high})"


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:,.0f}"


def _machine(found: Mapping[str, Any], cases: Mapping[str, Case]) -> list[list[str]]:
    machine = found["machine"]
    rounds = {case.rounds for case in cases.values()}
    commits = [f"`{found['commit'][:12]}`"]
    commits += [f"`{name}`: `{case.commit[:12]}`" for name, case in cases.items() if case.commit]
    return [
        ["", ""],
        ["processor", machine["cpu"]],
        ["usable cores", str(machine["usable_cpus"])],
        ["memory", f"{machine['memory_bytes'] / 2**30:.0f} GiB"],
        ["kernel", machine["kernel"]],
        ["Python", found["versions"]["python"]],
        ["commit of shardio", "; ".join(commits)],
        ["rounds", " or ".join(map(str, sorted(rounds)))],
    ]


def _workloads(cases: Mapping[str, Case]) -> dict[str, str]:
    """Return the part with a section for each workload: heading, command, plot and table."""
    sections = [
        f"### {TITLES[name]}\n\n`tools/bench race.{name}`\n\n"
        f"![{TITLES[name]}]({PLOTS.name}/{name}.svg)\n\n"
        f"{markdown(_figures(case, SHOWN[name], with_ratio=True))}"
        for name, case in cases.items()
    ]
    return {"workloads": "\n" + "\n".join(sections) + "\n"}


def _figures(case: Case, units: tuple[str, ...], *, with_ratio: bool = False) -> list[list[str]]:
    """Return the figures of all peers, sorted by the first unit."""
    units = tuple(unit for unit in units if unit in case.units())
    if not units:
        return [["loader", "figure"], ["all", NOT_RUN]]
    heading, *others = (COLUMNS[unit] for unit in units)
    rows = [["loader", heading, *(["shardio ÷ loader"] if with_ratio else []), *others]]
    for peer in case.ranked(units[0]):
        first, *others = (_ranged(case.figure(peer, unit)) for unit in units)
        ratio = [_ratio(1 / case.gain(peer, units[0]))] if with_ratio else []
        rows.append([_name(peer), first, *ratio, *others])
    return rows


def _behind(cases: Mapping[str, Case]) -> list[list[str]]:
    """Return the figures of libraries and baselines that are better than shardio's."""
    rows = []
    for name, case in cases.items():
        for unit, heading in COLUMNS.items():
            if (ours := case.figure("shardio", unit)) is None:
                continue
            for peer in case.ranked(unit):
                if (gain := case.gain(peer, unit)) >= MIN_GAIN:
                    shown = [heading, _name(peer), _ranged(case.figure(peer, unit)), _ranged(ours)]
                    rows.append([f"`{name}`", *shown, _ratio(gain)])
    return [["workload", "figure", "loader", "its figure", "shardio's", "better by"], *rows]


def _faults(outcomes: Mapping[str, Mapping[str, str]]) -> list[list[str]]:
    """Return the outcome of each fault for each loader."""
    rows = [
        [_name(peer), *(found.get(fault, NOT_RUN) for fault in FAULTS)]
        for peer, found in outcomes.items()
    ]
    return [["loader", *FAULTS.values()], *(rows or [["all", *[NOT_RUN] * len(FAULTS)]])]


def _missing(cases: Mapping[str, Case]) -> list[list[str]]:
    """Return the workloads and loaders without figures, with the reasons."""
    rows = []
    for name in WORKLOADS:
        if name not in cases:
            rows.append([f"`{name}`", "all", NOT_RUN])
            continue
        notes = {peer: NOT_RUN for peer in peers_of(name)}
        for note in cases[name].notes:
            named, _, reason = note.removeprefix("without ").partition(": ")
            notes |= dict.fromkeys(named.split(", "), reason)
        measured = cases[name].ranked(STREAM)
        rows += [
            [f"`{name}`", _name(peer), reason]
            for peer, reason in notes.items()
            if peer not in measured or reason != NOT_RUN
        ]
    return [["workload", "loader", "reason"], *(rows or [["", "", "nothing is missing"]])]


def _versions(cases: Mapping[str, Case]) -> dict[str, Mapping[str, str]]:
    """Return the versions of each peer's packages."""
    versions = dict[str, Mapping[str, str]]()
    for case in cases.values():
        versions |= case.versions
    return versions


def _peers(cases: Mapping[str, Case]) -> list[list[str]]:
    versions, rows = _versions(cases), []
    for name, peer in PEERS.items():
        shown = ", ".join(
            f"{package} {version}" for package, version in versions.get(name, {}).items()
        )
        rows.append([_name(name), shown, ", ".join(peer.workloads), peer.settings])
    return [["loader", "version", "workloads", "settings"], *rows]


def _speed(cases: Mapping[str, Case]) -> list[list[str]]:
    """Return the table of README.md: streams and, in brackets, first epochs."""
    names = [name for name in README_HEADINGS if name in cases]
    rows = [["loader", *(README_HEADINGS[name] for name in names)]]
    for peer in cases["frames"].ranked(STREAM):
        if peer not in README_WITHOUT:
            rows.append([_name(peer), *(_short(cases[name], peer) for name in names)])
    return rows


def _short_faults(
    outcomes: Mapping[str, Mapping[str, str]], cases: Mapping[str, Case]
) -> list[list[str]]:
    """Return the faults of README.md: a row for each fault, and a column for each loader."""
    versions = _versions(cases)
    peers = [peer for peer in README_FAULTS if peer in outcomes]
    headings = []
    for peer in peers:
        version = "" if peer == "shardio" else next(iter(versions.get(peer, {}).values()), "")
        headings.append(f"{_title(peer)} {version}".strip())
    rows = []
    for fault, text in FAULTS.items():
        found = [outcomes[peer].get(fault, NOT_RUN) for peer in peers]
        shown = [
            f"**{word}**" if peer == "shardio" else word
            for peer, word in zip(peers, found, strict=True)
        ]
        rows.append([text, *shown])
    return [["fault", *headings], *rows]


def _short(case: Case, peer: str) -> str:
    stream, first = case.figure(peer, STREAM), case.figure(peer, FIRST)
    if stream is None or first is None:
        return ""
    return f"{rounded(stream['median'])} ({rounded(first['median'])})"


def _plot(name: str, case: Case) -> str:
    """Return a plot of the first unit of a workload for all peers, with the range of all rounds."""
    unit, rows = SHOWN[name][0], []
    for peer in case.ranked(unit):
        if figure := case.figure(peer, unit):
            low, value, high = (figure[key] for key in ("min", "median", "max"))
            rows.append(Dot(_title(peer), low, value, high, peer == "shardio"))
    return dots(TITLES[name], _axis(AXES[unit], rows), rows)


def _axis(text: str, rows: list[Dot]) -> Axis:
    """Return a logarithmic axis whose ticks are the powers of ten around all values."""
    low, high = min(row.low for row in rows), max(row.high for row in rows)
    return Axis(text, list(_powers(low, high)), is_log=True)


def _powers(low: float, high: float) -> Iterator[float]:
    tick = 1.0
    while tick * 10 <= low:
        tick *= 10
    yield tick
    while tick < high:
        tick *= 10
        yield tick
