"""Measures what `import shardio` costs beyond `import numpy`; exits with 1 above the limit.

python tools/dev/bench_import.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys

LIMIT_MS = 30.0
N_ROUNDS = 15

_TIMED = """
import time
start = time.perf_counter()
{statement}
print((time.perf_counter() - start) * 1e3)
"""


def measure_ms(statement: str) -> float:
    """Time one statement in a fresh interpreter, in milliseconds."""
    command = [sys.executable, "-c", _TIMED.format(statement=statement)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> int:
    """Print the medians; return the exit code."""
    statements = ["import numpy", "import shardio", "import numpy, shardio"]
    # In turn, so that whatever else the machine does weighs on all alike.
    rounds = [[measure_ms(statement) for statement in statements] for _ in range(N_ROUNDS)]
    medians = [statistics.median(column) for column in zip(*rounds, strict=True)]
    for statement, median in zip(statements, medians, strict=True):
        print(f"{statement:<24} {median:7.1f} ms")
    extra_ms = max(medians[1:]) - medians[0]
    print(f"beyond import numpy      {extra_ms:7.1f} ms (limit {LIMIT_MS:.0f})")
    return int(extra_ms > LIMIT_MS)


if __name__ == "__main__":
    sys.exit(main())
