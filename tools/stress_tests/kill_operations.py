"""Kill operations on datasets; exits with 1 if one leaves damage, or cannot be done again.

    tools/stress operations [--times N | --minutes M] [--seed S] [OPERATION …]

Each operation (convert, overwrite, append, append-samples, merge, compact, add-column, repair,
split, stats, export, re-export) is started N times (default: 20) in a separate process and killed:
half of the times at a random change of a file, before, after or in the middle of the change, and
half of the times at a random moment. Then the earlier files must be unchanged, nothing that is not
whole may have a final name, and a reader must find the dataset as it was before the operation or is
after it. The operation is done again, and must give the files of an undisturbed operation, byte for
byte, and no others. It may be refused if the new dataset or export is already complete.

With --minutes, every operation gets an equal share of the time instead. `tools/stress conversion`
kills conversions with workers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import shardio
from shardio import Array, Schema, Text
from shardio.conversion.journal import plan_path
from shardio.dataset.transaction import remove_leftovers
from shardio.errors import DatasetExists, ShardioError
from shardio.export import export
from shardio.maintenance import add_column, compact, compute_stats, merge, repair, split
from shardio.storage import fs
from stress_tests.conversion_victim import OPTIONS, small_units
from stress_tests.kill_conversion import check_whole, contents, differences, install
from stress_tests.program import Deadline, make_parser, memory_folder

N = 12
"""Samples of a dataset."""


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation on the folder of a trial, which starts as a copy of `start`.

    `is_next` is True if it publishes the next generation of a dataset that readers use.
    """

    run: Callable[[Path], object]
    again: Callable[[Path], object]
    start: str = "new"
    is_next: bool = False


def operations(folder: Path) -> dict[str, Operation]:
    """Return the operations; each works on `out` in the folder that it is given."""
    source, one, two = folder / "source", folder / "one", folder / "two"

    def convert(place: Path, **options: Any) -> None:
        shardio.convert(source, place / "out", workers=0, **OPTIONS, **options)

    def resume(place: Path, **options: Any) -> None:
        """Convert as a user does after an interruption: resume if there is something to resume."""
        resumes = plan_path(place / "out" / ".conversion") is not None
        if not resumes and "append" not in options and "overwrite" not in options:
            shutil.rmtree(place / "out" / ".conversion", ignore_errors=True)
        if resumes:
            options.pop("overwrite", None)
        convert(place, **options, resume=resumes)

    def export_again(place: Path) -> None:
        export(one, place / "out", "files", overwrite=(place / "out").exists())

    def same(run: Callable[[Path], object], **options: Any) -> Operation:
        return Operation(run, run, **options)

    return {
        "convert": Operation(convert, resume),
        "overwrite": Operation(
            lambda place: convert(place, overwrite=True),
            lambda place: resume(place, overwrite=True),
            start="other",
        ),
        "append": Operation(
            lambda place: convert(place, append=True),
            lambda place: resume(place, append=True),
            start="old",
            is_next=True,
        ),
        "append-samples": same(
            lambda place: shardio.convert([_sample(N)], place / "out", append=True),
            start="small",
            is_next=True,
        ),
        "merge": same(lambda place: merge(place / "out", one, two, workers=0)),
        "compact": same(
            lambda place: compact(place / "out", workers=0), start="small", is_next=True
        ),
        "add-column": same(
            lambda place: add_column(place / "out", "more", Array("int64"), range(N)),
            start="small",
            is_next=True,
        ),
        "repair": same(lambda place: repair(one, place / "out")),
        "split": same(
            lambda place: split(place / "out", {"a": 0.5, "b": 0.5}), start="small", is_next=True
        ),
        "stats": same(lambda place: compute_stats(place / "out"), start="small", is_next=True),
        "export": Operation(lambda place: export(one, place / "out", "files"), export_again),
        "re-export": Operation(
            lambda place: export(one, place / "out", "files", overwrite=True),
            export_again,
            start="exported",
        ),
    }


