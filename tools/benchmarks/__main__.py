"""Run benchmarks; see what each measures with --list.

    tools/bench NAME … [--rounds N] [--set PARAMETER=VALUE …] [--json FILE] [--compare FILE]
    tools/bench --list [NAME …]
    tools/bench --gate
    tools/bench --page

NAME is a case, or a group of cases. Exits with 1 if a limit is missed, and with 3 if a case that is
named cannot run here. Datasets are kept in a cache: $XDG_CACHE_HOME/shardio-bench, or --folder.
--page renders the pages that show the race, from docs/explanation/benchmarks.json.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks import race_page, report
from benchmarks.data import Cache, default_folder
from benchmarks.harness import CASES, Case, Result, choose, measure

GROUPS: Final = (
    "loading",
    "workers",
    "messages",
    "ends",
    "opening",
    "order",
    "storage",
    "media",
    "conversion",
    "race",
    "peers",
    "gpu",
    "view",
    "gate",
)
GATE_ATTEMPTS: Final = 4


def load_groups() -> None:
    """Register the cases of all groups."""
    for group in GROUPS:
        importlib.import_module(f"benchmarks.{group}")


def main(arguments: list[str]) -> int:
    """Run the requested cases; return the exit code."""
    load_groups()
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.page:
        return _render_pages()
    if not (options.names or options.list or options.gate):
        parser.error(f"expected --list, --gate, --page, a case, or a group: {', '.join(GROUPS)}")
    try:
        cases = choose(options.names) if options.names else list(CASES.values())
        if options.gate:
            cases = [each for each in cases if each.for_gate]
        given = _parameters(options.set, cases)
        earlier = report.load(options.compare) if options.compare else None
    except KeyError as error:
        parser.error(f"{error.args[0]}: no case, and no group: {', '.join(GROUPS)}")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if options.list:
        print("\n".join(_listed(cases)))
        return 0
    results = _run(cases, Cache(options.folder), options, given)
    if earlier is not None:
        print("\n".join(report.comparison(results, earlier)))
    return _exit_code(results)


def _render_pages() -> int:
    figures = report.load(race_page.FIGURES)
    for path in race_page.write_stale(race_page.render(figures)):
        print(f"written: {path}")
    return 0


def _run(
    cases: Sequence[Case],
    cache: Cache,
    options: argparse.Namespace,
    given: Mapping[str, Mapping[str, Any]],
) -> list[Result]:
    """Measure the cases. Write the JSON after each: an interrupt keeps the cases that ended."""
    results: list[Result] = []
    for each in cases:
        result = measure(each, cache, rounds=options.rounds, options=given[each.name])
        for _ in range(GATE_ATTEMPTS - 1):
            if not options.gate or result.is_good or result.error:
                break
            more = measure(each, cache, rounds=options.rounds, options=given[each.name])
            result.extend(more)
        print("\n".join(report.table(result)), flush=True)
        results.append(result)
        if options.json:
            text = json.dumps(report.as_json(results), indent=1, ensure_ascii=False)
            options.json.write_text(f"{text}\n", "utf-8")
    return results


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools/bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases and groups")
    parser.add_argument("--list", action="store_true", help="list cases, parameters and limits")
    parser.add_argument("--gate", action="store_true", help="run the gate, with retries")
    parser.add_argument("--page", action="store_true", help="render the pages that show the race")
    parser.add_argument("--rounds", type=int, help="rounds over the lanes of each case")
    parser.add_argument(
        "--set", action="append", default=[], metavar="PARAMETER=VALUE", help="change a parameter"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="an earlier --json FILE")
    parser.add_argument("--folder", type=Path, default=default_folder(), help="of the datasets")
    return parser


def _parameters(changes: Sequence[str], cases: Sequence[Case]) -> dict[str, dict[str, Any]]:
    """Return the options of each case; raise ValueError for a parameter that no case has."""
    found: dict[str, dict[str, Any]] = {each.name: {} for each in cases}
    for change in changes:
        name, equals, text = change.partition("=")
        takers = [each for each in cases if name in each.parameters]
        if not equals or not takers:
            known = sorted({name for each in cases for name in each.parameters})
            raise ValueError(f"--set {change}: expected NAME=VALUE, with a name of {known}")
        for each in takers:
            found[each.name][name] = type(each.parameters[name])(text)
    return found


def _listed(cases: Sequence[Case]) -> list[str]:
    lines = []
    for each in cases:
        parameters = ", ".join(f"{name}={value!r}" for name, value in each.parameters.items())
        lines.append(f"{each.name:<24}{each.description}{f' ({parameters})' * bool(parameters)}")
        limits = [f"{'':<24}  {limit}" for limit in each.limits]
        lines += limits[:3] + [f"{'':<24}  … {len(limits) - 3} more"] * (len(limits) > 3)
    return lines


def _exit_code(results: Sequence[Result]) -> int:
    if not all(result.is_good for result in results):
        return 1
    return 3 if any(result.error for result in results) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
