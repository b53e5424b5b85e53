"""Let every call that changes the disk fail; exits with 1 if anything is lost.

    tools/stress disk [--every N] [--workers-only]
    tools/stress disk --minutes N [--seed S]

A call is a create, write, fsync, rename, link, mkdir, unlink or rmdir. Each call fails twice: once
alone, with EIO, and once together with all later calls, with ENOSPC. The first calls to fail are
those of a worker process, through this module, which the workers import for their converter; with
ENOSPC, all later calls of the main process then fail as well. Next are the calls of a conversion,
an append, a replacement, maintenance, exports and downloads in one process, through the tests in
`TESTS`.

A conversion that fails ends with exit code 3 and names the file; no process is left, nothing that
is not whole has a final name, and --resume gives the same bytes as an undisturbed conversion. The
sources of other operations do not change, and the operations give the undisturbed result when they
are repeated. With --every, only every N-th call fails. With --minutes, only calls of workers fail,
drawn at random until the time is over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import json
import os
import random
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from shardio.dataset.manifest import WORK_FOLDER
from shardio.storage import fs
from shardio_tools import cli
from stress_tests import conversion_victim
from stress_tests import kill_conversion as k
from stress_tests.program import ROOT, Deadline, make_parser, memory_folder

TESTS = (
    "tests/faults/test_failing_disk.py",
    "tests/faults/test_operations_on_a_failing_disk.py",
    "tests/storage/remote/test_failing_disk.py",
)
TRAP = "FAIL_DISK_TRAP"
MODES = ((errno.EIO, False), (errno.ENOSPC, True))


@dataclasses.dataclass(frozen=True)
class Victim(conversion_victim.Victim):
    """A converter that makes one sample of each word."""

    kind: ClassVar[str] = "failing"


# In the worker.


@dataclasses.dataclass
class Trap:
    """The number of the call that fails (-1 for none), and its error code.

    All calls are listed in the file `log`; the path of the failed one is written to `fired`.
    """

    at: int
    code: int
    for_good: bool
    log: str
    fired: str
    n_calls: int = 0

    def perform(
        self, kind: str, path: str, function: Callable[..., Any], *given: Any, **named: Any
    ) -> Any:
        """Call `function`, or fail; this replaces `fs.perform`."""
        n = self.n_calls
        self.n_calls += 1
        with open(self.log, "a") as log:
            log.write(f"{kind} {path}\n")
        if n == self.at:
            Path(self.fired).write_text(path)
        if n == self.at or (self.for_good and 0 <= self.at < n):
            raise OSError(self.code, os.strerror(self.code), path)
        return function(*given, **named)


real_perform = fs.perform
if os.environ.get(TRAP):
    fs.perform = Trap(**json.loads(os.environ[TRAP])).perform  # type: ignore[assignment]


# In the main process.


class Stage:
    """A folder with a source and its undisturbed conversion, in which trials are run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._n_trials = folder, 0
        meta = folder / "site" / "failing-1.0.dist-info"
        meta.mkdir(parents=True)
        (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: failing\nVersion: 1.0\n")
        (meta / "entry_points.txt").write_text(
            "[shardio.converters]\nfailing = stress_tests.fail_disk:Victim\n"
        )
        sys.path.insert(0, str(folder / "site"))
        for n in range(4):
            place = folder / "source" / f"class{n % 2}" / f"{n}.txt"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(f"{n} two three four{' !' if n == 2 else ''}")
        conversion_victim.small_units()
        self._convert(folder / "whole", 0)
        self.whole = k.contents(folder / "whole")

    def _convert(self, out: Path, workers: int, *options: str) -> tuple[int, str]:
        """Run the command; return its exit code, and its errors."""
        command = ["convert", str(self.folder / "source"), str(out), "--kind=failing", "--quiet"]
        with contextlib.redirect_stderr(io.StringIO()) as said:
            code = cli.main([*command, f"--workers={workers}", *options])
        return code, said.getvalue()

    def n_calls(self) -> int:
        """Return the number of calls that the worker of an undisturbed conversion makes."""
        self.trial(-1, 0, for_good=False)
        return len((self.folder / "log").read_text().splitlines())

    def trial(self, at: int, code: int, *, for_good: bool) -> list[str]:
        """Let a call fail, and resume; return what was wrong."""
        self._n_trials += 1
        out = self.folder / f"out{self._n_trials}"
        log, fired = self.folder / "log", self.folder / "fired"
        for rest in (log, fired):
            rest.unlink(missing_ok=True)
        trap = Trap(at, code, for_good, str(log), str(fired))
        mark = uuid.uuid4().hex
        os.environ |= {TRAP: json.dumps(dataclasses.asdict(trap)), k.MARK: mark}
        if for_good:
            fs.perform = _refusing(trap)
        try:
            exit_code, said = self._convert(out, 1)
        finally:
            fs.perform = real_perform
            del os.environ[TRAP], os.environ[k.MARK]
        wrong = k.check_ended(mark) + k.check_whole(out)
        if fired.exists():
            wrong += _wrong_words(exit_code, said, trap)
        if exit_code == cli.ENVIRONMENT:
            exit_code, said = self._convert(out, 0, "--resume")
        if exit_code != 1:  # one input is broken
            wrong.append(f"exit code {exit_code} at the end: {said}")
        if k.contents(out) != self.whole:
            wrong.append("other bytes")
        if not wrong:
            shutil.rmtree(out)
        return wrong


def _refusing(trap: Trap) -> Callable[..., Any]:
    """Return a wrapper for the main process that fails once the worker's call has failed."""

    def perform(
        kind: str, path: str, function: Callable[..., Any], *given: Any, **named: Any
    ) -> Any:
        if os.path.exists(trap.fired):
            raise OSError(trap.code, os.strerror(trap.code), path)
        return real_perform(kind, path, function, *given, **named)

    return perform


def _wrong_words(exit_code: int, said: str, trap: Trap) -> list[str]:
    """Return the fault in the outcome of a conversion with a failed call."""
    lines = said.splitlines()
    path = Path(trap.fired).read_text()
    if exit_code != cli.ENVIRONMENT:
        return [f"exit code {exit_code}: {said}"]
    shown = path.partition(f"/{WORK_FOLDER}")[0]  # an error in it names the dataset
    if not any(line.startswith(f"shardio: {shown}: {os.strerror(trap.code)}") for line in lines):
        return [f"the error does not name the failed file, {path}: {said}"]
    return []


def _drawn(n_calls: int, deadline: Deadline, chance: random.Random) -> Iterator[int]:
    """Yield random calls until the time is over; at least one."""
    yield chance.randrange(n_calls)
    while not deadline.is_over():
        yield chance.randrange(n_calls)


def in_workers(every: int, deadline: Deadline, seed: int) -> int:
    """Let calls in a worker fail; print a row for each way; return the number of faults."""
    n_wrong, chance = 0, random.Random(seed)
    with memory_folder() as folder:
        stage = Stage(folder)
        n_calls = stage.n_calls()
        for i, (code, for_good) in enumerate(MODES):
            calls, wrong = range(0, n_calls, every), list[str]()
            drawn = _drawn(n_calls, deadline.share(len(MODES) - i), chance)
            n_tried = n_good = 0
            for at in drawn if deadline.is_set else calls:
                found = stage.trial(at, code, for_good=for_good)
                n_tried, n_good = n_tried + 1, n_good + (not found)
                wrong += [f"call {at} of {n_calls}: {text}" for text in found]
            way = f"{errno.errorcode[code]}{' from then on' if for_good else ''}"
            print(f"in a worker, {way}: {n_good}/{n_tried} calls", flush=True)
            print("".join(f"  {text}\n" for text in wrong), end="", flush=True)
            n_wrong += len(wrong)
    return n_wrong


def main(arguments: list[str]) -> int:
    """Let all calls fail; return the exit code."""
    parser = make_parser("disk", __doc__)
    parser.add_argument(
        "--every", type=int, default=1, help="fail every N-th call only (default: 1)"
    )
    parser.add_argument("--workers-only", action="store_true", help="calls of workers only")
    options = parser.parse_args(arguments)
    deadline = Deadline(options.minutes)
    n_wrong = in_workers(options.every, deadline, options.seed)
    if not options.workers_only and not deadline.is_set:
        command = [sys.executable, "-m", "pytest", "-q", *TESTS]
        variables = os.environ | {"SHARDIO_FAIL_EVERY": str(options.every)}
        n_wrong += subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode != 0
    print(f"{n_wrong} wrong")
    return int(n_wrong > 0)
