"""Loading from the page cache: rates, and the cost of a batch, by kind of sample and of access."""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Final
from unittest import mock

import numpy as np

import shardio
from benchmarks import child, data
from benchmarks.data import BATCH, MIB, DatasetSpec, Sample, drain
from benchmarks.harness import Bench, Lanes, Limit, case
from shardio import Array, Bytes, ShardLoader, Text
from shardio._workers.processes.worker_pool import Event, WorkerPool
from shardio.outputs import tinygrad as adapter
from shardio.outputs.tinygrad import TinygradAdapter
from shardio.samples.packing import Pack
from shardio.samples.token_view import TokenView

# Rates.


def busy(seconds: float, sample: Sample) -> Sample:
    """Return a sample after `seconds` of computing."""
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        pass
    return sample


def asleep(sample: Sample) -> Sample:
    """Wait for 10 ms, as if for the answer of a server."""
    time.sleep(0.01)
    return sample


def halves(sample: Sample) -> Sample:
    """Return a copy of half the size, in floats, as many transforms do."""
    return {"image": sample["image"][:112, :112].astype(np.float32) / 255}


def whole_copy(sample: Sample) -> Sample:
    """Return a new array of the same size, made from an intermediate copy."""
    return {"image": 255 - (sample["image"] + 1)}


