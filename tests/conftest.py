"""Fixtures of all tests: real clips, tinygrad's device, a clean process."""

from __future__ import annotations

import functools
import gc
import os
import platform
import shutil
import signal
import subprocess
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import markers
from tests.faults.scene import Scene, scene

# A busy machine is no failure: no property is tested against the clock.
settings.register_profile("shardio", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shardio")


@functools.cache
def cpu_device_works() -> bool:
    """Return True if tinygrad's CPU device can compile with $CC or clang.

    The compiler must accept a target of clang's.
    """
    compiler = os.environ.get("CC", "clang")
    if shutil.which(compiler) is None:
        return False
    target = f"--target={platform.machine()}-none-unknown-elf"
    command = [compiler, target, "-x", "c", "-c", "-", "-o", os.devnull]
    return subprocess.run(command, input=b"", capture_output=True, check=False).returncode == 0


# Before any test imports tinygrad, which reads DEV once: the tests use no accelerator, and without
# clang they use the device written in Python.
os.environ.setdefault("DEV", "CPU" if cpu_device_works() else "PYTHON")


# Tests start hundreds of programs that import NumPy and multiply no large matrices. More threads of
# OpenBLAS would only spin, for 0.1 s of CPU time in each program.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


# A shell that starts a program in the background makes it ignore Ctrl-C, and whatever it starts;
# nohup does the same with SIGHUP.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_configure(config: pytest.Config) -> None:
    markers.register(config)


def pytest_runtest_teardown() -> None:
    """Undo the real-time priority that SVT-AV1 takes where tests encode with it by themselves."""
    if os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


@pytest.fixture
def swept() -> None:
    """Collect the garbage of earlier tests, for tests that count the objects of this process."""
    gc.collect()


@pytest.fixture(scope="module")
def quick_disk() -> Iterator[None]:
    """Skip fsync, for modules that write hundreds of shards that no power cut endangers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield


@pytest.fixture(scope="module")
def no_collections() -> Iterator[None]:
    """Disable the garbage collector for modules that parse all code, which is then 4 times as fast.

    Most of the trees stay in memory; later collections skip them.
    """
    gc.disable()
    yield
    gc.collect()
    gc.freeze()
    gc.enable()


_PRELOAD = ("hypothesis", "pytest", "tests.loading", "tests.media_made")
"""Modules that the zygote imports once. Without them, each worker that unpickles a test's function
would import them in half a second of CPU time."""


class KeptZygote:
    """A pool that keeps a zygote running while tests want one."""

    def __init__(self) -> None:
        self._pool: ExitStack | None = None

    def start(self) -> None:
        """Start it, unless it runs."""
        from shardio._workers.processes import zygote
        from shardio._workers.processes.worker_pool import WorkerPool

        if self._pool is None or zygote._current is None or not zygote._current.is_running():
            self.end()
            self._pool = ExitStack()
            self._pool.enter_context(
                WorkerPool(1, lambda channel: channel.recv(), preload=_PRELOAD)
            )

    def end(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


KEPT_ZYGOTE = KeptZygote()


@pytest.fixture(scope="module")
def shared_zygote() -> Iterator[None]:
    """Keep a zygote running until a test that starts processes does without this fixture."""
    KEPT_ZYGOTE.start()
    markers.pytest_runtest_setup()  # the test itself has started no process yet
    yield
    gc.collect()  # what failures refer to must not end in the middle of other tests
    gc.freeze()  # later collections skip the modules that tests have imported


@pytest.fixture(scope="module")
def warm_zygote(shared_zygote: None) -> None:
    """Keep a zygote running, for modules that start many workers; they share it."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("process") and not markers.uses_shared_zygote(item):
        KEPT_ZYGOTE.end()
    if item.get_closest_marker("cpu_device") and not cpu_device_works():
        pytest.skip("needs tinygrad's CPU device, which needs clang")


def pytest_sessionfinish() -> None:
    KEPT_ZYGOTE.end()


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of 7 texts, of which 4 have samples; see `tests.lines.OLD`."""
    from tests.lines import install

    return install(tmp_path, monkeypatch)


@pytest.fixture
def stage() -> Iterator[Scene]:
    """Run programs, and find what they leave behind."""
    with scene() as made:
        yield made


@pytest.fixture(scope="session")
def media_root() -> Path:
    """Return the folder of real media that SHARDIO_TEST_MEDIA names.

    It has `clips/`, `broken/` and `images/`.
    """
    folder = os.environ.get("SHARDIO_TEST_MEDIA")
    if not folder:
        pytest.skip("SHARDIO_TEST_MEDIA names no folder of real media")
    root = Path(folder)
    if not root.is_dir():
        pytest.fail(f"SHARDIO_TEST_MEDIA is not a folder: {root}")
    return root


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while modules are imported and tests made, most of which stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Freeze imported modules and collected tests, so that garbage collections skip them."""
    gc.collect()
    gc.freeze()
