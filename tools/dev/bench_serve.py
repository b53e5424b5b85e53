"""Rates of a loader here, and of one that a server on this machine feeds, plain and with keys.

    python tools/dev/bench_serve.py [--rounds 3] [--seconds 2]

Batches of 1 MiB and of 8 MiB, as arrays, shuffled, with one worker process each; round after round
in turn, and the ratio of each round's rates. Decoding nothing, the loader here copies memory alone:
what is measured is what the way over the loopback costs.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

import shardio
from shardio.serving import make_keys

_SHAPE: Final = (64, 64, 4, 8)
_SAMPLE_BYTES: Final = 64 * 64 * 4 * 8
_N_SAMPLES: Final = 1024
_BATCHES: Final = {"1 MiB": 8, "8 MiB": 64}


def main() -> None:
    """Measure, and print a line for each size and way."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path, keys = Path(folder) / "set", Path(folder) / "keys"
        rng = np.random.default_rng(0)
        pixels = rng.integers(0, 255, _SHAPE, np.uint8)
        samples = ({"x": pixels, "n": i} for i in range(_N_SAMPLES))
        shardio.convert(samples, path)
        make_keys(keys)
        servers = {"plain": _Served(path), "keys": _Served(path, "--keys", str(keys))}
        try:
            for name, batch_size in _BATCHES.items():
                _race(name, batch_size, path, servers, keys / "client", options)
        finally:
            for server in servers.values():
                server.process.terminate()
                server.process.wait()


class _Served:
    """`shardio serve` in a process."""

    def __init__(self, path: Path, *more: str) -> None:
        command = [sys.executable, "-m", "shardio", "serve", str(path), "--workers", "1", *more]
        command += ["--bind", "tcp://127.0.0.1:*"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        said = self.process.stdout.readline() if self.process.stdout is not None else ""
        self.address = said.split()[-1]


def _race(
    name: str, batch_size: int, path: Path, servers: dict[str, _Served], keys: Path, options: Any
) -> None:
    how: dict[str, Any] = {"output": "numpy", "shuffle": True}
    loaders = {"here": shardio.ShardLoader(path, batch_size, num_workers=1, **how)}
    for way, server in servers.items():
        more: dict[str, Any] = {"keys": keys} if way == "keys" else {}
        loaders[way] = shardio.ShardLoader(server.address, batch_size, **more, **how)
    for loader in loaders.values():
        _rate(loader, 0.5)
    rates: dict[str, list[float]] = {way: [] for way in loaders}
    for _ in range(options.rounds):
        for way, loader in loaders.items():
            rates[way].append(_rate(loader, options.seconds))
    n_bytes = batch_size * _SAMPLE_BYTES
    for way, found in rates.items():
        rate = statistics.median(found)
        ratios = [a / b for a, b in zip(found, rates["here"], strict=True)]
        print(
            f"{name} {way:>6}: {rate:7.0f} batches/s, {rate * n_bytes / 1e9:5.2f} GB/s, "
            f"{statistics.median(ratios):.2f} of here, from {min(ratios):.2f} to {max(ratios):.2f}"
        )
    for loader in loaders.values():
        loader.close()


def _rate(loader: Any, seconds: float) -> float:
    """Batches per second, over whole epochs."""
    n, start_s = 0, time.perf_counter()
    while time.perf_counter() - start_s < seconds:
        for batch in loader:
            batch["x"][0, 0, 0, 0, 0].item()
            n += 1
    return n / (time.perf_counter() - start_s)


if __name__ == "__main__":
    main()