def shift(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a new array of all samples."""
    return batch | {"image": batch["image"] + 1}


def _large(n_bytes: int, n: int) -> DatasetSpec:
    def sample(i: int) -> Sample:
        return {"image": np.full(n_bytes, i % 251, np.uint8)}

    schema = {"image": Array("uint8", (n_bytes,))}
    return DatasetSpec(schema, sample, n, variant=str(n_bytes))


def _varying(i: int) -> Sample:
    return {"blob": bytes(500 + (i * 7919) % 4000)}


def _labelled(i: int) -> Sample:
    return data.image(i) | {"label": i}


_SMALL, _IMAGES = data.KINDS["raw, 2 KB"], data.KINDS["raw, 150 KB"]
_FEW: Final = DatasetSpec(data.ROW, data.row, 192)
_MIB, _TEN_MIB = _large(MIB, 128), _large(10 * MIB, 24)
RATES: Final[dict[str, tuple[DatasetSpec, dict[str, Any]]]] = {
    **{name: (spec, {}) for name, spec in data.KINDS.items()},
    "records of 0.5 to 4.5 KB": (DatasetSpec({"blob": Bytes()}, _varying, 4096), {}),
    "raw, 1 MiB": (_MIB, {}),
    "raw, 1 MiB, a transform that copies": (_MIB, {"transform": whole_copy}),
    "raw, 10 MiB": (_TEN_MIB, {}),
    "raw, 10 MiB, a transform that copies": (_TEN_MIB, {"transform": whole_copy}),
    "raw, 150 KB, a transform to floats": (_IMAGES, {"transform": halves}),
    "raw, 2 KB, a transform of 10 µs": (_SMALL, {"transform": partial(busy, 1e-5)}),
    "raw, 2 KB, a transform of 10 ms": (_FEW, {"transform": partial(busy, 1e-2)}),
    "raw, 2 KB, one that sleeps 10 ms": (_FEW, {"transform": asleep}),
    "raw, 2 KB, batch_transform": (_SMALL, {"batch_transform": shift}),
    "raw, 150 KB, batch_transform": (
        DatasetSpec({**_IMAGES.schema, "label": Array("int64")}, _labelled, 512),
        {"batch_transform": shift},
    ),
}


@case(rounds=3)
def rates(bench: Bench, *, workers: int = 2, kind: str = "", seconds: float = 1.0) -> Lanes:
    """Measure rates and CPU time of many kinds of samples, shuffled, in batches of 32 or 8."""
    if kind and kind not in RATES:
        raise ValueError(f"kind={kind}: expected one of {', '.join(RATES)}")
    for name, (spec, options) in RATES.items():
        if kind in ("", name):
            folder = bench.cache.dataset("rates", spec)
            batch = 8 if "MiB" in name else BATCH
            how = options | {"shuffle": True, "num_workers": workers, "output": "numpy"}
            with ShardLoader(folder, batch, **how) as loader:
                for _ in range(3):
                    drain(loader)
                yield {name: partial(_rate, loader, spec.n, seconds)}


def _rate(loader: ShardLoader, n: int, seconds: float) -> Mapping[str, float]:
    """Run epochs for `seconds`; return the rate of the best, and the CPU time over all epochs."""
    workers = list(child.descendants(os.getpid()))
    before = sum(map(child.cpu_s, workers)), time.process_time()
    start_s, n_epochs, best_s = time.perf_counter(), 0, float("inf")
    while n_epochs < 2 or time.perf_counter() - start_s < seconds:
        epoch_s = time.perf_counter()
        drain(loader)
        best_s = min(best_s, time.perf_counter() - epoch_s)
        n_epochs += 1
    of_workers = sum(map(child.cpu_s, workers)) - before[0]
    of_main = time.process_time() - before[1]
    scale = 1e6 / (n_epochs * n)
    return {
        "samples/s": n / best_s,
        "CPU µs/sample, workers": of_workers * scale,
        "CPU µs/sample, main": of_main * scale,
    }


def _full(i: int, shape: tuple[int, ...], dtype: str) -> Sample:
    return {"x": np.full(shape, i % 200, dtype)}


def _image(i: int) -> Sample:
    return _full(i, data.FRAME, "uint8")


def _row(i: int) -> Sample:
    return _full(i, (2048,), "uint8")


def _number(i: int) -> Sample:
    return _full(i, (), "int64")


def _text(i: int) -> Sample:
    return {"x": f"{i:200d}"}


ACCESS: Final = {
    "images of 150,528 bytes": DatasetSpec(
        {"x": Array("uint8", data.FRAME)}, _image, 1024, 16 * MIB
    ),
    "rows of 2,048 bytes": DatasetSpec({"x": Array("uint8", (2048,))}, _row, 32_768, 16 * MIB),
    "numbers of 8 bytes": DatasetSpec({"x": Array("int64")}, _number, 262_144, 16 * MIB),
    "texts of 200 bytes": DatasetSpec({"x": Text()}, _text, 16_384, 16 * MIB),
}


@case(
    Limit("images of 150,528 bytes, pread", "µs/sample", "images of 150,528 bytes, mmap", 2.5),
    rounds=7,
)
def access(bench: Bench) -> Lanes:
    """Compare reading by offset with mapping, shuffled, without workers; time checks of lengths."""
    for name, spec in ACCESS.items():
        folder = bench.cache.dataset("access", spec)
        with ExitStack() as stack:
            loaders = {
                mode: stack.enter_context(
                    ShardLoader(
                        shardio.open(folder, access=mode),
                        64,
                        shuffle=True,
                        num_workers=0,
                        output="numpy",
                        reuse=True,
                    )
                )
                for mode in ("mmap", "pread")
            }
            for loader in loaders.values():
                drain(loader)
            yield {
                f"{name}, {mode}": partial(_epoch_us, loader, spec.n)
                for mode, loader in loaders.items()
            }
    with shardio.open(bench.cache.dataset("access", next(iter(ACCESS.values())))) as dataset:
        shards = np.arange(len(dataset.shards))
        dataset.files.check_lengths(shards)  # opens them
        yield {"checking a file's length": partial(_check_us, dataset.files, shards)}


def _epoch_us(loader: ShardLoader, n: int) -> Mapping[str, float]:
    start_s = time.perf_counter()
    drain(loader)
    return {"µs/sample": (time.perf_counter() - start_s) / n * 1e6}


def _check_us(files: Any, shards: Any) -> Mapping[str, float]:
    start_s = time.perf_counter()
    for _ in range(30):
        files.check_lengths(shards)
    return {"µs/file": (time.perf_counter() - start_s) / 30 / len(shards) * 1e6}


@case(Limit("clips", "GB/s", "frames", at_least=0.7))
def raw_clips(bench: Bench, *, workers: int = 2, mib: int = 320) -> Lanes:
    """Compare clips as `--store raw` stores them with as many bytes of frames, shuffled."""
    batch_bytes, lanes = 64 * int(np.prod(data.FRAME)), {}
    for name, schema, sample, shape in (
        ("frames", data.FRAMES, data.frame, data.FRAME),
        ("clips", data.CLIPS, data.clip, data.CLIP),
    ):
        n_bytes = int(np.prod(shape))
        folder = bench.cache.dataset(name, DatasetSpec(schema, sample, mib * MIB // n_bytes))
        lanes[name] = partial(_bytes_rate, folder, batch_bytes // n_bytes, workers)
    yield lanes


def _bytes_rate(folder: Any, batch: int, workers: int) -> Mapping[str, float]:
    """Measure the bytes per second from the first batch to the end of a loader's first epoch."""
    with ShardLoader(folder, batch, num_workers=workers, shuffle=True, output="numpy") as loader:
        batches = iter(loader)
        next(batches)
        start_s = time.perf_counter()
        n_bytes = sum(each["frames"].nbytes for each in batches)
        return {"GB/s": n_bytes / (time.perf_counter() - start_s) / 1e9}


LENGTH, N_TOKENS = 1024, 32 << 20
PACKS: Final = {
    "documents": Pack(LENGTH),
    "with targets": Pack(LENGTH, targets=True),
    "apart": Pack(LENGTH, targets=True, apart=True, eot=0),
}


def _document(i: int) -> Sample:
    n = 8 + int(np.random.default_rng(i).exponential(500))
    return {"tokens": data.noise((2 * min(n, 1 << 18),), i).view(np.uint16)}


def _window(i: int) -> Sample:
    return {"tokens": data.noise((2 * LENGTH,), i).view(np.uint16)}


@case(Limit("documents", "million tokens/s", "rows", at_least=0.2))
def packing(bench: Bench, *, workers: int = 2, epochs: int = 8) -> Lanes:
    """Compare documents of 500 tokens, packed into windows of 1,024, with rows of that length."""
    specs = {
        "rows": DatasetSpec({"tokens": Array("uint16", (LENGTH,))}, _window, N_TOKENS // LENGTH),
        "documents": DatasetSpec({"tokens": Array("uint16", (None,))}, _document, N_TOKENS // 508),
    }
    folders = {name: bench.cache.dataset(name, spec) for name, spec in specs.items()}
    lanes = {"rows": partial(_token_rate, folders["rows"], None, workers, epochs)}
    for name, pack in PACKS.items():
        lanes[name] = partial(_token_rate, folders["documents"], pack, workers, epochs)
    yield lanes


def _token_rate(folder: Any, pack: Pack | None, workers: int, epochs: int) -> Mapping[str, float]:
    """Measure all epochs after the first, because the first one also checks hashes."""
    dataset = shardio.open(folder)
    view = dataset if pack is None else TokenView(dataset, pack)
    options: dict[str, Any] = {"shuffle": True, "output": "numpy", "tail": "drop"}
    with ShardLoader(view, 64, num_workers=workers, **options) as loader:
        drain(loader)
        start_s, found = time.perf_counter(), 0
        for _ in range(epochs):
            found += sum(batch["tokens"].size for batch in loader)
        return {"million tokens/s": found / (time.perf_counter() - start_s) / 1e6}


# The cost of a batch for the main process.

LANES: Final[dict[str, tuple[float, dict[str, Any]]]] = {
    "arrays": (30.0, {"output": "numpy"}),
    "tensors": (150.0, {"output": "tinygrad"}),
    "tensors, reuse": (30.0, {"output": "tinygrad", "reuse": True}),
}
"""For each lane: the limit in µs per batch, and the options of the loader."""
Wait = Callable[[WorkerPool, float | None], list[Event]]


def _small(i: int) -> Sample:
    return {"image": np.zeros(1024, np.uint8), "label": i}


@case(*(Limit(name, "CPU µs/batch", at_most=most) for name, (most, _) in LANES.items()))
def main_per_batch(bench: Bench, *, epochs: int = 15) -> Lanes:
    """Measure main's CPU time per batch, without waits for workers; needs DEV=CPU."""
    schema = {"image": Array("uint8", (1024,)), "label": Array("int64")}
    folder = bench.cache.dataset("small", DatasetSpec(schema, _small, 32_768))
    yield {
        name: partial(_main_us, str(folder), epochs, options)
        for name, (_, options) in LANES.items()
    }


def _timed(wait: Wait, spent_s: list[float]) -> Wait:
    """Return a function that calls `wait`, and records the CPU seconds that this takes."""

    def timed_wait(pool: WorkerPool, timeout_s: float | None = None) -> list[Event]:
        start_s = time.thread_time()
        try:
            return wait(pool, timeout_s)
        finally:
            spent_s.append(time.thread_time() - start_s)

    return timed_wait


def _timing_costs_s() -> float:
    """Return the part of the cost of timing a wait that the recorded time does not include."""

    def no_wait(pool: WorkerPool | None, timeout_s: float | None = None) -> list[Event]:
        return []

    found = []
    for _ in range(20):
        spent_s: list[float] = []
        timed: Any = _timed(no_wait, spent_s)
        moments = [time.thread_time()]
        for call in (timed, no_wait):
            for _ in range(1000):
                call(None, None)
            moments.append(time.thread_time())
        start_s, middle_s, end_s = moments
        found.append((middle_s - start_s - sum(spent_s) - (end_s - middle_s)) / 1000)
    return max(0.0, min(found))


def _main_us(folder: str, n_epochs: int, options: dict[str, Any]) -> Mapping[str, float]:
    """Return the CPU times per batch, without and in waits, of the cheapest epoch after the first.

    The time without waits decides which epoch is the cheapest.
    """
    costs, timing_s, spent_s = [], _timing_costs_s(), list[float]()
    with (
        mock.patch.object(WorkerPool, "wait", _timed(WorkerPool.wait, spent_s)),
        ShardLoader(folder, BATCH, shuffle=True, **options) as loader,
    ):
        for _ in range(n_epochs + 1):
            spent_s.clear()
            start_s = time.thread_time()
            n = drain(loader)
            whole_s = time.thread_time() - start_s - len(spent_s) * timing_s
            costs.append(((whole_s - sum(spent_s)) / n * 1e6, sum(spent_s) / n * 1e6))
    cost, waiting = min(costs[1:])
    return {"CPU µs/batch": cost, "CPU µs/batch, waiting": waiting}


# From a block to tensors and back.

N_IMAGE_BYTES: Final = 64 * 150_528


@case(Limit("safe lane", "µs/batch", at_most=150), rounds=5)
def tensors(bench: Bench, *, batches: int = 1000) -> Lanes:
    """Measure the way from a block of two fields to tensors and back; needs DEV=CPU."""
    maker = TinygradAdapter()
    if not maker.aliases:
        yield {"copied to the device": partial(_batch_us, maker, 100)}
        return
    yield {"safe lane": partial(_batch_us, maker, batches)}
    with (
        mock.patch.object(adapter, "find_view", lambda device: None),
        mock.patch.object(adapter, "find_copies", lambda device: None),
    ):
        yield {"copied by public calls": partial(_batch_us, TinygradAdapter("CPU"), 100)}


def _batch_us(maker: TinygradAdapter, n_batches: int) -> Mapping[str, float]:
    """Return the median over batches, whose blocks are returned by finalizers."""
    blocks = deque(mmap.mmap(-1, N_IMAGE_BYTES + 4096) for _ in range(4))
    returned: deque[mmap.mmap] = deque()
    times = []
    for _ in range(n_batches):
        start_s = time.perf_counter()
        _lease(maker, blocks.popleft(), returned)
        if maker.aliases:
            maker.synchronize()
        blocks.append(returned.popleft())
        times.append(time.perf_counter() - start_s)
    return {"µs/batch": statistics.median(times) * 1e6}


def _lease(maker: TinygradAdapter, block: mmap.mmap, returned: deque[mmap.mmap]) -> None:
    carrier = (ctypes.c_ubyte * len(block)).from_buffer(block)
    weakref.finalize(carrier, returned.append, block).atexit = False
    leased = np.frombuffer(carrier, np.uint8)  # type: ignore[call-overload]  # a buffer
    images = leased[:N_IMAGE_BYTES].reshape(64, 224, 224, 3)
    labels = leased[N_IMAGE_BYTES : N_IMAGE_BYTES + 512].view(np.int64)
    maker.wrap(images, leased), maker.wrap(labels, leased)
