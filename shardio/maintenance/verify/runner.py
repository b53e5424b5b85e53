"""Run verification over many shards, in this process and in workers, one shard at a time each.

Processes rather than threads: hashing small rows holds the interpreter's lock. And if shards are
mapped, a page that the disk cannot read kills the process that touches it, which then is a finding
and not the end; so this process maps none unless it is to do all by itself.
"""

from __future__ import annotations

import json
import os
import signal
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from shardio._workers.processes.channel import Channel, MessageAssembler, send_chunks
from shardio._workers.processes.limits import usable_cpus
from shardio._workers.processes.worker_pool import Event, Failed, Message, WorkerExit, WorkerPool
from shardio._workers.ray_cluster import LOCAL, Cluster, Engine
from shardio.errors import ShardNotFound, WorkerDied
from shardio.maintenance.verify.findings import Finding, Findings
from shardio.maintenance.verify.shard import Examined, examine
from shardio.storage.file_access import Access


def examine_anyhow(path: Path, access: Access) -> Examined:
    """Audit a shard; that it is missing or cannot be opened is a finding."""
    findings = Findings(path)
    try:
        return examine(path, access)
    except ShardNotFound as error:
        if path.is_symlink() or path.exists():
            findings.add("unreadable", str(error).removeprefix(f"{path}: "))
        else:
            findings.add("missing", "the shard is missing")
    except OSError as error:
        findings.add("unreadable", f"the file cannot be read: {error.strerror or error}")
    return Examined(findings.close(), 0)


def serve(access: Access, channel: Channel) -> None:
    """Audit one shard after another, as main names them, until it is done."""
    while (message := channel.recv()) is not None:
        found = examine_anyhow(Path(os.fsdecode(message)), access)
        send_chunks(channel, json.dumps(asdict(found)).encode())


def examined_of(whole: bytes) -> Examined:
    """Rebuild what `serve` sent."""
    content: dict[str, Any] = json.loads(whole)
    findings = tuple(Finding(**finding) for finding in content.pop("findings"))
    return Examined(findings, **content)


LITTLE_BYTES: Final = 512 << 20
"""Less than this is checked before there is a worker."""

MAX_AHEAD: Final = 3
"""Shards that a worker has been told of before it needs them: with one, behind a dataset's small
ones it waited until main was through with a large one."""


@dataclass(frozen=True, slots=True)
class AuditProgress:
    """The progress of a verification."""

    n_shards_done: int
    n_shards: int
    n_bytes_done: int
    n_bytes: int


def examine_all(
    root: Path,
    names: Sequence[str],
    workers: int | None,
    progress: Callable[[AuditProgress], None] | None,
    access: Access = "pread",
    engine: Engine = LOCAL,
) -> dict[str, Examined]:
    """Audit shards of a folder; a shard that cannot be read is a finding.

    Args:
        root: the folder.
        names: file names of the shards.
        workers: processes, see `audit_dataset`.
        progress: called at the start and after every shard.
        access: see `audit_dataset`.
        engine: see `audit_dataset`.

    Raises:
        WorkerDied: a worker was killed, other than by bytes that cannot be read.
    """
    tally = _Tally(root, names, progress)
    if engine.is_ray:
        _examine_on_nodes(tally, root, workers, access, engine)
        return {name: tally.examined[name] for name in names}
    takes_part = workers is None and access != "mmap"
    n_workers = min(len(names), usable_cpus() if workers is None else workers)
    if takes_part:
        n_workers = max(0, n_workers - 1) if tally.n_bytes >= LITTLE_BYTES else 0
    if n_workers == 0:
        for name in names:
            tally.enter(name, examine_anyhow(root / name, access))
    else:
        with WorkerPool(n_workers, partial(serve, access), preload=(serve.__module__,)) as pool:
            _ShardScheduler(pool, root, tally).run(takes_part=takes_part)
    return {name: tally.examined[name] for name in names}


def _examine_on_nodes(
    tally: _Tally, root: Path, workers: int | None, access: Access, engine: Engine
) -> None:
    """Verify shards on the machines of a cluster, each shard as a whole."""
    # Imported late: verification in this process needs nothing that reads datasets.
    from shardio.dataset.manifest import POINTER

    there, pointer = Path(os.path.abspath(root)), root / POINTER
    jobs = iter(enumerate(tally.names))
    examine = partial(_examine_there, there, access)
    sees = pointer if pointer.exists() else root
    with Cluster(engine, sees=sees, n_at_once=workers) as cluster:
        for number, found in cluster.run(
            examine, partial(next, jobs, None), lambda n: tally.names[n]
        ):
            name = tally.names[number]
            findings = (replace(each, path=str(root / name)) for each in found.findings)
            tally.enter(name, replace(found, findings=tuple(findings)))


