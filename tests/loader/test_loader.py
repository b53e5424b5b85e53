"""Batches of a loader, compared with direct reads, for every way of filling them."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import InvalidArgument, Schema, ShardLoader, ShardReader, WeightedSampler
from shardio._loading import options
from shardio._workers.processes import limits
from shardio.errors import ChecksumMismatch, InsufficientMemory
from shardio.format.layout import Kind
from tests.loading import (
    AT_MOST_ONE_WORKER,
    TWO_FIELDS,
    WORKERS,
    bits,
    check_against,
    damage_row,
    make_loader,
    two_fields,
    write_dataset,
)
from tests.shards import EVERY_FIELD, flip

N = 131


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    root = tmp_path_factory.mktemp("loader")
    return {k: write_dataset(root / str(k), N, k) for k in (1, 3, 128)}


@pytest.fixture(scope="module")
def read(folders: dict[int, str]) -> list[dict[str, Any]]:
    return list(shardio.open(folders[1]))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("loader") / "small"
    return write_dataset(folder, 100, 3, TWO_FIELDS, two_fields(100))


def _loader(folder: str, batch_size: int = 32, **options: Any) -> ShardLoader:
    return make_loader(folder, batch_size, **{"output": "numpy", "num_workers": 0, **options})


def _epochs(folder: str, n: int = 1, batch_size: int = 32, **options: Any) -> list[Any]:
    with _loader(folder, batch_size, **options) as loader:
        return [[bits(batch) for batch in loader] for _ in range(n)]


def _order(folder: str, **options: Any) -> list[list[int]]:
    with _loader(folder, fields=["label"], **options) as loader:
        return [[i for batch in loader for i in batch.indices.tolist()] for _ in range(2)]


def test_the_options_of_a_loader_do_not_apply_to_its_view(small: str) -> None:
    with _loader(small, fields=["label"], transform=lambda sample: {"twice": 2}) as loader:
        assert set(loader.view[5]) == set(TWO_FIELDS)
        assert loader.view[5]["label"] == 5


@pytest.mark.parametrize(
    ("num_workers", "n_shards"),
    [(0, 1), (1, 1), (2, 1), *((n, 3) for n in (0, 1, 2, 5)), (0, 128), (2, 128)],
)
def test_every_sample_of_an_epoch_comes_once_and_as_a_direct_read_gives_it(
    folders: dict[int, str], read: list[dict[str, Any]], num_workers: int, n_shards: int
) -> None:
    seen: list[int] = []
    with _loader(folders[n_shards], shuffle=True, num_workers=num_workers) as loader:
        starts, shards = loader.dataset.shard_starts, loader.dataset.shards
        for step, batch in enumerate(loader):
            assert list(batch) == list(EVERY_FIELD)
            assert (batch.epoch, batch.step) == (0, step)
            check_against(batch, read)
            seen += batch.indices.tolist()
            for index, (shard, row) in zip(batch.indices, batch.origins.tolist(), strict=True):
                assert starts[shard] + row == index
                assert row < shards[shard].n_samples
    assert sorted(seen) == list(range(N))


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"num_workers": 1}, id="1 worker"),
        pytest.param({"num_workers": 2, "prefetch": 0}, id="2 workers, prefetch 0"),
        pytest.param({"num_workers": 5, "prefetch": 9}, id="5 workers, prefetch 9"),
        pytest.param({"num_workers": 0, "reuse": True}, id="reuse, here"),
        pytest.param({"num_workers": 2, "reuse": True}, id="reuse, 2 workers"),
        pytest.param({"num_workers": 2, "verify": "off"}, id="verify off"),
        pytest.param({"num_workers": 2, "verify": "always"}, id="verify always"),
        pytest.param({"num_workers": 2, "memory_bytes": 3 << 19}, id="3 blocks at most"),
    ],
)
def test_batches_are_equal_however_filled(folders: dict[int, str], given: dict[str, Any]) -> None:
    expected = _epochs(folders[3], 2, shuffle=True, seed=5)
    assert _epochs(folders[3], 2, shuffle=True, seed=5, **given) == expected


def test_shards_do_not_change_what_is_in_a_batch(folders: dict[int, str]) -> None:
    one, many = (_epochs(folders[k], shuffle=True)[0] for k in (1, 128))
    # Without (shard, row), which differ.
    assert [(b[2], b[4]) for b in one] == [(b[2], b[4]) for b in many]


def test_without_shuffle_samples_come_in_their_order_every_epoch(small: str) -> None:
    assert _order(small) == [list(range(100))] * 2


def test_shuffle_gives_every_epoch_and_every_seed_an_order_of_its_own(small: str) -> None:
    orders = [o for seed in (0, 1, 2**70) for o in _order(small, shuffle=True, seed=seed)]
    for a, b in itertools.combinations(orders, 2):
        assert a != b
    assert all(sorted(order) == list(range(100)) for order in orders)


def test_full_is_another_word_for_true(small: str) -> None:
    assert _order(small, shuffle="full") == _order(small, shuffle=True)


def test_the_epoch_counts_iterations_also_those_left_early(small: str) -> None:
    with _loader(small) as loader:
        assert loader.epoch == 0
        assert [batch.epoch for batch in loader] == [0] * 4
        for batch in loader:
            assert batch.epoch == loader.epoch == 1
            break
        assert next(iter(loader)).epoch == loader.epoch == 2


@WORKERS
@pytest.mark.parametrize(
    ("batch_size", "tail", "sizes"),
    [
        (32, "short", [32, 32, 32, 4]),
        (32, "drop", [32, 32, 32]),
        (50, "short", [50, 50]),
        (50, "drop", [50, 50]),
        (1000, "short", [100]),
        (99, "short", [99, 1]),
    ],
)
def test_batch_size_and_tail_decide_how_long_batches_are(
    small: str, batch_size: int, tail: str, sizes: list[int], num_workers: int
) -> None:
    with _loader(small, batch_size, tail=tail, num_workers=num_workers) as loader:
        batches = list(loader)
        assert len(loader) == len(sizes)
        assert [batch.n_rows for batch in batches] == sizes
        assert [batch["image"].shape for batch in batches] == [(n, 64, 96) for n in sizes]
        assert [len(batch.indices) for batch in batches] == sizes


@WORKERS
def test_a_loader_whose_epochs_have_no_batch_warns_once(small: str, num_workers: int) -> None:
    said = r"epoch 0 has no batch: .*100 samples.*1000 .*batch_size.*tail='short'"
    with _loader(small, 1000, tail="drop", num_workers=num_workers) as loader:
        with pytest.warns(RuntimeWarning, match=said) as caught:
            assert list(loader) == []
        assert [each.filename for each in caught] == [__file__]
        assert list(loader) == []
        assert len(loader) == 0
    place: dict[str, Any] = {"rank": 0, "world_size": 3}
    with _loader(small, 34, tail="drop", num_workers=num_workers, **place) as loader:
        with pytest.warns(RuntimeWarning, match="fewer than the 102 of a step of 3 ranks"):
            assert list(loader) == []


def test_an_epoch_that_goes_on_or_has_no_samples_may_have_no_batch(small: str) -> None:
    options: dict[str, Any] = {"tail": "drop", "num_workers": 0}
    with _loader(small, 60, **options) as loader:
        next(iter(loader))
        state = loader.state_dict()
        assert len(loader) == 1
    with _loader(small, 60, **options) as loader:
        loader.load_state_dict(state)
        assert list(loader) == []
    with _loader(small, 60, sampler=[], **options) as loader:
        assert list(loader) == []


@pytest.mark.parametrize(
    ("options", "n_rows"),
    [
        ({}, 100),
        ({"sampler": [3] * 120}, 120),
        ({"sampler": WeightedSampler(np.ones(100), n_draws=30)}, 30),
        ({"sampler": WeightedSampler(np.arange(100), replacement=False)}, 99),
    ],
)
def test_memory_is_bounded_by_the_epoch(small: str, options: dict[str, Any], n_rows: int) -> None:
    with _loader(small, 10**12, memory_bytes=4 << 20, **options) as loader:
        assert [batch.n_rows for batch in loader] == [n_rows]


@WORKERS
@pytest.mark.parametrize("taker", ["", "transform", "batch_transform"])
def test_an_empty_dataset_gives_empty_epochs(tmp_path: Path, num_workers: int, taker: str) -> None:
    folder = write_dataset(tmp_path / "empty", 0)
    options: dict[str, Any] = {taker: lambda _: pytest.fail("called")} if taker else {}
    with _loader(folder, num_workers=num_workers, tail="pad", **options) as loader:
        assert len(loader) == 0
        assert [list(loader), list(loader)] == [[], []]
        assert loader.epoch == 1


def test_empty_shards_between_others_are_passed_over(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "gaps", 3, 7)  # 4 of 7 shards are empty
    samples = list(shardio.open(folder))
    with _loader(folder, 2, shuffle=True) as loader:
        sizes = []
        for batch in loader:
            check_against(batch, samples)
            sizes.append(batch.n_rows)
    assert sizes == [2, 1]


@WORKERS
def test_field_order(folders: dict[int, str], read: list[dict[str, Any]], num_workers: int) -> None:
    fields = ["note", "label", "packed"]
    with _loader(folders[3], fields=iter(fields), num_workers=num_workers) as loader:
        for batch in loader:
            assert list(batch) == fields
            check_against(batch, read)
        with pytest.raises(KeyError, match="frames.*note, label, packed"):
            batch["frames"]


@WORKERS
def test_a_field_that_is_not_asked_for_is_not_read(tmp_path: Path, num_workers: int) -> None:
    folder = write_dataset(tmp_path / "set", 20, 1, TWO_FIELDS, two_fields(20))
    damage_row(folder, "image", 7)
    with _loader(folder, fields=["label"], num_workers=num_workers, verify="always") as loader:
        assert [batch["label"].tolist() for batch in loader] == [list(range(20))]


@pytest.mark.parametrize("transform", [None, lambda sample: {**sample, "note": "odd"}])
def test_varying_arrays_begin_on_cache_lines(folders: dict[int, str], transform: Any) -> None:
    fields = ("note", "blob", "points", "cloud")  # sizes that are no multiples of 64
    with _loader(folders[3], 8, fields=fields, transform=transform) as loader:
        batch = next(iter(loader))
    arrays = [array for array in (*batch["points"], *batch["cloud"]) if array.size]
    assert {array.ctypes.data % 64 for array in arrays} == {0}
    assert any(len(value) % 64 for name in ("note", "blob") for value in batch[name])


@AT_MOST_ONE_WORKER
@pytest.mark.parametrize("transform", [None, dict])
def test_flipped_column_bits_are_located(tmp_path: Path, num_workers: int, transform: Any) -> None:
    folder = write_dataset(tmp_path / "set", 30, 3, TWO_FIELDS, two_fields(30))
    path, offset = damage_row(folder, "image", 7, shard=1)
    with _loader(folder, 8, num_workers=num_workers, transform=transform) as loader:
        steps = iter(loader)
        assert [next(steps).step, next(steps).step] == [0, 1]  # samples 0..15: intact
        with pytest.raises(ChecksumMismatch) as caught:
            next(steps)
    error = caught.value
    assert (error.path, error.field, error.sample, error.offset) == (path, "image", 7, offset)
    assert all(str(part) in str(error) for part in (path, "'image'", "sample 7", offset))


@AT_MOST_ONE_WORKER
@pytest.mark.parametrize("field", ["packed", "cloud", "blob", "raw", "note", "meta", "points"])
def test_flipped_record_bits_are_located(tmp_path: Path, num_workers: int, field: str) -> None:
    folder = write_dataset(tmp_path / "set", 12, 1, Schema({field: EVERY_FIELD[field]}))
    path = Path(folder) / "000000-000.shard"
    with ShardReader(path) as reader:
        entry = reader.records.entries(field, np.array([7]))[0]
        payload = next(s.offset for s in reader.sections if s.kind == Kind.PAYLOAD)
    offset = payload + int(entry["offset"])
    flip(path, offset)
    with (
        _loader(folder, 4, num_workers=num_workers) as loader,
        pytest.raises(ChecksumMismatch) as caught,
    ):
        list(loader)
    error = caught.value
    assert (error.path, error.field, error.sample, error.offset) == (str(path), field, 7, offset)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_verify_decides_how_often_bytes_are_checked(tmp_path: Path, num_workers: int) -> None:
    def outcome(loader: ShardLoader) -> str:
        try:
            list(loader)
        except ChecksumMismatch:
            return "refused"
        return "delivered"

    outcomes = {}
    for verify in ("off", "first", "always"):
        folder = write_dataset(tmp_path / verify, 8, 1, TWO_FIELDS, two_fields(8))
        with _loader(folder, 8, num_workers=num_workers, verify=verify) as loader:
            list(loader)
            damage_row(folder, "image", 3)
            outcomes[verify] = [outcome(loader), outcome(loader)]
        with _loader(folder, 8, num_workers=num_workers, verify=verify) as loader:
            outcomes[verify].append(outcome(loader))
    assert outcomes == {
        "off": ["delivered", "delivered", "delivered"],
        "first": ["delivered", "delivered", "refused"],  # checked before it changed
        "always": ["refused", "refused", "refused"],
    }


@WORKERS
def test_after_an_error_the_loader_can_be_iterated_again(tmp_path: Path, num_workers: int) -> None:
    folder = write_dataset(tmp_path / "set", 40, 1, TWO_FIELDS, two_fields(40))
    damage_row(folder, "image", 30)
    with _loader(folder, 8, num_workers=num_workers) as loader:
        for _ in range(20):
            seen = []
            steps = iter(loader)
            with pytest.raises(ChecksumMismatch) as caught:
                for batch in steps:
                    seen += batch["label"].tolist()
            assert (caught.value.field, caught.value.sample) == ("image", 30)
            assert caught.value.path == f"{folder}/000000-000.shard"
            assert seen == list(range(24))
            assert list(steps) == []  # an iterator that raised is over
        assert len(loader._engine.pool) <= 10  # those of one pass, and of one that was cancelled


def test_a_shard_that_is_deleted_while_a_loader_is_open_is_still_read(small: str) -> None:
    dataset = shardio.open(small)
    expected = [sample["label"].item() for sample in dataset]
    with _loader(small, num_workers=1) as loader:
        steps = iter(loader)
        found = next(steps)["label"].tolist()
        moved = Path(small) / "moved"
        shard = Path(small) / dataset.shards[2].name
        shard.rename(moved)
        try:
            found += [i for batch in steps for i in batch["label"].tolist()]
        finally:
            moved.rename(shard)
    assert found == expected


@WORKERS
def test_a_budget_below_one_batch_is_refused(small: str, num_workers: int) -> None:
    with pytest.raises(InsufficientMemory, match=r"needs a block of \d{6} bytes.*allows 100000"):
        _loader(small, num_workers=num_workers, memory_bytes=100_000)


def test_no_block_is_made_if_memory_is_short(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reserved = []
    tight = limits.MemoryLimit(150_000, "the limit of a test")
    monkeypatch.setattr(limits, "tightest", lambda: tight)
    monkeypatch.setattr(os, "posix_fallocate", lambda *given: reserved.append(given))
    with pytest.raises(InsufficientMemory) as caught:
        _loader(small, memory_bytes=1 << 30)
    assert [n_bytes for _, _, n_bytes in reserved if n_bytes > 4096] == []  # no more than tables
    assert "150,000" in str(caught.value)
    assert "the limit of a test" in str(caught.value)


def test_default_budget_is_half_the_available(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        limits, "tightest", lambda: limits.MemoryLimit(300_000, "the limit of a test")
    )
    with pytest.raises(InsufficientMemory, match="allows 150000"):
        _loader(small)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch_size": 0}, "batch_size must be an integer from 1 up; found 0"),
        ({"batch_size": True}, "batch_size must be an integer from 1 up; found True"),
        ({"fields": "label"}, "fields must be a list of names; found the string 'label'"),
        (
            {"fields": ["labels"]},
            "different names among image, label; found .*; did you mean 'label'",
        ),
        ({"fields": []}, "fields must be different names among image, label"),
        ({"fields": ["label", "label"]}, "fields must be different names among image, label"),
        ({"fields": [["label"]]}, "fields must be different names among image, label"),
        ({"fields": 3}, "fields must be a list of names; found 3"),
        ({"shuffle": 1}, "shuffle must be one of True, False, 'full', 'blocks', 'shards'; found 1"),
        ({"seed": -1}, "seed must be an integer from 0 up; found -1"),
        ({"seed": None}, "seed must be an integer from 0 up; found None"),
        ({"num_workers": 1025}, "num_workers must be an integer from 0 to 1024; found 1025"),
        ({"transform": 3}, "transform must be callable; found 3"),
        ({"transform": lambda a, b, c: a}, r"transform must take \(sample\) or \(sample, rng\)"),
        ({"output": "cupy"}, "output must be one of 'tinygrad', 'numpy', 'torch', 'jax'; found"),
        ({"device": "CPU"}, "device is for tensors; output is 'numpy'"),
        ({"device": ("cpu",), "output": "torch"}, "device must be a name, such as .cuda:0., with"),
        ({"device": 3, "output": "tinygrad"}, "device must be a name or a tuple of names; found 3"),
        ({"device": (), "output": "tinygrad"}, "device must be a name or a tuple of names"),
        (
            {"transform": {"image": str}},
            r"write transform=lambda sample: sample \| {'image': f\(sample\['image'\]\)}$",
        ),
        ({"batch_transform": {"x": str}}, r"write batch_transform=lambda batch: batch \| {'x': "),
        ({"batch_transform": 3}, "batch_transform must be callable; found 3"),
        ({"batch_transform": lambda: {}}, r"must take \(batch\) or \(batch, rng\); it takes \(\)"),
        ({"tail": "long"}, "tail must be one of 'short', 'drop', 'pad'; found 'long'"),
        ({"tail": np.array(["pad", "drop"])}, "must be one of 'short', 'drop', 'pad'; found a"),
        ({"access": np.array(["mmap", "pread"])}, "access must be one of auto, mmap, pread; found"),
        ({"rank": 0, "world_size": 1 << 64}, "world_size must be an integer from 1 to 16777216; f"),
        ({"timeout_s": 1e300}, "timeout_s must be a number of seconds above 0 and up to 1000000; "),
        ({"timeout_s": 10**400}, "timeout_s must be a number of seconds above 0 and up to 1000000"),
        ({"collate": lambda: {}}, r"collate must take \(samples\); it takes \(\)"),
        ({"prefetch": -1}, "prefetch must be an integer from 0 up; found -1"),
        ({"memory_bytes": 1e9}, "memory_bytes must be an integer from 1 up; found 1000000000.0"),
        ({"verify": "last"}, "verify must be one of off, first, always; found 'last'"),
        ({"reuse": "yes"}, "reuse must be one of True, False; found 'yes'"),
        ({"start_method": "threads"}, "start_method must be one of 'zygote', 'spawn', 'thread"),
        ({"rank": 1}, "rank and world_size belong together"),
        ({"rank": 2, "world_size": 2}, "rank must be below world_size"),
        ({"rank": -1, "world_size": 2}, "rank must be an integer from 0 up"),
        ({"on_error": "skip"}, "on_error='skip' needs max_skips"),
        ({"max_skips": 1}, "max_skips is for on_error='skip'"),
        ({"on_error": "ignore"}, "on_error must be one of 'raise', 'skip'; found 'ignore'"),
        ({"on_error": "skip", "max_skips": -1}, "max_skips must be an integer from 0 up; found -1"),
    ],
)
def test_refused_options_name_what_is_fine(small: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        _loader(small, **{"batch_size": 4, **given})


def test_numpy_numbers_are_numbers(small: str) -> None:
    given: dict[str, Any] = {"batch_size": np.int64(7), "seed": np.uint8(3)}
    given["timeout_s"] = np.float32(60)
    with _loader(small, **given, prefetch=np.int16(1)) as loader:
        assert next(iter(loader)).n_rows == 7


def test_an_open_dataset_or_a_path_may_be_given_instead_of_a_folder_name(small: str) -> None:
    (expected,) = _epochs(small)
    with shardio.open(small) as dataset:
        for given in (dataset, Path(small)):
            with ShardLoader(given, 32, output="numpy", num_workers=0) as loader:
                assert [bits(batch) for batch in loader] == expected
        assert len(dataset[99]["image"]) == 64  # still open


def test_paths_survive_chdir(small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(small).parent)
    with _loader(Path(small).name, num_workers=1) as loader:
        monkeypatch.chdir(tmp_path)
        assert len(list(loader)) == 4


def test_by_default_a_worker_runs_on_each_cpu(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "usable_cpus", lambda: 3)
    with ShardLoader(small, 32, output="numpy") as loader:
        list(loader)
        assert loader._engine._backend.n_workers == 3


@WORKERS
def test_reused_batches_on_a_device_are_the_same_tensors(small: str, num_workers: int) -> None:
    options: dict[str, Any] = {"output": "tinygrad", "device": "PYTHON", "num_workers": num_workers}
    with _loader(small, 4, **options) as loader:
        expected = [[batch[name].numpy() for name in batch] for batch in loader]
    with _loader(small, 4, **options, reuse=True) as loader:
        seen: dict[int, set[int]] = {}
        for batch, values in zip(loader, expected, strict=True):
            for name, value in zip(batch, values, strict=True):
                np.testing.assert_array_equal(batch[name].numpy(), value)
            seen.setdefault(batch.n_rows, set()).add(id(batch["label"]))
    assert all(len(ids) == 1 for ids in seen.values()), "one for each number of rows"


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("drop_last", 'tail="drop" instead of drop_last=True'),
        ("collate_fn", 'collate="pad"'),
        ("num_samples", r"WeightedSampler\(weights, n_draws="),
        ("weights", r"sampler=shardio.WeightedSampler\(weights\)"),
        ("pin_memory", 'device="cuda"'),
        ("in_order", "batches are always in order"),
        ("persistent_workers", "workers always stay"),
        ("prefetch_factor", "prefetch="),
        ("worker_init_fn", r"transform\(sample, rng\)"),
        ("generator", "seed="),
        ("timeout", "timeout_s="),
        ("batch_sampler", "sampler="),
        ("multiprocessing_context", "start_method="),
        ("shufle", "did you mean 'shuffle'"),
        ("subset", r"write ShardLoader\(shardio.open\(path, subset=…\), batch_size\)"),
        ("storage_options", r"shardio.open\(path, storage_options=…\)"),
        ("preload", r"write dataset\.preload\(fields\)"),
        ("zzz", "its options are dataset, batch_size, fields, shuffle"),
    ],
)
@pytest.mark.parametrize("dataset", ["nowhere/", "tcp://127.0.0.1:1"])
def test_habits_of_torch_are_answered_with_options(dataset: str, option: str, said: str) -> None:
    options: dict[str, Any] = {option: None}
    with pytest.raises(TypeError, match=f"ShardLoader has no option '{option}': .*{said}"):
        ShardLoader(dataset, 4, **options)


def test_a_loader_of_ones_own_may_have_options_of_its_own(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "set", 16, 1, TWO_FIELDS, two_fields(16))

    class Mine(ShardLoader):
        def __init__(self, dataset: str, *, twice: bool) -> None:
            super().__init__(dataset, 8 if twice else 4, output="numpy", num_workers=0)

    with Mine(folder, twice=True) as loader:
        assert len(next(iter(loader))["label"]) == 8


def test_every_option_is_one_of_the_record_or_says_what_is_loaded() -> None:
    checked = {each.name for each in dataclasses.fields(options.LoaderOptions)}
    assert checked < (parameters := set(inspect.signature(ShardLoader).parameters))
    assert parameters - checked == {"dataset", "fields", "decode"}


def test_the_reference_lists_every_option_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "loader.md").read_text()
    rows = re.findall(r"(?m)^\| `(\w+)` \|([^|]*)\|", page.partition("## The loader")[0])
    parameters = inspect.signature(ShardLoader).parameters
    assert [name for name, _ in rows] == list(parameters)
    for name, default in rows:
        said = re.fullmatch(r"`(.*)`", default.strip())
        found = parameters[name].default
        if said:
            assert ast.literal_eval(said[1]) == found
        else:
            assert found in (None, inspect.Parameter.empty)
