"""Flips every bit of a small shard, one at a time; exits with 1 if the audit misses one.

python tools/dev/flip_every_bit.py [--step N] [--offset N]

The shard has every kind of section. A reader then reads the flipped shard as well: it must return
the same data or raise an error of shardio, and nothing else. `--step 8` takes one bit of each byte.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for tests/, which no wheel holds

from shardio.errors import ShardioError
from shardio.surgery.shard_audit import examine_bytes
from tests.corruption.forge import SMALL, content_of, read_everything, small_samples
from tests.shards import same_sample


def check(file: int, path: Path, content: bytearray, bit: int) -> str | None:
    """Flip one bit in the file and back; returns what is wrong with how that was met, if anything.

    Args:
        file: descriptor of the shard.
        path: of the same file.
        content: what the shard holds.
        bit: which bit of the file.
    """
    at, flipped = bit // 8, bytes([content[bit // 8] ^ 1 << bit % 8])
    os.pwrite(file, flipped, at)
    try:
        content[at] ^= 1 << bit % 8
        is_found = bool(examine_bytes(memoryview(content), str(path)).findings)
        read = read_everything(path)
    finally:
        content[at] ^= 1 << bit % 8
        os.pwrite(file, content[at : at + 1], at)
    if not is_found:
        return "the audit found nothing"
    wanted = small_samples()
    if isinstance(read, ShardioError) or all(map(same_sample, read, wanted)):
        return None
    return "a reader returned other data"


def main() -> int:
    """Flip all bits, or every N-th; print what was missed; return the exit code."""
    parser = argparse.ArgumentParser(description="Flip every bit of a small shard.")
    parser.add_argument("--step", type=int, default=1, help="flip every N-th bit only")
    parser.add_argument("--offset", type=int, default=0, help="the first bit to flip")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path, n_missed, start_s = Path(folder) / "small.shard", 0, time.monotonic()
        content = content_of(path, SMALL, small_samples())
        path.write_bytes(content)
        bits = range(options.offset, 8 * len(content), options.step)
        with open(path, "r+b", buffering=0) as file:
            for n_done, bit in enumerate(bits):
                if wrong := check(file.fileno(), path, content, bit):
                    n_missed += 1
                    print(f"byte {bit // 8}, bit {bit % 8}: {wrong}")
                if n_done % 50_000 == 49_999:
                    print(f"{n_done + 1:,} of {len(bits):,} bits", flush=True)
    elapsed_s = time.monotonic() - start_s
    print(f"{len(bits):,} bits of {len(content):,} bytes in {elapsed_s:.0f} s: {n_missed} missed")
    return int(n_missed > 0)


if __name__ == "__main__":
    sys.exit(main())
