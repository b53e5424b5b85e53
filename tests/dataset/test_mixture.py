"""shardio.mix: several datasets as one, read as a sequence, and loaded in proportion."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import Array, Schema, ShardLoader, ShardReader, Text, WeightedSampler, mix
from shardio.dataset.dataset import Dataset
from shardio.errors import (
    ChecksumMismatch,
    ClosedError,
    DatasetNotFound,
    InvalidArgument,
    TransformError,
)
from shardio.maintenance import add_column, split
from shardio.samples.mixture import Mixture
from tests.loading import (
    TWO_FIELDS,
    WORKERS,
    append_shard,
    bits,
    check_against,
    make_loader,
    state_after,
    write_dataset,
)
from tests.shards import EVERY_FIELD, as_read, every_field_sample, flip

pytestmark = pytest.mark.usefixtures("warm_zygote", "quick_disk")

N_LARGE, N_SMALL = 53, 10


def numbered(first: int, n: int) -> Iterator[dict[str, Any]]:
    """Make samples of TWO_FIELDS, labelled from `first` on."""
    for i in range(first, first + n):
        yield {"image": np.full((64, 96), i % 251, np.uint8), "label": i}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("mixture") / "large"
    write_dataset(path, N_LARGE, 3, TWO_FIELDS, numbered(0, N_LARGE))
    split(str(path), {"train": 0.5, "val": 0.5})
    return str(path)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Labels from 100 on; the path is no UTF-8."""
    path = tmp_path_factory.mktemp("mixture") / os.fsdecode(b"small\xff")
    return write_dataset(path, N_SMALL, 2, TWO_FIELDS, numbered(100, N_SMALL))


@pytest.fixture
def mixture(large: str, small: str) -> Iterator[Mixture]:
    """Three quarters large; 40 positions, until all of small is seen."""
    with mix([large, small], weights=[3, 1]) as made:
        yield made


def loader(given: Dataset, batch_size: int = 4, **options: Any) -> ShardLoader:
    defaults: dict[str, Any] = {"num_workers": 0, "output": "numpy", "shuffle": True, "seed": 3}
    return make_loader(given, batch_size, **(defaults | options))


def loaded(made: ShardLoader) -> list[int]:
    return [label for batch in made for label in batch["label"][batch.valid].tolist()]


# As a sequence.


def test_mixture_concatenates_its_sources(mixture: Mixture, large: str, small: str) -> None:
    assert len(mixture) == N_LARGE + N_SMALL
    assert [sample["label"] for sample in mixture] == [*range(N_LARGE), *range(100, 110)]
    assert mixture[-1]["label"] == 109
    assert mixture.sources_of([0, 52, 53, 62]).tolist() == [0, 0, 1, 1]
    assert [source.path for source in mixture.sources] == [large, small]
    assert mixture.shards[3].name == f"{small}/000000-000.shard"
    assert mixture.schema == TWO_FIELDS
    assert repr(mixture).startswith("Mixture(63 samples of 2 sources: ShardDataset(")
    with pytest.raises(IndexError, match="sample 63 of 63"):
        mixture[63]
    mixture.close()
    assert repr(mixture).startswith("Mixture(63 samples of 2 sources, closed: ShardDataset(")
    with pytest.raises(ClosedError, match="closed"):
        mixture[0]


def test_the_repr_of_a_mixture_is_bounded(small: str) -> None:
    with shardio.mix([small] * 50, weights=[1] * 50) as mixture:
        assert "50 sources: ShardDataset(" in repr(mixture)
        assert len(repr(mixture)) < 600


@pytest.mark.parametrize("index", [-1, N_LARGE + N_SMALL, 0.5])
def test_what_is_no_sample_of_a_mixture_has_no_source(mixture: Mixture, index: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"indices must be .* from 0 to 62.*{index}|float64"):
        mixture.sources_of([0, index])


