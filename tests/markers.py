"""Markers of tests: which ones start processes, need what the extra `dev` lacks, or take long.

`process` is added to the tests of modules that import what starts programs, and to the tests with a
fixture that does; a test that starts a process without the marker fails. `external` is added where
`cpu_device` is. `slow` is given by hand; what took long without it is listed at the end of a run.
"""

from __future__ import annotations

import functools
import multiprocessing
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Generator
from types import ModuleType
from typing import Any

import pytest

from tests import ascii_locale
from tests.faults import programs, scene

FIXTURES = frozenset({"one_server", "process", "stage", "warm_zygote"})
"""The fixtures that start processes."""
MODULES = (subprocess, multiprocessing)
HELPERS = frozenset({ascii_locale.__name__, programs.__name__, scene.__name__})
"""The modules of tests that start processes."""
EVENTS = frozenset({"os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"})
"""The audit events of a process that is started."""
SLOW_S = 5.0

_started: list[str] = []


def _note(
    event: str,
    _: tuple[Any, ...],
    *,
    events: frozenset[str] = EVENTS,
    started: list[str] = _started,
) -> None:
    """Note a start; the arguments outlive the globals, which are gone at the end of Python."""
    if event in events:
        started.append(event)


@functools.cache
def _imports_starters(module: ModuleType) -> bool:
    """Return True if a module imports what starts programs."""
    values = [*vars(module).values()]
    return any(value in MODULES for value in values if isinstance(value, ModuleType)) or any(
        getattr(value, "__module__", "") in HELPERS for value in values if callable(value)
    )


def starts_processes(item: pytest.Function) -> bool:
    return not FIXTURES.isdisjoint(item.fixturenames) or _imports_starters(item.module)


def uses_shared_zygote(item: pytest.Item) -> bool:
    """Return True if a test keeps the zygote that others have left; see `conftest.KeptZygote`."""
    return "shared_zygote" in getattr(item, "fixturenames", ())


def slow_first(items: list[pytest.Item], n_workers: int) -> list[pytest.Item]:
    """Return the items such that each of `n_workers` equal chunks begins with slow ones.

    In each chunk, the tests that share a zygote are adjacent, so that it starts once. Items keep
    their order otherwise: the tests of a module share fixtures.
    """
    # Keys: (is slow, shares a zygote).
    groups: dict[tuple[bool, bool], list[pytest.Item]] = {
        kind: [] for kind in ((True, False), (True, True), (False, True), (False, False))
    }
    for item in items:
        is_slow = item.get_closest_marker("slow") is not None
        groups[is_slow, uses_shared_zygote(item)].append(item)
    found: list[pytest.Item] = []
    for k in range(n_workers):
        for group in groups.values():
            found += group[k * len(group) // n_workers : (k + 1) * len(group) // n_workers]
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the markers, before -m selects by them; each worker of xdist begins with slow tests."""
    for item in items:
        if isinstance(item, pytest.Function) and starts_processes(item):
            item.add_marker("process")
        if item.get_closest_marker("cpu_device"):
            item.add_marker("external")
    worker: dict[str, Any] | None = getattr(config, "workerinput", None)
    if worker is not None:
        items[:] = slow_first(items, int(worker["workercount"]))


def unmarked_start(item: pytest.Item) -> str | None:
    """Return how a test has started a process, if it has and lacks the marker `process`."""
    if not _started or item.get_closest_marker("process"):
        return None
    return f"the test has started a process ({_started[0]}): mark it with pytest.mark.process"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Forget the processes that were started so far."""
    _started.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    result = yield
    if problem := unmarked_start(item):
        pytest.fail(problem, pytrace=False)
    return result


class Durations:
    """The tests that took long, and are not marked as slow."""

    def __init__(self) -> None:
        self.seconds = Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "slow" not in report.keywords:
            self.seconds[report.nodeid] += report.duration  # type: ignore[assignment]

    def lines(self) -> list[str]:
        """Return a line for each test that took over SLOW_S seconds without the marker `slow`."""
        found = [(s, name) for name, s in self.seconds.most_common() if s > SLOW_S]
        return [f"{s:.1f} s without the marker slow: {name}" for s, name in found]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """List them; a busy machine is no failure."""
        for line in self.lines():
            terminalreporter.write_line(line)


def register(config: pytest.Config) -> None:
    """Add this module to the plugins of a run of tests."""
    platform.processor()  # runs `uname -p` once in a process; h5py asks for it when it is imported
    sys.addaudithook(_note)
    config.pluginmanager.register(sys.modules[__name__], __name__)
    config.pluginmanager.register(Durations(), f"{__name__}.durations")
