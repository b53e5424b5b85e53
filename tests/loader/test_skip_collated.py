"""Samples that are skipped, in batches that are put together in several steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shardio import Array, Schema, ShardLoader, Text
from shardio.errors import TransformError
from shardio.order.sampling import Shuffle
from tests.loading import WORKERS, write_dataset

N = 40
SCHEMA = Schema({"points": Array("float32", (None, 2)), "label": Array("int64"), "note": Text()})
BAD = (0, 7, 21)


def samples() -> Iterator[dict[str, Any]]:
    for i in range(N):
        yield {"points": np.full((i % 5, 2), i, np.float32), "label": i, "note": f"note {i}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_dataset(tmp_path_factory.mktemp("skip") / "set", N, 3, SCHEMA, samples())


@pytest.fixture(scope="module")
def damaged(folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Copy the dataset with one bit flipped in the points of sample 8."""
    path = tmp_path_factory.mktemp("skip") / "damaged"
    write_dataset(path, N, 1, SCHEMA, samples())
    (shard,) = path.glob("*.shard")
    content = bytearray(shard.read_bytes())
    content[content.index(np.full((3, 2), 8, np.float32).tobytes())] ^= 1
    shard.write_bytes(content)
    return str(path)


def fail(sample: dict[str, Any]) -> dict[str, Any]:
    if int(sample["label"]) in BAD:
        raise ValueError("bad")
    return sample


def double(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "label": batch["label"] * 2}


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"total": np.array([each["points"].sum() for each in samples]), "label": [*range(4)]}


COLLATED: dict[str, dict[str, Any]] = {
    "pad": {"collate": "pad"},
    "ragged": {"collate": "ragged"},
    "list": {"collate": "list"},
    "batch_transform": {"collate": "list", "batch_transform": double},
    "padded, batch_transform": {"collate": "pad", "batch_transform": double},
    "function": {"collate": collate},
}


def seen(folder: str, num_workers: int, **options: Any) -> list[Any]:
    found = []
    options = {"shuffle": True} | options
    with ShardLoader(
        folder, 4, num_workers=num_workers, output="numpy", on_error="skip", max_skips=19, **options
    ) as loader:
        for _ in range(2):
            for batch in loader:
                values = {name: str(batch[name]) for name in batch}
                skips = [(each.row, each.index, each.error) for each in batch.skipped]
                found.append((values, batch.indices.tolist(), batch.valid.tolist(), skips))
    return found


@pytest.mark.parametrize("how", COLLATED)
def test_a_failing_transform_costs_its_row_in_collated_batches(folder: str, how: str) -> None:
    options: dict[str, Any] = COLLATED[how] | {"transform": fail}
    found = seen(folder, 0, **options)
    skipped = sorted(index for _, _, _, skips in found for _, index, _ in skips)
    assert skipped == sorted(BAD * 2)
    assert all(i not in BAD for _, indices, _, _ in found for i in indices)
    assert sum(valid.count(False) for _, _, valid, _ in found) == len(skipped)
    assert seen(folder, 2, **options) == found


@pytest.mark.parametrize("how", COLLATED)
def test_a_damaged_sample_costs_its_row_in_collated_batches(damaged: str, how: str) -> None:
    found = seen(damaged, 0, **COLLATED[how])
    errors = [skip[1:] for _, _, _, skips in found for skip in skips]
    assert errors == [(8, "ChecksumMismatch")] * 2
    assert seen(damaged, 2, **COLLATED[how]) == found


@pytest.mark.parametrize("shuffle", [False, True, "blocks"])
def test_batches_are_laid_out_by_the_first_sound_sample(folder: str, shuffle: Shuffle) -> None:
    given: list[list[int]] = []

    def fail_at_first(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["label"] < 5:
            raise ValueError("bad")
        return {"label": sample["label"]}

    def keep(batch: dict[str, Any]) -> dict[str, Any]:
        given.append(batch["label"].tolist())
        return batch

    seen(folder, 0, shuffle=shuffle, transform=fail_at_first, batch_transform=keep)
    assert given[0] == [5, 5, 5, 5]


@WORKERS
def test_what_fails_of_a_whole_batch_is_raised(folder: str, num_workers: int) -> None:
    def fail_of_all(batch: dict[str, Any]) -> dict[str, Any]:
        if 21 in batch["label"]:
            raise ValueError("no single sample's fault")
        return batch

    with pytest.raises(TransformError, match="no single sample's fault"):
        seen(folder, num_workers, collate="list", batch_transform=fail_of_all)
