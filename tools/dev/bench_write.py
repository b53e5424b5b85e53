"""Measures writing a shard of 4 GiB; exits with 1 when it takes more memory than it may.

python tools/dev/bench_write.py [FOLDER]

The most memory that the writing process ever has is compared with what it has after its imports.
Before that, it says how long small samples take, by kind: of those, the processor's time is told.
FOLDER says where the shards are written; they are removed again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

N_BYTES = 4 << 30
LIMIT_MIB = 256.0

_TIMED = """
import json, resource, sys, time
import numpy, shardio

path, n_bytes = sys.argv[1], int(sys.argv[2])
def max_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

schema = shardio.Schema({
    "frames": shardio.Array("uint8", (16, 112, 112, 3)),
    "pts": shardio.Array("int64", (16,)),
    "tokens": shardio.Array("int32", (None,)),
    "label": shardio.Array("int64"),
    "source": shardio.Text(),
})
rng = numpy.random.default_rng(0)
frames = rng.integers(0, 256, (16, 112, 112, 3), numpy.uint8)
tokens = rng.integers(0, 50000, 20_000, numpy.int32)
before, start, busy = max_mib(), time.perf_counter(), time.process_time()
with shardio.ShardWriter(path, schema) as writer:
    while writer.n_bytes < n_bytes:
        i = writer.n_samples
        frames[0, 0, 0, 0] = i % 256
        varying = {"pts": numpy.arange(16) + i, "tokens": tokens[: i % 20_000]}
        source = f"clips/number {i}.mp4"
        writer.append({"frames": frames, "label": i % 9, "source": source, **varying})
    summary = writer.close()
print(json.dumps({"grown_mib": max_mib() - before, "elapsed_s": time.perf_counter() - start,
                  "cpu_s": time.process_time() - busy, "n_bytes": summary.n_bytes,
                  "n_samples": summary.n_samples}))
"""

_SMALL = """
import sys, time
import numpy as np, shardio
from shardio import Array, Bytes, Json, Schema, Text

rng = np.random.default_rng(0)
x, data = rng.random((1000, 32), np.float32), rng.bytes(3000)
four = {"a": Array("int64"), "b": Array("float64"), "c": Array("float32"), "text": Text()}
kinds = {
    "32 numbers and a label": (
        {"x": Array("float32", (32,)), "y": Array("int64")},
        lambda i: {"x": x[i % 1000], "y": np.int64(i)},
    ),
    "3 of Python's numbers and a text": (
        four, lambda i: {"a": i, "b": i / 2, "c": i / 4, "text": f"row number {i}"},
    ),
    "3 of NumPy's numbers and a text": (
        four,
        lambda i: {"a": np.int64(i), "b": np.float64(i), "c": np.float32(i), "text": f"row {i}"},
    ),
    "up to 300 tokens": ({"t": Array("float32", (None,))}, lambda i: {"t": x.ravel()[: i % 300]}),
    "3,000 bytes and a name": (
        {"data": Bytes(), "name": Text()}, lambda i: {"data": data, "name": f"{i}.jpg"},
    ),
    "JSON": ({"m": Json()}, lambda i: {"m": {"id": i, "tags": [1, "x"], "in": {"a": "b"}}}),
}
for k, (kind, (fields, sample)) in enumerate(kinds.items()):
    samples = [sample(i) for i in range(30_000)]
    start = time.process_time()
    with shardio.ShardWriter(f"{sys.argv[1]}/{k}.shard", Schema(fields)) as writer:
        for one in samples:
            writer.append(one)
    taken_us = (time.process_time() - start) / len(samples) * 1e6
    print(f"{kind}: {taken_us:.1f} us of CPU a sample", flush=True)
"""


def main() -> int:
    """Print what was measured; return the exit code."""
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        subprocess.run([sys.executable, "-c", _SMALL, folder], check=True)
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        path = Path(folder) / "large.shard"
        command = [sys.executable, "-c", _TIMED, str(path), str(N_BYTES)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout)
    rate = found["n_bytes"] / 1e6 / found["elapsed_s"]
    print(f"{found['n_samples']:,} samples, {found['n_bytes'] / 2**30:.2f} GiB")
    print(f"{found['elapsed_s']:.1f} s, {found['cpu_s']:.1f} s of CPU, {rate:.0f} MB/s")
    print(f"memory +{found['grown_mib']:.0f} MiB (limit {LIMIT_MIB:.0f})")
    return int(found["grown_mib"] > LIMIT_MIB or found["n_bytes"] < N_BYTES)


if __name__ == "__main__":
    sys.exit(main())
