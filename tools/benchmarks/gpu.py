"""Uploads of batches to a GPU: how close they are to a bare copy, and how much a step hides."""

from __future__ import annotations

import ctypes
import importlib
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from benchmarks import data
from benchmarks.child import NotMeasured
from benchmarks.data import DatasetSpec
from benchmarks.harness import Bench, Lane, Lanes, Limit, case
from shardio import ShardLoader
from shardio.errors import ShardioError
from shardio.outputs import Output, create_adapter

N_BATCHES: Final = 128
N_SAMPLES: Final = 32
"""The number of samples in the dataset for each sample of a batch."""
MULTIPLE: Final = 64
"""The matrices of a step have a multiple of this number of rows."""
MAX_SIZE: Final = 1 << 14
Put = Callable[[], object]
Step = Callable[[Any], Any]
Frames = Iterable[Any]


class Framework(Protocol):
    """A framework on a device: the part that the cases need."""

    output: Output
    is_host: bool

    def bare_copy(self, n_bytes: int) -> tuple[str, Put]:
        """Return the kind of copy, and a function that copies n_bytes once."""

    def step(self, images: Any, size: int) -> Step:
        """Return a function of a batch of images that multiplies matrices of `size` rows."""

    def upload(self, array: Any) -> Any:
        """Return an array as a tensor on the device."""

    def wait(self, last: Any) -> None:
        """Wait until the device has finished all work; `last` is the latest result."""


def _limits(share_of_bare_copy: float, share_hidden: float) -> tuple[Limit, ...]:
    return (
        Limit("loader", "GB/s", "bare copy", at_least=share_of_bare_copy),
        Limit("loader, reuse=True", "GB/s", "bare copy", at_least=share_of_bare_copy),
        Limit("step and loader", "share hidden", at_least=share_hidden),
        Limit("step and loader", "share waiting", at_most=0.2),
    )


@case(*_limits(0.3, 0.6))
def torch(bench: Bench, *, device: str = "cuda", batch: int = 64, seconds: float = 0.5) -> Lanes:
    """Compare uploads by torch with a bare copy, and measure what a step hides of them."""
    yield from _uploads(bench, "torch", Torch, device, batch, seconds)


@case(*_limits(0.2, 0.25))
def jax(bench: Bench, *, device: str = "gpu", batch: int = 64, seconds: float = 0.5) -> Lanes:
    """Compare uploads by JAX with a bare copy, and measure what a step hides of them."""
    yield from _uploads(bench, "jax", Jax, device, batch, seconds)


@case(*_limits(0.05, 0.6))
def tinygrad(bench: Bench, *, device: str = "CUDA", batch: int = 64, seconds: float = 0.5) -> Lanes:
    """Compare uploads by tinygrad with a bare copy, and measure what a step hides of them."""
    yield from _uploads(bench, "tinygrad", Tinygrad, device, batch, seconds)


def _uploads(
    bench: Bench,
    output: Output,
    kind: Callable[[str], Framework],
    device: str,
    batch: int,
    seconds: float,
) -> Lanes:
    try:
        create_adapter(output, device)
    except ShardioError as error:
        raise NotMeasured(f"{error} (--set device=NAME measures another device)") from error
    spec = DatasetSpec(data.FRAMES, data.frame, N_SAMPLES * batch)
    folder = bench.cache.dataset("frames", spec)
    framework, n_bytes = kind(device), batch * int(np.prod(data.FRAME))
    how, put = framework.bare_copy(n_bytes)
    bench.note(f"device {device}; bare copy: {how}; batches of {n_bytes / 1e6:.1f} MB")
    prefix = "host's own, " if framework.is_host else ""
    loaders = _Loaders(folder, batch, framework, device)
    with loaders.safe as safe, loaders.reused as reused, loaders.arrays as arrays:
        rate = partial(_rate, framework, n_bytes)
        lanes: dict[str, Lane] = {
            "bare copy": lambda: {"GB/s": _per_second(framework, put, seconds) * n_bytes / 1e9},
            "loader, NumPy arrays": partial(rate, loaders.frames(arrays)),
            "loader": partial(rate, loaders.frames(safe)),
            "loader, reuse=True": partial(rate, loaders.frames(reused)),
            "NumPy arrays, each uploaded": partial(rate, loaders.uploaded(arrays)),
        }
        _epoch_s(framework, loaders.frames(safe))
        wanted_s = _epoch_s(framework, loaders.frames(reused)) / N_BATCHES
        step, size, step_s = _make_step(framework, batch, wanted_s)
        bench.note(f"step: matrices of {size} rows, {step_s * 1e3:.2f} ms")
        hidden = partial(_hidden, framework, step)
        lanes["step and loader"] = partial(hidden, loaders.frames(safe))
        lanes["step and loader, reuse=True"] = partial(hidden, loaders.frames(reused))
        lanes["step and uploads"] = partial(hidden, loaders.uploaded(arrays))
        yield {f"{prefix}{name}": lane for name, lane in lanes.items()}


