"""Uploads of batches to a device, and how much of them a training step hides."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import numpy as np
from tinygrad.device import Device
from tinygrad.engine.jit import TinyJit
from tinygrad.tensor import Tensor

from benchmarks import data
from benchmarks.data import DatasetSpec
from benchmarks.harness import Bench, Lanes, Limit, case
from shardio import ShardLoader

N_BATCHES: Final = 32
Put = Callable[[], object]


@case(
    Limit("loader, reuse=True", "GB/s", "bare copy", at_least=0.8),
    Limit("step and loader", "share hidden", at_least=0.5),
)
def upload(
    bench: Bench, *, device: str = Device.DEFAULT, batch: int = 64, seconds: float = 1.0
) -> Lanes:
    """Compare uploads with a bare copy, and measure what a step hides of them; for a GPU."""
    spec = DatasetSpec(data.FRAMES, data.frame, N_BATCHES * batch)
    folder = bench.cache.dataset("frames", spec)
    n_bytes = batch * int(np.prod(data.FRAME))
    kind, put = _bare_copy(device, n_bytes)
    bench.note(f"device {device}; bare copy: {kind}")
    is_host = device.partition(":")[0] in ("CPU", "PYTHON")
    prefix = "host's own, " if is_host else ""
    opened: Any = Device[device]
    options: dict[str, Any] = {"shuffle": True, "device": device}
    with (
        ShardLoader(folder, batch, **options) as safe,
        ShardLoader(folder, batch, reuse=True, **options) as fast,
    ):
        for loader in (safe, fast):
            _epoch_s(loader, opened)
        wanted_s = _epoch_s(fast, opened)[0] / N_BATCHES
        step, step_s = _make_step(device, batch, wanted_s)
        bench.note(f"step: {step_s * 1e3:.2f} ms")
        _epoch_s(fast, opened, step)
        yield {
            f"{prefix}bare copy": lambda: {
                "GB/s": _per_second(put, opened, seconds) * n_bytes / 1e9
            },
            f"{prefix}loader, safe lane": partial(_rate, safe, opened, n_bytes),
            f"{prefix}loader, reuse=True": partial(_rate, fast, opened, n_bytes),
            f"{prefix}step and loader": partial(_hidden, fast, opened, step, step_s),
        }


def _rate(loader: ShardLoader, device: Any, n_bytes: int) -> Mapping[str, float]:
    return {"GB/s": N_BATCHES * n_bytes / _epoch_s(loader, device)[0] / 1e9}


def _hidden(loader: ShardLoader, device: Any, step: Any, step_s: float) -> Mapping[str, float]:
    """Compare the time of a loader with steps with the sum of the times of each alone."""
    alone_s = _epoch_s(loader, device)[0]
    both_s, waited_s = _epoch_s(loader, device, step)
    steps_s = step_s * N_BATCHES
    hidden = (steps_s + alone_s - both_s) / min(steps_s, alone_s)
    return {"share hidden": hidden, "share waiting": waited_s / both_s}


def _bare_copy(device: str, n_bytes: int) -> tuple[str, Put]:
    """Return the kind of copy, and a function that copies n_bytes once."""
    array = np.ones(n_bytes, np.uint8)
    target = Tensor(array, device="NPY").to(device).realize()
    buffer: Any = target.uop.base.buffer
    if device.partition(":")[0] != "CUDA":
        view = array.data
        return "with the allocator", lambda: buffer.allocator._copyin(buffer._buf, view)
    from tinygrad.runtime.autogen import cuda

    host = ctypes.c_void_p()
    cuda.cuMemHostAlloc(ctypes.byref(host), n_bytes, 0)
    ctypes.memset(host, 1, n_bytes)

    def put() -> None:
        cuda.cuMemcpyHtoDAsync_v2(buffer._buf, host, n_bytes, None)

    return "from pinned memory", put


def _per_second(put: Put, device: Any, seconds: float) -> float:
    """Return calls per second, synchronising every 8."""
    put()
    device.synchronize()
    n, start_s = 0, time.perf_counter()
    while time.perf_counter() - start_s < seconds:
        for _ in range(8):
            put()
        device.synchronize()
        n += 8
    return n / (time.perf_counter() - start_s)


def _epoch_s(loader: ShardLoader, device: Any, step: Any = None) -> tuple[float, float]:
    """Return the duration of an epoch, and the time spent waiting for batches, in seconds."""
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


def _timed_step(device: str, batch: int, size: int) -> tuple[Any, float]:
    """Return a captured step over matrices of `size` rows, and how many seconds it takes."""
    weights = Tensor.ones(size, size, device=device).contiguous().realize()
    images = Tensor(np.zeros((batch, *data.FRAME), np.uint8), device="NPY").to(device).realize()

    @TinyJit
    def step(x: Tensor) -> Tensor:
        light = x[:, 0, 0, 0].float().mean()
        return (weights @ (weights * 0.5 + light)).sum().realize()

    for _ in range(3):
        step(images)
    return step, 1 / _per_second(lambda: step(images), Device[device], 0.3)


def _make_step(device: str, batch: int, wanted_s: float) -> tuple[Any, float]:
    """Return a captured step that takes at least `wanted_s`, and how long it takes."""
    size = 128
    step, taken_s = _timed_step(device, batch, size)
    while taken_s < wanted_s and size < 1 << 14:
        size *= 2
        step, taken_s = _timed_step(device, batch, size)
    return step, taken_s
