"""The faults of the race: a killed worker, a flipped bit and a truncated file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from benchmarks.child import NotMeasured
from benchmarks.peer_programs import Ended, run_peer
from benchmarks.racers.peers import PEERS

FAULTS: Final = {
    "kill": "a worker is killed",
    "flip": "a bit flips in a file",
    "truncate": "a file is truncated",
}
PEERS_WITH_FAULTS: Final = [
    name for name, peer in PEERS.items() if "frames" in peer.workloads and not peer.is_baseline
]
TIMEOUT_S: Final = 60
_MARK: Final = "fault-data"
"""The name of the folder of a peer's files: an error with this name in it names a file."""


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
        found[fault] = outcome(run_peer(peer, [*program, str(copy), fault], TIMEOUT_S))
    return found


def outcome(ended: Ended) -> str:
    """Describe the end of a run with a fault."""
    if ended.timed_out:
        return "hangs"
    if ended.answer is None:
        names = [
            word for word, mark in (("file", _MARK), ("sample", "sample ")) if mark in ended.reason
        ]
        return "error" + (f", with {' and '.join(names)}" if names else "")
    if "not possible" in ended.answer:
        return f"– ({ended.answer['not possible']})"
    texts = [f"{n} {what}" for what, n in ended.answer.items() if n]
    return f"delivered, {', '.join(texts)}" if texts else "all samples"
