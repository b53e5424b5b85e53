"""The processes that audit shards: one shard at a time each, here or in a crew.

Processes rather than threads: hashing holds the interpreter's lock, and a page that the disk
cannot read kills the process that touches it, which then is a finding and not the end.
"""

from __future__ import annotations

import json
import os
import signal
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardio._engine.cpus import usable_cpus
from shardio._engine.crew import Channel, Crew, Died, Event, Failed, Message
from shardio._engine.pieces import Pieces, send_whole
from shardio.errors import ShardNotFound, WorkerDied
from shardio.surgery.finding import Finding, Findings
from shardio.surgery.shard_audit import Examined, examine


@dataclass(frozen=True, slots=True)
class AuditProgress:
    """How far an audit is."""

    n_shards_done: int
    n_shards: int
    n_bytes_done: int
    n_bytes: int


def examine_all(
    root: Path,
    names: Sequence[str],
    workers: int | None,
    progress: Callable[[AuditProgress], None] | None,
) -> dict[str, Examined]:
    """Audit shards of a folder; a shard that cannot be read at all has a finding that says so.

    Args:
        root: the folder.
        names: file names of the shards.
        workers: processes, see `audit_dataset`.
        progress: called at the start and after every shard.

    Raises:
        WorkerDied: a worker was killed, other than by bytes that cannot be read.
    """
    tally = _Tally(root, names, progress)
    n_workers = min(len(names), usable_cpus() if workers is None else workers)
    if n_workers == 0:
        for name in names:
            tally.enter(name, examine_anyhow(root / name))
    else:
        with Crew(n_workers, serve, preload=(__name__,)) as crew:
            _Foreman(crew, root, tally).run()
    return {name: tally.examined[name] for name in names}


def examine_anyhow(path: Path) -> Examined:
    """Audit a shard; that it is missing or cannot be opened is a finding."""
    findings = Findings(path)
    try:
        return examine(path)
    except ShardNotFound:
        findings.add("missing", "the shard is missing")
    except OSError as error:
        findings.add("unreadable", f"the file cannot be read: {error.strerror or error}")
    return Examined(findings.close(), 0)


def serve(channel: Channel) -> None:
    """Audit one shard after another, as main names them, until it is done."""
    while (message := channel.recv()) is not None:
        found = examine_anyhow(Path(os.fsdecode(message)))
        send_whole(channel, json.dumps(asdict(found)).encode())


def _examined(whole: bytes) -> Examined:
    """Rebuild what `serve` sent."""
    content: dict[str, Any] = json.loads(whole)
    findings = tuple(Finding(**finding) for finding in content.pop("findings"))
    return Examined(findings, **content)


class _Tally:
    """What is done already, and who wants to know."""

    def __init__(
        self,
        root: Path,
        names: Sequence[str],
        progress: Callable[[AuditProgress], None] | None,
    ) -> None:
        self.examined: dict[str, Examined] = {}
        self.names = names
        self._sizes = {name: _size_of(root / name) for name in names}
        self._n_bytes_done, self._progress = 0, progress
        self._tell()

    def enter(self, name: str, examined: Examined) -> None:
        """Take in the result for one shard."""
        self.examined[name] = examined
        self._n_bytes_done += self._sizes[name]
        self._tell()

    def _tell(self) -> None:
        if self._progress is not None:
            n_bytes = sum(self._sizes.values())
            done = AuditProgress(len(self.examined), len(self.names), self._n_bytes_done, n_bytes)
            self._progress(done)


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # missing or unreadable: the audit of the shard says so


class _Foreman:
    """Gives every worker of a crew one shard after the other, one ahead of the one it works on.

    One ahead, so that on a busy machine no worker waits for main to be scheduled.
    """

    def __init__(self, crew: Crew, root: Path, tally: _Tally) -> None:
        self._crew, self._root, self._tally = crew, root, tally
        self._waiting = list(reversed(tally.names))
        self._tasks: dict[int, deque[str]] = {}
        """What each worker has been told, the one it works on first."""
        self._pieces = Pieces()

    def run(self) -> None:
        """Return when all shards are done."""
        workers = range(len(self._crew))
        self._tasks = {worker: deque() for worker in workers}
        for worker in (*workers, *workers):
            self._assign(worker)
        while any(self._tasks.values()):
            for event in self._crew.wait():
                self._take(event)

    def _assign(self, worker: int) -> None:
        if self._waiting:
            name = self._waiting.pop()
            self._tasks[worker].append(name)
            self._crew.send(worker, os.fsencode(self._root / name))

    def _take(self, event: Event) -> None:
        if isinstance(event, Message):
            whole = self._pieces.take(event.worker, event.data)
            if whole is not None:
                self._tally.enter(self._tasks[event.worker].popleft(), _examined(whole))
                self._assign(event.worker)
        elif isinstance(event, Failed):
            name = next(iter(self._tasks[event.worker]), "no shard")
            raise WorkerDied(f"the audit of {name} failed in a worker:\n{event.text}")
        else:
            self._bury(event)

    def _bury(self, died: Died) -> None:
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
        self._crew.restart(died.worker)
        self._assign(died.worker)
        self._assign(died.worker)
