"""Kill conversions and resume them; exits with 1 if a result is not that of an undisturbed one.

    tools/stress conversion [--times N | --minutes M] [--seed S] [--what new|append] [--listed N]

In each phase of a conversion, and of one that appends, the driver or a worker is killed N times
(default: 20), at a random step of the phase: before, after or in the middle of the step. Then no
process may be left, nothing that is not whole may have a final name, and a dataset to which the
conversion appends must be undamaged. The conversion is resumed, and must give the same files as an
undisturbed conversion, byte for byte. In the last round, conversions are killed at random moments.

With --minutes, every phase gets an equal share of the time instead of N kills. With --listed, lists
of more than N entries are stored in files of their own. The conversion is in `conversion_victim`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import shardio
from shardio.conversion.journal import plan_path
from shardio.maintenance import verify_dataset, verify_shard
from shardio.storage.fs import read_checksummed_json
from stress_tests.conversion_victim import LISTED, OPTIONS, TRAP, Trap, small_units
from stress_tests.program import Deadline, environment, make_parser

MARK = "KILL_CONVERSION_MARK"
N_STEPS = {"plan": 6, "decode": 12, "seal": 12, "fsync": 10, "rename": 8, "generation": 14}
"""The approximate number of steps of each phase in one process, from which that of the kill is
drawn."""
BY_DRIVER = {"plan", "generation"}
ANY = "any moment"
KINDS = {"new": "dataset.json", "append": "generations/000002.json"}
"""Kinds of conversion to kill, into a new or an existing dataset, with the file made last."""


class Stage:
    """A folder with a source and its undisturbed conversion, in which trials are run.

    Conversions that append begin with a dataset of the first files only.
    """

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder, self._chance, self._n_trials = folder, chance, 0
        install(folder)
        small_units()
        self._write_source(range(7))
        self._convert(folder / "old")
        self._write_source(range(7, 12))
        self._convert(folder / "new")
        shutil.copytree(folder / "old", folder / "append")
        self._convert(folder / "append", append=True)
        self.whole = {what: contents(folder / what) for what in KINDS}

    def _write_source(self, numbers: range) -> None:
        for n in numbers:
            place = self.folder / "source" / f"class{n % 3}" / f"{n}.txt"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(f"{n} two three four{' !' if n == 5 else ''}")

    def _convert(self, out: Path, **options: Any) -> None:
        shardio.convert(self.folder / "source", out, workers=0, **OPTIONS, **options)

    def trial(self, what: str, phase: str) -> tuple[str, list[str]]:
        """Kill a conversion and resume it; return who was killed, or "", and what was wrong."""
        self._n_trials += 1
        out, fired = self.folder / f"out{self._n_trials}", self.folder / f"fired{self._n_trials}"
        who = "driver" if phase in BY_DRIVER else self._chance.choice(["driver", "worker"])
        at = self._chance.randint(1, N_STEPS.get(phase, 1))
        where = self._chance.choice(["before", "after", "half"])
        mark = uuid.uuid4().hex
        wanted = Trap(phase, at, where, who, 0, str(fired))
        if what == "append":
            shutil.copytree(self.folder / "old", out)
        process = self._start(what, out, mark, None if phase == ANY else wanted)
        if phase == ANY:
            who = self._kill_at_random(process, mark, out / ".conversion")
        elif process.wait(60) is not None and not fired.exists():
            who = ""
        process.wait(60)
        wrong = check_ended(mark) + check_whole(out)
        if who != "driver" and process.returncode:
            wrong.append(f"exit code {process.returncode}")
        if not process.returncode and (out / ".conversion").exists():
            wrong.append(f"left after the end: {sorted(contents(out / '.conversion'))}")
        if plan_path(out / ".conversion") or not (out / KINDS[what]).exists():
            wrong += self._resume(what, out)
        wrong += differences(contents(out), self.whole[what])
        if not wrong:
            shutil.rmtree(out)
        return who, [f"{what}, {phase}, {wanted}: {text}" for text in wrong]

    def _start(
        self, what: str, out: Path, mark: str, wanted: Trap | None
    ) -> subprocess.Popen[bytes]:
        variables = environment() | {MARK: mark}
        variables["PYTHONPATH"] += f":{self.folder / 'site'}"
        if wanted is not None:
            variables[TRAP] = json.dumps(dataclasses.asdict(wanted))
        program = (
            "import sys; from stress_tests.conversion_victim import drive; drive(*sys.argv[1:])"
        )
        command = [sys.executable, "-c", program, str(self.folder / "source"), str(out), what]
        return subprocess.Popen(command, env=variables, stderr=subprocess.DEVNULL)

    def _kill_at_random(self, process: subprocess.Popen[bytes], mark: str, begun: Path) -> str:
        """Kill a random process at a random moment after `begun` exists; return who it was."""
        while not begun.exists() and process.poll() is None:
            time.sleep(0.001)
        time.sleep(self._chance.uniform(0.0, 0.8))
        pids = [pid for pid in processes(mark) if pid != process.pid]
        if process.poll() is not None:
            return ""
        chosen = self._chance.choice([process.pid, *pids])
        with contextlib.suppress(ProcessLookupError):
            os.kill(chosen, signal.SIGKILL)
        return "driver" if chosen == process.pid else "worker"

    def _resume(self, what: str, out: Path) -> list[str]:
        try:
            self._convert(out, resume=True, append=what == "append")
        except Exception as error:  # noqa: BLE001  (any error is a finding)
            return [f"not resumed: {error!r}"]
        return []


def install(folder: Path) -> None:
    """Install the converter for this process, in a new folder of `sys.path`."""
    meta = folder / "site" / "victim-1.0.dist-info"
    meta.mkdir(parents=True)
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: victim\nVersion: 1.0\n")
    point = "[shardio.converters]\nvictim = stress_tests.conversion_victim:Victim\n"
    (meta / "entry_points.txt").write_text(point)
    sys.path.insert(0, str(folder / "site"))


def contents(out: Path) -> dict[str, bytes]:
    """Read all files of a folder."""
    files = (path for path in out.rglob("*") if path.is_file())
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in files}


def differences(found: dict[str, bytes], expected: dict[str, bytes]) -> list[str]:
    """Return the differences between the files of two folders."""
    names = sorted({*found, *expected})
    others = [name for name in names if found.get(name) != expected.get(name)]
    return [
        f"{name}: {len(found[name]) if name in found else 'no'} bytes, expected "
        f"{len(expected[name]) if name in expected else 'no'} bytes, which differ"
        for name in others
    ]


def processes(mark: str) -> list[int]:
    """Return the running processes that have a mark in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if mark.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
    return found


