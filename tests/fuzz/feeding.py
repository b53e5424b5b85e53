"""One fuzzing process: feeds inputs until its time is over, and keeps a tally that others can read.

python -m tests.fuzz.feeding ENGINE FOLDER FINDINGS SEED SECONDS [TARGET]

ENGINE is `mutator` (tests/fuzz/inputs.py) or `guided` (atheris: what reaches new code is kept and
changed further). In FOLDER, `tally.json` says what was done so far, and `current` holds the input
that is being fed, for whoever finds this process dead.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import importlib
import json
import os
import pkgutil
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from tests.fuzz.judge import Judge, Verdict, prepare_process

CORPUS: Final = Path(__file__).parent / "corpus"
TARGETS: Final = ("shard", "dataset", "schema", "record", "labels", "journal", "part", "converter")
"""Names of all targets."""
_NOT_FED: Final = ("arrow", "hdf5", "hdf5_files", "lerobot", "videos", "images", "audio")
"""Converters of files that are not fed: their libraries take long to import."""
_TALLY_S: Final = 0.5
_MAX_GUIDED_BYTES: Final = 8192
MAX_PART_BYTES: Final = 4096


@dataclass
class IterationCounters:
    """The counts of a process so far."""

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
    text = f"tools/fuzz --replay {place}\n\n{problem}"
    place.with_name(place.name + ".txt").write_text(text, "utf-8", "backslashreplace")
    return place


class Feeder:
    """Feeds inputs to targets, judges them, and keeps the tally of that in `folder`."""

    def __init__(self, folder: Path, findings: Path) -> None:
        from tests.fuzz.targets import targets  # after atheris has prepared the imports

        self.tally, self.targets = IterationCounters(), targets(folder)
        self._findings, self._places = findings, set[str]()
        self._file = folder / "tally.json"
        self._current = os.open(folder / "current", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        self._start, self._next_tally = time.monotonic(), 0.0
        self._judge: Judge | None = None

    def feed(self, target: str, family: str, content: bytes) -> Verdict:
        """Feed one input."""
        if self._judge is None:  # late: libFuzzer takes the signal at its own start
            self._judge = Judge()
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
        """Let others see how far this is."""
        self.tally.seconds = time.monotonic() - self._start
        self._next_tally = time.monotonic() + _TALLY_S
        temporary = self._file.with_suffix(".new")
        temporary.write_text(json.dumps(vars(self.tally)))
        temporary.rename(self._file)

    def close(self) -> None:
        """Write the tally, and give the signals back."""
        self.write_tally()
        os.close(self._current)
        if self._judge is not None:
            self._judge.close()


def _place_of(problem: str) -> str:
    """Return the identity of a defect: the kind of error and the innermost line of shardio."""
    lines = problem.strip().splitlines()
    places = [line.strip() for line in lines if line.strip().startswith('File "')]
    inside = [place for place in places if "/shardio" in place]
    return f"{lines[-1].partition(':')[0]} {(inside or places or lines[:1])[-1]}"


def read_current(folder: Path) -> tuple[str, bytes] | None:
    """Return the input that a process was fed when it ended."""
    try:
        content = (folder / "current").read_bytes()
    except FileNotFoundError:
        return None
    front, _, rest = content.partition(b"\n")
    target, _, size = front.decode().partition(" ")
    return (target, rest[: int(size)]) if size else None


def feed_mutated(feeder: Feeder, seed: int, seconds: float, only: str | None) -> None:
    """Feed what the structure-aware mutator makes."""
    from tests.fuzz.inputs import Inputs

    end = time.monotonic() + seconds
    for target, family, content in Inputs(feeder.targets, seed, only):
        feeder.feed(target, family, content)
        if time.monotonic() >= end:
            return


def corpus() -> Iterator[tuple[str, str, bytes]]:
    """All inputs that are kept: target, name, content (of a shard: its dense form)."""
    for target in TARGETS:
        for file in sorted((CORPUS / target).glob("*")):
            yield target, file.name, file.read_bytes()


def guided_mutation(
    rng: random.Random, target: str, content: bytes, mutate: Callable[[bytes], bytes]
) -> bytes:
    """Change an input of the guided engine where it matters; `mutate` changes any bytes."""
    from tests.fuzz.mutate import change_json, dumped, number
    from tests.fuzz.parts import from_dense, to_dense

    if target == "schema" and rng.random() < 0.5:
        with contextlib.suppress(ValueError, RecursionError):
            return dumped(rng, change_json(rng, json.loads(content)))
    if target == "dataset" and rng.random() < 0.7:
        return _change_documents(rng, content)
    if target == "converter" and rng.random() < 0.7:
        return _change_files(rng, content, mutate)
    if target != "shard" or rng.random() < 0.1 or not (parts := from_dense(content)).sections:
        return mutate(content)
    i = rng.randrange(len(parts.sections))
    section = parts.sections[i]
    if rng.random() < 0.2:
        parts.sections[i] = replace(section, count=number(rng, section.count))
    elif rng.random() < 0.1:
        parts.n_samples = number(rng, parts.n_samples)
    else:
        changed = mutate(parts.contents[i])[:MAX_PART_BYTES]
        parts.contents[i] = changed
        if section.stride and rng.random() < 0.5:
            parts.sections[i] = replace(section, count=len(changed) // section.stride)
    return to_dense(parts)


def _change_documents(rng: random.Random, content: bytes) -> bytes:
    """Another dataset.json and generation, with digests that are right where they can be."""
    from tests.fuzz.inputs import with_digest
    from tests.fuzz.mutate import change_json
    from tests.fuzz.targets import SEPARATOR

    documents = content.split(SEPARATOR, 1)
    i = rng.randrange(len(documents))
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(documents[i])
        if isinstance(value, dict):
            value.pop("digest", None)
        documents[i] = with_digest(rng, change_json(rng, value))
    return SEPARATOR.join(documents)


def _change_files(rng: random.Random, content: bytes, mutate: Callable[[bytes], bytes]) -> bytes:
    """Another one of the files of a converter; lines of JSON as JSON."""
    from tests.fuzz.converting import SEPARATOR
    from tests.fuzz.mutate import change_json, dumped

    which, files = content[:1], content[1:].split(SEPARATOR)
    i = rng.randrange(len(files))
    lines = files[i].split(b"\n")
    j = rng.randrange(len(lines))
    if rng.random() < 0.7:
        with contextlib.suppress(ValueError, RecursionError):
            lines[j] = dumped(rng, change_json(rng, json.loads(lines[j])))
            files[i] = b"\n".join(lines)
            return which + SEPARATOR.join(files)
    files[i] = mutate(files[i])
    return which + SEPARATOR.join(files)


def feed_guided(feeder: Feeder, folder: Path, seed: int, seconds: float, target: str) -> None:
    """Feed what atheris makes; does not return."""
    from tests.fuzz.parts import from_dense

    atheris = importlib.import_module("atheris")
    started = folder / "corpus"
    started.mkdir()
    for owner, name, content in corpus():
        if owner == target:
            (started / name).write_bytes(content)

    def feed(content: bytes) -> None:
        whole = from_dense(content).seal() if target == "shard" else content
        feeder.feed(target, "guided", whole)

    def change(content: bytes, max_size: int, seed: int) -> bytes:
        def mutate(some: bytes) -> bytes:
            return bytes(atheris.Mutate(some, max(1, min(max_size, 64 + 2 * len(some)))))

        return guided_mutation(random.Random(seed), target, content, mutate)[:max_size]

    options = [
        f"-seed={seed + 1}",  # 0 would be a random one
        f"-max_total_time={max(1, int(seconds))}",
        f"-max_len={_MAX_GUIDED_BYTES}",
        "-len_control=0",
        "-rss_limit_mb=0",
        "-timeout=100",
        "-verbosity=0",
    ]
    atheris.Setup([sys.argv[0], *options, str(started)], feed, custom_mutator=change)
    atheris.Fuzz()


def import_converters() -> None:
    """Import what converters import when they are first used: by then nothing is instrumented."""
    package = importlib.import_module("shardio_converters")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith(_NOT_FED):
            with contextlib.suppress(ModuleNotFoundError):  # of an extra that is not installed
                importlib.import_module(module.name)


def main(engine: str, folder: Path, findings: Path, seed: int, seconds: float, only: str) -> None:
    """Feed until the time is over."""
    if engine == "guided":
        with importlib.import_module("atheris").instrument_imports(
            include=["shardio", "shardio_converters"]
        ):
            if only == "converter":
                import_converters()
            feeder = Feeder(folder, findings)
        prepare_process()
        feed_guided(feeder, folder, seed, seconds, only or TARGETS[0])
        return
    feeder = Feeder(folder, findings)
    prepare_process()
    feed_mutated(feeder, seed, seconds, only or None)
    feeder.close()


if __name__ == "__main__":
    _engine, _folder, _found, _seed, _seconds, *_only = sys.argv[1:]
    main(_engine, Path(_folder), Path(_found), int(_seed), float(_seconds), "".join(_only))
