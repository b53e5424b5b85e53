"""dataset.select: some samples as a dataset of their own, read and loaded like any other."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio import Array, Batch, Schema, ShardDataset, ShardLoader, WeightedSampler
from shardio import open as open_dataset
from shardio.errors import InvalidArgument
from shardio.maintenance import split
from tests.loading import TWO_FIELDS, WORKERS, bits, make_loader, two_fields, write_dataset

pytestmark = pytest.mark.usefixtures("warm_zygote", "quick_disk")

N = 53
SOME = [5, 5, 52, 0, 30]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("select") / "set"
    write_dataset(path, N, 3, TWO_FIELDS, two_fields(N))
    split(str(path), {"train": 0.5, "val": 0.5})
    return str(path)


@pytest.fixture
def dataset(folder: str) -> Iterator[ShardDataset]:
    with open_dataset(folder) as opened:
        yield opened


def labels(samples: ShardDataset) -> list[int]:
    return [sample["label"] for sample in samples]


def loader(given: ShardDataset, batch_size: int = 4, **options: Any) -> ShardLoader:
    defaults: dict[str, Any] = {"num_workers": 0, "output": "numpy"}
    return make_loader(given, batch_size, **(defaults | options))


def loaded(made: ShardLoader) -> list[int]:
    return [label for batch in made for label in batch["label"].tolist()]


def test_indices_come_in_their_order_and_repeatedly(dataset: ShardDataset) -> None:
    with dataset.select(SOME) as found:
        assert len(found) == 5
        assert labels(found) == SOME
        assert [found[i]["label"] for i in (-1, 1)] == [30, 5]
        assert np.array_equal(found[2]["image"], dataset[52]["image"])
        assert repr(found).endswith("a selection, 5 samples in 3 shards, generation 2)")
        with pytest.raises(IndexError, match="sample 5 of 5"):
            found[5]


def test_a_mask_keeps_the_order(dataset: ShardDataset) -> None:
    mask = np.arange(N) % 10 == 3
    for given in (mask, mask.tolist()):
        with dataset.select(given) as found:
            assert labels(found) == [3, 13, 23, 33, 43]


def test_a_function_of_columns_gives_the_mask(dataset: ShardDataset) -> None:
    asked = []

    def where(columns: dict[str, Any]) -> Any:
        asked.append({name: (each.dtype, each.shape) for name, each in columns.items()})
        return (columns["label"] % 2 == 1) & (columns["image"][:, 0, 0] < 100)

    with dataset.select(where, fields=["label", "image"]) as found:
        assert labels(found) == [i for i in range(1, N, 2) if i * 31 % 256 < 100]
    assert asked == [{"label": (np.int64, (N,)), "image": (np.uint8, (N, 64, 96))}]


def test_a_predicate_over_many_samples_reads_them_all(tmp_path: Path) -> None:
    schema = Schema({"label": Array("int64")})
    n = 20_000
    write_dataset(tmp_path / "set", n, 3, schema, ({"label": i} for i in range(n)))
    with open_dataset(tmp_path / "set") as opened:
        found = opened.select(lambda c: c["label"] % 9_999 == 1, fields="label")
        assert labels(found) == [1, 10_000, 19_999]
        found.close()


def test_a_selection_of_a_selection_or_of_a_subset_counts_within_it(folder: str) -> None:
    with open_dataset(folder, subset="train") as train, train.select(SOME[:2]) as two:
        rows = labels(train)
        assert labels(two) == [rows[5], rows[5]]
        with train.select(range(10, 2, -1)) as part, part.select([0, 7]) as inner:
            assert labels(inner) == [rows[10], rows[3]]
        with train.select(lambda c: c["label"] == rows[4], fields=["label"]) as one:
            assert labels(one) == [rows[4]]


def test_subsets_without_a_common_sample_are_refused(folder: str) -> None:
    with open_dataset(folder, subset="train") as train:
        with pytest.raises(
            InvalidArgument, match="the subset 'train' has no sample of 'val': open"
        ):
            train.subset("val")
        with train.select([0]) as one:
            assert "subsets" not in one._repr_html_()
            assert len(one.subset("val")) == 0


def test_a_selection_outlives_the_dataset_that_it_was_made_of(folder: str) -> None:
    with open_dataset(folder) as opened:
        found = opened.select([7])
    assert labels(found) == [7]
    found.close()


def test_a_selection_and_a_subset_have_the_path_of_their_dataset(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(folder).parent)
    with open_dataset(Path(folder).name) as dataset:
        with dataset.select([0, 2]) as chosen, dataset.subset("train") as part:
            assert chosen.path == part.path == dataset.path == Path(folder).name


def test_none_may_be_selected(dataset: ShardDataset) -> None:
    with dataset.select([]) as found, loader(found) as made:
        assert (len(found), labels(found), loaded(made)) == (0, [], [])


@pytest.mark.parametrize(
    ("rows", "fields", "said"),
    [
        ([N], [], f"select must be integers from 0 to {N - 1}; found {N} at 0"),
        ([-1], [], "found -1 at 0"),
        ([0.5], [], "select must be a sequence of integers"),
        (5, [], "select must be a sequence of integers"),
        ([True], [], rf"select, a mask, must be {N} booleans.* found bool \(1,\)"),
        ([[True], [True, False]], [], "select must be a sequence of integers"),
        (lambda c: c["label"], ["label"], "the mask must be .*found int64"),
        (lambda: [], ["label"], r"select must take \(columns\); it takes \(\)"),
        (lambda c: c["label"], [], "a function and the columns for it"),
        ([1], ["label"], r"indices or a mask alone; found \[1\] with fields=\['label'\]"),
        (
            lambda c: c["image"] > 0,
            ["label"],
            r"uses the column 'image', .* pass fields=\['label', 'image'\]; found .*\['label'\]",
        ),
        (lambda _: [], ["lable"], "'lable' is not a column; .*: image, label"),
    ],
)
def test_invalid_selections(dataset: ShardDataset, rows: Any, fields: list[str], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        dataset.select(rows, fields=fields)


# Loading.


@WORKERS
def test_a_loader_reads_a_selection(dataset: ShardDataset, num_workers: int) -> None:
    with dataset.select(SOME) as found, loader(found, 3, num_workers=num_workers) as made:
        batches = list(made)
        assert [batch["label"].tolist() for batch in batches] == [SOME[:3], SOME[3:]]
        assert [batch.indices.tolist() for batch in batches] == [[0, 1, 2], [3, 4]]
        assert batches[0].origins.tolist() == [[0, 5], [0, 5], [2, 17]]
        assert len(made.dataset) == 5


def test_a_large_selection_is_the_same_for_any_number_of_workers(dataset: ShardDataset) -> None:
    many = np.arange(20_000) * 17 % N
    batches: list[Batch] = []
    with dataset.select(many) as found:
        hashes = []
        for num_workers in (0, 2):
            options: dict[str, Any] = {"num_workers": num_workers, "fields": ["label"]}
            with loader(found, 1000, shuffle=True, seed=4, **options) as made:
                batches = list(made)
                hashes.append([bits(batch) for batch in batches])
    assert hashes[0] == hashes[1]
    assert all(np.array_equal(many[batch.indices], batch["label"]) for batch in batches)


def test_the_first_sample_of_a_selection_is_transformed_first(dataset: ShardDataset) -> None:
    def refuse(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["label"] < 50:
            raise ValueError("not selected")
        return sample

    with dataset.select([50, 52]) as found:
        for num_workers in (0, 1):
            with loader(found, num_workers=num_workers, transform=refuse) as made:
                assert loaded(made) == [50, 52]


def test_replacement_worker_has_the_selection(dataset: ShardDataset, tmp_path: Path) -> None:
    mark = tmp_path / "died"

    def die_once(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["label"] == 30 and not mark.exists():
            mark.touch()
            os._exit(3)
        return {"label": sample["label"]}

    with dataset.select(SOME) as found, loader(found, 2, num_workers=1, transform=die_once) as made:
        assert loaded(made) == SOME
    assert mark.exists()


def test_a_selection_resumes_and_is_told_from_others(dataset: ShardDataset) -> None:
    with dataset.select(range(40)) as found, loader(found, shuffle=True) as made:
        whole = loaded(made)
        for batch in made:
            if batch.step == 2:
                break
        state = json.loads(json.dumps(made.state_dict()))
        rest = loaded(made)
    with dataset.select(list(range(40))) as same, loader(same, 5, shuffle=True) as made:
        made.load_state_dict(state | {"epoch": 0})
        assert loaded(made) == whole[12:]
        assert rest != whole
    for other in (dataset, dataset.select(range(39)), dataset.select(range(39, -1, -1))):
        with loader(other, shuffle=True) as made:
            with pytest.raises(InvalidArgument, match="the state's view is"):
                made.load_state_dict(state)
        other.close()


def test_choices_are_of_the_positions_of_a_selection(dataset: ShardDataset) -> None:
    with dataset.select(SOME) as found:
        with loader(found, sampler=[2, 2, 4]) as made:
            assert loaded(made) == [52, 52, 30]
        with loader(found, sampler=WeightedSampler([0, 0, 0, 1, 0])) as made:
            assert loaded(made) == [0] * 5
        with pytest.raises(InvalidArgument, match="from 0 to 4; found 5"):
            iter(loader(found, sampler=[5]))
