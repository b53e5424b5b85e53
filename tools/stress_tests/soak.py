"""Run loaders under random faults; check every sample that they deliver.

    tools/stress soak --minutes N [--seed S]

In each episode, a loader with random options runs through epochs. Meanwhile workers are killed and
stopped, samples are slow, batches are held and checked again later, loops end with `break` or an
exception or are nested, memory is short, training is resumed with other options, and some datasets
have a damaged sample. Every sample must be the expected one, with the random draws that it has
without workers; every epoch must be complete; errors must name the place of the damage. Nothing may
take longer than PATIENCE_S, and at the end no process, descriptor or memory may be left. The
program prints how often each event happened, and ends with an error at the first fault.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import os
import random
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import shardio
import shardio.errors
from shardio import Array, Batch, DatasetWriter, Schema, ShardLoader, Text
from shardio.errors import ChecksumMismatch
from stress_tests.program import make_parser
from stress_tests.soak_trouble import Trouble

N = 480
PATIENCE_S = 120.0
GROWTH_MIB = 128.0
DAMAGED = 137
SCHEMA = Schema({"image": Array("uint8", (32, 32, 3)), "label": Array("int64"), "note": Text()})
Values = tuple[bytes, str, float, float]


class _Left(Exception):
    """Raised in the body of a loop, to leave the loop."""


class Wrong(Exception):
    """Raised for a wrong result."""


def expect(is_so: object, what: object) -> None:
    """Raise Wrong unless `is_so` is true; `what` is the message."""
    if not is_so:
        raise Wrong(str(what))


def stored(index: int) -> dict[str, Any]:
    """Return the sample with this number."""
    image = np.random.default_rng(index).integers(0, 256, (32, 32, 3), np.uint8)
    return {"image": image, "label": index, "note": f"sample {index} " * (index % 9)}


def draw(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Draw from every generator, and be slow now and then."""
    drawn = [rng.random(), random.random() + float(np.random.random())]
    if drawn[0] < 0.01:
        time.sleep(0.02)
    return {**sample, "drawn": np.array(drawn)}


def write(folder: Path, *, damage: bool) -> str:
    """Write the dataset; with damage, one bit of a sample's image is flipped."""
    with DatasetWriter(folder, SCHEMA, shard_bytes=256 << 10) as writer:
        for i in range(N):
            writer.append(stored(i))
    if damage:
        needle = stored(DAMAGED)["image"].tobytes()
        for path in sorted(folder.glob("*.shard")):
            content = bytearray(path.read_bytes())
            if (at := content.find(needle)) >= 0:
                content[at + 5] ^= 1
                path.write_bytes(content)
    return str(folder)


