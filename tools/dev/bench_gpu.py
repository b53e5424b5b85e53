"""Measure the upload of batches to a device, and how much of it a training step hides.

    python tools/dev/bench_gpu.py [--device CUDA] [--batch-size 64] [--seconds 3] [--folder DIR]

Made for a GPU; with --device CPU or PYTHON it runs everywhere, and its figures mean little. Frames
of 224 x 224 x 3 bytes are written to DIR, then batches of them go, by a ShardLoader, to the device:

* **bare**: copies of one batch, from pinned memory where the backend has it (CUDA), else by the
  allocator's own copy from memory that is in the cache: the best there is;
* **loader**: an epoch after the first, in the safe lane and with reuse=True, without any step;
* **hidden**: a captured step that takes about as long as a batch needs, without and with the
  loader: (time of steps alone + of loading alone - of both together) / the smaller of the two;
* **waiting**: the share of the loop with steps that passes until the next batch is there.

Exits with 1 where the fast lane gets less than 0.8 of the bare copy, or less than 0.5 is hidden, on
a device that is not the host's own.
"""

from __future__ import annotations

import argparse
import ctypes
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tinygrad.device import Device
from tinygrad.engine.jit import TinyJit
from tinygrad.tensor import Tensor

import shardio
from shardio import Array, Schema

SHAPE = (224, 224, 3)
N_BATCHES = 32
ENOUGH_OF_BARE, ENOUGH_HIDDEN = 0.8, 0.5
HOSTS = ("CPU", "PYTHON")
Put = Callable[[], object]


def write(folder: Path, n_samples: int) -> None:
    """Write frames in which no two rows are alike."""
    frame = np.random.default_rng(0).integers(0, 255, SHAPE, np.uint8)
    schema = Schema({"frames": Array("uint8", SHAPE), "label": Array("int64")})
    with shardio.DatasetWriter(folder, schema) as writer:
        for i in range(n_samples):
            frame[0, 0] = i & 255, i >> 8, 0
            writer.append({"frames": frame, "label": i})


def bare_copy(device: str, n_bytes: int) -> tuple[str, Put]:
    """Return the kind of copy, and a function that copies n_bytes once."""
    array = np.ones(n_bytes, np.uint8)
    target = Tensor(array, device="NPY").to(device).realize()
    buffer: Any = target.uop.base.buffer
    if device.partition(":")[0] != "CUDA":
        view = array.data
        return "allocator's copy", lambda: buffer.allocator._copyin(buffer._buf, view)
    from tinygrad.runtime.autogen import cuda

    host = ctypes.c_void_p()
    cuda.cuMemHostAlloc(ctypes.byref(host), n_bytes, 0)
    ctypes.memset(host, 1, n_bytes)

    def put() -> None:
        cuda.cuMemcpyHtoDAsync_v2(buffer._buf, host, n_bytes, None)

    return "pinned memory", put


def per_second(put: Put, device: Any, seconds: float) -> float:
    """Return calls per second, synchronising at the end only."""
    put()
    device.synchronize()
    n, start_s = 0, time.perf_counter()
    while time.perf_counter() - start_s < seconds:
        for _ in range(8):
            put()
        device.synchronize()
        n += 8
    return n / (time.perf_counter() - start_s)


def epoch_s(loader: shardio.ShardLoader, device: Any, step: Any = None) -> tuple[float, float]:
    """Seconds of an epoch, and of those that passed in waiting for batches."""
    waited_s, start_s = 0.0, time.perf_counter()
    batches = iter(loader)
    while True:
        before_s = time.perf_counter()
        batch = next(batches, None)
        waited_s += time.perf_counter() - before_s
        if batch is None:
            device.synchronize()
            return time.perf_counter() - start_s, waited_s
        frames = batch["frames"]
        if step is not None:
            step(frames)


def timed_step(device: str, batch_size: int, size: int) -> tuple[Any, float]:
    """Return a captured step over matrices of so many rows, and how many seconds it takes."""
    weights = Tensor.ones(size, size, device=device).contiguous().realize()
    images = Tensor(np.zeros((batch_size, *SHAPE), np.uint8), device="NPY").to(device).realize()

    @TinyJit
    def step(x: Tensor) -> Tensor:
        light = x[:, 0, 0, 0].float().mean()
        return (weights @ (weights * 0.5 + light)).sum().realize()

    for _ in range(3):
        step(images)
    return step, 1 / per_second(lambda: step(images), Device[device], 0.3)


def make_step(device: str, batch_size: int, wanted_s: float) -> tuple[Any, float]:
    """Return a captured step that takes about so long, and how long it does."""
    size = 128
    step, taken_s = timed_step(device, batch_size, size)
    while taken_s < wanted_s and size < 1 << 14:
        size *= 2
        step, taken_s = timed_step(device, batch_size, size)
    return step, taken_s


def measure(folder: Path, device: str, batch_size: int, seconds: float) -> bool:
    """Print all figures; returns whether they are good enough."""
    n_bytes = batch_size * int(np.prod(SHAPE))
    how, put = bare_copy(device, n_bytes)
    opened = Device[device]
    bare = per_second(put, opened, seconds) * n_bytes / 1e9
    print(f"bare, {how:<22} {bare:8.2f} GB/s")
    rates = {}
    for reuse in (False, True):
        with shardio.ShardLoader(
            folder, batch_size, shuffle=True, device=device, reuse=reuse
        ) as loader:
            epoch_s(loader, opened)
            found = [epoch_s(loader, opened)[0] for _ in range(5)]
        rates[reuse] = N_BATCHES * n_bytes / statistics.median(found) / 1e9
        lane = "loader, reuse=True" if reuse else "loader, safe lane"
        print(f"{lane:<28} {rates[reuse]:8.2f} GB/s  {rates[reuse] / bare:5.2f} of bare")
    step, step_s = make_step(device, batch_size, n_bytes / rates[True] / 1e9)
    with shardio.ShardLoader(folder, batch_size, shuffle=True, device=device, reuse=True) as loader:
        epoch_s(loader, opened, step)
        alone_s = statistics.median(epoch_s(loader, opened)[0] for _ in range(5))
        both = [epoch_s(loader, opened, step) for _ in range(5)]
    both_s, waited_s = (statistics.median(column) for column in zip(*both, strict=True))
    steps_s = step_s * N_BATCHES
    hidden = (steps_s + alone_s - both_s) / min(steps_s, alone_s)
    print(f"{'step':<28} {step_s * 1e3:8.2f} ms")
    print(f"{'loading hidden behind it':<28} {hidden:8.2f}")
    print(f"{'share of the loop waiting':<28} {waited_s / both_s:8.2f}")
    is_host = device.partition(":")[0] in HOSTS
    return is_host or (rates[True] >= ENOUGH_OF_BARE * bare and hidden >= ENOUGH_HIDDEN)


def main() -> int:
    """Measure, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default=Device.DEFAULT)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--folder", help="where the data is written for a while")
    options = parser.parse_args()
    print(f"{platform.node()}, {platform.machine()}, device {options.device}")
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        folder = Path(place) / "frames"
        write(folder, N_BATCHES * options.batch_size)
        is_good = measure(folder, options.device, options.batch_size, options.seconds)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
