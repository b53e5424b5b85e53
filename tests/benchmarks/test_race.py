"""The race of `tools/bench`: its peers, their environments, its checks, and the pages it draws."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow
import pytest

from benchmarks import race
from benchmarks.__main__ import main
from benchmarks.child import NotMeasured
from benchmarks.data import Cache
from benchmarks.environments import interpreter
from benchmarks.harness import Bench
from benchmarks.peer_programs import Ended, run_peer
from benchmarks.race_faults import NO_MOUNTS, can_mount, outcome, with_small_shm
from benchmarks.racers import lerobot, run, samples
from benchmarks.racers.peers import ENVIRONMENTS, PEERS, loader_of, peers_of
from benchmarks.racers.workloads import (
    CLIP_FRAMES,
    VIDEO_FRAMES,
    WORKLOADS,
    Batch,
    Workload,
    picture,
    workload_of,
    write_data,
)

pytestmark = pytest.mark.process

Capture = pytest.CaptureFixture[str]
N_SAMPLES = 256
UNITS = {
    "samples/s",
    "samples of the first epoch/s",
    "samples of a stream/s",
    "s from start to first batch",
    "s from start to end of epoch",
    "s to first batch of later epochs",
    "CPU µs/sample",
    "MB of memory",
}
FETCHED = {"requests of the first epoch", "MB of the first epoch"}


# --- peers ---------------------------------------------------------------------------------------


def test_every_requirement_is_pinned() -> None:
    found = [each for requirements in ENVIRONMENTS.values() for each in requirements]
    assert found and all(re.fullmatch(r"[\w-]+==[\w.]+", each) for each in found)


@pytest.mark.parametrize("name", PEERS)
def test_every_peer_has_a_loader_an_environment_and_workloads(name: str) -> None:
    peer = PEERS[name]
    assert callable(loader_of(peer))
    assert {*peer.workloads} <= {*WORKLOADS} and peer.environment in ENVIRONMENTS


@pytest.mark.parametrize("name", peers_of("remote"))
def test_peers_that_read_from_an_object_store_have_a_loader_for_it(name: str) -> None:
    assert loader_of(PEERS[name], "remote").__module__ == "benchmarks.racers.remote"


def test_a_peer_that_took_too_long_does_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[str] = []

    def stop(name: str, program: list[str], timeout_s: float) -> Ended:
        runs.append(name)
        return Ended(None, f"stopped after {timeout_s:g} s", timed_out=True)

    monkeypatch.setattr(race, "run_peer", stop)
    bench = Bench(Cache(tmp_path))
    racer = race.Racer("spdl", sys.executable, workload_of("frames", tmp_path), 2, bench)
    assert [racer.run(), racer.run()] == [{}, {}]
    assert (runs, bench.notes) == (["spdl"], ["spdl: stopped after 150 s"])


def test_every_workload_has_a_baseline_or_another_loader_beside_shardio() -> None:
    assert all(
        "shardio" in peers_of(workload) and len(peers_of(workload)) > 1 for workload in WORKLOADS
    )


# --- workloads -----------------------------------------------------------------------------------


@pytest.fixture(params=["frames", "tokens", "augment"])
def workload(request: pytest.FixtureRequest, tmp_path: Path) -> Workload:
    found = workload_of(request.param, tmp_path, N_SAMPLES)
    write_data(found)
    return found


def test_rows_carry_their_numbers(workload: Workload) -> None:
    assert workload.numbers(workload.rows()).tolist() == list(range(N_SAMPLES))


def test_pictures_carry_their_numbers_through_jpeg() -> None:
    simplejpeg = pytest.importorskip("simplejpeg")
    numbers = [0, 1, 1000, 2047]
    data = [simplejpeg.encode_jpeg(picture(i), 90, colorsubsampling="420") for i in numbers]
    decoded = np.stack([simplejpeg.decode_jpeg(each) for each in data])
    assert WORKLOADS["jpeg"].numbers(decoded).tolist() == numbers


def test_clips_carry_their_numbers_and_are_checked_for_missing_frames(tmp_path: Path) -> None:
    workload = workload_of("clips", tmp_path, 3)
    write_data(workload)
    clips = []
    for path in workload.files():
        with av.open(str(path)) as container:
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        clips.append(frames[5 : 5 + CLIP_FRAMES])
    batch = np.array(clips)
    assert batch.shape == (3, *workload.shape) and workload.numbers(batch).tolist() == [0, 1, 2]
    batch[1, 7] = batch[1, 6]
    batch[2, 9] = batch[0, 9]
    assert workload.numbers(batch).tolist() == [0, 3, 3]


def test_files_of_a_peer_are_written_once_and_not_kept_if_that_fails(workload: Workload) -> None:
    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        workload.made("x", fail)
    assert [path.name for path in workload.folder.iterdir()] == ["rows.npy"]
    place = workload.made("x", lambda path: path.write_bytes(b"whole"))
    assert workload.made("x", fail) == place and place.read_bytes() == b"whole"


@pytest.mark.parametrize("name", ["tokens", "jpeg"])
def test_samples_are_the_same_from_arrow_columns(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "FILES_PER_COLUMN", 2)  # several chunks
    workload = workload_of(name, tmp_path, 5)
    write_data(workload)
    column = pyarrow.chunked_array(list(samples.arrow_columns(workload)))
    assert len(column) == 5 and (name == "tokens" or column.num_chunks == 3)
    for part, wanted in ((column, [0, 1, 2, 3, 4]), (column.take([3, 1]), [3, 1])):
        values = samples.arrow_values(part, workload)
        assert values.dtype == workload.dtype and values.shape == (len(wanted), *workload.shape)
        assert workload.numbers(values).tolist() == wanted


def test_a_clip_of_lerobot_lies_in_one_episode_of_each_video() -> None:
    workload = WORKLOADS["clips"]
    sampler = lerobot.Starts(workload)
    epochs = [np.array([*sampler]), np.array([*sampler])]
    for starts in epochs:
        assert sorted(starts // VIDEO_FRAMES) == [*range(workload.n_samples)]
        assert (starts % VIDEO_FRAMES <= VIDEO_FRAMES - CLIP_FRAMES).all()
    assert len(sampler) == workload.n_samples and (epochs[0] != epochs[1]).any()


def test_lerobot_gets_copies_of_the_videos(tmp_path: Path) -> None:
    paths = [tmp_path / "0.mp4", tmp_path / "1.mp4"]
    for path in paths:
        path.write_text(path.name, "utf-8")
    videos = lerobot.VideoCopier(paths)
    for path in paths:
        videos.start_episode([lerobot.KEY], tmp_path)
        ((copied, statistics),) = videos.finish_episode().values()
        assert copied.read_text("utf-8") == path.name and copied not in paths
        assert copied.parent.parent == tmp_path and statistics is None


# --- checks --------------------------------------------------------------------------------------


class Faulty:
    """Epochs of rows, in which a batch is changed."""

    def __init__(self, workload: Workload, change: Any) -> None:
        self.workload, self.change = workload, change

    def __call__(self, epoch: int) -> Iterator[Batch]:
        """Yield the batches of an epoch; that of epoch 1 has the fault."""
        for step, chosen in enumerate(self.workload.batches(epoch)):
            batch = self.workload.rows()[chosen]
            yield self.change(batch) if (epoch, step) == (1, 2) else batch


CHANGES = {
    "an epoch without 64 samples, and with 0 repeated": lambda batch: batch[:0],
    "an epoch without 63 samples, and with 1 repeated": lambda batch: batch[[0] * 64],
    "samples of int16": lambda batch: batch.astype(np.int16),
    "samples of uint8 (224, 224)": lambda batch: batch[..., 0],
}


@pytest.mark.parametrize("said", CHANGES)
def test_an_epoch_that_is_not_exact_has_no_figures(tmp_path: Path, said: str) -> None:
    workload = workload_of("frames", tmp_path, N_SAMPLES)
    write_data(workload)
    with pytest.raises(run.WrongSamples, match=re.escape(said)):
        run.figures(Faulty(workload, CHANGES[said]), workload, 0.0)


# --- environments --------------------------------------------------------------------------------


def test_without_requirements_this_interpreter_runs_a_peer(tmp_path: Path) -> None:
    assert interpreter(tmp_path, "none", ()) == sys.executable


def test_an_environment_may_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RACE_PYTHON_OTHER", sys.executable)
    assert interpreter(tmp_path, "other", ("x==1",)) == sys.executable
    monkeypatch.setenv("RACE_PYTHON_OTHER", "/nowhere/python")
    with pytest.raises(NotMeasured, match="RACE_PYTHON_OTHER=/nowhere/python: no such file"):
        interpreter(tmp_path, "other", ("x==1",))


@pytest.mark.slow
def test_an_environment_is_made_once(tmp_path: Path) -> None:
    python = Path(interpreter(tmp_path, "pip", ("pip",)))
    assert python.exists() and python.is_relative_to(tmp_path)
    written = python.lstat().st_mtime_ns
    assert interpreter(tmp_path, "pip", ("pip",)) == str(python)
    assert python.lstat().st_mtime_ns == written
    assert list(tmp_path.rglob("site-packages/pip/__pycache__/*.pyc"))


MAKES_ENVIRONMENT = """#!/bin/sh
mkdir -p "$3/bin"
printf '#!/bin/sh\\nexec {python} "$@"\\n' > "$3/bin/python"
chmod +x "$3/bin/python"
"""
"""Stands in for `python -m venv FOLDER`, which takes seconds: the folder's Python is this one."""


