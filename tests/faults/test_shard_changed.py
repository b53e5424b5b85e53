"""A shard that is cut short or replaced under its readers is an error that says so, and no hang."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import shardio
from shardio import Array, Schema, ShardDataset, ShardLoader, Text
from shardio._engine.dispatch.crashes import InFlightRows, crash_error
from shardio.errors import ShardChanged, ShardCorrupt, WorkerDied
from tests.faults.scene import PATIENCE_S, Scene, line
from tests.loading import TWO_FIELDS, make_loader, two_fields, write_dataset

pytestmark = pytest.mark.usefixtures("warm_zygote", "quick_disk")

N, BATCH = 80, 8
PER_SHARD = N // 2  # rows of the second shard, which is the one that is cut
CUT = 4096 + 6144 * 13 + 100  # in the middle of row 13 of its images
SECOND = "000001-000.shard"


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return write_dataset(tmp_path / "set", N, 2, TWO_FIELDS, two_fields(N))


def second(folder: str) -> str:
    return os.path.join(folder, SECOND)


def load_mapped(folder: str, num_workers: int, **options: Any) -> ShardLoader:
    """Load with so few blocks that at most 4 batches of the next epoch are filled when one ends."""
    return make_loader(
        folder, BATCH, access="mmap", output="numpy", num_workers=num_workers, prefetch=1, **options
    )


# Workers, whose maps it kills.


def run_until_it_fails(loader: ShardLoader) -> tuple[list[int], BaseException]:
    """Iterate an epoch; return the samples that arrived and the error that ended it."""
    seen: list[int] = []
    with pytest.raises(ShardChanged) as caught:
        for batch in loader:
            seen += batch["label"].tolist()
    return seen, caught.value


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("verify", ["off", "first"])
def test_a_worker_killed_by_a_cut_blames_it(folder: str, num_workers: int, verify: Any) -> None:
    size = os.path.getsize(second(folder))
    with load_mapped(folder, num_workers, verify=verify, fields=["label", "image"]) as loader:
        for batch in loader:  # the workers have mapped all
            assert len(batch["label"]) == BATCH
        os.truncate(second(folder), CUT)
        seen, error = run_until_it_fails(loader)
    assert isinstance(error, ShardChanged)
    # The labels lie behind the images: theirs are the first bytes that are gone.
    assert (error.code, error.path, error.field) == ("file_size", second(folder), "label")
    assert (error.expected, error.found, error.sample) == (size, CUT, 0)
    assert "the file was cut short while it was read: worker" in str(error)
    assert "killed by signal 7" in str(error)
    assert f"samples 0, 1, 2, … of shard {SECOND} for batch 5 of epoch 1" in str(error)
    assert isinstance(error.__cause__, WorkerDied)
    assert seen == list(range(PER_SHARD))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_later_epochs_end_with_the_error_of_the_file(folder: str, num_workers: int) -> None:
    with load_mapped(folder, num_workers) as loader:
        assert len(list(loader)) == N // BATCH
        os.truncate(second(folder), CUT)
        for _ in range(6):
            with pytest.raises(ShardCorrupt, match=SECOND):
                list(loader)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_sample_cut_in_a_transform_is_named(folder: str, tmp_path: Path, num_workers: int) -> None:
    path, go = second(folder), tmp_path / "go"

    def cut(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["label"] == PER_SHARD + 20 and go.exists():
            os.truncate(path, 4096)
        return {"sum": int(sample["image"].sum()), "label": sample["label"]}

    with load_mapped(folder, num_workers, verify="off", transform=cut) as loader:
        for batch in loader:  # the workers have mapped all
            assert len(batch["label"]) == BATCH
        go.touch()
        seen, error = run_until_it_fails(loader)
    assert isinstance(error, ShardChanged)
    assert error.path == path
    assert seen == list(range(len(seen)))
    if num_workers == 1:
        assert (len(seen), error.sample) == (PER_SHARD + 16, 20)
    else:  # the other one may have been at an earlier batch of the shard
        assert len(seen) in (PER_SHARD, PER_SHARD + 8, PER_SHARD + 16)


def test_a_cut_in_the_first_sample_is_named_when_its_schema_is_asked_for(folder: str) -> None:
    path = os.path.join(folder, "000000-000.shard")

    def cut(sample: dict[str, Any]) -> dict[str, Any]:
        os.truncate(path, 4096)
        return {"sum": int(sample["image"].sum())}

    with load_mapped(folder, 1, transform=cut, verify="off") as loader:
        with pytest.raises(ShardChanged, match="the first sample: sample 0 of shard") as caught:
            list(loader)
    assert (caught.value.path, caught.value.sample) == (path, 0)


def test_a_signal_7_with_whole_files_points_to_the_storage(folder: str) -> None:
    def fail(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["label"] == 20:
            os.kill(os.getpid(), signal.SIGBUS)
        return sample

    with load_mapped(folder, 1, transform=fail) as loader:
        with pytest.raises(WorkerDied, match="storage could not provide a page") as caught:
            list(loader)
    assert "sample 20 of shard 000000-000.shard" in str(caught.value)


def test_other_deaths_say_nothing_of_files(folder: str) -> None:
    with ShardDataset(folder) as dataset:
        os.truncate(second(folder), CUT)
        claims = InFlightRows("while it slept over", {1: [3]})
        error = crash_error("worker 0 was killed", signal.SIGKILL, claims, " batch 2", dataset)
        assert type(error) is WorkerDied
        assert str(error) == "worker 0 was killed, while it slept over batch 2"


def test_where_a_worker_left_no_claim_every_shard_is_looked_at(folder: str) -> None:
    with ShardDataset(folder) as dataset:
        os.truncate(second(folder), CUT)
        error = crash_error("it was killed", signal.SIGBUS, InFlightRows("before"), "", dataset)
        assert isinstance(error, ShardChanged)
        assert (error.path, error.sample) == (second(folder), None)
        os.unlink(second(folder))
        gone = crash_error("it was killed", signal.SIGBUS, InFlightRows("before"), "", dataset)
        assert type(gone) is WorkerDied


# Read by offset: no signal, anywhere.


@pytest.mark.parametrize(("num_workers", "verify"), [(0, "first"), (1, "off"), (2, "first")])
def test_without_maps_a_cut_has_its_place(folder: str, num_workers: int, verify: Any) -> None:
    options = {"num_workers": num_workers, "access": "pread", "verify": verify}
    with make_loader(folder, BATCH, output="numpy", fields=["image"], **options) as loader:
        assert len(list(loader)) == N // BATCH
        os.truncate(second(folder), CUT)
        for _ in range(3):  # nobody has died of it: it is the same each time
            n_batches = 0
            with pytest.raises(ShardChanged, match="cut short while it was in use") as caught:
                for _ in loader:
                    n_batches += 1
            error = caught.value
            assert n_batches == PER_SHARD // BATCH + 1
            assert (error.path, error.field, error.sample) == (second(folder), "image", 13)
            assert (error.offset, error.found) == (CUT, CUT)
            assert error.__cause__ is None or not isinstance(error.__cause__, WorkerDied)


RECORDS = Schema({"n": Array("int64"), "note": Text(), "points": Array("int16", (None,))})


@pytest.mark.parametrize("field", ["note", "points", "n"])
def test_records_and_indexes_that_are_cut_off_are_errors_too(tmp_path: Path, field: str) -> None:
    samples = ({"n": i, "note": str(i) * 400, "points": [i] * 50} for i in range(N))
    folder = write_dataset(tmp_path / "r", N, 2, RECORDS, samples)
    with ShardDataset(folder, access="pread") as dataset:
        reader = dataset.reader(1)
        reader[0]
        whole = Path(reader.path).read_bytes()
        for section in reader.sections:
            os.truncate(reader.path, section.offset)
            for row in range(len(reader)):
                try:
                    reader.sample(row, [field])
                except ShardChanged as error:
                    assert (error.code, error.path) == ("file_size", reader.path)
                    assert error.section is not None or (error.field, error.sample) == (field, row)
                    break
            Path(reader.path).write_bytes(whole)
        os.truncate(reader.path, 4096)
        with pytest.raises(ShardChanged):
            reader.sample(0, [field])


# The program itself, mapped.

GUARDED = """
import os
import numpy as np
import shardio