def test_subsets_selections_and_the_same_dataset_twice_may_be_mixed(large: str, small: str) -> None:
    chosen = [3, 3, 9, 1]
    with (
        shardio.open(large, subset="val") as val,
        shardio.open(small) as whole,
        whole.select(chosen) as some,
        val.select([2, 0]) as two,
        mix([val, some, Path(large), two], weights=[1, 1, 1, 1]) as made,
    ):
        labels = [sample["label"] for sample in val]
        expected = [*labels, *(100 + i for i in chosen), *range(N_LARGE), labels[2], labels[0]]
        assert [sample["label"] for sample in made] == expected
        for num_workers in (0, 2):
            with loader(made, num_workers=num_workers, shuffle=False) as loading:
                for batch in loading:
                    assert batch["label"].tolist() == [expected[i] for i in batch.indices]
                    shards = [made.shards[k].name for k, _ in batch.origins.tolist()]
                    of_small = [name.startswith(small) for name in shards]
                    assert of_small == [i == 1 for i in made.sources_of(batch.indices)]


def test_strictest_verify_applies_to_all_sources(large: str, small: str, tmp_path: Path) -> None:
    copy = shutil.copytree(small, tmp_path / "copy")
    name = next(iter(TWO_FIELDS.columns))
    with ShardReader(copy / "000000-000.shard") as reader:
        flip(reader.path, reader.column_section(name).offset)
    with shardio.open(copy, verify="off") as lax, mix([lax, large], weights=[1, 1]) as made:
        assert len(lax[0]) == len(TWO_FIELDS)
        with pytest.raises(ChecksumMismatch) as caught:
            made[0]
        assert (caught.value.path, caught.value.field) == (reader.path, name)
        assert made[len(lax)]["label"] == 0


def test_all_sources_are_read_in_one_way(large: str, small: str) -> None:
    with shardio.open(small, access="pread") as opened, mix([large, opened], weights=[1, 1]) as one:
        assert one.access == "pread"
        with mix([large, small], weights=[1, 1]) as other:
            assert other.access == "mmap"
            for i in (0, N_LARGE):
                assert np.array_equal(one[i]["image"], other[i]["image"])
        assert {one.reader(k).access for k in (0, 3)} == {"pread"}
        with loader(one, access="mmap") as loading:
            assert loading.dataset.access == "mmap"
            assert len(loaded(loading)) == 20


def test_classes_are_those_that_all_sources_have(tmp_path: Path) -> None:
    schema = Schema({"label": Array("int64")})
    for name, classes in (("a", ("x", "y")), ("b", ("x", "y")), ("c", ("y",))):
        with shardio.DatasetWriter(tmp_path / name, schema, classes=classes) as writer:
            writer.append({"label": 0})
    for names, expected in (("ab", ("x", "y")), ("ac", ())):
        with mix([tmp_path / name for name in names], weights=[1, 1]) as made:
            assert made.classes == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"weights": None}, r"one for each source; found none: pass weights=, or a dict"),
        ({"weights": [1]}, r"weights must be 2 numbers above 0, one for each source; found \[1\]"),
        ({"weights": [1, 0]}, r"numbers above 0.* found \[1, 0\]"),
        ({"weights": [1, -1]}, "numbers above 0"),
        ({"weights": [1, float("nan")]}, "numbers above 0.*: Invalid literal.*nan"),
        ({"weights": [1, float("inf")]}, "numbers above 0"),
        ({"weights": None}, "numbers above 0"),
        ({"weights": "12"}, "numbers above 0.*found '12': they have no order, or are not numbers"),
        ({"weights": {1, 3}}, r"numbers above 0.*found \{1, 3\}: they have no order"),
        ({"weights": {1: 2, 3: 4}}, "numbers above 0.*: they have no order"),
        ({"exhausted": "end"}, "exhausted must be one of 'stop', 'repeat'; found 'end'"),
        ({"exhausted": ["stop"]}, "exhausted must be one of"),
        ({"exhausted": np.array(["stop"])}, "exhausted must be one of"),
        ({"sources": "large"}, "mix takes a list of datasets; found 'large'"),
        ({"sources": {"large", "small"}}, "mix takes a list of datasets; found {"),
        ({"sources": {"large": 1, "small": 1}}, "weights= is for a list of sources"),
        ({"sources": 5}, "mix takes a list of datasets; found 5"),
        ({"sources": [5, 6]}, "mix takes folders and open datasets; found 5"),
        ({"sources": []}, "mix takes 1 to 1024 datasets; found 0"),
        ({"sources": ["x"] * 1025}, "found 1025"),
    ],
)
def test_invalid_options_refused(large: str, small: str, given: dict[str, Any], said: str) -> None:
    options: dict[str, Any] = {"sources": [large, small], "weights": [1, 1]} | given
    with pytest.raises(InvalidArgument, match=said):
        mix(options.pop("sources"), **options)