class _Loaders:
    """The loaders of a case, and iterables over epochs of the frames that they deliver."""

    def __init__(self, folder: Path, batch: int, framework: Framework, device: str) -> None:
        indices = np.random.default_rng(0).integers(0, N_SAMPLES * batch, N_BATCHES * batch)
        options: dict[str, Any] = {"sampler": indices, "fields": ["frames"]}
        on_device = {**options, "output": framework.output, "device": device}
        self.safe: Any = ShardLoader(folder, batch, **on_device)
        self.reused: Any = ShardLoader(folder, batch, reuse=True, **on_device)
        self.arrays: Any = ShardLoader(folder, batch, output="numpy", **options)
        self._upload = framework.upload

    def frames(self, loader: Any) -> Callable[[], Frames]:
        return lambda: (batch["frames"] for batch in loader)

    def uploaded(self, loader: Any) -> Callable[[], Frames]:
        """Upload arrays as a program does without the option `device`."""
        return lambda: (self._upload(batch["frames"]) for batch in loader)


def _rate(framework: Framework, n_bytes: int, frames: Callable[[], Frames]) -> Mapping[str, float]:
    return {"GB/s": N_BATCHES * n_bytes / _epoch_s(framework, frames) / 1e9}


def _hidden(framework: Framework, step: Step, frames: Callable[[], Frames]) -> Mapping[str, float]:
    """Compare the time of an epoch with steps with the times of the steps and of the epoch alone.

    All steps wait for the share of the time in which the device does not run them.
    """
    alone_s = _epoch_s(framework, frames)
    last = next(iter(frames()))
    steps_s = _epoch_s(framework, lambda: [last] * N_BATCHES, step)
    both_s = _epoch_s(framework, frames, step)
    hidden = (steps_s + alone_s - both_s) / min(steps_s, alone_s)
    return {
        "share hidden": hidden,
        "share waiting": max(0.0, 1 - steps_s / both_s),
        "ms/step": steps_s / N_BATCHES * 1e3,
        "ms/batch": both_s / N_BATCHES * 1e3,
    }


def _per_second(framework: Framework, put: Put, seconds: float) -> float:
    """Return calls per second, waiting for the device every 8."""
    last = put()
    framework.wait(last)
    n, start_s = 0, time.perf_counter()
    while time.perf_counter() - start_s < seconds:
        for _ in range(8):
            last = put()
        framework.wait(last)
        n += 8
    return n / (time.perf_counter() - start_s)


def _epoch_s(framework: Framework, frames: Callable[[], Frames], step: Step | None = None) -> float:
    """Return the duration of an epoch in seconds, until the device has finished."""
    start_s = time.perf_counter()
    last = None
    for each in frames():
        last = each if step is None else step(each)
    framework.wait(last)
    return time.perf_counter() - start_s