class Stage:
    """A folder with the inputs of the operations, and the results of undisturbed operations."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self._folder, self._chance, self._n_trials = folder, chance, 0
        self.operations = operations(folder)
        install(folder)
        small_units()
        self._write_inputs(range(5))
        self._make("old", lambda place: self.operations["convert"].run(place))
        self._write_inputs(range(5, 8))
        for name, first in (("one", 0), ("two", 100)):
            _write_dataset(folder / name, first)
        self._make("new", lambda _: None)
        self._make("small", lambda place: _write_dataset(place / "out", 0))
        self._make("other", lambda place: _write_dataset(place / "out", 50))
        self._make("exported", lambda place: export(folder / "two", place / "out", "files"))
        self._sources = self._contents_of_sources()
        self._whole: dict[str, tuple[dict[str, bytes], int, float]] = {}

    def _write_inputs(self, numbers: range) -> None:
        for n in numbers:
            place = self._folder / "source" / f"class{n % 3}" / f"{n}.txt"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(f"{n} two three{' !' if n == 3 else ''}")

    def _make(self, name: str, make: Callable[[Path], object]) -> None:
        place = self._folder / name if name in ("one", "two") else self._folder / "start" / name
        place.mkdir(parents=True)
        make(place)

    def _contents_of_sources(self) -> dict[str, bytes]:
        found = (contents(self._folder / name) for name in ("source", "one", "two"))
        return {f"{k}/{name}": data for k, each in enumerate(found) for name, data in each.items()}

    def begin(self, operation: Operation) -> Path:
        """Make the folder of a trial."""
        self._n_trials += 1
        place = self._folder / f"trial{self._n_trials}"
        shutil.copytree(self._folder / "start" / operation.start, place)
        return place

    def undisturbed(self, name: str) -> tuple[dict[str, bytes], int, float]:
        """Return the files that an undisturbed operation gives, its calls and its seconds."""
        if name not in self._whole:
            operation = self.operations[name]
            operation.run(self.begin(operation))  # so that everything is imported
            place, n_calls, began_s = self.begin(operation), 0, time.monotonic()

            def count(kind: str, path: str, do: Any, *given: Any, **named: Any) -> Any:
                nonlocal n_calls
                n_calls += 1
                return do(*given, **named)

            real, fs.perform = fs.perform, count  # type: ignore[assignment]
            try:
                operation.run(place)
            finally:
                fs.perform = real
            self._whole[name] = contents(place), n_calls, time.monotonic() - began_s
        return self._whole[name]

    def trial(self, name: str) -> tuple[str, list[str]]:
        """Kill an operation once and do it again; return its state when killed, and what is wrong.

        The state is "before", "after" or "between", or "" if nothing was killed.
        """
        operation = self.operations[name]
        whole, n_calls, took_s = self.undisturbed(name)
        place = self.begin(operation)
        old = contents(place)
        where = self._chance.choice(["before", "after", "half"])
        call = (self._chance.randrange(n_calls), where) if self._chance.random() < 0.5 else None
        delay_s = self._chance.uniform(0, 1.1 * took_s)
        moment = (
            f"after {delay_s:.4f} s" if call is None else f"{where} call {call[0]} of {n_calls}"
        )
        if not self._kill(operation, place, call, delay_s):
            state = ""
        else:
            found = visible(place)
            state = "before" if found == old else "after" if found == whole else "between"
        wrong = self.check(name, place, old)
        return state, [f"{name}, {moment}: {text}" for text in wrong]

    def check(self, name: str, place: Path, old: dict[str, bytes]) -> list[str]:
        """Check what an interrupted operation left and do it again; return what is wrong.

        Args:
            name: the operation.
            place: the folder of the trial, which is removed if all is well.
            old: the files that were in it before.
        """
        operation, (whole, _, _) = self.operations[name], self.undisturbed(name)
        wrong = self._check_left(operation, place, old, whole)
        wrong += self._check_again(operation, place, whole)
        if self._contents_of_sources() != self._sources:
            wrong.append("a source has changed")
        if not wrong:
            shutil.rmtree(place)
        return wrong

    def _kill(
        self, operation: Operation, place: Path, call: tuple[int, str] | None, delay_s: float
    ) -> bool:
        """Run an operation in a process that is killed; return True if it was."""
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                if call is not None:
                    fs.perform = _trap(*call)
                operation.run(place)
                os._exit(0)
            os._exit(1)
        if call is None:
            time.sleep(delay_s)
            os.kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status == 1:
            raise RuntimeError(f"the operation failed by itself in {place}")
        return status == -signal.SIGKILL

    def _check_left(
        self, operation: Operation, place: Path, old: dict[str, bytes], whole: dict[str, bytes]
    ) -> list[str]:
        """Return what is wrong with the files right after the interruption."""
        out, found = place / "out", visible(place)
        if "out/_export.json" in whole:
            return ["neither the old export nor the new one"] * (found not in (old, whole))
        wrong = check_whole(out) if out.exists() else []
        if operation.is_next and not old.items() <= found.items():
            pointer = "out/dataset.json"
            if any(found.get(name) != data for name, data in old.items() if name != pointer):
                wrong.append("a file of the generation before is gone or changed")
            if found.get(pointer) not in (old[pointer], whole[pointer]):
                wrong.append("the pointer is neither the old one nor the new one")
        if (out / "dataset.json").exists():
            with shardio.open(out) as dataset:
                for _ in dataset:
                    pass
        return wrong

    def _check_again(self, operation: Operation, place: Path, whole: dict[str, bytes]) -> list[str]:
        """Do the operation again, unless it is a published append or the like; return faults."""
        is_published = whole.items() <= contents(place).items()
        try:
            if is_published and operation.is_next:
                if plan_path(place / "out" / ".conversion") is not None:
                    operation.again(place)
                remove_leftovers(place / "out")  # as the next writer does
            elif is_published:
                with contextlib.suppress(DatasetExists):  # a refused operation leaves nothing
                    self._chance.choice([operation.run, operation.again])(place)
            else:
                operation.again(place)
        except (ShardioError, OSError) as error:
            return [f"not done again: {error!r}"]
        return differences(contents(place), whole)


def visible(place: Path) -> dict[str, bytes]:
    """Return the files of a folder that are not hidden, nor in a hidden folder."""
    found = contents(place)
    return {n: data for n, data in found.items() if not any(p[0] == "." for p in n.split("/"))}


def _trap(at: int, where: str) -> Callable[..., Any]:
    """Return a wrapper of calls that kills the process at one of them."""
    left = [at]

    def perform(kind: str, path: str, do: Any, *given: Any, **named: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            return do(*given, **named)
        if where == "half" and kind == "write":
            do(bytes(given[0])[: len(given[0]) // 2])
        elif where == "after":
            do(*given, **named)
        os.kill(os.getpid(), signal.SIGKILL)

    return perform


def _write_dataset(folder: Path, first: int) -> None:
    schema = Schema({"text": Text(), "label": Array("int64"), "pad": Array("uint8", (500,))})
    with shardio.DatasetWriter(folder, schema, shard_bytes=1500) as writer:
        for n in range(first, first + N):
            writer.append(_sample(n))


def _sample(n: int) -> dict[str, Any]:
    return {"text": f"sample {n}", "label": n, "pad": np.full(500, n, np.uint8)}


def main(arguments: list[str]) -> int:
    """Kill every operation; print a table; return the exit code."""
    parser = make_parser("operations", __doc__)
    names = [*operations(Path())]
    parser.add_argument("names", nargs="*", metavar="OPERATION", help=f"of {', '.join(names)}")
    parser.add_argument("--times", type=int, default=20, help="kills of each (default: 20)")
    options = parser.parse_args(arguments)
    if unknown := {*options.names} - {*names}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    chosen, deadline, n_wrong = options.names or names, Deadline(options.minutes), 0
    print(f"{'operation':<16}{'before':>8}{'between':>8}{'after':>8}{'wrong':>8}", flush=True)
    with memory_folder() as folder:
        stage = Stage(folder, random.Random(options.seed))
        for i, name in enumerate(chosen):
            n_wrong += kill(stage, name, options.times, deadline.share(len(chosen) - i))
    print(f"{n_wrong} wrong")
    return int(n_wrong > 0)


def kill(stage: Stage, name: str, times: int, deadline: Deadline) -> int:
    """Kill an operation `times` times, or until a deadline; print a row; count the faults."""
    states = {"before": 0, "between": 0, "after": 0}
    wrong: list[str] = []
    while deadline.asks_for(sum(states.values()) < times):
        state, found = stage.trial(name)
        if state:
            states[state] += 1
        wrong += found
    counts = "".join(f"{n:>8}" for n in states.values())
    print(f"{name:<16}{counts}{len(wrong):>8}", flush=True)
    print("".join(f"  {text}\n" for text in wrong), end="", flush=True)
    return len(wrong)