def check_ended(mark: str) -> list[str]:
    """Wait until all processes with a mark have exited; return a fault if some have not."""
    end_s = time.monotonic() + 10
    while left := processes(mark):
        if time.monotonic() > end_s:
            return [f"processes left: {left}"]
        time.sleep(0.01)
    return []


def check_whole(out: Path) -> list[str]:
    """Check everything that has a final name; return what is wrong with it."""
    wrong = []
    for place in out.rglob("*"):
        if any(part.startswith(".shardio-staging-") for part in place.parts):
            continue  # names are final only outside this folder
        try:
            if place.suffix == ".shard" and not place.name.startswith("."):
                wrong += [str(finding) for finding in verify_shard(place)]
            elif place.suffix == ".json" and not place.name.startswith("."):
                read_checksummed_json(place)
        except shardio.ShardioError as error:
            wrong.append(str(error))
    if (out / "dataset.json").exists():
        # Shards of an append have their names for a moment before the generation that names them.
        found = verify_dataset(out, workers=0).findings
        wrong += [str(finding) for finding in found if finding.code != "unknown_shard"]
    return wrong


def main(arguments: list[str]) -> int:
    """Kill until every phase has had its share; print a table; return the exit code."""
    parser = make_parser("conversion", __doc__)
    parser.add_argument("--times", type=int, default=20, help="kills in each phase (default: 20)")
    parser.add_argument("--what", choices=KINDS, help="new or append alone (default: both)")
    parser.add_argument("--listed", type=int, help="maximum length of lists that are stored inline")
    options = parser.parse_args(arguments)
    if options.listed is not None:
        os.environ[LISTED] = str(options.listed)  # for this process and those that are killed
    deadline, n_wrong = Deadline(options.minutes), 0
    phases = [(w, p) for w in ([options.what] if options.what else KINDS) for p in (*N_STEPS, ANY)]
    print(f"{'phase':<20}{'driver':>8}{'worker':>8}{'wrong':>8}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(Path(folder), random.Random(options.seed))
        for i, (what, phase) in enumerate(phases):
            share = deadline.share(len(phases) - i)
            n_wrong += run_phase(stage, what, phase, options.times, share)
    print(f"{n_wrong} wrong")
    return int(n_wrong > 0)


def run_phase(stage: Stage, what: str, phase: str, times: int, deadline: Deadline) -> int:
    """Kill in one phase `times` times, or until a deadline; print a row; count the faults."""
    killed = {"driver": 0, "worker": 0, "": 0}
    wrong: list[str] = []
    while deadline.asks_for(killed["driver"] + killed["worker"] < times):
        who, found = stage.trial(what, phase)
        killed[who] += 1
        wrong += found
    name = f"{what}: {phase}"
    print(f"{name:<20}{killed['driver']:>8}{killed['worker']:>8}{len(wrong):>8}", flush=True)
    print("".join(f"  {text}\n" for text in wrong), end="", flush=True)
    return len(wrong)
