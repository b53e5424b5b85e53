"""The faults of the race: a killed worker, a flipped bit, a truncated file and a full /dev/shm."""

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
    "full": "`/dev/shm` and the folder of temporary files are full",
}
PEERS_WITH_FAULTS: Final = [
    name for name, peer in PEERS.items() if "frames" in peer.workloads and not peer.is_baseline
]
TIMEOUT_S: Final = 60
_MARK: Final = "fault-data"
"""The name of the folder of a peer's files: an error with this name in it names a file."""
ALL_SAMPLES: Final = "all samples"
CONTROL: Final = "large"
"""The name of a run without a fault, with the large batches of the fault "full"."""
NO_MOUNTS: Final = "– (no mount namespaces here)"
"""The outcome of a fault that needs a mount namespace, where the system permits none."""
_SMALL_SHM: Final = """
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
        command = [*program, str(copy)]
        found[fault] = (
            _outcome_in_small_shm(peer, command, copy)
            if fault == "full"
            else outcome(run_peer(peer, [*command, fault], TIMEOUT_S))
        )
    return found


def _outcome_in_small_shm(peer: str, command: Sequence[str], folder: Path) -> str:
    """Return the outcome of the fault "full", if the peer loads such batches without it."""
    if not can_mount():
        return NO_MOUNTS
    control = outcome(run_peer(peer, [*command, CONTROL], TIMEOUT_S))
    if control != ALL_SAMPLES:
        return f"– (without the fault: {control})"
    return outcome(run_peer(peer, with_small_shm([*command, "full"], folder), TIMEOUT_S))


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


def with_small_shm(program: Sequence[str], folder: Path) -> list[str]:
    """Return a command that runs a program with 1 MiB in /dev/shm and for temporary files.

    The folder stays visible to the program, also if it is in /dev/shm.
    """
    return [*_namespace(), "sh", "-c", _SMALL_SHM, "sh", str(folder), *program]


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
    return f"delivered, {', '.join(texts)}" if texts else ALL_SAMPLES
