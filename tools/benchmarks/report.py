"""Results of benchmarks as a table, as JSON, and compared with an earlier run."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from benchmarks.child import ROOT
from benchmarks.harness import Result

PACKAGES: Final = (
    "shardio-loader",
    "numpy",
    "av",
    "tinygrad",
    "xxhash",
    "zstandard",
    "torch",
    "jax",
)
NOTEWORTHY: Final = 0.1
"""A median is marked if it differs from that of the earlier run by at least this share."""


def machine() -> dict[str, Any]:
    """Return facts about this machine that figures depend on."""
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "usable_cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of packages that figures depend on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Return the commit of the checkout, with "+changes" if files differ; empty outside git."""
    answers = []
    for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        done = subprocess.run(
            ["git", *command], cwd=ROOT, capture_output=True, text=True, check=False
        )
        answers.append(done.stdout.strip() if not done.returncode else "")
    return answers[0] + ("+changes" if answers[1] else "")


def as_json(results: Sequence[Result]) -> dict[str, Any]:
    """Return all results, and the machine, the versions and the commit that they belong to."""
    return {
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "load_average": os.getloadavg()[0],
        "cases": {result.case.name: _case_as_json(result) for result in results},
    }


def _case_as_json(result: Result) -> dict[str, Any]:
    return {
        "group": result.case.group,
        "rounds": result.rounds,
        "notes": result.notes,
        "versions": result.versions,
        "outcomes": result.outcomes,
        "error": result.error,
        "figures": [
            {
                "lane": figure.lane,
                "unit": figure.unit,
                "min": min(figure.values),
                "median": figure.median,
                "max": max(figure.values),
                "values": figure.values,
            }
            for figure in result.figures.values()
        ],
        "limits": [
            {"limit": str(limit), "found": result.value_of(limit), "is_met": result.is_met(limit)}
            for limit in result.case.limits
        ],
    }


def table(result: Result) -> Iterator[str]:
    """Yield the lines of a case: its figures, its notes, its limits."""
    yield f"{result.case.name}: {result.case.description}"
    if result.figures:
        width = max(12, *(len(lane) for lane, _ in result.figures))
        yield f"  {'':{width}}  {'best':>12}  {'median':>12}"
        for figure in result.figures.values():
            best, median = number(figure.best), number(figure.median)
            yield f"  {figure.lane:{width}}  {best:>12}  {median:>12}  {figure.unit}"
    for lane, outcomes in result.outcomes.items():
        for what, outcome in outcomes.items():
            yield f"  {lane:<18}{what:<12}{outcome}"
    for note in result.notes:
        yield f"  note: {note}"
    for limit in result.case.limits:
        if (value := result.value_of(limit)) is not None:
            verdict = "ok    " if result.is_met(limit) else "MISSED"
            yield f"  {verdict} {limit}; found {number(value)}"
    if result.error:
        kind = "not measured" if result.is_unavailable else "ERROR"
        yield f"  {kind}: {result.error}"


def number(value: float) -> str:
    """Return a number with three or four significant digits."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 100 else f"{value:.3g}"


def comparison(results: Sequence[Result], earlier: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines that compare medians with those of an earlier run.

    Only ratios within a run can be compared between machines. If the machines differ, a line says
    so.
    """
    was = earlier["commit"] or "an unknown commit"
    yield f"beside {was}"
    if earlier["machine"] != machine():
        yield f"  another machine: {earlier['machine']}"
    for result in results:
        old = earlier["cases"].get(result.case.name, {"figures": [], "limits": []})
        medians = {(each["lane"], each["unit"]): each["median"] for each in old["figures"]}
        for key, figure in result.figures.items():
            if medians.get(key):
                change = figure.median / medians[key]
                mark = "  <" if abs(change - 1) > NOTEWORTHY else ""
                values = f"{number(medians[key])} -> {number(figure.median)} {figure.unit}"
                yield f"  {result.case.name}, {figure.lane}: {values} ({change:.2f} x){mark}"
        ratios = {each["limit"]: each["found"] for each in old["limits"]}
        for limit in result.case.limits:
            value, before = result.value_of(limit), ratios.get(str(limit))
            if limit.beside and value is not None and before is not None:
                yield f"  {result.case.name}, {limit}: {number(before)} -> {number(value)}"


def load(path: Path) -> dict[str, Any]:
    """Read the JSON of an earlier run; raise ValueError if the file is not such JSON."""
    found = json.loads(path.read_text("utf-8"))
    if not isinstance(found, dict) or not {"machine", "commit", "cases"} <= found.keys():
        raise ValueError(
            f"{path}: not written by tools/bench --json: expected machine, commit, cases"
        )
    return found
