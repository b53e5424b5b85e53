"""A converter for tests that reads words from text files, and helpers that use it."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import shardio
from shardio import Array, ConversionReport, Converter, Input, MediaError, Outcome, Schema, Text
from shardio.conversion import Progress
from shardio.conversion.staging import Staging

OLD = "one two three four five six seven".split()
"""The samples of the folder that `install` makes."""


RETURNED: dict[str, Outcome] = {
    "returns:None": None,  # type: ignore[dict-item]
    "returns:broken": Outcome("broken", "it says so itself"),
    "returns:long": Outcome("converted", "why " * 10_000, {"long": "x" * 200_000}),
}
"""Words that end an input, and its outcome."""


@dataclasses.dataclass(frozen=True)
class Lines(Converter):
    """A converter for tests: a word is a sample; `!` breaks, others are worse."""

    kind: ClassVar[str] = "lines"
    version: ClassVar[str] = "7"

    repeat: int = 1

    def schema(self) -> Schema:
        return Schema({"text": Text(), "label": Array("int64"), "pad": Array("uint8", (5000,))})

    def libraries(self) -> Mapping[str, str]:
        return {"alphabet": "26"}

    def samples(self, source: Input) -> Generator[Mapping[str, Any], None, Outcome]:
        if not source.name.endswith(".txt"):
            return Outcome("unsupported")
        n = 0
        for line in Path(source.path).read_text().split():
            if line == "!":
                raise MediaError(f"{source.path}: breaks after {n} lines")
            if line == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if line.startswith("once:") and not os.path.exists(line[5:]):
                Path(line[5:]).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if line.startswith("wait:"):
                Path(line[5:]).touch()
                time.sleep(1000)
            if line.startswith("stuck:") and not os.path.exists(line[6:]):
                Path(line[6:]).write_text(f"{os.environ.get('RAY_RAYLET_PID')} {os.getpid()}")
                time.sleep(1000)
            if line == "full":
                raise OSError(errno.ENOSPC, "No space left on device")
            if line == "bug":
                raise KeyError("a mistake in the converter")
            if line in RETURNED:
                return RETURNED[line]
            label = "no number" if line == "misfit" else source.label
            for _ in range(self.repeat):
                yield {"text": line, "label": label, "pad": np.full(5000, n, np.uint8)}
            n += 1
        return Outcome("converted", detail={"lines": n}) if n else Outcome("empty", "no line")


def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    site = tmp_path / "site"
    meta = site / "lines-1.0.dist-info"
    meta.mkdir(parents=True)
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: lines\nVersion: 1.0\n")
    (meta / "entry_points.txt").write_text(f"[shardio.converters]\nlines = {__name__}:Lines\n")
    monkeypatch.syspath_prepend(str(site))
    # Several units from a few bytes.
    monkeypatch.setattr("shardio.conversion.journal.MIN_UNIT_BYTES", 8)
    monkeypatch.setattr("shardio.conversion.journal.MIN_INPUT_BYTES", 0)
    root = tmp_path / "lines"
    write(root, {"a/1.txt": "one two", "a/2.txt": "", "b/3.txt": "three", "b/readme": "hello"})
    write(root, {"c/4.txt": "four five six", "d/5.txt": "", "top.txt": "seven"})
    return root


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)


def convert(root: Path, out: Path, **options: Any) -> ConversionReport:
    return shardio.convert(root, out, kind="lines", **{"workers": 0, **options})


def append(root: Path, out: Path, **options: Any) -> ConversionReport:
    return shardio.convert(root, out, append=True, **{"workers": 0, **options})


def interrupt_after(n_inputs: int) -> Callable[[Progress], None]:
    def progress(state: Progress) -> None:
        if state.n_inputs_done == n_inputs:
            raise KeyboardInterrupt

    return progress


def killed(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def leave_killed(root: Path, out: Path, place: object, name: str, **options: Any) -> None:
    """Run a conversion that is killed when `name` of `place` is called."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Staging, "_clean_up", killed)
        patch.setattr(place, name, killed)
        with pytest.raises(KeyboardInterrupt):
            convert(root, out, **options)


def column(out: Path, name: str) -> list[Any]:
    with shardio.open(out) as dataset:
        return [sample[name] for sample in dataset]


def texts(out: Path) -> list[str]:
    return column(out, "text")


def outcomes(report: ConversionReport) -> dict[str, str]:
    return {source.name: source.outcome for source in report.inputs}


def check_resumes(root: Path, out: Path, **options: Any) -> ConversionReport:
    """Resume the conversion to `out`; compare the result with an uninterrupted conversion."""
    report = convert(root, out, **options, resume=True)
    whole = out.parent / "uninterrupted"
    convert(root, whole, **options)
    assert contents(out) == contents(whole)
    return report


def contents(out: Path) -> dict[str, bytes]:
    files = (path for path in out.rglob("*") if path.is_file())
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in files}


def during(monkeypatch: pytest.MonkeyPatch, act: Callable[[Input], object]) -> None:
    """Call `act` for each input after its samples, before its outcome."""
    samples = Lines.samples

    def disturbed(self: Lines, source: Input) -> Generator[Mapping[str, Any], None, Outcome]:
        outcome = yield from samples(self, source)
        act(source)
        return outcome

    monkeypatch.setattr(Lines, "samples", disturbed)


def note_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the names of the inputs that this process reads from now on."""
    names: list[str] = []
    samples = Lines.samples

    def reading(self: Lines, source: Input) -> Generator[Mapping[str, Any], None, Outcome]:
        names.append(source.name)
        return (yield from samples(self, source))

    monkeypatch.setattr(Lines, "samples", reading)
    return names
