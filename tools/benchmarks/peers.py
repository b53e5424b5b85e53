"""Loaders of pictures, and interfaces of shardio compared with those that they replace."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import child
from benchmarks.child import NotMeasured
from benchmarks.harness import Bench, Lane, Lanes, Limit, case
from benchmarks.media import drawn_pictures
from shardio import DataLoader
from shardio.media import decode_image, encode_jpeg

# Loaders of pictures.

N_FILES: Final = 2048
IMAGE_PEERS: Final = {"ffcv": 0.9, "torchdl-pillow": 2.0, "torchdl-simplejpeg": 1.5}
"""The minimum ratio of the time of a peer's epoch to that of shardio's."""


@case(*(Limit(name, "s", "shardio", at_least=bar) for name, bar in IMAGE_PEERS.items()), rounds=12)
def image_loaders(bench: Bench) -> Lanes:
    """Compare epochs of 2,048 JPEGs of 4:2:0 with FFCV and torch's DataLoader."""
    folder = bench.cache.made("pictures", f"{N_FILES}", _write_pictures)
    torch = os.environ.get("RACE_PYTHON_TORCH", sys.executable)
    pythons = {"shardio": sys.executable} | {
        name: os.environ.get("RACE_PYTHON_FFCV", sys.executable) if name == "ffcv" else torch
        for name in IMAGE_PEERS
    }
    with ExitStack() as stack:
        lanes: dict[str, Lane] = {}
        for name, python in pythons.items():
            racer = Racer(name, python, folder)
            stack.callback(racer.close)
            if racer.is_ready:
                lanes[name] = racer.epoch
            else:
                bench.note(f"without {name}: {racer.close()}")
        yield lanes


def _write_pictures(folder: Path) -> None:
    """Write pictures whose first pixel encodes their number, and JPEGs of them."""
    folder.mkdir()
    many = np.resize(drawn_pictures(64), (N_FILES, 224, 224, 3))
    many[:, 0, 0, 0], many[:, 0, 0, 1] = np.arange(N_FILES) % 256, np.arange(N_FILES) // 256
    np.save(folder / "frames.npy", many)
    for i, frame in enumerate(many):
        content = encode_jpeg(frame, quality=90, subsampling="420")
        (folder / f"{i:06d}.jpg").write_bytes(content)


