"""Verify many shards in this process and in workers; each process verifies one shard at a time.

Processes are used rather than threads because hashing small rows holds the interpreter lock. Also,
touching a mapped page that the disk cannot read kills the process. The death of a worker is
reported as a finding; if there are workers, the main process therefore does not map shards.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from shardio._workers.processes.limits import usable_cpus
from shardio._workers.processes.worker_pool import WorkerExit
from shardio._workers.ray_cluster import LOCAL, Cluster, Engine
from shardio._workers.tasks.task_pool import TaskPool
from shardio.errors import ShardNotFound
from shardio.maintenance.verify.findings import Findings
from shardio.maintenance.verify.shard import VerifiedShard, verify_file
from shardio.storage.file_access import Access


def verify_or_report(path: Path, access: Access) -> VerifiedShard:
    """Verify a shard; report a missing or unreadable file as a finding."""
    findings = Findings(path)
    try:
        return verify_file(path, access)
    except ShardNotFound as error:
        if path.is_symlink() or path.exists():
            findings.add("unreadable", str(error).removeprefix(f"{path}: "))
        else:
            findings.add("missing", "the shard is missing")
    except OSError as error:
        findings.add("unreadable", f"the file cannot be read: {error.strerror or error}")
    return VerifiedShard(findings.close(), 0)


LITTLE_BYTES: Final = 512 << 20
"""Below this total size, shards are verified without workers."""

MAX_AHEAD: Final = 3
"""The maximum number of shards queued for a worker in advance. With 1, a worker with small shards
ran out of work while the main process verified a large shard."""


@dataclass(frozen=True, slots=True)
class VerificationProgress:
    """The progress of a verification."""

    n_shards_done: int
    n_shards: int
    n_bytes_done: int
    n_bytes: int


def verify_all(
    root: Path,
    names: Sequence[str],
    workers: int | None,
    progress: Callable[[VerificationProgress], None] | None,
    access: Access = "pread",
    engine: Engine = LOCAL,
) -> dict[str, VerifiedShard]:
    """Verify shards of a folder; a shard that cannot be read is a finding.

    Args:
        root: the folder.
        names: file names of the shards.
        workers: the number of processes, as in `verify_dataset`.
        progress: called at the start and after every shard.
        access: how shards are read, as in `verify_dataset`.
        engine: the engine that runs the processes.

    Raises:
        WorkerDied: two workers crashed on the same shard for a reason other than unreadable bytes.
    """
    tally = _Tally(root, names, progress)
    if engine.is_ray:
        _verify_on_nodes(tally, root, workers, access, engine)
        return {name: tally.examined[name] for name in names}
    takes_part = workers is None and access != "mmap"
    n_workers = min(len(names), usable_cpus() if workers is None else workers)
    if takes_part:
        n_workers = max(0, n_workers - 1) if tally.n_bytes >= LITTLE_BYTES else 0
    if n_workers == 0:
        for name in names:
            tally.enter(name, verify_or_report(root / name, access))
    else:
        verify_file = partial(_verify_there, root, access)
        _verify_in_workers(tally, root, verify_file, n_workers, takes_part=takes_part)
    return {name: tally.examined[name] for name in names}


def _verify_on_nodes(
    tally: _Tally, root: Path, workers: int | None, access: Access, engine: Engine
) -> None:
    """Verify shards on the machines of a cluster, each shard as a whole."""
    # Imported here, because verification in this process needs no code that reads datasets.
    from shardio.dataset.manifest import POINTER

    there, pointer = Path(os.path.abspath(root)), root / POINTER
    jobs = iter(enumerate(tally.names))
    verify_file = partial(_verify_there, there, access)
    sees = pointer if pointer.exists() else root
    with Cluster(engine, sees=sees, n_at_once=workers) as cluster:
        for number, found in cluster.run(
            verify_file, partial(next, jobs, None), lambda n: tally.names[n]
        ):
            name = tally.names[number]
            findings = (replace(each, path=str(root / name)) for each in found.findings)
            tally.enter(name, replace(found, findings=tuple(findings)))


def _verify_there(root: Path, access: Access, name: str) -> VerifiedShard:
    return verify_or_report(root / name, access)


class _Tally:
    """The shards verified so far, and the progress callback."""

    def __init__(
        self,
        root: Path,
        names: Sequence[str],
        progress: Callable[[VerificationProgress], None] | None,
    ) -> None:
        self.examined: dict[str, VerifiedShard] = {}
        self.names = names
        self._sizes = {name: _size_of(root / name) for name in names}
        self.n_bytes = sum(self._sizes.values())
        self._n_bytes_done, self._progress = 0, progress
        self._report_progress()

    def enter(self, name: str, examined: VerifiedShard) -> None:
        """Add the result for one shard."""
        self.examined[name] = examined
        self._n_bytes_done += self._sizes[name]
        self._report_progress()

    def _report_progress(self) -> None:
        if self._progress is not None:
            n_done = len(self.examined)
            bytes_done = self._n_bytes_done
            self._progress(VerificationProgress(n_done, len(self.names), bytes_done, self.n_bytes))


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # a missing or unreadable shard is reported when it is verified


def _verify_in_workers(
    tally: _Tally,
    root: Path,
    verify_file: Callable[[str], VerifiedShard],
    n_workers: int,
    *,
    takes_part: bool = False,
) -> None:
    """Verify shards in worker processes; with `takes_part`, verify some in this process too.

    Shards are queued in advance, because this process may be busy verifying a shard itself. Towards
    the end fewer shards are queued, so that each of the last shards goes to the first idle worker.
    """
    waiting, under_way = deque(tally.names), dict[int, str]()
    with TaskPool(
        verify_file,
        n_workers,
        most_items=n_workers * (1 + MAX_AHEAD),
        depth=1 + MAX_AHEAD,
        in_order=False,
        preload=[__name__],
        is_called="the verification",
        on_crash=partial(_unreadable, root),
    ) as pool:
        while waiting or under_way:
            while waiting and len(under_way) < n_workers * (1 + _n_ahead(len(waiting), n_workers)):
                name = waiting.popleft()
                under_way[pool.put(name)] = name
            # Verify a shard here meanwhile: workers take a quarter of a second to start.
            if takes_part and waiting:
                name = waiting.popleft()
                tally.enter(name, verify_or_report(root / name, "pread"))
                pool.wait(0)
            else:
                pool.wait()
            while (finished := pool.take()) is not None:
                number, examined = finished
                tally.enter(under_way.pop(number), examined)


def _n_ahead(n_waiting: int, n_workers: int) -> int:
    """Return the number of shards to queue in advance per worker, which falls towards the end."""
    return min(MAX_AHEAD, (n_waiting - 1) // (2 * n_workers))


def _unreadable(root: Path, name: str, _: int | None, died: WorkerExit) -> VerifiedShard | None:
    """Return the finding if a worker was killed by SIGBUS because it touched an unreadable page."""
    if died.signal != signal.SIGBUS:
        return None
    findings = Findings(root / name)
    message = "the disk cannot read some of its bytes, or the file was truncated in the meantime"
    findings.add("unreadable", message)
    return VerifiedShard(findings.close(), 0)