def test_a_dict_has_sources_and_weights(large: str, small: str) -> None:
    options: dict[str, Any] = {"output": "numpy", "shuffle": True, "num_workers": 0}
    with shardio.open(small) as opened:
        mixtures = mix({large: 3, opened: 1}), mix([large, opened], weights=[3, 1])
    orders = []
    for each in mixtures:
        with each, shardio.ShardLoader(each, 4, **options) as loader:
            orders.append([batch.indices.tolist() for batch in loader])
    assert orders[0] == orders[1]
    with pytest.raises(InvalidArgument, match="numbers above 0"):
        mix({large: 1, small: 0})
    with pytest.raises(InvalidArgument, match="weights must be 1 number above 0, one for each"):
        mix([large], weights=[1, 2])


def test_unmixable_source_refused(mixture: Mixture, large: str, small: str, tmp_path: Path) -> None:
    with pytest.raises(DatasetNotFound, match="nowhere"):
        mix([large, tmp_path / "nowhere"], weights=[1, 1])
    with pytest.raises(InvalidArgument, match="a mixture of .* cannot be part of a mixture"):
        mix([mixture, large], weights=[1, 1])  # type: ignore[list-item]
    with shardio.open(small) as opened, opened.select([]) as none:
        with pytest.raises(InvalidArgument, match="a selection, 0 samples.* leave it out"):
            mix([large, none], weights=[1, 1])
    with pytest.raises(InvalidArgument, match="select with a function, or from its sources"):
        mixture.select([1])


# Fields that differ.


