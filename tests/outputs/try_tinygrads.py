"""Run the tests of tensors with every tinygrad that shardio supports.

    python -m tests.outputs.try_tinygrads [VERSION …]

Each version (0.12.0, 0.13.0 and 0.14.0 by default) is installed into a folder of its own, which is
removed again, and put in front of the installed one; 0.14 is tried with HCQ2=1, too, and the
installed one with DEV=PYTHON, as on a machine without clang. Exits with 1 where a test fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("0.12.0", "0.13.0", "0.14.0")
TESTS = ("tests/outputs/test_tinygrad.py",)
HOUSE = [ROOT, ROOT / "converters", ROOT / "tools"]


def passes(what: str, folders: list[Path], variables: dict[str, str]) -> bool:
    """Run the tests with folders in front of what is installed; prints their last line."""
    path = os.pathsep.join(map(str, folders + HOUSE))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **variables},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    print(f"{what:<24} {done.stdout.strip().splitlines()[-1]}", flush=True)
    if done.returncode:
        print(done.stdout)
    return done.returncode == 0


def main() -> int:
    """Try them all, and return the exit code."""
    are_good = [passes("installed, DEV=PYTHON", [], {"DEV": "PYTHON"})]
    for version in sys.argv[1:] or VERSIONS:
        with tempfile.TemporaryDirectory() as folder:
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder]
            subprocess.run([*pip, f"tinygrad=={version}"], check=True)
            are_good.append(passes(f"tinygrad {version}", [Path(folder)], {}))
            if version >= "0.14":
                hcq2 = {"HCQ2": "1"}
                are_good.append(passes(f"tinygrad {version}, HCQ2=1", [Path(folder)], hcq2))
    return 0 if all(are_good) else 1


if __name__ == "__main__":
    sys.exit(main())
