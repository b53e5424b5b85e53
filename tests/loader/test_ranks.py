"""Several ranks: their batches together are one epoch, in equal steps, whatever their number."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import pytest

from shardio import Batch, ShardLoader
from shardio.errors import InvalidArgument
from shardio.order.permutation import epoch_permutation
from tests.faults.scene import MARK
from tests.faults.stem import stem
from tests.loading import WORKERS, check_against, values_of, write_dataset
from tests.shards import as_read, every_field_sample

N = 53
LAUNCHED = ["RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"]
LAUNCHED += ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_dataset(tmp_path_factory.mktemp("ranks") / "set", N, 3)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)


def loader(folder: str, rank: int, world_size: int, **options: Any) -> ShardLoader:
    given: dict[str, Any] = {"shuffle": True, "seed": 3, "num_workers": 0, "output": "numpy"}
    return ShardLoader(folder, 4, rank=rank, world_size=world_size, **(given | options))


def epoch_of(folder: str, world_size: int, **options: Any) -> list[list[Batch]]:
    found = []
    for rank in range(world_size):
        with loader(folder, rank, world_size, **options) as made:
            found.append(list(made))
            assert len(made) == len(found[-1])
    return found


def in_order(found: list[list[Batch]]) -> Iterator[Batch]:
    for step in range(max(map(len, found))):
        yield from (batches[step] for batches in found if step < len(batches))


def indices(batches: Iterator[Batch]) -> list[int]:
    return [i for batch in batches for i in batch.indices[batch.valid].tolist()]


@WORKERS
@pytest.mark.parametrize("tail", ["pad", "short"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 15])
def test_ranks_share_the_order(folder: str, world_size: int, tail: str, num_workers: int) -> None:
    if world_size == 15:  # the last rank has no row
        num_workers = min(num_workers, 1)
    found = epoch_of(folder, world_size, fields=["label"], tail=tail, num_workers=num_workers)
    order = epoch_permutation(N, seed=3, epoch=0).at(np.arange(N)).tolist()
    assert indices(in_order(found)) == order


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_by_default_all_ranks_take_equal_steps_of_equal_shape(folder: str, world_size: int) -> None:
    found = epoch_of(folder, world_size)
    assert {len(batches) for batches in found} == {-(-N // (4 * world_size))}
    for batch in in_order(found):
        assert batch.n_rows == 4
        assert all(len(batch[name]) == 4 for name in batch)


@WORKERS
def test_padding_copies_valid_rows_and_is_not_valid(folder: str, num_workers: int) -> None:
    samples = [as_read(every_field_sample(i)) for i in range(N)]
    for batches in epoch_of(folder, 5, num_workers=num_workers):
        last = batches[-1]
        n_valid = int(last.valid.sum())
        assert 0 < n_valid < 4
        assert last.valid.tolist() == [True] * n_valid + [False] * (4 - n_valid)
        values = values_of(last)
        for i in range(n_valid, 4):
            assert last.indices[i] == last.indices[i % n_valid]
            assert last.origins[i].tolist() == last.origins[i % n_valid].tolist()
            for name, column in values.items():
                assert str(column[i]) == str(column[i % n_valid])
                assert last.present(name)[i] == last.present(name)[i % n_valid]
        for batch in batches[:-1]:
            check_against(batch, samples)


def test_a_rank_that_nothing_is_left_for_gets_a_batch_of_padding(folder: str) -> None:
    found = epoch_of(folder, 4, fields=("label",))  # 48 in three steps, and 5 for four ranks
    assert [int(batches[-1].valid.sum()) for batches in found] == [1, 1, 1, 2]
    with loader(folder, 0, 60) as first:
        (batch,) = first
    assert not batch.valid.any()
    assert len(set(batch.indices.tolist())) == 1


def test_a_dataset_smaller_than_a_batch_is_padded_to_the_whole_batch(tmp_path: Path) -> None:
    small = write_dataset(tmp_path / "small", 3)
    with ShardLoader(small, 7, tail="pad", num_workers=0, output="numpy") as made:
        (batch,) = made
    assert batch.valid.tolist() == [True] * 3 + [False] * 4
    assert batch["label"].shape[0] == 7


@WORKERS
def test_draws_do_not_depend_on_the_number_of_ranks(folder: str, num_workers: int) -> None:
    def noisy(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"label": sample["label"], "noise": rng.integers(1 << 60), "np": np.random.random()}

    def drawn(world_size: int) -> dict[int, tuple[int, float]]:
        found = epoch_of(folder, world_size, transform=noisy, num_workers=num_workers)
        return {
            int(index): (int(noise), float(other))
            for batch in in_order(found)
            for index, noise, other in zip(batch.indices, batch["noise"], batch["np"], strict=True)
        }

    assert drawn(1) == drawn(2) == drawn(3)


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "1", "WORLD_SIZE": "2"},
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
        {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "8"},
        {"RANK": "1", "WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "9"},
    ],
)
def test_what_a_launcher_says_in_the_environment_is_the_default(
    folder: str, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with ShardLoader(folder, 4, num_workers=0, output="numpy") as made:
        found = next(iter(made)).indices.tolist()
        assert len(made) == -(-N // 8)
    assert found == [4, 5, 6, 7]
    with ShardLoader(folder, 4, rank=0, world_size=1, num_workers=0, output="numpy") as made:
        assert next(iter(made)).indices.tolist() == [0, 1, 2, 3]


def test_a_batch_script_of_slurm_is_no_rank(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    with ShardLoader(folder, 4, num_workers=0, output="numpy") as made:
        assert len(made) == -(-N // 4)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "1"}, "RANK='1' and WORLD_SIZE=None"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK must be below world_size, which is 2; found 2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1"),
    ],
)
def test_an_environment_that_makes_no_sense_is_an_error_that_names_it(
    folder: str, variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgument) as raised:
        ShardLoader(folder, 4, num_workers=0)
    assert said in str(raised.value)


# A rank that trains: what it has learnt of, and where it is, are saved together after each batch.
TRAINS = """
import json, os, sys, time
import shardio