folder, path = {folder!r}, {path!r}

def use(what):
    os.truncate(path, {cut})
    try:
        what()
    except shardio.errors.ShardChanged as error:
        print(error.code, error.path == path, error.found, flush=True)

{then}
"""

WAYS = {
    "a sample": "d = shardio.open(folder); d[{row}]; use(lambda: d[{row}])",
    "a reader's sample": "r = shardio.ShardReader(path); r[3]; use(lambda: r[30])",
    "rows of a column": "r = shardio.ShardReader(path); use(lambda: r.column('image', [30]))",
    "a column": "r = shardio.ShardReader(path, verify='always'); use(lambda: r.column('image'))",
    "a column first mapped": """
d = shardio.open(folder); d[{row}]; use(lambda: d.gather("image"))""",
    "batches": """
loader = shardio.ShardLoader(folder, 8, output="numpy", num_workers=0)
list(loader)
use(lambda: list(loader))""",
    "transformed batches": """
loader = shardio.ShardLoader(
    folder, 8, output="numpy", num_workers=0, transform=lambda s: {{"m": s["image"].max()}})
list(loader)
use(lambda: list(loader))""",
}


@pytest.mark.parametrize("how", WAYS)
def test_the_program_notices_a_cut_first(stage: Scene, folder: str, how: str) -> None:
    then = WAYS[how].format(row=PER_SHARD + 3)
    program = GUARDED.format(folder=folder, path=second(folder), cut=CUT, then=then)
    main = stage.start(["-c", program])
    assert line(main) == f"file_size True {CUT}"
    assert main.wait(PATIENCE_S) == 0


HELD = """
import os, sys
import shardio
reader = shardio.ShardReader(sys.argv[1], access=sys.argv[2])
image = reader[30]["image"]
os.truncate(sys.argv[1], 8192)
print(int(image.sum()), flush=True)
"""


@pytest.mark.parametrize(("access", "code"), [("mmap", -signal.SIGBUS), ("pread", 0)])
def test_only_what_was_read_is_safe(stage: Scene, folder: str, access: str, code: int) -> None:
    with ShardDataset(folder) as dataset:
        expected = int(dataset[PER_SHARD + 30]["image"].sum())
    main = stage.start(["-c", HELD, second(folder), access])
    assert main.stdout is not None
    assert main.wait(PATIENCE_S) == code
    assert main.stdout.read().decode().strip() == ("" if code else str(expected))


@pytest.mark.parametrize("access", ["mmap", "pread"])
def test_an_open_shard_may_be_replaced(folder: str, tmp_path: Path, access: Any) -> None:
    black = ({"image": [[0] * 96] * 64, "label": -1} for _ in range(N))
    other = write_dataset(tmp_path / "other", N, 2, TWO_FIELDS, black)
    with ShardLoader(
        shardio.open(folder, access=access), BATCH, output="numpy", num_workers=1
    ) as loader:
        labels = [batch["label"].tolist() for batch in loader]
        os.rename(second(other), second(folder))
        assert [batch["label"].tolist() for batch in loader] == labels
