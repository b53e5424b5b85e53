"""Options of a loader, drawn at random together: workers and resumes change nothing in a batch."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import ShardLoader, WeightedSampler
from shardio.dataset.dataset import Dataset
from shardio.errors import InvalidArgument, TooManySkipped, TransformError
from tests.loading import make_loader, whole, write_dataset

# There are few samples.
pytestmark = pytest.mark.filterwarnings("ignore:epoch .* has no batch:RuntimeWarning")

N_SETS_OF_OPTIONS = 48
N_SETS_FOR_MIXTURES = 6
SIZES = (0, 1, 21)
FIELDS = ("points", "note", "vector", "maybe", "hint", "mask", "boxes", "packed", "camera.id")
Sample = dict[str, Any]
Said = list[Any]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    return written(tmp_path_factory.mktemp("any"))


def written(folder: Path) -> dict[int, str]:
    return {n: write_dataset(folder / str(n), n, 3) for n in SIZES}


def vary(sample: Sample, rng: np.random.Generator) -> Sample:
    values = rng.integers(0, 99, int(rng.integers(0, 5)), np.int16)
    return {"values": values, "label": sample["label"], "text": "x" * len(values)}


def draw(sample: Sample, rng: np.random.Generator) -> Sample:
    return {**sample, "drawn": rng.random(3)}


def fail_at_times(sample: Sample, rng: np.random.Generator) -> Sample:
    if sample["label"] % 5 == 0:
        raise ValueError(f"sample {sample['label']} is bad")
    return vary(sample, rng)


def collate(samples: list[Sample]) -> dict[str, Any]:
    labels = [int(each["label"]) for each in samples]
    return {
        "label": np.array(labels),
        "twice": np.array(labels * 2),
        "text": list(map(str, labels)),
    }


def mix(batch: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    n_rows, n_more = len(batch["label"]), int(rng.integers(1, 4))
    return {"label": batch["label"], "order": rng.permutation(n_rows), "more": rng.random(n_more)}


def keep(batch: dict[str, Any]) -> dict[str, Any]:
    return batch


def drawn_options(rng: random.Random, n: int) -> dict[str, Any]:
    fields = ["label", *rng.sample(FIELDS, rng.randrange(5))]
    options: dict[str, Any] = {"fields": fields, "seed": rng.choice([0, 10**30])}
    options |= _order(rng, n) | _rows(rng, fields)
    options["batch_transform"] = rng.choice([None, None, keep, mix])
    options["tail"] = rng.choice([None, "short", "drop", "pad", "pad"])
    world_size = rng.choice([1, 1, 1, 1, 2, 3, 40])
    options |= {"world_size": world_size, "rank": rng.randrange(world_size)}
    options |= {"reuse": rng.random() < 0.4, "access": rng.choice(["mmap", "pread"])}
    return {"batch_size": rng.choice([1, 2, 3, 4, 4, 7, 50]), "output": "numpy", **options}


def _order(rng: random.Random, n: int) -> dict[str, Any]:
    weights = [1, *(rng.choice([0, 1, 2.5]) for _ in range(n - 1))]
    positions = [rng.randrange(n) for _ in range(rng.choice([0, 5, 5, 23, 23]))] if n else []
    ways: list[dict[str, Any]] = [
        {"shuffle": rng.choice([False, True, "blocks", "shards"])},
        {"sampler": positions},
        {"sampler": lambda epoch: positions[epoch:] + positions[:epoch]},
        {"sampler": WeightedSampler(weights)},
        {"sampler": WeightedSampler(weights, n_draws=rng.choice([0, 9, 30]))},
        {"sampler": WeightedSampler(weights, replacement=False)},
    ]
    return rng.choice(ways) if n else ways[0]


def _rows(rng: random.Random, fields: list[str]) -> dict[str, Any]:
    made: dict[str, Any] = {"transform": rng.choice([None, None, draw, vary, fail_at_times])}
    if made["transform"] is fail_at_times or rng.random() < 0.2:
        made |= {"on_error": "skip", "max_skips": rng.choice([3, 1000])}
    kinds = ["pad", "ragged", "list"]
    varying = made["transform"] in (vary, fail_at_times)
    named: dict[str, Any] = {}
    if varying:
        named = {"values": rng.choice([*kinds, (6,), (None,)])}
    else:
        shapes = {"points": (6, 2), "mask": (6,)}
        named = {each: rng.choice([*kinds, shapes[each]]) for each in shapes if each in fields}
    whole = kinds if varying else ["stack", *kinds]
    return {**made, "collate": rng.choice([*whole, named, collate])}


def epoch_of(loader: ShardLoader) -> Iterator[Said]:
    """All that an epoch says, an error at its end among it."""
    try:
        for batch in loader:
            yield [*whole(batch)]
    except (TransformError, TooManySkipped) as error:
        yield [type(error), str(error).partition("\n")[0]]


def epochs(folder: str | Dataset, n: int = 2, **options: Any) -> list[list[Said]]:
    """All that n epochs say, or why there are none."""
    try:
        with make_loader(folder, **options) as loader:
            return [list(epoch_of(loader)) for _ in range(n)]
    except (InvalidArgument, TransformError) as error:
        return [[[type(error), str(error).partition("\n")[0]]]]


def check(folder: str | Dataset, seed: int, n: int) -> None:
    """Draw options for n samples, and compare what comes: with workers, and behind a state."""
    rng = random.Random(seed)
    options = drawn_options(rng, n)
    expected = epochs(folder, **options, num_workers=0)
    workers: dict[str, Any] = {"num_workers": 2}
    workers["start_method"] = "thread" if rng.random() < 0.85 else "zygote"
    assert epochs(folder, **options, **workers) == expected, options
    first = expected[0]
    if not first or any(isinstance(said[0], type) for epoch in expected for said in epoch):
        return
    step = rng.randrange(len(first))
    with make_loader(folder, **options, num_workers=0) as loader:
        assert len(loader) == len(first), options
        for batch in loader:
            if batch.step == step:
                break
        state = json.loads(json.dumps(loader.state_dict()))
    with make_loader(folder, **options, **workers) as loader:
        loader.load_state_dict(state)
        found = [list(epoch_of(loader)) for _ in range(2)]
    assert found == [first[step + 1 :], expected[1]], (options, step)


def size_for(seed: int) -> int:
    return SIZES[-1] if seed % 6 else SIZES[seed // 6 % 2]


@pytest.mark.parametrize("seed", range(N_SETS_OF_OPTIONS))
def test_drawn_options_agree_with_workers_and_resumed(folders: dict[int, str], seed: int) -> None:
    n = size_for(seed)
    check(folders[n], seed, n)


@pytest.mark.parametrize("seed", range(N_SETS_OF_OPTIONS, N_SETS_OF_OPTIONS + N_SETS_FOR_MIXTURES))
def test_options_drawn_together_go_with_mixtures(folders: dict[int, str], seed: int) -> None:
    large, one = folders[SIZES[-1]], folders[1]
    with (
        shardio.open(large) as opened,
        opened.select([3, 3, 20, 0]) as some,
        shardio.mix(
            [large, some, one], weights=[3, 1, 0.2], exhausted="repeat" if seed % 2 else "stop"
        ) as mixture,
    ):
        check(mixture, seed, 0)  # as of none: with no sampler and no weights


def test_most_options_drawn_together_go_together(folders: dict[int, str]) -> None:
    n_whole = 0
    for seed in range(N_SETS_OF_OPTIONS):
        options = drawn_options(random.Random(seed), size_for(seed))
        (found,) = epochs(folders[size_for(seed)], 1, **options, num_workers=0)
        n_whole += bool(found) and not isinstance(found[-1][0], type)
    assert n_whole > N_SETS_OF_OPTIONS // 2