def test_an_environment_that_cannot_be_made_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker, folder = tmp_path / "python", tmp_path / "environments"
    maker.write_text(MAKES_ENVIRONMENT.format(python=sys.executable), "utf-8")
    maker.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(maker))
    said = "environment x: cannot be installed: .*nothing.*; RACE_PYTHON_X may name an interpreter"
    with pytest.raises(NotMeasured, match=said):
        interpreter(folder, "x", (str(tmp_path / "nothing.whl"),))
    assert list(folder.iterdir()) == []


# --- runs ----------------------------------------------------------------------------------------


def raced(workload: str, peers: str, folder: Path, n_samples: int = N_SAMPLES) -> dict[str, Any]:
    file = folder / "found.json"
    options = ["--set", f"samples={n_samples}", "--set", f"peers={peers}", "--rounds", "1"]
    code = main([f"race.{workload}", *options, "--json", str(file), "--folder", str(folder)])
    assert code == 0
    found: dict[str, Any] = json.loads(file.read_text("utf-8"))["cases"][f"race.{workload}"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workload", "peers"),
    [
        ("frames", "limit,memmap,shardio"),
        ("tokens400", "shardio"),
        ("augment", "shardio"),
        ("jpeg", "limit,memmap,shardio"),
        ("clips", "shardio"),
        ("remote", "shardio"),
    ],
)
def test_peers_race(workload: str, peers: str, tmp_path: Path) -> None:
    here = peers.split(",")
    found = raced(workload, peers, tmp_path, {"clips": 16, "jpeg": 64}.get(workload, N_SAMPLES))
    assert found["notes"] == []
    assert {each["lane"] for each in found["figures"]} == {*here}
    units = UNITS | FETCHED if workload == "remote" else UNITS
    assert {each["unit"] for each in found["figures"]} == units
    assert all(each["min"] > 0 for each in found["figures"])
    assert found["versions"]["shardio"].keys() == {"shardio-loader"}


