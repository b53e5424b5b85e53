"""Race MultiLoader against webdataset's, with samples of 1 MB and with small ones.

    python tools/dev/bench_multi.py
    SHARDIO_PEERS_PYTHON=/path/to/python python tools/dev/bench_multi.py

Two workers each send as many samples of one array; what is counted is samples per second from the
first to the last, each loader in a process of its own, in turn, round after round. webdataset's
reader is replaced by the same one that closes ZeroMQ before it ends, or it would lose samples.
`SHARDIO_PEERS_PYTHON` names an interpreter that has webdataset (the extra `peers`) and pyzmq.
Exits with 1 where the median ratio of samples of 1 MB is below its bar, or samples are lost.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from typing import Final

BAR: Final = 3.0
N_WORKERS: Final = 2
SIZES: Final = {"1 MB": (1 << 20, 400), "1 KB": (1 << 10, 20_000)}
"""Bytes of a sample's array, and samples of a worker."""

DATASET: Final = """
import sys, time
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
    print(n, (n - 1) / (time.perf_counter() - start_s))

dataset = Dataset(int(sys.argv[1]), int(sys.argv[2]))
"""
OURS: Final = f"""{DATASET}
from shardio import MultiLoader
race(MultiLoader(dataset, workers={N_WORKERS}))
"""
THEIRS: Final = f"""{DATASET}
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
with tempfile.TemporaryDirectory() as folder:  # its socket's file stays there
    race(webdataset.multi.MultiLoader(dataset, workers={N_WORKERS}, prefix=folder + "/"))
"""


def _rate(python: str, program: str, n_bytes: int, n_samples: int) -> float:
    """Return samples per second of one run in a process of its own."""
    command = [python, "-c", program, str(n_bytes), str(n_samples)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    n, rate = done.stdout.split()
    if int(n) != N_WORKERS * n_samples:
        raise SystemExit(f"{n} samples arrived of {N_WORKERS * n_samples}")
    return float(rate)


def main() -> int:
    """Print every rate; return 1 where ours is below its bar."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    n_rounds = parser.parse_args().rounds
    peers = os.environ.get("SHARDIO_PEERS_PYTHON", sys.executable)
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs; samples per second")
    medians = {}
    for name, (n_bytes, n_samples) in SIZES.items():
        ratios = []
        for _ in range(n_rounds):
            theirs = _rate(peers, THEIRS, n_bytes, n_samples)
            ours = _rate(sys.executable, OURS, n_bytes, n_samples)
            ratios.append(ours / theirs)
            print(f"{name}: webdataset {theirs:8.0f}, shardio {ours:8.0f}: {ratios[-1]:5.2f} x")
        medians[name] = statistics.median(ratios)
        print(f"{name}: median {medians[name]:.2f} x")
    is_below = medians["1 MB"] < BAR
    print(f"the bar for 1 MB is {BAR} x{': BELOW' if is_below else ''}")
    return 1 if is_below else 0


if __name__ == "__main__":
    sys.exit(main())
