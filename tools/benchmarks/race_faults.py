"""The faults of the race: a killed worker, a flipped bit, a truncated file and full memory."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final

from benchmarks.child import NotMeasured
from benchmarks.peer_programs import Ended, run_peer
from benchmarks.racers.peers import PEERS

FAULTS: Final = {
    "kill": "a worker is killed",
    "flip": "a bit flips in a file",
    "truncate": "a file is truncated",
    "full": "`/dev/shm` is full",
}
PEERS_WITH_FAULTS: Final = [
    name for name, peer in PEERS.items() if "frames" in peer.workloads and not peer.is_baseline
]
TIMEOUT_S: Final = 60
_MARK: Final = "fault-data"
"""The name of the folder of a peer's files: an error with this name in it names a file."""
NO_MOUNTS: Final = "– (no mount namespaces here)"
"""The outcome of a fault that needs a mount namespace, where the system permits none."""
_FULL: Final = """
mount --bind "$1" /mnt && mount -t tmpfs -o size=1m full /dev/shm && mkdir -p "$1" &&
mount --bind /mnt "$1" && umount /mnt && export TMPDIR=/dev/shm && shift && exec "$@"
"""


def outcomes(peer: str, python: str, folder: Path) -> dict[str, str]:
    """Return a peer's outcome for each fault; raise NotMeasured if it fails without a fault."""
    program = [python, "-m", "benchmarks.racers.faults", peer]
    place = folder / _MARK / "whole"
    ended = run_peer(peer, [*program, str(place)], TIMEOUT_S)
    if ended.answer is None:
        raise NotMeasured(f"{peer}: {ended.reason}")
    found = {}
    for fault in FAULTS:
        copy = folder / _MARK / fault
        shutil.copytree(place, copy)
        faulty = [*program, str(copy), fault]
        if fault == "full":
            if not can_mount():
                found[fault] = NO_MOUNTS
                continue
            faulty = in_full_memory(faulty, copy)
        found[fault] = outcome(run_peer(peer, faulty, TIMEOUT_S))
    return found


@cache
def can_mount() -> bool:
    """Return True if a mount namespace can be created here, and a tmpfs be mounted in it."""
    mounting = "mount -t tmpfs full /dev/shm && mount --bind /dev/shm /mnt"
    try:
        done = subprocess.run(
            [*_namespace(), "sh", "-c", mounting], capture_output=True, check=False
        )
    except OSError:  # no `unshare`
        return False
    return done.returncode == 0


def in_full_memory(program: Sequence[str], folder: Path) -> list[str]:
    """Return a command that runs a program with 1 MiB in /dev/shm and for temporary files.

    The folder stays visible to the program, also if it is in /dev/shm.
    """
    return [*_namespace(), "sh", "-c", _FULL, "sh", str(folder), *program]


def _namespace() -> list[str]:
    """Return a command that runs another in a mount namespace of its own."""
    return ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-Urm"]


def outcome(ended: Ended) -> str:
    """Describe the end of a run with a fault."""
    if ended.timed_out:
        return "hangs"
    if ended.reason.startswith("killed by "):
        return ended.reason
    if ended.answer is None:
        names = [
            word for word, mark in (("file", _MARK), ("sample", "sample ")) if mark in ended.reason
        ]
        return "error" + (f", with {' and '.join(names)}" if names else "")
    if "not possible" in ended.answer:
        return f"– ({ended.answer['not possible']})"
    texts = [f"{n} {what}" for what, n in ended.answer.items() if n]
    return f"delivered, {', '.join(texts)}" if texts else "all samples"