class Soak:
    """A run: the expected random draws, and counts of events."""

    def __init__(self, root: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.tally: collections.Counter[str] = collections.Counter()
        self.trouble = Trouble(seed + 1, self.tally)
        self.whole = write(root / "whole", damage=False)
        self.damaged = write(root / "damaged", damage=True)
        self.samples = [stored(i) for i in range(N)]
        self._draws: dict[tuple[int, int], dict[int, tuple[float, float]]] = {}

    def draws(self, seed: int, epoch: int) -> dict[int, tuple[float, float]]:
        """Return the random draws for each sample of an epoch, from a loader without workers."""
        if (seed, epoch) not in self._draws:
            options: dict[str, Any] = {"shuffle": True, "seed": seed, "transform": draw}
            with ShardLoader(self.whole, N, num_workers=0, output="numpy", **options) as loader:
                loader.load_state_dict(loader.state_dict() | {"epoch": epoch})
                (batch,) = loader
                rows = batch["drawn"].tolist()
                self._draws[seed, epoch] = dict(zip(batch["label"].tolist(), rows, strict=True))
        return self._draws[seed, epoch]

    def check(self, batch: Batch, seed: int, *, is_drawn: bool) -> None:
        """Compare every row of a batch with the expected sample."""
        draws = self.draws(seed, batch.epoch) if is_drawn else {}
        images, labels = np.asarray(batch["image"]), np.asarray(batch["label"]).tolist()
        expect(labels == batch.indices.tolist(), f"labels {labels} at {batch.indices}")
        for i, label in enumerate(labels):
            expected = self.samples[label]
            where = f"sample {label} in batch {batch.step} of epoch {batch.epoch}"
            expect(np.array_equal(images[i], expected["image"]), where)
            expect(batch["note"][i] == expected["note"], where)
            if is_drawn:
                expect(batch["drawn"][i].tolist() == draws[label], where)
        self.tally["batches"] += 1
        self.tally["samples"] += len(labels)

    def options(self) -> dict[str, Any]:
        """Return random options for a loader."""
        choose = self.random.choice
        memory = choose([None, None, 1 << 20])
        return {
            "batch_size": choose([1, 3, 8, 32, 100]),
            "num_workers": choose([0, 1, 2, 2, 3, 5]),
            "prefetch": choose([None, 0, 4]),
            "reuse": choose([False, False, True]),
            "transform": choose([None, draw]),
            "memory_bytes": memory,
            "access": choose(["auto", "pread"]),
            "start_method": choose(["zygote"] * 6 + ["spawn", "thread"]),
        }

    def episode(self) -> None:
        """Run one random kind of episode, with random options."""
        what = self.random.choice(
            [
                self.whole_epochs,
                self.left_loops,
                self.nested_loops,
                self.resumed,
                self.with_damage,
                self.with_skips,
            ]
        )
        self.tally[f"episodes: {what.__name__.replace('_', ' ')}"] += 1
        options, seed = self.options(), self.random.randrange(3)
        try:
            what(seed, options)
        except Wrong as error:
            error.add_note(f"with seed {seed} and {options}")
            raise
        except (shardio.WorkerDied, shardio.errors.TooManySkipped) as error:
            # The workers of one batch or sample may be killed one after the other by chance.
            expect(self.trouble.n_killed > 1 and "crashed" in str(error), error)
            self.tally["batches reported to have crashed two workers"] += 1
        except shardio.errors.UnsupportedEnvironment:
            # So many workers may be killed, before this machine can start new ones, that the loader
            # no longer treats the kills as accidents.
            expect(self.trouble.n_killed > 2 * options["num_workers"] + 2, "nobody killed them")
            self.tally["loaders that gave up"] += 1
        finally:
            self.trouble.loader = None

    @contextlib.contextmanager
    def loader(self, folder: str, seed: int, options: dict[str, Any]) -> Iterator[ShardLoader]:
        """Yield a loader whose workers are killed or stopped."""
        options = dict(options)
        dataset = shardio.open(folder, access=options.pop("access"))
        made = ShardLoader(dataset, shuffle=True, seed=seed, output="numpy", **options)
        with made:
            self.trouble.loader, self.trouble.n_killed = made, 0
            yield made

    def whole_epochs(self, seed: int, options: dict[str, Any]) -> None:
        """Run two epochs, and hold some batches."""
        is_drawn, may_hold = options["transform"] is draw, not options["reuse"]
        with self.loader(self.whole, seed, options) as loader:
            for _ in range(2):
                held: list[Batch] = []
                seen: list[int] = []
                for batch in loader:
                    self.check(batch, seed, is_drawn=is_drawn)
                    seen += batch.indices.tolist()
                    if may_hold and self.random.random() < 0.2:
                        held.append(batch)
                        self.tally["batches held"] += 1
                for batch in held:
                    self.check(batch, seed, is_drawn=is_drawn)
                expect(sorted(seen) == list(range(N)), "an epoch is not whole")
                self.tally["epochs"] += 1

    def left_loops(self, seed: int, options: dict[str, Any]) -> None:
        """Leave loops with `break` or an exception, then run a whole epoch."""
        is_drawn = options["transform"] is draw
        with self.loader(self.whole, seed, options) as loader:
            for _ in range(self.random.randrange(1, 5)):
                last = self.random.randrange(len(loader))
                with contextlib.suppress(_Left):
                    for batch in loader:
                        self.check(batch, seed, is_drawn=is_drawn)
                        if batch.step == last and self.random.random() < 0.5:
                            break
                        if batch.step == last:
                            raise _Left
                self.tally["loops left early"] += 1
            seen = [i for batch in loader for i in batch.indices.tolist()]
            expect(sorted(seen) == list(range(N)), "the epoch after is not whole")

    def nested_loops(self, seed: int, options: dict[str, Any]) -> None:
        """Run a loop in a loop over the same loader."""
        options |= {"reuse": False, "batch_size": max(32, options["batch_size"])}
        is_drawn = options["transform"] is draw
        with self.loader(self.whole, seed, options) as loader:
            seen = []
            for outer in loader:
                for batch in loader:
                    self.check(batch, seed, is_drawn=is_drawn)
                    if self.random.random() < 0.3:
                        break
                self.check(outer, seed, is_drawn=is_drawn)
                seen += outer.indices.tolist()
            expect(sorted(seen) == list(range(N)), "the outer epoch is not whole")

    def resumed(self, seed: int, options: dict[str, Any]) -> None:
        """Run an epoch in two halves, by two loaders."""
        is_drawn = options["transform"] is draw
        seen: list[int] = []
        with self.loader(self.whole, seed, options) as loader:
            last = self.random.randrange(len(loader))
            for batch in loader:
                self.check(batch, seed, is_drawn=is_drawn)
                seen += batch.indices.tolist()
                if batch.step == last:
                    break
            state = loader.state_dict()
        others = self.options() | {"transform": options["transform"]}
        with self.loader(self.whole, seed, others) as loader:
            loader.load_state_dict(state)
            for batch in loader:
                self.check(batch, seed, is_drawn=is_drawn)
                seen += batch.indices.tolist()
        expect(sorted(seen) == list(range(N)), "the halves are not an epoch")
        self.tally["epochs resumed"] += 1

    def with_damage(self, seed: int, options: dict[str, Any]) -> None:
        """Load a dataset with a damaged sample."""
        options |= {"memory_bytes": None}
        is_drawn = options["transform"] is draw
        with self.loader(self.damaged, seed, options) as loader:
            try:
                for batch in loader:
                    self.check(batch, seed, is_drawn=is_drawn)
            except ChecksumMismatch as error:
                expect(error.field == "image", error)
                self.tally["errors of damage"] += 1
                return
        raise Wrong("a damaged sample was delivered")

    def with_skips(self, seed: int, options: dict[str, Any]) -> None:
        """Load a dataset with a damaged sample, whose row another sample fills."""
        options |= {"memory_bytes": None, "on_error": "skip", "max_skips": 1}
        is_drawn = options["transform"] is draw
        with self.loader(self.damaged, seed, options) as loader:
            seen: list[int] = []
            skipped: list[int] = []
            for batch in loader:
                self.check(batch, seed, is_drawn=is_drawn)
                seen += batch.indices[batch.valid].tolist()
                skipped += [each.index for each in batch.skipped]
        expect(skipped == [DAMAGED], f"skipped {skipped}")
        expect(sorted([*seen, DAMAGED]) == list(range(N)), "the rest is not whole")
        self.tally["damage skipped"] += 1


def _resident_mib() -> float:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / (1 << 20)


def _children() -> int:
    with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
        return len(file.read().split())


def _left_over() -> tuple[int, int]:
    """Return the numbers of child processes and of open descriptors of this process."""
    return _children(), len(os.listdir("/proc/self/fd"))


def run(seconds: float, seed: int) -> int:
    """Run episodes for `seconds`; return the exit code."""
    end_s = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as root:
        soak = Soak(Path(root), seed)
        soak.trouble.start()
        soak.whole_epochs(0, soak.options())
        soak.trouble.loader = None
        before, resident = _left_over(), _resident_mib()
        most = 0.0
        while time.monotonic() < end_s:
            faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
            soak.episode()
            expect(soak.trouble.is_alive(), "the thread that kills workers has crashed")
            faulthandler.cancel_dump_traceback_later()
            most = max(most, _resident_mib() - resident)
        after = _left_over()
    for name, count in sorted(soak.tally.items()):
        print(f"{count:>10,}  {name}")
    print(f"{most:10.1f}  MiB more than after the first episode, at most (limit {GROWTH_MIB:.0f})")
    print(f"processes and descriptors: {before} before, {after} after")
    return 0 if after <= before and most <= GROWTH_MIB else 1


def main(arguments: list[str]) -> int:
    """Read the command line, and soak."""
    parser = make_parser("soak", __doc__)
    options = parser.parse_args(arguments)
    if options.minutes is None:
        parser.error("--minutes is missing")
    return run(options.minutes * 60, options.seed)
