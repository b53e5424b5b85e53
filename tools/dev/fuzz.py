"""Feeds shardio broken files until the time is over; exits with 1 if any of them shows a defect.

tools/fuzz --minutes N [--seed S] [--processes P] [--engine E] [--target T] [--out DIR]
tools/fuzz --replay FILE

Two engines take turns, or share the processes: `mutator` knows the format, breaks a rule and gets
the hashes right again; `guided` (atheris, if installed) keeps what reaches new code. A finding is
an error that is not shardio's own, over 1 s, more than twice the memory that the size justifies,
or a reader and verification that disagree. It is kept in DIR with the command that shows it again.
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
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for tests/, which no wheel holds

from tests.fuzz.feeding import TARGETS, read_current, save_finding

ROOT = Path(__file__).resolve().parents[2]
FEEDING = (sys.executable, "-m", "tests.fuzz.feeding")
HUNG_S = 30.0
ENDED_FROM_OUTSIDE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LIBFUZZER_INTERRUPTED = 72  # how it ends at one of the first two signals
REPORT_S = 30.0


Turn = tuple[str, str, float]
"""Engine, target ("" for all of them), seconds."""
GUIDED_SHARES = {
    "shard": 0.4,
    "dataset": 0.2,
    "schema": 0.1,
    "record": 0.1,
    "labels": 0.05,
    "journal": 0.05,
    "part": 0.05,
    "converter": 0.05,
}


@dataclass
class Lane:
    """One process after another: what each does, for how long."""

    number: int
    turns: list[Turn]
    process: subprocess.Popen[bytes] | None = None
    folder: Path = Path()
    engine: str = ""
    target: str = ""
    ends_at: float = 0.0
    log: Path = Path()


@dataclass
class Totals:
    """Totals of all processes."""

    tallies: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    findings: dict[str, str] = field(default_factory=dict)

    def of(self, engine: str) -> tuple[int, float]:
        """Return inputs, and seconds of processes, of an engine."""
        chosen = [tally for name, tally in self.tallies if name == engine]
        return sum(t["n_inputs"] for t in chosen), sum(t["seconds"] for t in chosen)

    def counter(self, key: str) -> Counter[str]:
        """Return the sum of one table of all tallies."""
        total: Counter[str] = Counter()
        for _, tally in self.tallies:
            total.update(tally[key])
        return total


class Run:
    """Starts processes, watches them, and buries those that end too early."""

    def __init__(
        self, options: argparse.Namespace, scratch: Path, command: Sequence[str] = FEEDING
    ) -> None:
        self._options, self._scratch, self._command = options, scratch, command
        self._n_started, self.totals = 0, Totals()

    def run(self, lanes: list[Lane]) -> None:
        """Return when all turns are over."""
        next_report = time.monotonic() + REPORT_S
        for lane in lanes:
            self._next_turn(lane)
        try:
            while any(lane.process for lane in lanes):
                time.sleep(0.1)
                for lane in lanes:
                    self._look_after(lane)
                if time.monotonic() >= next_report:
                    next_report += REPORT_S
                    self._report(lanes)
        finally:
            for lane in lanes:
                if lane.process is not None:
                    lane.process.kill()
                    lane.process.wait()

    def _next_turn(self, lane: Lane) -> None:
        if lane.turns:
            lane.engine, lane.target, seconds = lane.turns.pop(0)
            lane.ends_at = time.monotonic() + seconds
            self._start(lane, seconds)
        else:
            lane.process = None

    def _start(self, lane: Lane, seconds: float) -> None:
        self._n_started += 1
        lane.folder = self._scratch / str(self._n_started)
        lane.folder.mkdir()
        lane.log = lane.folder / "log"
        seed = self._options.seed * 1000 + self._n_started
        arguments = [lane.engine, lane.folder, self._options.out, seed, seconds, lane.target]
        with open(lane.log, "wb") as log:
            lane.process = subprocess.Popen(
                [*self._command, *map(str, arguments)],
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )

    def _look_after(self, lane: Lane) -> None:
        if lane.process is None:
            return
        code = lane.process.poll()
        if code is None:
            if not self._is_hung(lane):
                return
            lane.process.kill()
            lane.process.wait()
            self._bury(lane, f"hung: no input ended in {HUNG_S:.0f} s, and no signal got through")
        elif -code in ENDED_FROM_OUTSIDE or code == LIBFUZZER_INTERRUPTED:
            pass  # by a person, or whoever shares the machine: it says nothing of the input
        elif code < 0:
            self._bury(lane, f"the process was killed by {signal.Signals(-code).name}")
        elif code > 0:
            self._bury(lane, f"the process ended with exit code {code}")
        self._take_tally(lane)
        left = lane.ends_at - time.monotonic()
        if code != 0 and left > 1:
            self._start(lane, left)
        else:
            self._next_turn(lane)

    def _is_hung(self, lane: Lane) -> bool:
        try:
            last = (lane.folder / "tally.json").stat().st_mtime
        except FileNotFoundError:
            last = lane.folder.stat().st_mtime
        return time.time() - last > HUNG_S

    def _bury(self, lane: Lane, problem: str) -> None:
        text = f"{problem}\n\n{lane.log.read_text('utf-8', 'replace')[-4000:]}"
        current = read_current(lane.folder)
        if current is None:
            sys.exit(f"tools/fuzz: a process ended before its first input: {text}")
        place = save_finding(self._options.out, *current, text)
        self.totals.findings[str(place)] = problem

    def _take_tally(self, lane: Lane) -> None:
        tally = _tally(lane.folder)
        if tally:
            self.totals.tallies.append((lane.engine, tally))
            self.totals.findings.update(tally["findings"])

    def _report(self, lanes: list[Lane]) -> None:
        running = [_tally(lane.folder) for lane in lanes if lane.process]
        n_done = sum(tally["n_inputs"] for _, tally in self.totals.tallies)
        n_done += sum(tally["n_inputs"] for tally in running if tally)
        n_found = len(self.totals.findings) + sum(len(t["findings"]) for t in running if t)
        left = max((lane.ends_at for lane in lanes if lane.process), default=0) - time.monotonic()
        print(f"{n_done:,} inputs, {n_found} findings, {left:.0f} s left of this turn", flush=True)


def _tally(folder: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads((folder / "tally.json").read_bytes())
    except FileNotFoundError:
        return None
    return found


def turns_of(engine: str, target: str | None, seconds: float) -> list[Turn]:
    """Return the turns of one process: the guided engine handles one target at a time."""
    if engine == "mutator" or target:
        return [(engine, target or "", seconds)]
    return [(engine, name, share * seconds) for name, share in GUIDED_SHARES.items()]


def lanes_for(
    engines: list[str], n_processes: int, seconds: float, target: str | None = None
) -> list[Lane]:
    """Assign engines to processes; with only one process they take turns."""
    if n_processes == 1:
        each = seconds / len(engines)
        return [Lane(0, [turn for engine in engines for turn in turns_of(engine, target, each)])]
    chosen = [engines[i % len(engines)] for i in range(n_processes)]
    return [Lane(i, turns_of(engine, target, seconds)) for i, engine in enumerate(chosen)]


def print_totals(totals: Totals) -> None:
    """Say what was fed, and what became of it."""
    for key in ("families", "outcomes"):
        print(f"\n{key}:")
        for name, n in sorted(totals.counter(key).items()):
            print(f"{n:>12,}  {name}")
    print()
    for engine in sorted({name for name, _ in totals.tallies}):
        n, seconds = totals.of(engine)
        print(f"{engine}: {n:,} inputs, {n / max(seconds, 1e-9):,.0f} per second and process")
    slowest = max((t["slowest_s"] for _, t in totals.tallies), default=0.0)
    largest = max((t["largest_bytes"] for _, t in totals.tallies), default=0)
    n_all = sum(t["n_inputs"] for _, t in totals.tallies)
    print(f"slowest input {slowest:.2f} s; most memory {largest / (1 << 20):.1f} MiB")
    print(f"{n_all:,} inputs in all: {len(totals.findings)} findings")
    for place, problem in totals.findings.items():
        print(f"  {problem}\n    tools/fuzz --replay {place}")


def replay(file: Path) -> int:
    """Feed one kept input again; returns 1 if it still shows a defect."""
    from tests.fuzz.judge import Judge
    from tests.fuzz.targets import targets

    target = file.name.partition("-")[0]
    if target not in TARGETS:
        sys.exit(f"tools/fuzz: {file}: its name must begin with one of {', '.join(TARGETS)} and -")
    with tempfile.TemporaryDirectory() as folder:
        verdict = Judge().judge(targets(Path(folder))[target], file.read_bytes())
    print(verdict.problem or f"{verdict.outcome}: as it should be")
    return int(verdict.problem is not None)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="tools/fuzz", description=__doc__.partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--minutes", type=float, help="how long to go on")
    what.add_argument("--replay", type=Path, help="feed one finding again")
    parser.add_argument("--seed", type=int, default=0, help="of the mutator and of atheris")
    default = max(1, len(os.sched_getaffinity(0)) - 1)
    parser.add_argument("--processes", type=int, default=default, help="default: CPUs but one")
    parser.add_argument("--engine", choices=["both", "mutator", "guided"], default="both")
    parser.add_argument("--target", choices=TARGETS, help="feed only this one; default: all")
    parser.add_argument("--out", type=Path, default=Path("fuzz-findings"), help="for findings")
    options = parser.parse_args(arguments)
    if options.processes < 1 or (options.minutes is not None and options.minutes <= 0):
        parser.error("--processes and --minutes must be positive")
    options.out = options.out.absolute()
    return options


def main(arguments: list[str]) -> int:
    """Fuzz; return the exit code."""
    options = parse(arguments)
    if options.replay:
        return replay(options.replay)
    engines = ["mutator", "guided"] if options.engine == "both" else [options.engine]
    if "guided" in engines and find_spec("atheris") is None:
        print("atheris is not installed (pip install '.[fuzz]'): no coverage-guided fuzzing")
        engines.remove("guided")
        if not engines:
            return 3
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as scratch:
        run = Run(options, Path(scratch))
        seconds = options.minutes * 60
        run.run(lanes_for(engines, options.processes, seconds, options.target))
    print_totals(run.totals)
    return int(bool(run.totals.findings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