@pytest.mark.slow
def test_a_peer_fetches_everything_in_every_run_since_its_cache_is_new(tmp_path: Path) -> None:
    for _ in range(2):
        found = raced("remote", "shardio", tmp_path)
        fetched = {each["unit"]: each["min"] for each in found["figures"]}
        n_bytes = workload_of("remote", tmp_path).row_bytes * N_SAMPLES
        assert 1 < fetched["MB of the first epoch"] * 1e6 / n_bytes < 1.01
        assert fetched["requests of the first epoch"] > 2
    assert [path.name for path in (tmp_path / "race").iterdir()] == [f"frames-{N_SAMPLES}"]


def test_peers_that_fail_are_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "broken", replace(PEERS["memmap"], place="baselines.nothing"))
    monkeypatch.setitem(PEERS, "absent", replace(PEERS["memmap"], environment="absent"))
    monkeypatch.setitem(ENVIRONMENTS, "absent", ("absent==1",))
    monkeypatch.setenv("RACE_PYTHON_ABSENT", "/nowhere/python")
    found = raced("frames", "memmap,broken,absent", tmp_path)
    assert {each["lane"] for each in found["figures"]} == {"memmap"}
    absent, broken = found["notes"]
    assert absent.startswith("without absent: ") and broken.startswith("broken: ")


