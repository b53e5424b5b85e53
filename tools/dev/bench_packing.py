#!/usr/bin/env python
"""Tokens per second of documents packed into windows, beside those of rows of the same length.

    python tools/dev/bench_packing.py [--workers 2] [--rounds 5]

Two datasets of as many tokens, uint16: rows of 1,024, which need no packing and are gathered as
they lie; and documents of 8 tokens up to some thousands, 500 in the mean. Both are read shuffled,
in batches of 64 x 1,024, in turns; each round gives a ratio, and the median counts.

Exit code 1 where windows come at less than 0.2 of the rows' tokens per second: two or three
documents have a part in a window, each of which is a piece of its own, while a row is
one of many that a single call gathers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "converters"), str(ROOT / "tools")]

import numpy as np  # noqa: E402 - the checkout comes first

import shardio  # noqa: E402
from shardio.samples.packing import Pack  # noqa: E402
from shardio.samples.token_view import TokenView  # noqa: E402

BAR = 0.2
LENGTH, BATCH, MEAN = 1024, 64, 500
N_TOKENS = 32 << 20
N_EPOCHS = 8
WAYS = {
    "documents": Pack(LENGTH),
    "with targets": Pack(LENGTH, targets=True),
    "apart": Pack(LENGTH, targets=True, apart=True, eot=0),
}
"""The first of them is judged."""


def write(out: Path, lengths: Iterable[int], shape: tuple[int | None]) -> None:
    """Make a dataset of documents of these lengths."""
    noise = np.random.default_rng(0).integers(0, 1 << 16, 1 << 20, np.uint16)
    schema = shardio.Schema({"tokens": shardio.Array("uint16", shape)})
    with shardio.DatasetWriter(out, schema) as writer:
        for n in lengths:
            writer.append({"tokens": noise[:n]})


def lengths() -> list[int]:
    """Return lengths of documents with N_TOKENS in total."""
    drawn = np.random.default_rng(1).exponential(MEAN, N_TOKENS // MEAN)
    return [8 + int(n) for n in drawn.tolist()]


def rate(place: Path, pack: Pack | None, n_workers: int, epochs: int) -> float:
    """Tokens per second, of the epochs behind the first, in which hashes are checked."""
    dataset = shardio.open(place)
    view = dataset if pack is None else TokenView(dataset, pack)
    with shardio.ShardLoader(
        view, BATCH, num_workers=n_workers, shuffle=True, output="numpy", tail="drop"
    ) as loader:
        for _ in loader:
            pass
        start_s, found = time.perf_counter(), 0
        for _ in range(epochs):
            for batch in loader:
                found += batch["tokens"].size
        return found / (time.perf_counter() - start_s)


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description="Windows of documents beside rows.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows, documents = Path(folder, "rows"), Path(folder, "documents")
        write(rows, [LENGTH] * (N_TOKENS // LENGTH), (LENGTH,))
        write(documents, lengths(), (None,))
        shares: dict[str, list[float]] = {name: [] for name in WAYS}
        for _ in range(options.rounds):
            by_row = rate(rows, None, options.workers, N_EPOCHS)
            told = [f"rows {by_row / 1e6:,.0f}"]
            for name, pack in WAYS.items():
                found = rate(documents, pack, options.workers, N_EPOCHS)
                shares[name].append(found / by_row)
                told.append(f"{name} {found / 1e6:,.0f}")
            print(", ".join(told), "million tokens/s")
    medians = {name: statistics.median(each) for name, each in shares.items()}
    print("of the rows' tokens/s:", ", ".join(f"{n} {share:.2f}" for n, share in medians.items()))
    share = next(iter(medians.values()))
    print(f"packing: {share:.2f} (bar {BAR}){'' if share >= BAR else ': BELOW'}")
    return int(share < BAR)


if __name__ == "__main__":
    sys.exit(main())
