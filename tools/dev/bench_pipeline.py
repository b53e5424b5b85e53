"""Race DataLoader with SPDL's: items per second, and what an item costs.

    SPDL_PYTHON=/path/to/bin/python python tools/dev/bench_pipeline.py

SPDL_PYTHON is an interpreter that has SPDL 0.8.0 and shardio's own requirements; without it the
one that runs this. All is one process and one run: the loaders take turns, and the best of several
rounds counts for each.

* trivial: a preprocessor that returns its item, in the order of input and in that of completion;
* batches: the same with lists of 32, an aggregator and a transfer function;
* JPEG: pictures of 500 x 375 decoded by `shardio.media.decode_image`, in both loaders.

Exits with 1 if DataLoader has less than twice the items per second where the work is trivial, costs
more than half as much per item, or is slower with JPEG than SPDL by more than 3 %, which is noise;
and with 3 where there is no SPDL.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from shardio import DataLoader
from shardio.media import decode_image, encode_jpeg

PYTHON: Final = "SPDL_PYTHON"
MIN_RATIO, MAX_OVERHEAD, MIN_JPEG = 2.0, 0.5, 0.97
THREADS: Final = 2

Lane = tuple[str, int, dict[str, Any]]


def _same(item: Any) -> Any:
    return item


def _jpegs() -> list[bytes]:
    """Return some pictures that are neither flat nor noise."""
    y, x = np.mgrid[:375, :500]
    made = []
    for i in range(16):
        channels = [127 + 120 * np.sin((x * (i + c + 1) + y * (c + 2)) / 40) for c in range(3)]
        pixels = np.stack(channels, -1) + np.random.default_rng(i).normal(0, 6, (375, 500, 3))
        made.append(encode_jpeg(pixels.clip(0, 255).astype(np.uint8)))
    return made


def _lanes(n_items: int, n_jpegs: int) -> list[Lane]:
    jpegs = _jpegs()

    def decode(i: int) -> Any:
        return decode_image(jpegs[i % len(jpegs)])

    batches = {"batch_size": 32, "aggregator": len, "transfer_fn": _same}
    return [
        ("trivial, input", n_items, {"preprocessor": _same, "output_order": "input"}),
        ("trivial, completion", n_items, {"preprocessor": _same}),
        ("batches", n_items, {"preprocessor": _same, **batches}),
        ("JPEG", n_jpegs, {"preprocessor": decode, "batch_size": 32, "aggregator": len}),
    ]


def _rate(make: Callable[..., Any], n_items: int, options: dict[str, Any]) -> float:
    start_s = time.perf_counter()
    for _ in make(range(n_items), num_threads=THREADS, **options):
        pass
    return n_items / (time.perf_counter() - start_s)


def _race(n_items: int, n_jpegs: int, rounds: int) -> bool:
    from spdl.dataloader import DataLoader as Theirs

    is_good = True
    print(f"{'':22}{'shardio':>12}{'SPDL':>12}  items/s")
    for name, n, options in _lanes(n_items, n_jpegs):
        pairs = [(_rate(DataLoader, n, options), _rate(Theirs, n, options)) for _ in range(rounds)]
        ours, theirs = (max(rates) for rates in zip(*pairs, strict=True))
        cost = f"{1e6 / ours:.0f} us an item, SPDL {1e6 / theirs:.0f}"
        least = MIN_JPEG if name == "JPEG" else MIN_RATIO
        is_met = ours >= least * theirs
        if name != "JPEG":
            is_met = is_met and 1 / ours <= MAX_OVERHEAD / theirs
        print(f"{name:22}{ours:12,.0f}{theirs:12,.0f}  {ours / theirs:.2f} x, {cost}", end="")
        print("" if is_met else f"  BELOW {least}")
        is_good = is_good and is_met
    return is_good


def main() -> int:
    """Race, here or in the interpreter that has SPDL."""
    parser = argparse.ArgumentParser(description="Race DataLoader with SPDL's.")
    parser.add_argument("--items", type=int, default=10_000)
    parser.add_argument("--jpegs", type=int, default=1_500)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if importlib.util.find_spec("spdl") is not None:
        return 0 if _race(given.items, given.jpegs, given.rounds) else 1
    other = os.environ.get(PYTHON)
    if other is None:
        print(f"there is no SPDL here: pip install spdl==0.8.0, or name a Python by {PYTHON}")
        return 3
    command = [other, *sys.argv]
    without = {name: value for name, value in os.environ.items() if name != PYTHON}
    places = os.pathsep.join(filter(None, sys.path[1:]))
    return subprocess.run(command, env=without | {"PYTHONPATH": places}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
