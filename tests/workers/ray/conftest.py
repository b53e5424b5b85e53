"""A Ray cluster on this machine: a head, which takes no jobs, and two nodes.

Each has a CPU, and says that it has a GPU.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_STORE = {"object_store_memory": 80 << 20}  # Ray takes no less than 75 MB
_QUICK = {
    "health_check_period_ms": 200,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
_PATIENCE_S = 60.0


class Nodes:
    """Owns the cluster: who asks for it has two nodes."""

    def __init__(self, ray_cluster: Any) -> None:
        self._made = ray_cluster
        self._nodes: list[Any] = []
        self._silent: list[int] = []
        self.address: str = ray_cluster.address

    def complete(self) -> None:
        """Start what there is less than two of."""
        while len(self._nodes) < 2:
            self._nodes.append(self._made.add_node(num_cpus=1, num_gpus=1, **_STORE))

    def kill_who_wrote(self, file: Path) -> None:
        """End the node by SIGKILL on which a job has written a file, once it has.

        And its agents, as they stay; but not who does the job: that is to end by itself.
        """
        raylet = self._lose(file)
        for pid in (raylet, *_children(raylet, b"Agent")):
            os.kill(pid, signal.SIGKILL)

    def silence_who_wrote(self, file: Path) -> None:
        """Freeze the whole node, as if its cable was pulled."""
        raylet = self._lose(file)
        self._silent += [raylet, *_children(raylet, b"ray::")]
        for pid in self._silent:
            os.kill(pid, signal.SIGSTOP)

    def end_silent(self) -> None:
        """End what stands still."""
        for pid in self._silent:
            os.kill(pid, signal.SIGKILL)
        self._silent.clear()

    def _lose(self, file: Path) -> int:
        raylet, _ = written_to(file)
        (node,) = [each for each in self._nodes if _raylet(each) == raylet]
        self._nodes.remove(node)
        self._made.worker_nodes.discard(node)
        return raylet


def written_to(file: Path) -> list[int]:
    """Return the ids that a stuck job has written: its node's process, and its own."""
    end_s = time.monotonic() + _PATIENCE_S
    while not (file.exists() and (text := file.read_text())):
        if time.monotonic() > end_s:
            raise TimeoutError(f"{file}: no job came to write it")
        time.sleep(0.02)
    return [int(word) for word in text.split()]


def _raylet(node: Any) -> int:
    pid: int = node.all_processes["raylet"][0].process.pid
    return pid


def _children(raylet: int, word: bytes) -> list[int]:
    """Return the processes of a node that have a word in their names."""
    children = Path(f"/proc/{raylet}/task/{raylet}/children").read_text().split()
    names = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
    return [pid for pid, name in names.items() if word in name]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    """Start a cluster for all tests of a module; its folder has a short name, as sockets need."""
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
        # Ray writes the address of the cluster to a folder below this one, which must exist.
        patch.setenv("RAY_TMPDIR", folder)
        os.mkdir(os.path.join(folder, "ray"))
        options = {"num_cpus": 0, "include_dashboard": False, "temp_dir": folder}
        made = Cluster(
            initialize_head=True, head_node_args={**options, **_STORE, "_system_config": _QUICK}
        )
        try:
            yield Nodes(made)
        finally:
            made.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def nodes(cluster: Nodes) -> Nodes:
    """Return the cluster, with all its nodes."""
    cluster.complete()
    return cluster