# --- faults --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_shardio_does_at_faults_as_promised_and_a_bare_map_delivers_damage(tmp_path: Path) -> None:
    full = "all samples" if can_mount() else NO_MOUNTS
    file = tmp_path / "found.json"
    options = ["--set", "peers=shardio,memmap", "--json", str(file), "--folder", str(tmp_path)]
    assert main(["race.faults", *options]) == 0
    case = json.loads(file.read_text("utf-8"))["cases"]["race.faults"]
    assert case["outcomes"] == {
        "shardio": {
            "kill": "all samples",
            "flip": "error, with file and sample",
            "truncate": "error, with file",
            "full": full,
        },
        "memmap": {
            "kill": "– (it has no worker processes)",
            "flip": "delivered, 1 damaged",
            "truncate": "error",
            "full": full,
        },
    }


needs_mounts = pytest.mark.skipif(not can_mount(), reason="the system has no mount namespaces")


@needs_mounts
def test_a_program_that_overfills_dev_shm_is_killed(tmp_path: Path) -> None:
    sharing = """
from multiprocessing.shared_memory import SharedMemory
block = SharedMemory(create=True, size=2 << 20)
block.buf[:] = bytes(block.size)
"""
    program = with_small_shm([sys.executable, "-c", sharing], tmp_path)
    assert outcome(run_peer("shardio", program, 60)) == "killed by SIGBUS"


@needs_mounts
def test_files_in_a_full_dev_shm_stay_visible() -> None:
    looking = """
import json, shutil, sys, tempfile
text = open(sys.argv[1]).read()
found = {"text": text, "folder": tempfile.gettempdir()}
print(json.dumps(found | {"bytes": shutil.disk_usage("/dev/shm").total}))
"""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        file = Path(name, "file")
        file.write_text("whole", "utf-8")
        program = with_small_shm([sys.executable, "-c", looking, str(file)], file.parent)
        ended = run_peer("shardio", program, 60)
    assert ended.answer == {"text": "whole", "folder": "/dev/shm", "bytes": 1 << 20}, ended.reason


def test_faults_fail_if_shardio_delivers_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    found = race.WANTED | {"flip": "delivered, 1 damaged", "full": NO_MOUNTS}
    monkeypatch.setattr(race, "outcomes", lambda *_: found)
    assert main(["race.faults", "--set", "peers=shardio", "--folder", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "flip        delivered, 1 damaged" in said and "WrongResult: shardio: " in said


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        (Ended(None, "stopped after 60 s", timed_out=True), "hangs"),
        (Ended(None, "exit code 1: OSError: no file"), "error"),
        (
            Ended(None, "exit code 1: Damaged: /x/fault-data/y: sample 7"),
            "error, with file and sample",
        ),
        (Ended(None, "killed by SIGBUS"), "killed by SIGBUS"),
        (Ended({"missing": 0, "damaged": 0}, ""), "all samples"),
        (Ended({"missing": 2, "damaged": 1}, ""), "delivered, 2 missing, 1 damaged"),
        (Ended({"not possible": "it has no workers"}, ""), "– (it has no workers)"),
    ],
)
def test_outcomes_in_words(ended: Ended, said: str) -> None:
    assert outcome(ended) == said
