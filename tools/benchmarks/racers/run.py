"""Run one peer on one workload, and print its figures as a line of JSON.

    python -m benchmarks.racers.run PEER WORKLOAD FOLDER [SAMPLES [WORKERS [STARTED_S [STORE]]]]
    python -m benchmarks.racers.run --prepare PEER WORKLOAD FOLDER [SAMPLES …]

The first epoch, in which pages are mapped and shardio verifies every hash, has a rate of its own.
The rate of the best of the other epochs favours peers that prepare batches between epochs; the rate
of a stream of epochs without a pause does not. The consumer copies every batch into one buffer, as
an upload to a device does: no peer gains by delivering memory that nobody reads. An epoch before
the stream must deliver every sample exactly once; otherwise, the peer has no figures. With
--prepare, the peer's files are written, and nothing is measured. STORE is the endpoint of an object
store that serves FOLDER, a comma, and an empty folder for the peer's cache.

The program runs in the interpreter of each peer, and imports only NumPy and the peer.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import child
from benchmarks.racers.peers import PEERS, installed_versions, loader_of
from benchmarks.racers.store import Store
from benchmarks.racers.workloads import Batch, Epochs, Workload, workload_of

N_EPOCHS: Final = 3
STREAM_EPOCHS: Final = 20
STREAM_S: Final = 10.0
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


class WrongSamples(Exception):
    """Raised if an epoch does not deliver every sample exactly once, in its shape and dtype."""


def figures(epochs: Epochs, workload: Workload, started_s: float) -> Mapping[str, float]:
    """Run all epochs; return figures by unit. `started_s` is the time of the process's start."""
    out = np.empty((workload.batch_size, *workload.shape), workload.dtype)
    rates, first_s, from_start_s = list[float](), list[float](), list[float]()
    fetched = dict[str, float]()
    for epoch in range(N_EPOCHS):
        begun_s, numbers = time.monotonic(), list[Batch]()
        for batch in epochs(epoch):
            if not numbers:
                first_s.append(time.monotonic())
            numbers.append(workload.numbers(_copied(batch, out)))
        ended_s = time.monotonic()
        if workload.store is not None and epoch == 0:
            fetched = workload.store.fetched()
        _check(np.concatenate(numbers) if numbers else np.empty(0, np.int64), workload)
        rates.append(workload.n_samples / (ended_s - begun_s))
        from_start_s.append(ended_s - started_s)
        first_s[epoch] -= started_s if epoch == 0 else begun_s
    return {
        "samples/s": max(rates[1:]),
        "samples of the first epoch/s": rates[0],
        **_stream(epochs, out),
        "s from start to first batch": first_s[0],
        "s from start to end of epoch": from_start_s[0],
        "s to first batch of later epochs": min(first_s[1:]),
        **fetched,
    }


def _stream(epochs: Epochs, out: Batch) -> Mapping[str, float]:
    """Run up to 20 epochs within 10 s; return the rate, the CPU time, and the memory at the end."""
    cpu_s, begun_s, n = _cpu_s(), time.monotonic(), 0
    for batch in (each for epoch in range(STREAM_EPOCHS) for each in epochs(N_EPOCHS + epoch)):
        n += len(_copied(batch, out))
        if time.monotonic() - begun_s > STREAM_S:
            break
    taken_s = time.monotonic() - begun_s
    return {
        "samples of a stream/s": n / taken_s,
        "CPU µs/sample": (_cpu_s() - cpu_s) / n * 1e6,
        "MB of memory": _memory_bytes() / 1e6,
    }


def _copied(batch: Any, out: Batch) -> Batch:
    """Copy a batch into the buffer; return the part that it fills."""
    batch = np.asarray(batch)
    if batch.shape[1:] != out.shape[1:] or batch.dtype != out.dtype:
        raise WrongSamples(f"samples of {batch.dtype} {batch.shape[1:]}; expected {out.dtype}")
    filled = out[: len(batch)]
    filled[:] = batch
    return filled


def _check(numbers: Batch, workload: Workload) -> None:
    counts = np.bincount(numbers, minlength=workload.n_samples)
    if len(counts) > workload.n_samples or (counts != 1).any():
        n_missing, n_again = int((counts == 0).sum()), int((counts > 1).sum())
        raise WrongSamples(f"an epoch without {n_missing} samples, and with {n_again} repeated")


def _processes() -> list[int]:
    return [os.getpid(), *child.descendants(os.getpid())]


def _cpu_s() -> float:
    """Return the CPU time of this process and its descendants, including those that have ended."""
    total = 0.0
    for pid in _processes():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        total += child.cpu_s(pid) + sum(map(int, fields[13:15])) / _TICKS_PER_S
    return total


def _memory_bytes() -> int:
    """Return the anonymous and shared memory of all processes, without mapped files."""
    total = 0
    for pid in _processes():
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        kinds = ("Pss_Anon:", "Pss_Shmem:")
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(kinds))
    return total


def main(arguments: list[str]) -> None:
    """Run the peer, or write its files."""
    is_prepared_only = arguments[0] == "--prepare"
    name, workload_name, folder, *numbers = arguments[is_prepared_only:]
    defaults = ["0", "2", str(time.monotonic()), ""]
    n_samples, workers, started_s, store = numbers + defaults[len(numbers) :]
    peer, workload = PEERS[name], workload_of(workload_name, Path(folder), int(n_samples))
    if store:
        endpoint, _, cache = store.partition(",")
        workload = replace(workload, store=Store(endpoint, Path(cache)))
    epochs = loader_of(peer, workload_name)(workload, int(workers))
    if is_prepared_only:
        print(json.dumps({"versions": installed_versions(peer)}), flush=True)
    else:
        print(json.dumps({"figures": figures(epochs, workload, float(started_s))}), flush=True)
    os._exit(0)  # do not wait for the peer's threads and processes


if __name__ == "__main__":
    main(sys.argv[1:])
