"""Feed shardio broken files until the time is over; exits with 1 if any of them shows a defect.

    tools/stress fuzz --minutes N [--seed S] [--processes P] [--target T] [--out DIR]
    tools/stress fuzz --replay FILE

The inputs break a rule of the format, but their hashes are correct (tests/fuzz/inputs.py). An input
is a finding if it causes an error that is not one of shardio's, if it takes over 1 s or more than
twice the memory that its size justifies, or if a reader and verification disagree. Findings
are kept in DIR, and for each, the command that feeds it again is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stress_tests.program import environment, make_parser, memory_folder
from tests.fuzz.feeding import TARGETS, read_current, save_finding

FEEDING = (sys.executable, "-m", "tests.fuzz.feeding")
HUNG_S = 30.0
ENDED_FROM_OUTSIDE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REPORT_S = 30.0


@dataclass
class Feeding:
    """A process that feeds inputs."""

    process: subprocess.Popen[bytes]
    folder: Path

    def tally(self) -> dict[str, Any] | None:
        """Return the counts so far; None before the first."""
        try:
            found: dict[str, Any] = json.loads((self.folder / "tally.json").read_bytes())
        except FileNotFoundError:
            return None
        return found

    def is_hung(self) -> bool:
        """Return True if no input has ended for a long time."""
        file = self.folder / "tally.json"
        last = (file if file.exists() else self.folder).stat().st_mtime
        return time.time() - last > HUNG_S


class Run:
    """A run of several processes, which are watched, and replaced if they end too early."""

    def __init__(
        self, options: argparse.Namespace, scratch: Path, command: Sequence[str] = FEEDING
    ) -> None:
        self._options, self._scratch, self._command = options, scratch, command
        self._n_started = 0
        self.tallies: list[dict[str, Any]] = []
        self.findings: dict[str, str] = {}

    def run(self, seconds: float) -> None:
        """Feed inputs for `seconds`."""
        self._end = time.monotonic() + seconds
        next_report = time.monotonic() + REPORT_S
        running = [self._start() for _ in range(self._options.processes)]
        try:
            while running:
                time.sleep(0.1)
                running = [each for old in running if (each := self._look_after(old))]
                if time.monotonic() >= next_report:
                    next_report += REPORT_S
                    self._report(running)
        finally:
            for each in running:
                each.process.kill()
                each.process.wait()

    def _start(self) -> Feeding:
        self._n_started += 1
        folder = self._scratch / str(self._n_started)
        folder.mkdir()
        seed, seconds = self._options.seed * 1000 + self._n_started, self._end - time.monotonic()
        arguments = [folder, self._options.out, seed, seconds, self._options.target or ""]
        with open(folder / "log", "wb") as log:
            command = [*self._command, *map(str, arguments)]
            process = subprocess.Popen(command, env=environment(), stdout=log, stderr=log)
            return Feeding(process, folder)

    def _look_after(self, feeding: Feeding) -> Feeding | None:
        """Return the process, another one if it ended too early, or None if the time is over."""
        code = feeding.process.poll()
        if code is None:
            if not feeding.is_hung():
                return feeding
            feeding.process.kill()
            feeding.process.wait()
            text = f"hung: no input ended in {HUNG_S:.0f} s, and no signal got through"
            self._bury(feeding, text)
        elif -code in ENDED_FROM_OUTSIDE:
            pass  # killed by a user or another program, which says nothing about the input
        elif code < 0:
            self._bury(feeding, f"the process was killed by {signal.Signals(-code).name}")
        elif code > 0:
            self._bury(feeding, f"the process ended with exit code {code}")
        if tally := feeding.tally():
            self.tallies.append(tally)
            self.findings.update(tally["findings"])
        return self._start() if code != 0 and self._end - time.monotonic() > 1 else None

    def _bury(self, feeding: Feeding, problem: str) -> None:
        text = f"{problem}\n\n{(feeding.folder / 'log').read_text('utf-8', 'replace')[-4000:]}"
        current = read_current(feeding.folder)
        if current is None:
            sys.exit(f"tools/stress fuzz: a process ended before its first input: {text}")
        place = save_finding(self._options.out, *current, text)
        self.findings[str(place)] = problem

    def _report(self, running: list[Feeding]) -> None:
        tallies = [tally for each in running if (tally := each.tally())]
        n_done = sum(tally["n_inputs"] for tally in [*self.tallies, *tallies])
        n_found = len(self.findings) + sum(len(tally["findings"]) for tally in tallies)
        left = self._end - time.monotonic()
        print(f"{n_done:,} inputs, {n_found} findings, {left:.0f} s left", flush=True)

    def print_totals(self) -> None:
        """Print the numbers of inputs and of outcomes, and the findings."""
        for key in ("families", "outcomes"):
            total: Counter[str] = Counter()
            for tally in self.tallies:
                total.update(tally[key])
            print(f"\n{key}:")
            for name, n in sorted(total.items()):
                print(f"{n:>12,}  {name}")
        n_all = sum(tally["n_inputs"] for tally in self.tallies)
        seconds = max(sum(tally["seconds"] for tally in self.tallies), 1e-9)
        slowest = max((tally["slowest_s"] for tally in self.tallies), default=0.0)
        largest = max((tally["largest_bytes"] for tally in self.tallies), default=0)
        print(f"\n{n_all / seconds:,.0f} inputs per second and process")
        print(f"slowest input {slowest:.2f} s; most memory {largest / (1 << 20):.1f} MiB")
        print(f"{n_all:,} inputs in all: {len(self.findings)} findings")
        for place, problem in self.findings.items():
            print(f"  {problem}\n    tools/stress fuzz --replay {place}")


def replay(file: Path) -> int:
    """Feed one kept input again; return 1 if it still shows a defect."""
    from tests.fuzz.judge import Judge
    from tests.fuzz.targets import targets

    target = file.name.partition("-")[0]
    if target not in TARGETS:
        expected = ", ".join(TARGETS)
        sys.exit(f"tools/stress fuzz: {file}: its name must begin with one of {expected} and -")
    with tempfile.TemporaryDirectory() as folder:
        verdict = Judge().judge(targets(Path(folder))[target], file.read_bytes())
    print(verdict.problem or f"{verdict.outcome}: as it should be")
    return int(verdict.problem is not None)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser("fuzz", __doc__)
    parser.add_argument("--replay", type=Path, help="feed one finding again")
    default = max(1, len(os.sched_getaffinity(0)) - 1)
    parser.add_argument("--processes", type=int, default=default, help="default: CPUs but one")
    parser.add_argument("--target", choices=TARGETS, help="feed only this one; default: all")
    parser.add_argument("--out", type=Path, default=Path("fuzz-findings"), help="for findings")
    options = parser.parse_args(arguments)
    if (options.minutes is None) == (options.replay is None):
        parser.error("expected one of --minutes and --replay")
    if options.processes < 1:
        parser.error("--processes must be positive")
    options.out = options.out.absolute()
    return options


def main(arguments: list[str]) -> int:
    """Fuzz; return the exit code."""
    options = parse(arguments)
    if options.replay:
        return replay(options.replay)
    with memory_folder() as scratch:
        run = Run(options, scratch)
        run.run(options.minutes * 60)
    run.print_totals()
    return int(bool(run.findings))
