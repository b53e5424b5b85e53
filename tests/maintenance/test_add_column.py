"""Columns that are added to a finished dataset: nothing that was there is changed, or lost."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio import Array, Bytes, Image, Json, List, ShardLoader, Text
from shardio import open as open_dataset
from shardio.dataset.manifest import load, load_generation, publish_next
from shardio.dataset.transaction import StagingFolder, check_only_dataset, link_staged, sweep
from shardio.errors import DatasetConflict, InvalidArgument, MediaError, SchemaError, WorkerDied
from shardio.format.layout import Kind
from shardio.maintenance import (
    MaintenanceProgress,
    add_column,
    compact,
    compute_stats,
    diff,
    merge,
    repair,
    reshard,
    split,
    verify_dataset,
)
from shardio.storage import fs
from tests.maintenance.datasets import (
    LABELS,
    is_sound,
    labelled,
    place,
    shard_of,
    side_of,
    tree,
    write,
)
from tests.shards import flip, same_sample

pytestmark = pytest.mark.process

FLOAT = Array("float32", (3,))
N = 12


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """12 samples in 3 shards."""
    return write(tmp_path / "d", N, 3, schema=LABELS, samples=labelled(N), classes=["a", "b"])


def rows_of(n: int) -> Iterator[np.ndarray[Any, Any]]:
    return (np.full(3, i, np.float32) for i in range(n))


def values_of(folder: Path, name: str) -> list[Any]:
    with open_dataset(folder) as dataset:
        return [np.asarray(sample[name]).tolist() for sample in dataset]


def numbers_of(folder: Path, name: str = "x") -> list[int]:
    return [int(row[0]) for row in values_of(folder, name)]


# What is added.


def test_a_column_is_added_as_the_next_generation_and_all_else_stays(folder: Path) -> None:
    split(folder, {"train": 0.5, "val": 0.5})
    compute_stats(folder)
    before, old = tree(folder), load(folder)
    report = add_column(folder, "x", FLOAT, rows_of(N))
    assert (report.generation, report.n_samples, report.n_shards) == (4, N, 3)
    assert report.n_rewritten == 3
    after, new = tree(folder), load(folder)
    assert report.n_bytes == sum(len(after[shard.name]) for shard, _ in new.files)
    assert {**before, "dataset.json": after["dataset.json"]}.items() <= after.items()
    assert len(after) == len(before) + 3 + 1
    assert (new.lineage, new.schema, new.shards) == (old.lineage, old.schema, old.shards)
    assert (new.subsets, new.stats, new.classes) == (old.subsets, old.stats, old.classes)
    assert new.operation == {"name": "add_column", "options": {"name": "x"}}
    assert list(new.full_schema) == ["label", "source", "x"]
    assert numbers_of(folder) == list(range(N))
    assert load_generation(folder, 3) == old
    assert is_sound(folder)


@pytest.mark.parametrize(
    "values",
    [
        [[i, i, i] for i in range(N)],
        np.repeat(np.arange(N, dtype=np.float32), 3).reshape(N, 3),
        lambda sample: [int(sample["source"].split()[1])] * 3,
    ],
    ids=["list", "array", "function"],
)
def test_values_are_an_iterable_or_a_function_of_the_sample(folder: Path, values: Any) -> None:
    add_column(folder, "x", FLOAT, values)
    assert numbers_of(folder) == list(range(N))


def test_values_are_taken_one_at_a_time_as_shards_are_written(folder: Path) -> None:
    states: list[MaintenanceProgress] = []
    n_done = []

    def values() -> Iterator[int]:
        for i in range(N):
            n_done.append(states[-1].n_shards_done)
            yield i

    add_column(folder, "n", Array("int64"), values(), progress=states.append)
    assert n_done == [0] * 4 + [1] * 4 + [2] * 4


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("line", Array("int16", (None, 2), codec="zstd"), np.ones((5, 2), np.int16)),
        ("blob", Bytes(), b"\0\1"),
        ("facts", Json(), {"a": [1, None]}),
        ("parts", List(Array("uint8", (None,))), [np.arange(3, dtype=np.uint8)]),
        ("camera.id", Text("zstd_dictionary", optional=True), None),
        ("camera.lens.name", Text("zstd_dictionary"), "large " * 30),
    ],
)
def test_a_field_may_be_of_any_type(folder: Path, name: str, field: Any, value: Any) -> None:
    add_column(folder, name, field, [value] * N)
    with open_dataset(folder) as dataset:
        assert dataset.schema[name] == field
        assert all(same_sample({name: sample[name]}, {name: value}) for sample in dataset)
    assert is_sound(folder)


def test_shards_without_samples_get_one_without_samples(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", 2, 5, schema=LABELS, samples=labelled(2))
    add_column(folder, "x", FLOAT, rows_of(2))
    counts = [shard.n_samples for shard in load(folder).column_groups[0].shards]
    assert counts == [shard.n_samples for shard in load(folder).shards] == [0, 0, 1, 0, 1]
    assert numbers_of(folder) == [0, 1]
    empty = write(tmp_path / "empty", 0, 1, schema=LABELS)
    add_column(empty, "x", FLOAT, [])
    with ShardLoader(str(empty), 2, output="numpy", num_workers=0) as loader:
        assert list(loader) == []


# Functions, by batches and in other processes.


def number_of(sample: dict[str, Any]) -> int:
    return int(sample["source"].split()[1])


@pytest.mark.parametrize(("workers", "batch_size"), [(0, 3), (None, 100), (2, None), (2, 3)])
def test_same_bytes_any_worker(tmp_path: Path, workers: int | None, batch_size: int | None) -> None:
    function: Any = number_of
    if batch_size is not None:
        function = lambda samples: np.array([*map(number_of, samples)])  # noqa: E731
    one, other = (
        write(tmp_path / name, N, 3, schema=LABELS, samples=labelled(N)) for name in ("a", "b")
    )
    add_column(one, "n", Array("int64"), number_of)
    add_column(other, "n", Array("int64"), function, workers=workers, batch_size=batch_size)
    assert tree(one) == tree(other)
    assert values_of(other, "n") == list(range(N))


def test_a_batch_holds_samples_of_one_shard_in_order(folder: Path) -> None:
    seen: list[list[int]] = []

    def note(samples: list[dict[str, Any]]) -> list[int]:
        seen.append([number_of(sample) for sample in samples])
        return seen[-1]

    add_column(folder, "n", Array("int64"), note, batch_size=3)
    assert seen == [[0, 1, 2], [3], [4, 5, 6], [7], [8, 9, 10], [11]]


def test_workers_are_other_processes_that_keep_the_function(folder: Path) -> None:
    calls: list[int] = []

    def process(sample: dict[str, Any]) -> list[int]:
        calls.append(1)
        return [os.getpid(), len(calls)]

    add_column(folder, "who", Array("int64", (2,)), process, workers=1)
    assert {pid for pid, _ in values_of(folder, "who")}.isdisjoint({os.getpid()})
    assert [n for _, n in values_of(folder, "who")] == list(range(1, N + 1))
    assert calls == []


def test_a_worker_that_ends_is_replaced_once_over_a_shard(folder: Path, tmp_path: Path) -> None:
    once, before = tmp_path / "once", tree(folder)

    def fatal(sample: dict[str, Any]) -> int:
        if sample["source"] == "clip 5" and not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return number_of(sample)

    add_column(folder, "n", Array("int64"), fatal, workers=2)
    assert values_of(folder, "n") == list(range(N))
    tries = tmp_path / "tries"

    def always_fatal(_: object) -> None:
        with open(tries, "a") as file:
            file.write("1")
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(WorkerDied, match="2 workers crashed .*'shard 0'.* by signal 9"):
        add_column(folder, "m", Array("int64"), always_fatal, workers=1)
    assert tries.read_text() == "11"
    after = tree(folder)
    assert before.keys() < after.keys()
    assert load(folder).number == 2
    assert not [name for name in os.listdir(folder) if name.startswith(".")]


@pytest.mark.parametrize("workers", [0, 1])
def test_error_of_the_function_names_the_sample(folder: Path, workers: int) -> None:
    before, field = tree(folder), Array("int64")
    with pytest.raises(ZeroDivisionError) as caught:
        fail = lambda sample: 1 // (sample["source"] != "clip 5")  # noqa: E731
        add_column(folder, "n", field, fail, workers=workers)
    first, *others = caught.value.__notes__
    assert first == f"while the value of sample 5 of {folder} was made"
    assert [note.partition("\n")[0][:18] for note in others] == ["in worker 0, item "] * workers
    assert all(":\n\nTraceback" in note for note in others)
    with pytest.raises(SchemaError, match=rf"{folder}, sample 0: field 'n'"):
        add_column(folder, "n", Array("uint8"), lambda sample: 300, workers=workers)
    with pytest.raises(MediaError, match=rf"^{folder}, sample 0: field 'n': not a picture"):
        add_column(folder, "n", Image(), lambda sample: b"none", workers=workers)
    assert tree(folder) == before


# What is refused: nothing is published, and nothing is left.


def of_batches(values: Any) -> dict[str, Any]:
    return {"values": lambda samples: values, "batch_size": 3}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"values": (i for i in range(N - 1))}, "12 samples, but there are only 11 values"),
        ({"values": (i for i in range(N + 1))}, "has 12 samples, but there are more values"),
        ({"values": list(range(N + 3))}, "has 12 samples, but there are 15 values"),
        ({"values": np.arange(5)}, "there are 5 values"),
        ({"values": "x" * N}, "found a str"),
        ({"values": b"x" * N}, "found a bytes"),
        ({"values": set(range(N))}, "found a set"),
        ({"values": np.array(3)}, "found a ndarray"),
        ({"values": None}, "found a NoneType"),
        (of_batches([1]), "samples 0 to 2 of .*expected a sequence of 3 values, found 1"),
        (of_batches(7), "expected a sequence of 3 values, found a int"),
        (of_batches("abc"), "expected a sequence of 3 values, found a str"),
        ({"values": range(N), "batch_size": 2}, "only for a function"),
        ({"values": range(N), "workers": 1}, "only for a function"),
        ({"values": number_of, "batch_size": 0}, "it must be"),
        ({"values": number_of, "workers": -1}, "it must be"),
    ],
)
def test_invalid_arguments_are_refused(folder: Path, given: dict[str, Any], message: str) -> None:
    before = tree(folder)
    with pytest.raises(InvalidArgument, match=message):
        add_column(folder, "n", Array("int64"), **given)
    assert tree(folder) == before
    assert not [name for name in os.listdir(folder) if name.startswith(".")]


@pytest.mark.parametrize(
    ("name", "field", "message"),
    [
        ("label", FLOAT, "there is a field 'label' already"),
        ("x", FLOAT, "there is a field 'x' already"),
        ("label.inner", FLOAT, "'label'.* names of fields and of nested records"),
        ("deep", FLOAT, "'deep'.* names of fields and of nested records"),
        ("deep.y", FLOAT, "there is a field 'deep.y' already"),
        ("deep.y.z", FLOAT, "'deep.y'.* names of fields and of nested records"),
        ("new", {"inner": FLOAT}, "nested record; add its fields one by one"),
        ("new", "float32", "expected one of Array"),
        ("", FLOAT, "non-empty string"),
    ],
)
def test_invalid_name_is_refused(folder: Path, name: str, field: Any, message: str) -> None:
    add_column(folder, "x", FLOAT, rows_of(N))
    add_column(folder, "deep.y", FLOAT, rows_of(N))
    before = tree(folder)
    with pytest.raises(SchemaError, match=f"{folder}: .*{message}"):
        add_column(folder, name, field, rows_of(N))
    assert tree(folder) == before


# Beside others.


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: split(folder, {"a": 0.5, "b": 0.5}),
        compute_stats,
        lambda folder: add_column(folder, "theirs", FLOAT, rows_of(N)),
        compact,
    ],
    ids=["split", "stats", "columns", "compact"],
)
def test_concurrent_publish_is_not_lost(folder: Path, change: Callable[[Path], object]) -> None:
    def meanwhile(sample: dict[str, Any]) -> int:
        if sample["source"] == "clip 3":
            change(folder)
        return int(sample["label"])

    with pytest.raises(DatasetConflict, match="another writer published after generation 1"):
        add_column(folder, "ours", Array("int64"), meanwhile)
    theirs = load(folder)
    assert theirs.number == 2
    assert is_sound(folder)
    add_column(folder, "ours", Array("int64"), lambda sample: int(sample["label"]))
    again = load(folder)
    assert (again.subsets, again.stats) == (theirs.subsets, theirs.stats)
    names = [group.name for group in theirs.column_groups]
    assert [group.name for group in again.column_groups] == [*names, "ours"]
    assert is_sound(folder)


def test_other_shards_are_not_published_beside_an_added_column(folder: Path) -> None:
    add_column(folder, "x", FLOAT, rows_of(N))
    with pytest.raises(InvalidArgument, match="fields x were added later.*shardio compact"):
        publish_next(folder, load(folder), shards=load(folder).shards[:2])
    assert numbers_of(folder) == list(range(N))


def test_files_that_a_killed_writer_left_are_neither_taken_nor_overwritten(folder: Path) -> None:
    left = folder / "g000002-000.shard"
    left.write_bytes(b"left")
    (folder / ".shardio-staging-killed").mkdir()
    report = add_column(folder, "x", FLOAT, rows_of(N))
    assert (report.generation, left.read_bytes()) == (2, b"left")
    names = [shard.name for shard in load(folder).column_groups[0].shards]
    assert names == [f"g000002-{k:03d}.shard" for k in (1, 2, 3)]
    assert numbers_of(folder) == list(range(N))
    assert not (folder / ".shardio-staging-killed").exists()


# Other operations.


def test_subsets_and_statistics_can_be_made_of_an_added_column(folder: Path) -> None:
    compute_stats(folder)
    add_column(folder, "group", Array("int64"), [i // 3 for i in range(N)])
    split(folder, {"a": 0.5, "b": 0.5}, group="group")
    with open_dataset(folder, subset="a") as a, open_dataset(folder, subset="b") as b:
        groups = [{int(sample["group"]) for sample in part} for part in (a, b)]
    assert sorted(groups[0] | groups[1]) == [0, 1, 2, 3]
    assert not groups[0] & groups[1]
    found = compute_stats(folder).stats["fields"]["group"]
    assert (found["count"], found["mean"], found["max"]) == (N, 1.5, 3)
    with open_dataset(folder) as dataset:
        assert dataset.stats["whole"]["fields"]["group"] == found
        assert list(dataset.column_groups) == ["group"]


def rewritten_by_compact(folder: Path, out: Path) -> Path:
    report = compact(folder, workers=0)
    assert (report.n_shards, report.n_rewritten, report.n_removed) == (1, 1, 0)
    assert compact(folder, remove_old=True, workers=0).n_removed == 3 + 2 * 3
    assert len([name for name in os.listdir(folder) if name.endswith(".shard")]) == 1
    return folder


@pytest.mark.parametrize(
    "rewrite",
    [
        lambda folder, out: merge(out, folder, workers=0).dataset,
        lambda folder, out: reshard(folder, out, shard_bytes=100, workers=0).dataset,
        rewritten_by_compact,
    ],
    ids=["merge", "reshard", "compact"],
)
def test_rewriting_moves_columns_into_shards(folder: Path, tmp_path: Path, rewrite: Any) -> None:
    add_column(folder, "x", FLOAT, rows_of(N))
    add_column(folder, "y", Text(), (f"y {i}" for i in range(N)))
    with open_dataset(folder) as dataset:
        before, schema = list(dataset), dataset.schema
        out = rewrite(folder, tmp_path / "out")
        generation = load(out)
        assert generation.column_groups == ()
        assert generation.schema == schema
        with open_dataset(out) as after:
            assert len(after) == N
            assert all(map(same_sample, after, before))
    assert is_sound(out)


def test_compact_rewrites_a_single_shard_if_columns_lie_beside_it(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", N, 1, schema=LABELS, samples=labelled(N))
    assert compact(folder, workers=0).n_rewritten == 0
    add_column(folder, "x", FLOAT, rows_of(N))
    assert compact(folder, workers=0).n_rewritten == 1
    assert numbers_of(folder) == list(range(N))
    assert compact(folder, workers=0).n_rewritten == 0


def test_datasets_are_merged_only_if_the_column_is_in_all(folder: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "o", 4, schema=LABELS, samples=labelled(4), classes=["a", "b"])
    add_column(folder, "x", FLOAT, rows_of(N))
    with pytest.raises(InvalidArgument, match="only .* has x"):
        merge(tmp_path / "out", folder, other, workers=0)


def test_diff_compares_added_columns_as_any_others(folder: Path, tmp_path: Path) -> None:
    add_column(folder, "x", FLOAT, rows_of(N))
    reshard(folder, tmp_path / "whole", workers=0)
    assert diff(folder, tmp_path / "whole").is_same
    other = write(tmp_path / "o", N, 2, schema=LABELS, samples=labelled(N), classes=["a", "b"])
    assert diff(folder, other).fields_only_a == ["x"]
    values = [np.full(3, i if i != 5 else 99, np.float32) for i in range(N)]
    add_column(other, "x", FLOAT, values)
    assert diff(folder, other).changed == [(5, ("x",))]


# Killed.


def add_and_be_killed(folder: Path, call: int) -> bool:
    """Add x in a process that ends at this change of the file system; returns whether it did."""
    pid = os.fork()
    if pid == 0:
        n_calls = itertools.count(1)

        def perform(_: str, __: str, act: Callable[..., Any], *given: Any, **named: Any) -> Any:
            if next(n_calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return act(*given, **named)

        vars(fs)["perform"] = perform
        try:
            add_column(folder, "x", Array("int64"), range(N))
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@pytest.mark.slow
def test_rerun_after_a_kill_recovers(folder: Path, tmp_path: Path, quick_disk: None) -> None:
    before, seen, copy = tree(folder), set(), folder
    for n in range(1, 100):
        copy = Path(shutil.copytree(folder, tmp_path / f"copy{n}"))
        if not add_and_be_killed(copy, n):
            break
        left = tree(copy)
        assert {name: left[name] for name in before} == before or load(copy).number == 2
        codes = [finding.code for finding in verify_dataset(copy, workers=0).findings]
        is_begun = "generations/000002.json" in left
        seen.add((is_begun, bool(codes)))
        assert set(codes) <= {"unknown_shard"}
        assert not (is_begun and codes)  # its writer may be about to publish it
        is_published = load(copy).number == 2
        add_column(copy, "y", Array("int64"), range(N))
        assert is_sound(copy)
        assert load(copy).number == (3 if is_published else 2)
        added = [group.name for group in load(copy).column_groups]
        assert added == (["x", "y"] if is_published else ["y"])
    assert seen == {(False, False), (False, True), (True, False)}
    assert values_of(copy, "x") == list(range(N))


def test_only_names_of_files_that_a_killed_operation_staged_are_removed(folder: Path) -> None:
    held, dead = StagingFolder(folder), folder / ".shardio-staging-dead"
    dead.mkdir()
    for staging, name in ((held.path, "held.shard"), (dead, "dead.shard")):
        (staging / "000000.shard").touch()
        link_staged(staging / "000000.shard", folder / name)
    (dead / "000001.shard").touch()
    (folder / "theirs.shard").touch()
    with pytest.raises(DatasetConflict, match=r"theirs\.shard: created by another writer"):
        link_staged(dead / "000001.shard", folder / "theirs.shard")
    generation = folder / "generations" / "000002.json"
    generation.write_text("{")
    sweep(folder)
    assert dead.exists() and (folder / "dead.shard").exists()  # that generation may name them
    generation.unlink()
    sweep(folder)
    assert not dead.exists() and not (folder / "dead.shard").exists()
    assert held.path.exists() and (folder / "held.shard").exists()
    assert (folder / "theirs.shard").exists()
    held.remove(None)


# Damage.


def test_verify_finds_a_file_beside_that_is_missing_or_another(folder: Path) -> None:
    add_column(folder, "x", FLOAT, rows_of(N))
    add_column(folder, "y", FLOAT, rows_of(N))
    side_of(folder, "x", 0).unlink()
    side_of(folder, "x", 1).write_bytes(side_of(folder, "x", 2).read_bytes())
    side_of(folder, "x", 2).write_bytes(side_of(folder, "y", 2).read_bytes())
    found = {(f.path, f.code, f.message) for f in verify_dataset(folder, workers=0).findings}
    disagree = "the shard and its generation disagree about its"
    assert found == {
        (str(side_of(folder, "x", 0)), "missing", "the shard is missing"),
        (str(side_of(folder, "x", 1)), "generation", f"{disagree} id"),
        (str(side_of(folder, "x", 2)), "generation", f"{disagree} id"),
        (str(side_of(folder, "x", 2)), "generation", f"{disagree} schema"),
    }


def test_damage_is_not_laundered_by_rewriting(folder: Path, tmp_path: Path) -> None:
    add_column(folder, "x", FLOAT, rows_of(N))
    path = side_of(folder, "x", 1)
    flip(path, place(path, Kind.COLUMN, "x")[0])
    before = tree(folder)
    actions: list[Callable[[], object]] = [
        lambda: merge(tmp_path / "out", folder, workers=0),
        lambda: reshard(folder, tmp_path / "out", workers=0),
        lambda: compact(folder, workers=0),
        lambda: compute_stats(folder),
        lambda: add_column(folder, "z", FLOAT, lambda sample: sample["x"]),
    ]
    for action in actions:
        with pytest.raises(ValueError, match=path.name):
            action()
    assert tree(folder) == before
    assert not (tmp_path / "out").exists()


def test_repair_loses_a_sample_if_any_of_its_files_does(folder: Path, tmp_path: Path) -> None:
    add_column(folder, "y", Text(), (f"value {i}" for i in range(N)))
    add_column(folder, "z", Text(), (f"other {i}" for i in range(N)))
    first, second = side_of(folder, "y", 0), side_of(folder, "z", 1)
    flip(first, 20, place(first, Kind.PAYLOAD)[0] + 8)  # its header, and its second sample
    flip(shard_of(folder, 0), place(shard_of(folder, 0), Kind.PAYLOAD)[0])
    second.unlink()
    report = repair(folder, tmp_path / "out")
    assert [shard.outcome for shard in report.shards] == ["damaged", "lost", "sound"]
    assert [(shard.n_kept, shard.n_lost) for shard in report.shards] == [(2, 2), (0, 4), (4, 0)]
    assert report.shards[0].mended == (f"{first.name}: the first page is restored from the last",)
    assert [loss.reason[:10] for loss in report.shards[0].losses] == ["field 'sou", "field 'y':"]
    assert report.shards[1].losses[0].reason == f"{second.name}: there is no such shard"
    with open_dataset(tmp_path / "out") as dataset:
        assert list(dataset.schema) == ["label", "source", "y", "z"]
        assert dataset.column_groups == {}
        found = [(s["source"], s["y"], s["z"]) for s in dataset]
    kept = [2, 3, *range(8, N)]
    assert found == [(f"clip {i}", f"value {i}", f"other {i}") for i in kept]
    assert is_sound(tmp_path / "out")


def test_a_conversion_counts_added_columns_as_parts_of_what_it_may_overwrite(folder: Path) -> None:
    add_column(folder, "x", FLOAT, rows_of(N))
    check_only_dataset(folder, "")
    (folder / "g000002-999.shard").write_bytes(b"somebody's")
    with pytest.raises(FileExistsError, match=r"g000002-999\.shard"):
        check_only_dataset(folder, "")