folder, checkpoint, stops_at = sys.argv[1], sys.argv[2], int(sys.argv[3])
kept = {"state": None, "seen": []}
if os.path.exists(checkpoint):
    kept = json.loads(open(checkpoint).read())
options = {"shuffle": True, "seed": 3, "num_workers": 1, "output": "numpy", "fields": ["label"]}
with shardio.ShardLoader(folder, 2, **options) as loader:
    if kept["state"] is not None:
        loader.load_state_dict(kept["state"])
    for batch in loader:
        if len(kept["seen"]) == stops_at:
            print("has a batch that is in no checkpoint", flush=True)
            time.sleep(1000)
        kept["seen"].append(batch.indices[batch.valid].tolist())
        kept["state"] = loader.state_dict()
        with open(checkpoint + ".new", "w") as file:
            file.write(json.dumps(kept))
        os.replace(checkpoint + ".new", checkpoint)
"""


@pytest.fixture
def start_rank(folder: str, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Return a function that starts one of 4 ranks, which are forks of one process."""
    with stem(MARK) as grown:

        def start(rank: int, stops_at: int = -1) -> subprocess.Popen[bytes]:
            env = {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank), MARK: "0" * 32}
            arguments = [folder, str(tmp_path / f"{rank}.json"), str(stops_at)]
            command = [sys.executable, "-c", f"import sys; sys.argv += {arguments!r}\n{TRAINS}"]
            pipes: dict[str, Any] = {"stdin": PIPE, "stdout": PIPE, "stderr": 2}
            return grown.popen(command, env=os.environ | env, **pipes)

        yield start


def test_a_killed_rank_resumes_from_its_state(
    start_rank: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    ranks = [start_rank(rank, 3 if rank == 2 else -1) for rank in range(4)]
    assert ranks[2].stdout is not None
    assert b"in no checkpoint" in ranks[2].stdout.readline()
    ranks[2].kill()
    assert ranks[2].wait() == -signal.SIGKILL
    again = start_rank(2)
    for rank in (*ranks, again):
        rank.communicate()
    assert [rank.returncode for rank in (*ranks, again)] == [0, 0, -signal.SIGKILL, 0, 0]
    seen = [json.loads((tmp_path / f"{rank}.json").read_text())["seen"] for rank in range(4)]
    assert [len(steps) for steps in seen] == [7] * 4
    in_steps = [number for step in zip(*seen, strict=True) for batch in step for number in batch]
    assert in_steps == epoch_permutation(N, seed=3, epoch=0).at(np.arange(N)).tolist()
