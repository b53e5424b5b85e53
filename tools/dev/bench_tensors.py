"""Measure what a batch of two fields costs main on the way from a block to tensors and back.

    DEV=CPU python tools/dev/bench_tensors.py

A batch is 64 x 150,528 uint8 and 64 int64 in one block: lease the block, make both tensors, drop
them, take the block back, synchronize. Exits with 1 above 150 us in the safe lane (median).
"""

from __future__ import annotations

import ctypes
import mmap
import statistics
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np

from shardio.outputs import tinygrad as adapter
from shardio.outputs.tinygrad import TinygradAdapter

LIMIT_US = 150.0
N_BATCHES = 5000
N_BLOCKS = 4
N_IMAGE_BYTES = 64 * 150_528


def _batches(maker: TinygradAdapter) -> Callable[[], object]:
    """One batch after the other, over blocks that come back by their finalizers."""
    blocks = deque(mmap.mmap(-1, N_IMAGE_BYTES + 4096) for _ in range(N_BLOCKS))
    returned: deque[mmap.mmap] = deque()

    def batch() -> None:
        block = blocks.popleft()
        carrier = (ctypes.c_ubyte * len(block)).from_buffer(block)
        weakref.finalize(carrier, returned.append, block).atexit = False
        leased = np.frombuffer(carrier, np.uint8)  # type: ignore[call-overload]  # a buffer
        del carrier
        images = leased[:N_IMAGE_BYTES].reshape(64, 224, 224, 3)
        labels = leased[N_IMAGE_BYTES : N_IMAGE_BYTES + 512].view(np.int64)
        kept = maker.wrap(images, leased), maker.wrap(labels, leased)
        del images, labels, leased, kept
        if maker.aliases:
            maker.synchronize()
        blocks.append(returned.popleft())

    return batch


def _per_batch_us(maker: TinygradAdapter, n_batches: int = N_BATCHES) -> list[float]:
    batch = _batches(maker)
    times = []
    for _ in range(n_batches):
        start_s = time.perf_counter()
        batch()
        times.append((time.perf_counter() - start_s) * 1e6)
    return times


def main() -> int:
    """Print the figures; return 1 when the safe lane is above its limit."""
    maker = TinygradAdapter()
    if not maker.aliases:
        print(f"copied to the device  {statistics.median(_per_batch_us(maker, 100)):8.1f} us")
        return 0
    times = _per_batch_us(maker)
    median_us = statistics.median(times)
    print(f"safe lane             {median_us:8.1f} us  (limit {LIMIT_US:.0f})")
    print(f"... its best          {min(times):8.1f} us")
    vars(adapter).update(dict.fromkeys(("find_view", "find_copies"), lambda device: None))
    slow_us = statistics.median(_per_batch_us(TinygradAdapter("CPU"), 100))
    print(f"copied by public calls {slow_us:8.1f} us")
    return int(median_us > LIMIT_US)


if __name__ == "__main__":
    sys.exit(main())
