"""One fuzzing process: feeds inputs until its time is over, and keeps a tally that others can read.

python -m tests.fuzz.feeding FOLDER FINDINGS SEED SECONDS [TARGET]

In FOLDER, `tally.json` says what was done so far, and `current` holds the input that is being fed,
for whoever finds this process dead.
"""

from __future__ import annotations

import collections
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.fuzz.inputs import Inputs
from tests.fuzz.judge import Judge, Verdict, prepare_process
from tests.fuzz.targets import targets

CORPUS: Final = Path(__file__).parent / "corpus"
TARGETS: Final = ("shard", "dataset", "schema", "record", "labels", "journal", "part", "converter")
"""Names of all targets."""
_TALLY_S: Final = 0.5


@dataclass
class IterationCounters:
    n_inputs: int = 0
    seconds: float = 0.0
    outcomes: dict[str, int] = field(default_factory=collections.Counter)
    families: dict[str, int] = field(default_factory=collections.Counter)
    slowest_s: float = 0.0
    largest_bytes: int = 0
    findings: dict[str, str] = field(default_factory=dict)
    """File to the first line of what is wrong; one for each place in the code."""
    n_found: int = 0


def save_finding(folder: Path, target: str, content: bytes, problem: str) -> Path:
    """Keep an input that shows a defect, beside what is wrong and how to see it again."""
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f"{target}-{hashlib.sha256(content).hexdigest()[:12]}"
    place.write_bytes(content)
    text = f"tools/stress fuzz --replay {place}\n\n{problem}"
    place.with_name(place.name + ".txt").write_text(text, "utf-8", "backslashreplace")
    return place


class Feeder:
    """Feeds inputs to targets, judges them, and keeps the tally of that in `folder`."""

    def __init__(self, folder: Path, findings: Path) -> None:
        self.tally, self.targets = IterationCounters(), targets(folder)
        self._findings, self._places = findings, set[str]()
        self._file = folder / "tally.json"
        self._current = os.open(folder / "current", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        self._start, self._next_tally = time.monotonic(), 0.0
        self._judge = Judge()

    def feed(self, target: str, family: str, content: bytes) -> Verdict:
        os.pwrite(self._current, f"{target} {len(content)}\n".encode() + content, 0)
        verdict = self._judge.judge(self.targets[target], content)
        tally = self.tally
        tally.n_inputs += 1
        tally.outcomes[f"{target}: {verdict.outcome}"] += 1
        tally.families[family] += 1
        tally.slowest_s = max(tally.slowest_s, verdict.seconds)
        tally.largest_bytes = max(tally.largest_bytes, verdict.n_bytes)
        if verdict.problem is not None:
            self._note(target, content, verdict.problem)
        if time.monotonic() >= self._next_tally:
            self.write_tally()
        return verdict

    def _note(self, target: str, content: bytes, problem: str) -> None:
        self.tally.n_found += 1
        where = _place_of(problem)
        if where not in self._places:
            self._places.add(where)
            file = save_finding(self._findings, target, content, problem)
            self.tally.findings[str(file)] = problem.strip().splitlines()[-1][:300]

    def write_tally(self) -> None:
        self.tally.seconds = time.monotonic() - self._start
        self._next_tally = time.monotonic() + _TALLY_S
        temporary = self._file.with_suffix(".new")
        temporary.write_text(json.dumps(vars(self.tally)))
        temporary.rename(self._file)

    def close(self) -> None:
        self.write_tally()
        os.close(self._current)
        self._judge.close()


def _place_of(problem: str) -> str:
    """Return the identity of a defect: the kind of error and the innermost line of shardio."""
    lines = problem.strip().splitlines()
    places = [line.strip() for line in lines if line.strip().startswith('File "')]
    inside = [place for place in places if "/shardio" in place]
    return f"{lines[-1].partition(':')[0]} {(inside or places or lines[:1])[-1]}"


def read_current(folder: Path) -> tuple[str, bytes] | None:
    try:
        content = (folder / "current").read_bytes()
    except FileNotFoundError:
        return None
    front, _, rest = content.partition(b"\n")
    target, _, size = front.decode().partition(" ")
    return (target, rest[: int(size)]) if size else None


def corpus() -> Iterator[tuple[str, str, bytes]]:
    """All inputs that are kept: target, name, content (of a shard: its dense form)."""
    for target in TARGETS:
        for file in sorted((CORPUS / target).glob("*")):
            yield target, file.name, file.read_bytes()


if __name__ == "__main__":
    _folder, _found, _seed, _seconds, *_only = sys.argv[1:]
    _feeder = Feeder(Path(_folder), Path(_found))
    prepare_process()
    _end = time.monotonic() + float(_seconds)
    for _input in Inputs(_feeder.targets, int(_seed), "".join(_only) or None):
        _feeder.feed(*_input)
        if time.monotonic() >= _end:
            break
    _feeder.close()
