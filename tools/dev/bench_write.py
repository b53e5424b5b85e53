"""Measures writing a shard of 4 GiB; exits with 1 when it takes more memory than it may.

python tools/dev/bench_write.py [FOLDER]

The most memory that the writing process ever has is compared with what it has after its imports.
FOLDER says where the shard is written; it is removed again.
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
def most_mib():
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
before, start, busy = most_mib(), time.perf_counter(), time.process_time()
with shardio.ShardWriter(path, schema) as writer:
    while writer.n_bytes < n_bytes:
        i = writer.n_samples
        frames[0, 0, 0, 0] = i % 256
        varying = {"pts": numpy.arange(16) + i, "tokens": tokens[: i % 20_000]}
        source = f"clips/number {i}.mp4"
        writer.append({"frames": frames, "label": i % 9, "source": source, **varying})
    summary = writer.close()
print(json.dumps({"grown_mib": most_mib() - before, "elapsed_s": time.perf_counter() - start,
                  "cpu_s": time.process_time() - busy, "n_bytes": summary.n_bytes,
                  "n_samples": summary.n_samples}))
"""


def main() -> int:
    """Print what was measured; return the exit code."""
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
