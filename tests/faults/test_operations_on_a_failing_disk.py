"""An operation leaves its sources as they were, and can be done again, whichever call fails."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from dev.kill_operations import Stage
from dev.kill_operations import operations as all_operations
from tests.faults.failing import FailingDisk
from tests.lines import contents

EVERY = int(os.environ.get("SHARDIO_FAIL_EVERY", "4"))
"""One of this many calls fails; in tools/dev/fail_disk.py each does."""
OPERATIONS = sorted(all_operations(Path()))


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    """Return a stage in memory if there is some: thousands of fsyncs need no disk."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder, pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)  # the stage installs a converter
        for name in ("MIN_UNIT_BYTES", "MIN_INPUT_BYTES"):
            patch.setattr(f"shardio.conversion.journal.{name}", 8)
        yield Stage(Path(folder), Random(0))


@pytest.mark.parametrize(
    ("code", "for_good"), [(errno.EIO, False), (errno.ENOSPC, True)], ids=["EIO", "ENOSPC for good"]
)
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_undone_or_done_after_any_failing_call(
    stage: Stage, name: str, monkeypatch: pytest.MonkeyPatch, code: int, *, for_good: bool
) -> None:
    operation, (whole, n_calls, _), n_failed = stage.operations[name], stage.undisturbed(name), 0
    every = 1 if name == "convert" else EVERY
    for at in range(code % every, n_calls, every):
        place, failing = stage.begin(operation), FailingDisk(code, at, for_good=for_good)
        old = contents(place)
        with monkeypatch.context() as during:
            failing.install(during)
            try:
                operation.run(place)
            except OSError as error:
                n_failed += 1
                assert failing.refused is not None
                path = failing.refused.path  # an error in a hidden folder names the dataset
                assert error.errno == code
                assert error.filename in (path, path.partition("/.staging-")[0])
        if name == "overwrite" and not for_good:
            found = contents(place).items()
            assert old.items() <= found or whole.items() <= found, failing.refused
        assert stage.check(name, place, old) == [], failing.refused
    assert n_failed >= n_calls // every // 2