class Racer:
    """A loader in a process of its own, which runs an epoch for each line that it reads."""

    def __init__(self, peer: str, python: str, folder: Path) -> None:
        script = Path(__file__).with_name("image_peers.py")
        environment = child.environment() if python == sys.executable else dict(os.environ)
        self._process = subprocess.Popen(
            [python, str(script), peer, str(folder)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.is_ready = self._line() == "ready\n"

    def _line(self) -> str:
        return self._process.stdout.readline() if self._process.stdout else ""

    def _cpu_s(self) -> float:
        pids = [self._process.pid, *child.descendants(self._process.pid)]
        return sum(map(child.cpu_s, pids))

    def epoch(self) -> Mapping[str, float]:
        """Run one epoch."""
        before_s = self._cpu_s()
        if self._process.stdin:
            print(file=self._process.stdin, flush=True)
        taken_s = float(self._line())
        cpu_us = (self._cpu_s() - before_s) / N_FILES * 1e6
        return {"s": taken_s, "pictures/s": N_FILES / taken_s, "CPU µs/picture": cpu_us}

    def close(self) -> str:
        """End the process; return the last line that it wrote to stderr."""
        if self._process.returncode is not None:
            return ""
        said = self._process.communicate()[1].strip().splitlines()
        return said[-1] if said else "it crashed"


# tinyloader's interface.

_ITEMS: Final = """
import importlib, json, sys, time
import numpy as np

home, n_items, n_warm, n_bytes = json.loads(sys.argv[1])
module = importlib.import_module(home)

class Arrays(module.Loader):
    def make_request(self, item):
        return item
    def load(self, request):
        return np.full(n_bytes, request % 251, np.uint8), np.array(request)
    def post_process(self, response):
        array, number = response  # the check touches every page
        is_right = len(array) == n_bytes and (array[::4096] == number % 251).all()
        return bool(is_right), int(number)

n_wrong = n = 0
with module.load_with_workers(Arrays(), range(n_items), 2) as generator:
    for n, (is_right, number) in enumerate(generator, 1):
        n_wrong += not is_right or number != n - 1
        if n == n_warm:
            start_s = time.perf_counter()
taken_s = time.perf_counter() - start_s
n_wrong += n_items - n
assert not n_wrong or home != "shardio.items", f"{n_wrong} of {n_items} items are wrong"
print(json.dumps({"items/s": (n_items - n_warm) / taken_s, "wrong items": n_wrong}))
"""


@case(Limit("shardio", "items/s", "tinyloader", at_least=3))
def tinyloader(bench: Bench, *, items: int = 600) -> Lanes:
    """Compare `load_with_workers` with tinyloader's: arrays of 1 MB, two workers."""
    python = child.peer_python("SHARDIO_PEERS_PYTHON", "tinyloader.loader")
    how = items, 20, 1_000_000
    yield {
        "shardio": partial(child.run_program, _ITEMS, "shardio.items", *how),
        "tinyloader": partial(child.run_program, _ITEMS, "tinyloader.loader", *how, python=python),
    }


# webdataset's MultiLoader.

_DATASET: Final = """
import json, sys, time
import numpy as np

class Dataset:
    def __init__(self, n_bytes, n):
        self.n_bytes, self.n = n_bytes, n
    def __iter__(self):
        pixels = np.zeros(self.n_bytes, np.uint8)
        for number in range(self.n):
            yield {"number": number, "pixels": pixels}

def race(loader):
    n = 0
    for sample in loader:
        if n == 0:
            start_s = time.perf_counter()
        n += 1
        sample["pixels"][0]
    assert n == 2 * n_samples, f"{n} samples arrived of {2 * n_samples}"
    print(json.dumps({"samples/s": (n - 1) / (time.perf_counter() - start_s)}))

n_bytes, n_samples = json.loads(sys.argv[1])
dataset = Dataset(n_bytes, n_samples)
"""
_OURS: Final = f"""{_DATASET}
from shardio import MultiLoader
race(MultiLoader(dataset, workers=2))
"""
# This reader closes ZeroMQ before it ends. webdataset's reader does not, and loses samples.
_THEIRS: Final = f"""{_DATASET}
import pickle, tempfile
import webdataset.multi, zmq

def reader(dataset, sockname, index, num_workers):
    context = zmq.Context()
    with context.socket(zmq.PUSH) as socket:
        socket.connect(sockname)
        for sample in dataset:
            socket.send(pickle.dumps(sample, protocol=webdataset.multi.the_protocol))
        socket.send(pickle.dumps(webdataset.multi.EOF(index=index)))
    context.term()  # waits until all is sent

webdataset.multi.reader = reader
with tempfile.TemporaryDirectory() as folder:  # for the file of the socket, which stays
    race(webdataset.multi.MultiLoader(dataset, workers=2, prefix=folder + "/"))
"""


@case(Limit("1 MB, shardio", "samples/s", "1 MB, webdataset", at_least=3))
def webdataset(bench: Bench) -> Lanes:
    """Compare `MultiLoader` with webdataset's: samples of a megabyte and of a kilobyte."""
    python = child.peer_python("SHARDIO_PEERS_PYTHON", "webdataset.multi", "zmq")
    for size, n_bytes, n in (("1 MB", 1 << 20, 400), ("1 KB", 1 << 10, 20_000)):
        theirs = partial(child.run_program, _THEIRS, n_bytes, n, python=python)
        yield {
            f"{size}, webdataset": theirs,
            f"{size}, shardio": partial(child.run_program, _OURS, n_bytes, n),
        }


# SPDL's DataLoader.

SPDL: Final = {"trivial, input": 2.0, "trivial, completion": 2.0, "batches": 2.0, "JPEG": 0.97}
"""The minimum ratio of shardio's rate to SPDL's. 0.97 allows for noise between equal rates."""


@case(
    *(
        Limit(f"{name}, shardio", "items/s", f"{name}, SPDL", at_least=bar)
        for name, bar in SPDL.items()
    ),
    rounds=3,
)
def spdl(bench: Bench, *, items: int = 10_000, jpegs: int = 1_500) -> Lanes:
    """Compare `DataLoader` with SPDL's: trivial work, batches, and JPEGs of 500 x 375."""
    if importlib.util.find_spec("spdl") is None:
        raise NotMeasured("SPDL is not installed: pip install spdl==0.8.0")
    theirs: Any = importlib.import_module("spdl.dataloader").DataLoader
    for name, n, options in _spdl_works(items, jpegs):
        yield {
            f"{name}, {who}": partial(_items_rate, make, n, options)
            for who, make in (("shardio", DataLoader), ("SPDL", theirs))
        }


def _same(item: Any) -> Any:
    return item


def _spdl_works(n_items: int, n_jpegs: int) -> list[tuple[str, int, dict[str, Any]]]:
    y, x = np.mgrid[:375, :500]
    jpegs = []
    for i in range(16):  # neither flat nor noise
        channels = [127 + 120 * np.sin((x * (i + c + 1) + y * (c + 2)) / 40) for c in range(3)]
        pixels = np.stack(channels, -1) + np.random.default_rng(i).normal(0, 6, (375, 500, 3))
        jpegs.append(encode_jpeg(pixels.clip(0, 255).astype(np.uint8)))

    def decode(i: int) -> Any:
        return decode_image(jpegs[i % len(jpegs)])

    batches: dict[str, Any] = {"batch_size": 32, "aggregator": len}
    return [
        ("trivial, input", n_items, {"preprocessor": _same, "output_order": "input"}),
        ("trivial, completion", n_items, {"preprocessor": _same}),
        ("batches", n_items, {"preprocessor": _same, "transfer_fn": _same, **batches}),
        ("JPEG", n_jpegs, {"preprocessor": decode, **batches}),
    ]


def _items_rate(
    make: Callable[..., Any], n_items: int, options: dict[str, Any]
) -> Mapping[str, float]:
    start_s = time.perf_counter()
    for _ in make(range(n_items), num_threads=2, **options):
        pass
    taken_s = time.perf_counter() - start_s
    return {"items/s": n_items / taken_s, "µs/item": taken_s / n_items * 1e6}
