"""Run the units of a plan on the machines of a Ray cluster.

As on one machine, a unit is converted by a process of its own, which is replaced if an input
crashes it. Each attempt writes to a new folder; only this process moves the folder of a finished
attempt to the unit's place. So a machine that was given up but still runs cannot do damage.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from shardio._workers.processes.zygote_client import Zygote, acquire
from shardio._workers.ray_cluster import Cluster, Engine
from shardio.conversion.journal import conversion_settings, read_record
from shardio.conversion.plan import Unit, UnitEvent
from shardio.conversion.scheduler import ConversionState, UnitRecorder, run_units
from shardio.conversion.worker import ConversionJob
from shardio.errors import UnsupportedEnvironment
from shardio.storage.fs import make_folder, remove_tree, rename, sync_folder

_ATTEMPTS: Final = "attempts-"
"""Prefix of the folder that holds the attempts of a conversion."""


@dataclass(frozen=True, slots=True)
class UnitAttempt:
    """The result of converting a unit on a machine: its events, and the folder of its shards.

    `folder` is "" if the unit was already complete. If the machine cannot see an input,
    `missing_path` names it and everything else is empty.
    """

    events: tuple[UnitEvent, ...] = ()
    folder: str = ""
    missing_path: str = ""


@dataclass(frozen=True, slots=True)
class _UnitTask:
    """A task that converts units on a machine of the cluster; holds what all units share.

    `attempts` is a folder with a unique name, `settings` are those of the journal.
    """

    job: ConversionJob
    attempts: str
    settings: Mapping[str, Any]

    def __call__(self, assignment: tuple[Unit, bool]) -> UnitAttempt:
        """Convert a unit, given with a flag to look for its inputs first."""
        unit, checks_inputs = assignment
        self._check_same_libraries()
        missing_path = _first_invisible(unit) if checks_inputs else ""
        if missing_path:
            return UnitAttempt(missing_path=missing_path)
        if kept := read_record(Path(self.job.folder, unit.key), unit):
            done, end = kept
            return UnitAttempt((*done, end))
        folder = os.path.join(self.attempts, secrets.token_hex(8))
        make_folder(folder)
        _shared_zygote()
        log = UnitRecorder()
        # The number is an index into the list of units, which has length 1 here.
        run_units([replace(unit, number=0)], replace(self.job, folder=folder), 1, log)
        return UnitAttempt(log.events(unit.number), os.path.join(folder, unit.key))

    def _check_same_libraries(self) -> None:
        """Check that this machine has the versions that the conversion started with."""
        found = conversion_settings(self.settings["converter"], self.job.source.libraries())
        expected = {**self.settings["versions"], "machine": self.settings["machine"]}
        local = {**found["versions"], "machine": found["machine"]}
        differences = [
            f"{name} is {local.get(name)}, the conversion started with {expected.get(name)}"
            for name in sorted({*expected, *local})
            if expected.get(name) != local.get(name)
        ]
        if differences:
            raise UnsupportedEnvironment(
                f"machine {platform.node()} of the Ray cluster would produce different bytes: "
                f"{'; '.join(differences)}; install the same versions everywhere"
            )


@functools.cache
def _shared_zygote() -> Zygote:
    """Keep the process that forks workers alive for later units, until this process exits.

    It takes half a second to start, longer than most units take.
    """
    return acquire()


def run_on_ray(
    units: Sequence[Unit],
    job: ConversionJob,
    engine: Engine,
    n_at_once: int | None,
    state: ConversionState,
    settings: Mapping[str, Any],
) -> None:
    """Convert units on the machines of a cluster until `state` is finished.

    Raises:
        UnsupportedEnvironment: a machine cannot see the source or the dataset, or has other
            versions of shardio or of a library than this one.
        WorkerDied, OSError, ShardioError: as `run_units`.
    """
    attempts = os.path.join(job.folder, f"{_ATTEMPTS}{secrets.token_hex(8)}")
    make_folder(attempts)
    retries: list[int] = []  # units whose inputs are missing on this machine as well

    def next_job() -> tuple[int, tuple[Unit, bool]] | None:
        if retries:
            number = retries.pop()
            return number, (units[number], False)
        following = state.next_unit()
        return None if following is None else (following, (units[following], True))

    try:
        with Cluster(engine, sees=attempts, n_at_once=n_at_once) as cluster:
            work = _UnitTask(job, attempts, settings)
            for number, found in cluster.run(work, next_job, lambda n: _unit_name(units[n])):
                if found.missing_path:
                    _check_visible(found.missing_path)
                    retries.append(number)
                    continue
                _commit_attempt(found, units[number], job)
                for event in found.events:
                    state.handle(event)
                if state.is_finished():
                    break
    finally:
        with contextlib.suppress(OSError):  # the next conversion removes it
            remove_tree(attempts)  # a machine given up but still running cannot write any more


def _first_invisible(unit: Unit) -> str:
    """Return the first input or part that existed when listed, and does not here; "" if none."""
    for one in unit.inputs:
        for each in (one, *one.parts):
            if each.stamp != (0, 0) and not os.path.lexists(each.path):
                return each.path
    return ""


def _check_visible(path: str) -> None:
    if os.path.lexists(path):
        raise UnsupportedEnvironment(
            f"a machine of the Ray cluster cannot see {path}: the source must be on a file "
            "system that all machines mount at the same path"
        )


def _unit_name(unit: Unit) -> str:
    return f"{unit.inputs[0].name} to {unit.inputs[-1].name}"


def _commit_attempt(found: UnitAttempt, unit: Unit, job: ConversionJob) -> None:
    """Move the shards of an attempt to the unit's place, durably."""
    if found.folder:
        path = os.path.join(job.folder, unit.key)
        remove_tree(path)  # left unfinished by an earlier conversion
        rename(found.folder, path)
        sync_folder(job.folder)