def _examine_there(root: Path, access: Access, name: str) -> Examined:
    return examine_anyhow(root / name, access)


class _Tally:
    """The shards verified so far, and the progress callback."""

    def __init__(
        self,
        root: Path,
        names: Sequence[str],
        progress: Callable[[AuditProgress], None] | None,
    ) -> None:
        self.examined: dict[str, Examined] = {}
        self.names = names
        self._sizes = {name: _size_of(root / name) for name in names}
        self.n_bytes = sum(self._sizes.values())
        self._n_bytes_done, self._progress = 0, progress
        self._tell()

    def enter(self, name: str, examined: Examined) -> None:
        """Add the result for one shard."""
        self.examined[name] = examined
        self._n_bytes_done += self._sizes[name]
        self._tell()

    def _tell(self) -> None:
        if self._progress is not None:
            n_done = len(self.examined)
            bytes_done = self._n_bytes_done
            self._progress(AuditProgress(n_done, len(self.names), bytes_done, self.n_bytes))


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # a missing or unreadable shard is reported when it is verified


class _ShardScheduler:
    """A scheduler that queues shards for every worker of a pool, some ahead of the current one.

    No worker waits for main, which may be in the middle of a shard of its own; but the last shards
    each go to the first idle worker.
    """

    def __init__(self, pool: WorkerPool, root: Path, tally: _Tally) -> None:
        self._pool, self._root, self._tally = pool, root, tally
        self._waiting = list(reversed(tally.names))
        self._tasks: dict[int, deque[str]] = {worker: deque() for worker in range(len(pool))}
        """The queued shards of each worker, the current one first."""
        self._pieces = MessageAssembler()

    def run(self, *, takes_part: bool = False) -> None:
        """Return when all shards are done; main verifies some of them itself if it takes part."""
        for worker in self._tasks:
            self._assign(worker)
        while takes_part and self._waiting:  # workers take a quarter of a second to start
            name = self._waiting.pop()
            self._tally.enter(name, examine_anyhow(self._root / name, "pread"))
            for event in self._pool.wait(0):
                self._take(event)
        for worker in self._tasks:
            self._assign(worker)
        while any(self._tasks.values()):
            for event in self._pool.wait():
                self._take(event)

    def _assign(self, worker: int) -> None:
        """Queue shards for a worker, the next one and some after that, while there are enough."""
        tasks = self._tasks[worker]
        while self._waiting and len(tasks) < 1 + self._n_ahead():
            name = self._waiting.pop()
            tasks.append(name)
            self._pool.send(worker, os.fsencode(self._root / name))

    def _n_ahead(self) -> int:
        """Return how many shards a worker may have queued: fewer towards the end."""
        return min(MAX_AHEAD, (len(self._waiting) - 1) // (2 * len(self._tasks)))

    def _take(self, event: Event) -> None:
        if isinstance(event, Message):
            whole = self._pieces.take(event.worker, event.data)
            if whole is not None:
                self._tally.enter(self._tasks[event.worker].popleft(), examined_of(whole))
                self._assign(event.worker)
        elif isinstance(event, Failed):
            name = next(iter(self._tasks[event.worker]), "no shard")
            raise WorkerDied(f"the audit of {name} failed in a worker:\n{event.text}")
        else:
            self._on_worker_exit(event)

    def _on_worker_exit(self, died: WorkerExit) -> None:
        """Note the shard that a worker died of, and go on with a new one."""
        tasks = self._tasks[died.worker]
        name = tasks.popleft() if tasks else None
        self._waiting += reversed(tasks)
        tasks.clear()
        self._pieces.forget(died.worker)
        if name is None or died.signal != signal.SIGBUS:
            raise WorkerDied(
                f"a worker that audited {name} ended early: signal {died.signal}, "
                f"exit code {died.exit_code}"
            )
        findings = Findings(self._root / name)
        message = "the disk cannot read some of its bytes, or the file was cut short meanwhile"
        findings.add("unreadable", message)
        self._tally.enter(name, Examined(findings.close(), 0))
        self._pool.restart(died.worker)
        self._assign(died.worker)
