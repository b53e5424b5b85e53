"""Damage a shard in every way; exits with 1 if verification or a reader misses any damage.

    tools/stress flips [--what KIND] [--shard NAME …] [--step N] [--offset N]
    tools/stress flips --minutes N [--seed S]

Without --minutes, four shards are damaged, which together have every kind of section, field type
and codec: three with less than 64 KiB in all, and one of twice this size. Every bit is flipped, the
file is cut at every length, and bytes are appended. Verification must find every damage and its
place. A reader must refuse the file or, if the bit is in padding, which it does not read, return
the same data. With --step and --offset, only every N-th case is tried, beginning at an offset.

With --minutes, shards of random sizes, including larger ones, are damaged at random until the time
is over.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from shardio.shard.verification import Verify
from stress_tests.program import make_parser, memory_folder
from tests.corruption.damage import Victim
from tests.corruption.forge import EVERYTHING, VICTIMS, content_of, everything
from tests.shards import EVERY_FIELD, MEDIA_FIELDS, as_read, media_sample, samples

FLIPS_PER_SHARD = 400
MAX_SAMPLES = 60
VERIFYING: tuple[Verify, ...] = ("first", "always")
REPORT_S = 30.0
KINDS = ("lengths", "tails", "flips")
SHARDS = {**VICTIMS, "all": (EVERYTHING, everything)}


class Count:
    """Counts of cases handled as expected, by kind."""

    def __init__(self, what: str, n_cases: int | None) -> None:
        self._what, self._n_cases = what, n_cases
        self.n_done = self.n_missed = 0
        self._start = self._last = time.monotonic()

    def enter(self, case: str, complaint: str | None) -> None:
        """Count a case; `complaint` states what was wrong with its outcome, or is None."""
        self.n_done += 1
        if complaint is not None:
            self.n_missed += 1
            print(f"{case}: {complaint}", flush=True)
        if time.monotonic() - self._last > REPORT_S:
            self._last = time.monotonic()
            of_all = f" of {self._n_cases:,}" if self._n_cases else ""
            print(f"... {self.n_done:,}{of_all} {self._what}", flush=True)

    def close(self) -> int:
        """Print the counts; return the number of missed cases."""
        met, elapsed_s = self.n_done - self.n_missed, time.monotonic() - self._start
        print(f"{self._what}: {met:,}/{self.n_done:,} in {elapsed_s:.0f} s", flush=True)
        return self.n_missed


def check_all(what: str, cases: Sequence[int], check: Callable[[int], str | None]) -> int:
    """Check all cases of a kind; return the number of missed cases."""
    count = Count(what, len(cases))
    for case in cases:
        count.enter(f"{what} {case}", check(case))
    return count.close()


def tails(content: bytes) -> list[bytes]:
    """Return the bytes to append: one byte to three pages, zeros or others, and the file itself."""
    lengths = [*range(1, 129), 511, 512, 4095, 4096, 4097, 8192, 12288]
    return [byte * n for n in lengths for byte in (b"\0", b"\x01", b"\xff")] + [content]


def damage_wholly(name: str, folder: Path, kinds: Sequence[str], step: int, offset: int) -> int:
    """Try every bit, every length and many tails; return the number of missed cases."""
    schema, made = SHARDS[name]
    content = content_of(folder / f"{name}.shard", schema, made())
    print(f"{name}: a shard of {len(content):,} bytes", flush=True)
    victim = Victim(folder / f"{name}.shard", content, made())
    appended, n_missed = tails(bytes(content)), 0
    if "lengths" in kinds:
        lengths = range(offset, len(content), step)
        n_missed += check_all("lengths", lengths, victim.complaint_about_length)
    if "tails" in kinds:
        which = range(offset, len(appended), step)
        n_missed += check_all("tails", which, lambda i: victim.complaint_about_tail(appended[i]))
    if "flips" in kinds:
        victim.n_refused = 0
        bits = range(offset, 8 * len(content), step)
        n_missed += check_all("flipped bits", bits, victim.complaint_about_flip)
        print(f"  readers: {victim.n_refused:,} refused, {victim.n_same:,} the same data (padding)")
    victim.close()
    return n_missed


def damage_random_shards(folder: Path, minutes: float, seed: int) -> int:
    """Flip, cut and extend random shards until the time is over; return the number of misses."""
    rng, end = random.Random(seed), time.monotonic() + 60 * minutes
    count, n_shards, n_bytes = Count("cases of damage to random shards", None), 0, 0
    while time.monotonic() < end:
        n = rng.randint(0, MAX_SAMPLES)
        is_media = rng.random() < 0.5
        schema = MEDIA_FIELDS if is_media else EVERY_FIELD
        some = [media_sample(i, rng.choice((9, 9_000))) for i in range(n)] if is_media else []
        some = some if is_media else list(samples(n))
        rng.shuffle(some)
        path = folder / f"{n_shards}.shard"
        content = content_of(path, schema, some)
        victim = Victim(path, content, [as_read(sample, schema) for sample in some])
        n_shards, n_bytes = n_shards + 1, n_bytes + len(content)
        for case, complaint in random_damage(victim, rng):
            count.enter(
                f"seed {seed}, shard {n_shards - 1} of {len(some)} samples, {case}", complaint
            )
            if time.monotonic() >= end:
                break
        victim.close()
        path.unlink()
    print(f"{n_shards} shards, {n_bytes:,} bytes")
    return count.close()


def random_damage(victim: Victim, rng: random.Random) -> Iterable[tuple[str, str | None]]:
    """Yield cases of damage, each with the complaint about its outcome, or None."""
    size = len(victim.content)
    n_flips = max(4, FLIPS_PER_SHARD * 100_000 // size)
    for _ in range(n_flips):
        bit = rng.randrange(8 * size)
        yield f"bit {bit}", victim.complaint_about_flip(bit, rng.choice(VERIFYING))
    for _ in range(n_flips // 4):
        length = rng.randrange(size)
        yield f"length {length}", victim.complaint_about_length(length)
    tail = rng.randbytes(rng.randint(1, 9000))
    yield f"{len(tail)} bytes appended", victim.complaint_about_tail(tail)


def main(arguments: list[str]) -> int:
    """Damage shards; print what was missed; return the exit code."""
    parser = make_parser("flips", __doc__)
    parser.add_argument("--step", type=int, default=1, help="take every N-th case only")
    parser.add_argument("--offset", type=int, default=0, help="the first case to take")
    parser.add_argument("--what", choices=KINDS, help="one kind of damage only")
    names = list(SHARDS)
    parser.add_argument("--shard", nargs="*", choices=names, default=names, help="those alone")
    options = parser.parse_args(arguments)
    with memory_folder() as folder:
        if options.minutes is not None:
            n_missed = damage_random_shards(folder, options.minutes, options.seed)
        else:
            kinds = [options.what] if options.what else KINDS
            where = (kinds, options.step, options.offset)
            n_missed = sum(damage_wholly(name, folder, *where) for name in options.shard)
    print("nothing was missed" if not n_missed else f"{n_missed:,} cases were missed")
    return int(n_missed > 0)