@pytest.fixture(scope="module")
def unlike(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of TWO_FIELDS the label alone is alike; labels from 200 on."""
    path = tmp_path_factory.mktemp("mixture") / "unlike"
    schema = Schema(
        {"note": Text(), "label": Array("int64"), "image": Array("uint8", (8,)), "a.b": Text()}
    )
    made = (
        {"note": f"{i}", "label": 200 + i, "image": [i] * 8, "a.b": f"inner {i}"} for i in range(9)
    )
    return write_dataset(path, 9, 1, schema, made)


def test_sources_without_a_field_in_common_are_named(large: str, tmp_path: Path) -> None:
    rows: Any = [{"caption": "a"}]
    other = write_dataset(tmp_path / "other", 1, 1, Schema({"caption": Text()}), iter(rows))
    with pytest.raises(InvalidArgument, match=f"have none: {large} has image.*other has caption"):
        mix([large, other], weights=[1, 1])


def test_preload_names_the_source_that_lacks_a_field(large: str, unlike: str) -> None:
    with mix([large, unlike], weights=[1, 1]) as made:
        assert made.preload() == made.preload(["label"]) > 0
        for name in ("image", "note"):
            with pytest.raises(InvalidArgument, match=f"'{name}' is .* in {large} .*source 1"):
                made.preload([name])


def test_a_mixture_selects_by_one_column_as_a_dataset_does(mixture: Mixture) -> None:
    with mixture.select(lambda columns: columns["label"] % 2 == 0, fields="label") as some:
        assert [sample["label"] for sample in some] == [*range(0, N_LARGE, 2), *range(100, 110, 2)]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (None, r"field 'image' is Array\(.*64, 96.*\) in .*large \(source 0\), and Array\(.*8"),
        (["label", "image"], r"\(source 2\): pass fields= without it; common fields: label$"),
        (iter(["note"]), r"field 'note' is absent in .*large \(source 0\), and Text\("),
        (["a"], "field 'a.b' is absent"),
    ],
)
def test_read_fields_match(large: str, small: str, unlike: str, fields: Any, said: str) -> None:
    with mix([large, small, unlike], weights=[1, 1, 1]) as made:
        assert list(made.schema) == ["label"]
        assert made[N_LARGE + N_SMALL] == {"label": 200}
        with pytest.raises(InvalidArgument, match=said):
            loader(made, fields=fields)


@WORKERS
def test_fields_that_are_not_read_may_differ(large: str, unlike: str, num_workers: int) -> None:
    with mix([large, unlike], weights=[1, 1]) as made:
        with loader(made, fields=iter(["label"]), num_workers=num_workers) as loading:
            found = loaded(loading)
    assert sorted(label for label in found if label >= 200) == list(range(200, 209))
    with mix([large, unlike], weights=[1, 1]) as made:
        with pytest.raises(InvalidArgument, match="fields must be different names among label"):
            loader(made, fields=["lable"])


@WORKERS
def test_added_column_mixes_with_written_one(small: str, tmp_path: Path, num_workers: int) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(small, copied)
    add_column(str(copied), "score", values=np.arange(N_SMALL) * 0.5, field=Array("float64"))
    schema = Schema({"score": Array("float64"), **TWO_FIELDS})
    samples = ({"score": -float(each["label"]), **each} for each in numbered(0, 20))
    both = [str(copied), write_dataset(tmp_path / "with", 20, 3, schema, samples)]
    for sources in (both, both[::-1]):
        with mix(sources, weights=[1, 2], exhausted="repeat") as made:
            assert list(made.schema) == ["image", "label", "score"]
            for sample in made:
                label = sample["label"]
                assert sample["score"] == ((label - 100) * 0.5 if label >= 100 else -label)
            with loader(made, num_workers=num_workers) as loading:
                batches = list(loading)
            assert sorted({*np.concatenate([batch.indices for batch in batches])}) == [*range(30)]
            for batch in batches:
                check_against(batch, made)


# Loading.


def test_every_kind_of_field_arrives_from_each_source(tmp_path: Path) -> None:
    write_dataset(tmp_path / "a", 9, 2)
    write_dataset(tmp_path / "b", 7, 3, samples=map(every_field_sample, range(50, 57)))
    expected = [as_read(every_field_sample(i)) for i in (*range(9), *range(50, 57))]
    with mix([tmp_path / "a", tmp_path / "b"], weights=[1, 1], exhausted="repeat") as made:
        assert made.schema == EVERY_FIELD
        for access in ("mmap", "pread"):
            with loader(made, 6, access=access, tail="pad", verify="always") as loading:
                batches = list(loading)
                assert loading.dataset.access == access
            assert sum(batch.valid.sum() for batch in batches) == 18
            for batch in batches[:-1]:
                check_against(batch, expected)


def test_an_epoch_has_each_source_as_often_as_its_weight_says(large: str, small: str) -> None:
    with mix([large, small], weights=[3, 1]) as stops:
        with loader(stops) as made:
            first, second = loaded(made), loaded(made)
            assert (len(made), len(made.dataset)) == (10, 63)
    for found in (first, second):
        assert sorted(label for label in found if label >= 100) == list(range(100, 110))
        assert len({label for label in found if label < 100}) == 30
    assert first != second
    with mix([large, small], weights=[3, 1], exhausted="repeat") as repeats:
        with loader(repeats) as made:
            found = loaded(made)
            assert len(made) == 18
    assert sorted(label for label in found if label < 100) == list(range(N_LARGE))
    times = [found.count(label) for label in range(100, 110)]
    assert (sum(times), min(times), max(times)) == (18, 1, 2)


@pytest.mark.parametrize("shuffle", [True, False, "blocks"])
def test_mixture_is_the_same_however_it_is_filled(large: str, small: str, shuffle: Any) -> None:
    def noisy(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"label": sample["label"], "noise": rng.integers(1 << 60)}

    ways: list[dict[str, Any]] = [
        {"num_workers": 0},
        {"num_workers": 2},
        {"num_workers": 3, "start_method": "thread", "prefetch": 0},
        {"num_workers": 1, "access": "pread"},
    ]
    with shardio.open(small) as opened, opened.select([1, 1, 4, 9, 2]) as some:
        with mix([large, some], weights=[2, 1], exhausted="repeat") as made:
            hashes = []
            for way in ways:
                with loader(made, shuffle=shuffle, transform=noisy, **way) as loading:
                    hashes.append([bits(batch) for _ in range(2) for batch in loading])
    assert all(each == hashes[0] for each in hashes)
    labels = [value for *_, fields in hashes[0] for value in fields[0][1]]
    noise = [value for *_, fields in hashes[0] for value in fields[1][1]]
    assert len({*labels}) < len(labels) == len({*noise})  # two draws of one sample differ


@pytest.mark.parametrize("world_size", [2, 3])
def test_slices_of_all_ranks_are_the_order_of_a_mixture(mixture: Mixture, world_size: int) -> None:
    with loader(mixture) as made:
        expected = loaded(made)
    steps: list[list[list[int]]] = []
    for rank in range(world_size):
        with loader(mixture, rank=rank, world_size=world_size) as made:
            steps.append([batch["label"][batch.valid].tolist() for batch in made])
            assert len(steps[-1]) == len(made) == -(-40 // (4 * world_size))
    together = [label for each in zip(*steps, strict=True) for part in each for label in part]
    assert together == expected


@pytest.mark.parametrize(
    "given", [{"sampler": [1]}, {"sampler": WeightedSampler([1] * (N_LARGE + N_SMALL))}]
)
def test_another_order_of_a_mixture_is_refused(mixture: Mixture, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="and so does a mixture: pass weights to shardio.mix"):
        loader(mixture, shuffle=False, **given)


@pytest.mark.parametrize("exhausted", ["stop", "repeat"])
def test_weights_equal_to_sizes_cover_each_sample(large: str, small: str, exhausted: Any) -> None:
    for weights in ([53, 10], [5.3, 1.0], [530 * 10**9, 10**11]):
        with mix([large, small], weights=weights, exhausted=exhausted) as made:
            assert made.mixing.shares == (53, 10)
            with loader(made) as loading:
                assert sorted(loaded(loading)) == [*range(N_LARGE), *range(100, 110)]


def test_weights_in_no_simple_proportion_are_rounded(large: str, small: str) -> None:
    for weights in ([math.pi, 2], np.array([1e-12, 1]), [1, 1 << 40]):
        with mix([large, small], weights=weights) as made:
            first, second = made.mixing.shares
            assert first >= 1 and abs(first + second - (1 << 30)) <= 1
            assert abs(first / (1 << 30) - weights[0] / sum(weights)) <= 2**-30


# Failures.


@WORKERS
def test_damaged_source_is_named(large: str, small: str, tmp_path: Path, num_workers: int) -> None:
    copied = tmp_path / "small"
    shutil.copytree(small, copied)
    path = copied / "000001-000.shard"
    with ShardReader(path) as reader:
        section = reader.column_section("image")
        offset = section.offset + 2 * section.stride
    flip(path, offset)
    with mix([large, copied], weights=[1, 1]) as made:
        with loader(made, num_workers=num_workers) as loading:
            with pytest.raises(ChecksumMismatch) as caught:
                loaded(loading)
        found = caught.value
        assert (found.path, found.field, found.sample) == (str(path), "image", 2)
        options: dict[str, Any] = {"on_error": "skip", "max_skips": 1}
        with loader(made, num_workers=num_workers, **options) as loading:
            batches = list(loading)
    (skipped,) = [each for batch in batches for each in batch.skipped]
    assert (skipped.index, skipped.shard, skipped.sample) == (N_LARGE + 7, 4, 2)
    labels = [label for batch in batches for label in batch["label"][batch.valid].tolist()]
    assert sorted(label for label in labels if label >= 100) == [*range(100, 107), 108, 109]


def test_a_transform_that_fails_names_the_shard_of_the_source(mixture: Mixture, small: str) -> None:
    def fail(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["label"] == 107:
            raise ValueError("no")
        return {"label": sample["label"]}

    with loader(mixture, transform=fail) as made:
        said = rf"sample 2 of shard {small}/000001-000\.shard of a mixture of .*large, {small} "
        with pytest.raises(TransformError, match=said):
            loaded(made)


def test_workers_that_are_killed_cost_no_sample_of_a_mixture(large: str, small: str) -> None:
    with (
        shardio.open(small) as opened,
        opened.select([7, 1, 1, 4]) as some,
        mix([large, some], weights=[3, 1], exhausted="repeat") as made,
    ):
        with loader(made) as loading:
            expected = [[bits(batch) for batch in loading] for _ in range(3)]
        with loader(made, num_workers=2) as loading:
            pool: Any = loading._engine._backend._pool  # type: ignore[union-attr]
            for epoch in expected:
                batches = iter(loading)
                found = [bits(next(batches))]
                for pid in pool.pids():
                    if pid is not None:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                found += [bits(batch) for batch in batches]
                assert found == epoch
            assert loading.stats().total.n_restarts > 0


# Resume.


@pytest.mark.parametrize("shuffle", [True, False, "blocks"])
@pytest.mark.parametrize("exhausted", ["stop", "repeat"])
def test_resumes_at_other_sizes(large: str, small: str, shuffle: Any, exhausted: Any) -> None:
    with (
        shardio.open(small) as opened,
        opened.select(range(9, 2, -1)) as some,
        mix([large, some], weights=[3, 1], exhausted=exhausted) as made,
    ):
        with loader(made, shuffle=shuffle) as loading:
            _, second, third = (loaded(loading) for _ in range(3))
        state = state_after(loader(made, shuffle=shuffle), 3, n_epochs=1)
        with loader(made, 7, shuffle=shuffle, num_workers=1) as loading:
            loading.load_state_dict(state)
            assert loading.state_dict() == state
            assert loaded(loading) == second[12:]
            assert loaded(loading) == third
        by_rank = []
        for rank in range(2):
            with loader(made, 3, shuffle=shuffle, rank=rank, world_size=2) as loading:
                loading.load_state_dict(state)
                by_rank += loaded(loading)
        assert sorted(by_rank) == sorted(second[12:])


def test_a_state_of_another_mixture_is_refused(large: str, small: str, unlike: str) -> None:
    with mix([large, small], weights=[3, 1]) as made:
        state = state_after(loader(made), 3, n_epochs=1)
    others: list[tuple[list[str], list[float], str, str]] = [
        ([large, small], [2, 1], "stop", "the state's mixing is"),
        ([large, small], [3, 1], "repeat", "the state's mixing is"),
        ([small, large], [3, 1], "stop", "the state's lineage is"),
        ([large, unlike], [3, 1], "stop", "the state's lineage is"),
    ]
    for sources, weights, exhausted, said in others:
        with mix(sources, weights=weights, exhausted=exhausted) as other:  # type: ignore[arg-type]
            with loader(other, fields=["label"]) as loading:
                with pytest.raises(InvalidArgument, match=said):
                    loading.load_state_dict(state)
    with shardio.open(large, subset="val") as val, mix([val, small], weights=[3, 1]) as other:
        with loader(other) as loading, pytest.raises(InvalidArgument, match="selection or view of"):
            loading.load_state_dict(state)
    with mix([large, small], weights=[0.75, 0.25]) as same, loader(same) as loading:
        loading.load_state_dict(state)
        for sizes in ([53], [53, 11], [53, 0], None, [53, True]):
            with pytest.raises(InvalidArgument, match="the state's sizes must be at most those"):
                loading.load_state_dict(state | {"sizes": sizes})
        with pytest.raises(InvalidArgument, match="at position 12 of 41 samples"):
            loading.load_state_dict(state | {"rows": 41})
    with ShardLoader(large, 4, shuffle=True, seed=3) as loading:
        said = "load_state_dict: the state belongs to another dataset: the state's lineage"
        with pytest.raises(InvalidArgument, match=said):
            loading.load_state_dict(state)


@pytest.mark.parametrize("shuffle", [True, "blocks"])
def test_grown_sources_keep_the_epoch(large: str, small: str, tmp_path: Path, shuffle: Any) -> None:
    folders = [tmp_path / "large", tmp_path / "small"]
    for source, folder in zip((large, small), folders, strict=True):
        shutil.copytree(source, folder)
    with mix(folders, weights=[3, 1]) as made:
        with loader(made, shuffle=shuffle) as loading:
            _, second = loaded(loading), loaded(loading)
        state = state_after(loader(made, shuffle=shuffle), 3, n_epochs=1)
    append_shard(folders[0], TWO_FIELDS, [*numbered(N_LARGE, 8)])
    append_shard(folders[1], TWO_FIELDS, [*numbered(110, 2)])
    with mix(folders, weights=[3, 1]) as made, loader(made, shuffle=shuffle) as loading:
        loading.load_state_dict(state)
        assert loaded(loading) == second[12:]
        found = loaded(loading)
    assert len(found) == 48
    assert sorted(label for label in found if label >= 100) == list(range(100, 112))


def test_a_pickled_mixture_is_made_anew_of_the_same_samples(large: str, small: str) -> None:
    with (
        shardio.open(large, subset="train") as train,
        train.select([4, 1]) as some,
        mix([some, small], weights=[1, 2]) as mixture,
        pickle.loads(pickle.dumps(mixture)) as found,
    ):
        assert [each["label"] for each in found] == [each["label"] for each in mixture]
        assert found.mixing == mixture.mixing
