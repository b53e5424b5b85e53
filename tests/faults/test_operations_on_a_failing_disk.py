"""An operation leaves its sources as they were, and can be done again, whichever call fails."""

from __future__ import annotations

import errno
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from shardio.conversion.staging import Staging
from stress_tests.kill_operations import Operation, Stage
from stress_tests.kill_operations import operations as all_operations
from tests.faults.failing import FailingDisk, before_calls
from tests.lines import contents

EVERY = int(os.environ.get("SHARDIO_FAIL_EVERY", "4"))
"""One of this many calls fails; in tools/stress disk each does."""
OPERATIONS = [*sorted(all_operations(Path())), "resume"]


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    """Return a stage in memory if there is some: thousands of fsyncs need no disk."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])  # the stage installs a converter
        for name in ("MIN_UNIT_BYTES", "MIN_INPUT_BYTES"):
            patch.setattr(f"shardio.conversion.journal.{name}", 8)
        made = Stage(Path(folder), Random(0))
        convert = made.operations["convert"]
        made.operations["resume"] = Operation(convert.again, convert.again)
        yield made


def leave_unpublished(convert: Operation, place: Path) -> None:
    """Convert, and end before the dataset is published, as after SIGKILL."""

    def end(_: str, path: str) -> None:
        if ".dataset.json." in path:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as during, pytest.raises(KeyboardInterrupt):
        during.setattr(Staging, "_clean_up", lambda *_: None)
        before_calls(during, end)
        convert.run(place)


def visible(path: str) -> str:
    """Return the path to name in an error about a file that may be temporary or in work."""
    path = re.sub(r"/\.([^/]+)\.[0-9a-f]{12}\.tmp$", r"/\1", path)
    return re.sub(r"/\.(shardio-staging-|conversion\b).*", "", path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "for_good"), [(errno.EIO, False), (errno.ENOSPC, True)], ids=["EIO", "ENOSPC for good"]
)
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_undone_or_done_after_any_failing_call(
    stage: Stage, name: str, monkeypatch: pytest.MonkeyPatch, code: int, *, for_good: bool
) -> None:
    operation, (whole, n_calls, _), n_failed = stage.operations[name], stage.undisturbed(name), 0
    every = 1 if name in ("convert", "overwrite", "resume") else EVERY
    for at in range(code % every, n_calls, every):
        place, failing = stage.begin(operation), FailingDisk(code, at, for_good=for_good)
        if name == "resume":
            leave_unpublished(operation, place)
        old = contents(place)
        with monkeypatch.context() as during:
            failing.install(during)
            try:
                operation.run(place)
            except OSError as error:
                n_failed += 1
                assert error.errno == code
                shown = {visible(path) for path in failing.refused_paths}
                # An error in a folder that will be renamed names the final folder.
                assert error.filename in shown or os.path.dirname(error.filename) in shown
        if name == "overwrite" and not for_good:
            found = contents(place).items()
            assert old.items() <= found or whole.items() <= found, failing.refused
        assert stage.check(name, place, old) == [], failing.refused
    assert n_failed >= (10 if name == "resume" else n_calls // every // 2)