def _make_step(framework: Framework, batch: int, wanted_s: float) -> tuple[Step, int, float]:
    """Return a step that takes at least `wanted_s`, the size of its matrices, and its time."""
    images = framework.upload(np.zeros((batch, *data.FRAME), np.uint8))
    size = 4 * MULTIPLE
    while True:
        step = framework.step(images, size)
        for _ in range(3):
            framework.wait(step(images))
        taken_s = 1 / _per_second(framework, partial(step, images), 0.1)
        if size >= MAX_SIZE or taken_s >= wanted_s:
            return step, size, taken_s
        # The time of large matrices grows with the cube of their size, that of small ones less.
        growth = min(4.0, 1.05 * (wanted_s / taken_s) ** (1 / 3))
        size = max(size + MULTIPLE, int(size * growth) // MULTIPLE * MULTIPLE)


class Torch:
    """PyTorch on a device such as cuda or cpu."""

    output: Output = "torch"

    def __init__(self, device: str) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._device = device
        self.is_host = self._torch.device(device).type == "cpu"

    def bare_copy(self, n_bytes: int) -> tuple[str, Put]:
        """Copy to one tensor."""
        torch = self._torch
        host = torch.ones(n_bytes, dtype=torch.uint8, pin_memory=not self.is_host)
        target = torch.empty(n_bytes, dtype=torch.uint8, device=self._device)
        kind = "from memory" if self.is_host else "from pinned memory"
        return kind, lambda: target.copy_(host, non_blocking=True)

    def step(self, images: Any, size: int) -> Step:
        """Return a step that torch runs eagerly."""
        weights = self._torch.ones(size, size, device=self._device)

        def run(x: Any) -> Any:
            return (weights @ (weights * 0.5 + x[:, 0, 0, 0].float().mean())).sum()

        return run

    def upload(self, array: Any) -> Any:
        """Copy as programs do that follow no advice."""
        return self._torch.from_numpy(array).to(self._device)

    def wait(self, last: Any) -> None:
        """Wait for all streams."""
        if not self.is_host:
            self._torch.cuda.synchronize(self._device)


class Jax:
    """JAX on a device such as gpu or cpu."""

    output: Output = "jax"

    def __init__(self, device: str) -> None:
        self._jax: Any = importlib.import_module("jax")
        platform, _, number = device.partition(":")
        self._device = self._jax.devices(platform)[int(number or 0)]
        self.is_host = self._device.platform == "cpu"

    def bare_copy(self, n_bytes: int) -> tuple[str, Put]:
        """Copy an array of the memory kind pinned_host."""
        jax = self._jax
        place = partial(jax.sharding.SingleDeviceSharding, self._device)
        pinned = place(memory_kind=None if self.is_host else "pinned_host")
        host = jax.block_until_ready(jax.device_put(np.ones(n_bytes, np.uint8), pinned))
        kind = "device_put of an array" + " in pinned_host" * (not self.is_host)
        return kind, lambda: jax.device_put(host, place(), may_alias=False)

    def step(self, images: Any, size: int) -> Step:
        """Return a compiled step."""
        jax = self._jax
        weights = jax.device_put(np.ones((size, size), np.float32), self._device)

        def run(x: Any) -> Any:
            light = x[:, 0, 0, 0].astype("float32").mean()
            return (weights @ (weights * 0.5 + light)).sum()

        return jax.jit(run).lower(images).compile()  # type: ignore[no-any-return]

    def upload(self, array: Any) -> Any:
        """Copy with the default options."""
        return self._jax.device_put(array, self._device)

    def wait(self, last: Any) -> None:
        """Wait for a result, which is computed after all others."""
        self._jax.block_until_ready(last)


class Tinygrad:
    """tinygrad on a device such as CUDA, NV or CPU."""

    output: Output = "tinygrad"

    def __init__(self, device: str) -> None:
        from tinygrad.device import Device

        self._device = device
        self._opened: Any = Device[device]
        self.is_host = device.partition(":")[0] in ("CPU", "PYTHON")

    def bare_copy(self, n_bytes: int) -> tuple[str, Put]:
        """Copy to one buffer, on CUDA without tinygrad's allocator."""
        array = np.ones(n_bytes, np.uint8)
        buffer: Any = self.upload(array).uop.base.buffer
        if self._device.partition(":")[0] != "CUDA":
            view = array.data
            return "with the allocator", lambda: buffer.allocator._copyin(buffer._buf, view)
        from tinygrad.runtime.autogen import cuda

        host = ctypes.c_void_p()
        cuda.cuMemHostAlloc(ctypes.byref(host), n_bytes, 0)
        ctypes.memset(host, 1, n_bytes)
        copy = partial(cuda.cuMemcpyHtoDAsync_v2, buffer._buf, host, n_bytes, None)
        return "from pinned memory", copy

    def step(self, images: Any, size: int) -> Step:
        """Return a captured step."""
        from tinygrad.engine.jit import TinyJit
        from tinygrad.tensor import Tensor

        weights = Tensor.ones(size, size, device=self._device).contiguous().realize()

        @TinyJit
        def run(x: Tensor) -> Tensor:
            light = x[:, 0, 0, 0].float().mean()
            return (weights @ (weights * 0.5 + light)).sum().realize()

        return run

    def upload(self, array: Any) -> Any:
        """Copy with tinygrad's public API."""
        from tinygrad.tensor import Tensor

        source = np.array(array)  # tinygrad needs writable memory
        return Tensor(source, device="NPY").to(self._device).realize()

    def wait(self, last: Any) -> None:
        """Wait for the device."""
        self._opened.synchronize()
