"""Merge, reshard and compact: the same samples, other shards, and no damage laundered."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio import Array, Schema, ShardLoader, Text
from shardio import open as open_dataset
from shardio.dataset import writer
from shardio.dataset.manifest import load, publish_next
from shardio.dataset.selection import RowRuns
from shardio.errors import (
    DatasetCorrupt,
    DatasetExists,
    InvalidArgument,
    ShardChanged,
    ShardNotFound,
)
from shardio.format.layout import Kind
from shardio.maintenance import compact, diff, merge, reshard, resharding, verify_dataset
from shardio.maintenance.verify.dataset import require_sound
from tests.maintenance.datasets import LABELS, is_sound, labelled, place, shard_of, tree, write
from tests.shards import as_read, every_field_sample, flip, same_sample


def samples_of(folder: Path) -> list[tuple[int, str]]:
    with open_dataset(folder) as dataset:
        return [(int(sample["label"]), sample["source"]) for sample in dataset]


def small(folder: Path, n: int, n_shards: int = 1, first: int = 0, **details: Any) -> Path:
    samples = labelled(n, first=first)
    return write(folder, n, n_shards, schema=LABELS, samples=samples, **details)


# Merge.


def test_merged_datasets_follow_one_another_and_their_shards_are_copied(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", 5, 2), write(tmp_path / "b", 3)
    report = merge(tmp_path / "out", a, b, workers=0)
    assert (report.n_samples, report.n_shards, report.generation) == (8, 3, 1)
    assert (report.dataset, report.n_rewritten, report.n_removed) == (tmp_path / "out", 3, 0)
    assert report.n_bytes == sum(path.stat().st_size for path in (tmp_path / "out").glob("*.shard"))
    assert report.as_json()["dataset"] == str(tmp_path / "out")
    assert report.as_json()["n_shards"] == 3
    assert "generation 1" in repr(report)
    with open_dataset(tmp_path / "out") as dataset:
        for i, sample in zip([0, 1, 2, 3, 4, 0, 1, 2], dataset, strict=True):
            assert same_sample(sample, as_read(every_field_sample(i)))
        assert dataset.operation["name"] == "merge"
        assert dataset.operation["sources"] == [
            {"lineage": load(source).lineage, "generation": 1} for source in (a, b)
        ]
        assert dataset.operation["options"] == {"shard_bytes": 256 << 20}
        assert dataset.lineage not in (load(a).lineage, load(b).lineage)
    out = tmp_path / "out"
    assert shard_of(out, 0).read_bytes() == shard_of(a, 0).read_bytes()
    assert shard_of(out, 2).read_bytes() == shard_of(b, 0).read_bytes()
    assert is_sound(out)


def test_an_existing_dataset_is_refused_before_sources_are_verified(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", 5, 2), write(tmp_path / "b", 3)

    def verified(_: object) -> None:
        raise AssertionError("a source is verified")

    for operation in (partial(merge, b, a), partial(reshard, a, b)):
        with pytest.raises(DatasetExists, match="already holds a dataset"):
            operation(progress=verified)


def test_classes_are_put_together_and_labels_follow_their_names(tmp_path: Path) -> None:
    a = small(tmp_path / "a", 4, classes=["cat", "dog"])
    b = small(tmp_path / "b", 4, first=10, classes=["dog", "eel"])
    merge(tmp_path / "out", a, b, workers=0)
    with open_dataset(tmp_path / "out") as dataset:
        assert dataset.classes == ("cat", "dog", "eel")
        names = [dataset.classes[int(sample["label"])] for sample in dataset]
    assert names == ["cat", "dog", "cat", "dog", "dog", "eel", "dog", "eel"]
    assert is_sound(tmp_path / "out")


def test_a_label_of_no_class_stays_and_one_that_names_none_is_refused(tmp_path: Path) -> None:
    a = small(tmp_path / "a", 2, classes=["cat", "dog"])
    values = [{"label": label, "source": ""} for label in (-1, 0)]
    b = write(tmp_path / "b", 2, schema=LABELS, samples=values, classes=["dog"])
    merge(tmp_path / "out", a, b, workers=0)
    assert [label for label, _ in samples_of(tmp_path / "out")] == [0, 1, -1, 1]
    values[0]["label"] = 7
    c = write(tmp_path / "c", 2, schema=LABELS, samples=values, classes=["dog"])
    before = tree(c)
    with pytest.raises(InvalidArgument, match="its label is 7, which names no class") as caught:
        merge(tmp_path / "again", a, c, workers=0)
    assert "sample 0 of shard 000000-000.shard: " in str(caught.value)
    assert "expected 0 to 0, or a negative number for no class" in str(caught.value)
    assert not (tmp_path / "again").exists()
    assert tree(c) == before


def test_classes_that_cannot_be_told_or_renumbered_are_refused(tmp_path: Path) -> None:
    a = small(tmp_path / "a", 2, classes=["cat", "dog"])
    b = small(tmp_path / "b", 2)
    with pytest.raises(InvalidArgument, match="while others have cat, dog: ") as caught:
        merge(tmp_path / "out", a, b, workers=0)
    assert str(caught.value).startswith(f"{b}: has no class names")
    assert "convert it again with class names" in str(caught.value)
    bare = Schema({"source": Text()})
    values = [{"source": ""}]
    c = write(tmp_path / "c", 1, schema=bare, samples=values, classes=["x"])
    d = write(tmp_path / "d", 1, schema=bare, samples=values, classes=["y"])
    with pytest.raises(InvalidArgument, match="no field 'label' of whole numbers") as caught:
        merge(tmp_path / "out", c, d, workers=0)
    assert str(caught.value).startswith(f"{d}: its classes differ")
    assert not (tmp_path / "out").exists()
    with pytest.raises(InvalidArgument, match="at least one source"):
        merge(tmp_path / "out")
    e = write(tmp_path / "e", 1, schema=bare, samples=values)
    merge(tmp_path / "fine", c, e, workers=0)
    assert load(tmp_path / "fine").classes == ("x",)


def test_other_fields_are_refused_and_named(tmp_path: Path) -> None:
    a = small(tmp_path / "a", 1)
    other = Schema({"label": Array("int32"), "note": Text()})
    b = write(tmp_path / "b", 1, schema=other, samples=[{"label": 0, "note": ""}])
    with pytest.raises(InvalidArgument) as caught:
        merge(tmp_path / "out", a, b, workers=0)
    for part in (
        f"{a} and {b} do not have the same fields: ",
        f"only {a} has source; only {b} has note; ",
        f"label is Array('int64') in {a}, Array('int32') in {b}",
    ):
        assert part in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_the_same_fields_in_another_order_are_the_same(tmp_path: Path) -> None:
    a = small(tmp_path / "a", 1)
    turned = Schema({name: LABELS[name] for name in ("source", "label")})
    b = write(tmp_path / "b", 2, schema=turned, samples=labelled(2, first=5))
    merge(tmp_path / "out", a, b, workers=0)
    assert samples_of(tmp_path / "out") == [(0, "clip 0"), (1, "clip 5"), (0, "clip 6")]


def test_what_all_sources_say_is_kept(tmp_path: Path) -> None:
    described: dict[str, Any] = {"converter": {"name": "videos"}, "versions": {"av": "1"}}
    one, two = ([{"path": name, "outcome": "converted"}] for name in "xy")
    a = small(tmp_path / "a", 1, inputs=one, **described)
    b = small(tmp_path / "b", 1, inputs=two, **described)
    merge(tmp_path / "out", a, b, workers=0)
    found = load(tmp_path / "out")
    assert found.inputs == (*one, *two)
    assert (found.converter, found.versions["av"]) == ({"name": "videos"}, "1")
    c = small(tmp_path / "c", 1, converter={"name": "other"}, versions={"av": "2"})
    merge(tmp_path / "more", a, c, workers=0)
    assert load(tmp_path / "more").converter == {}
    assert "av" not in load(tmp_path / "more").versions


def test_units_of_times_stay_recorded_and_others_are_refused(tmp_path: Path) -> None:
    def timed(folder: str, unit: str, **recorded: Any) -> Path:
        options = {"options": {"units": {"label": f"timestamp[{unit}]"}}}
        return small(tmp_path / folder, 1, converter={**options, **recorded})

    a, b, c = timed("a", "us"), timed("b", "us", name="arrow"), timed("c", "ns")
    merge(tmp_path / "out", a, b, small(tmp_path / "d", 1), workers=0)
    assert load(tmp_path / "out").converter == {"options": {"units": {"label": "timestamp[us]"}}}
    with pytest.raises(InvalidArgument, match=r"'label' are timestamp\[ns\], .* timestamp\[us\]"):
        merge(tmp_path / "no", a, c, workers=0)
    assert not (tmp_path / "no").exists()


def test_empty_datasets_are_merged_and_compared(tmp_path: Path) -> None:
    a, b = small(tmp_path / "a", 0), small(tmp_path / "b", 2)
    assert merge(tmp_path / "out", a, a, workers=0).n_samples == 0
    assert diff(tmp_path / "out", a).is_same and diff(a, b).n_only_b == 2


# Reshard.


@pytest.mark.parametrize(("shard_bytes", "n_shards"), [(1, 10), (20_000, 5), (1 << 28, 1)])
def test_reshard_keeps_samples_metadata(tmp_path: Path, shard_bytes: int, n_shards: int) -> None:
    source = write(tmp_path / "a", 10, 3, classes=["x"], converter={"name": "videos"})
    kept: Any = {"subsets": {"s": RowRuns([2], [3])}, "stats": {"whole": {"samples": 10}}}
    publish_next(source, load(source), **kept)
    out = tmp_path / "out"
    report = reshard(source, out, shard_bytes=shard_bytes, workers=0)
    assert (report.n_shards, report.n_rewritten) == (n_shards, n_shards)
    assert (report.n_samples, report.generation, report.n_removed) == (10, 1, 0)
    assert report.n_bytes == sum(shard.n_bytes for shard in load(out).shards)
    assert report.dataset == out
    assert diff(source, out).is_same
    was, found = load(source), load(out)
    assert (found.number, found.classes, found.converter) == (1, was.classes, was.converter)
    assert (found.subsets, found.stats) == (was.subsets, was.stats)
    assert found.operation["sources"] == [{"lineage": was.lineage, "generation": 2}]
    assert (found.operation["name"], found.operation["options"]) == (
        "reshard",
        {"shard_bytes": shard_bytes},
    )
    assert (found.inputs, found.versions, found.view) == (was.inputs, was.versions, was.view)
    assert is_sound(out)


@pytest.mark.parametrize("shard_bytes", [0, -1, 1.5, True], ids=repr)
def test_a_size_that_is_none_is_refused(tmp_path: Path, shard_bytes: Any) -> None:
    source = small(tmp_path / "a", 1)
    with pytest.raises(InvalidArgument, match="shard_bytes"):
        reshard(source, tmp_path / "out", shard_bytes=shard_bytes)
    with pytest.raises(InvalidArgument, match="shard_bytes"):
        merge(tmp_path / "out", source, shard_bytes=shard_bytes, workers=0)
    with pytest.raises(InvalidArgument, match="shard_bytes"):
        compact(source, shard_bytes=shard_bytes)
    assert not (tmp_path / "out").exists()


# Compact.


def test_small_neighbours_are_put_together_in_the_next_generation(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", 12, 6)
    before, first = tree(folder), load(folder)
    report = compact(folder, workers=0)
    assert (report.generation, report.n_samples, report.n_shards) == (2, 12, 1)
    assert (report.n_rewritten, report.n_removed, report.dataset) == (1, 0, folder)
    assert report.n_bytes == (folder / "g000002-000.shard").stat().st_size
    found = load(folder)
    assert (found.lineage, found.shards[0].name) == (first.lineage, "g000002-000.shard")
    assert found.operation == {"name": "compact", "options": {"shard_bytes": 256 << 20}}
    assert diff(write(tmp_path / "same", 12), folder).is_same
    after = tree(folder)
    assert all(after[name] == before[name] for name in before if name != "dataset.json")
    assert is_sound(folder)


def test_large_shards_stay_and_so_does_the_order(tmp_path: Path) -> None:
    schema = Schema({"x": Array("uint8", (10_000,))})
    values = [{"x": np.full(10_000, i, np.uint8)} for i in range(16)]
    shards = [1, 1, 10, 1, 1, 1, 1]
    folder = tmp_path / "a"
    write(folder, 1, schema=schema, samples=values[:1])
    generation, at = load(folder), 1
    for n in shards[1:]:  # as appending would do it
        with writer.GenerationWriter(folder, schema, previous=generation) as more:
            for shard in generation.shards:
                more.add_unchanged(shard)
            for value in values[at : at + n]:
                more.append(value)
            generation = more.publish()
        at += n
    assert [shard.n_samples for shard in load(folder).shards] == shards
    report = compact(folder, shard_bytes=100_000, workers=0)
    assert [shard.n_samples for shard in load(folder).shards] == [2, 10, 4]
    assert (report.n_rewritten, report.n_shards) == (2, 3)
    assert load(folder).shards[1] == generation.shards[2]
    assert diff(write(tmp_path / "same", 16, schema=schema, samples=values), folder).is_same
    again = compact(folder, shard_bytes=100_000, remove_old=True, workers=0)
    assert (again.n_rewritten, again.generation) == (0, report.generation)
    assert again.n_removed == len(shards) - 1
    assert diff(tmp_path / "same", folder).is_same


@pytest.mark.process
def test_readers_of_the_older_generation_are_undisturbed(tmp_path: Path) -> None:
    folder = small(tmp_path / "a", 12, 6)
    with (
        open_dataset(folder) as dataset,
        ShardLoader(folder, 5, output="numpy", num_workers=1) as loader,
    ):
        expected = samples_of(folder)
        dataset[0]
        compact(folder, workers=0)
        assert [(int(s["label"]), s["source"]) for s in dataset] == expected
        assert [s for batch in loader for s in batch["source"]] == [s for _, s in expected]
        assert dataset.generation == 1
    assert samples_of(folder) == expected


def test_old_shards_are_removed_only_if_that_is_asked_for(tmp_path: Path) -> None:
    folder = small(tmp_path / "a", 12, 4)
    assert compact(folder, workers=0).n_removed == 0
    assert len(list(folder.glob("*.shard"))) == 5
    stray = small(tmp_path / "b", 1)
    os.link(shard_of(stray, 0), folder / "stray.shard")
    with open_dataset(folder, generation=1) as old:
        assert old[0]["source"] == "clip 0"
        report = compact(folder, remove_old=True, workers=0)
        assert (report.n_removed, report.n_rewritten, report.generation) == (4, 0, 2)
        assert old[1]["source"] == "clip 1"  # of the shard that is mapped
        with pytest.raises(ShardNotFound, match=r"000000-003\.shard: there is no such shard"):
            old[11]
    assert sorted(p.name for p in folder.glob("*.shard")) == ["g000002-000.shard", "stray.shard"]
    assert len(samples_of(folder)) == 12
    assert [f.code for f in verify_dataset(folder, workers=0).findings] == ["unknown_shard"]
    assert compact(folder, remove_old=True, workers=0).n_removed == 0
    assert merge(tmp_path / "out", folder, stray, workers=0).n_samples == 12 + 1


def test_subsets_are_of_the_same_samples_afterwards(tmp_path: Path) -> None:
    folder = small(tmp_path / "a", 12, 4)
    publish_next(folder, load(folder), subsets={"s": RowRuns([1, 8], [1, 2])})
    compact(folder, workers=0)
    with open_dataset(folder, subset="s") as dataset:
        assert [sample["source"] for sample in dataset] == ["clip 1", "clip 8", "clip 9"]


# Nothing is laundered, nothing is left, nobody's work is lost.


@pytest.mark.parametrize("operation", [merge, reshard, compact])
def test_damage_is_refused_and_nothing_is_written(tmp_path: Path, operation: Any) -> None:
    source = write(tmp_path / "a", 6, 3)
    out = tmp_path / "out"
    places = {merge: (out, source), reshard: (source, out), compact: (source,)}[operation]
    flip(shard_of(source, 1), place(shard_of(source, 1), Kind.COLUMN, "odd")[0] + 2101)
    before = tree(source)
    with pytest.raises(DatasetCorrupt, match=r"damaged, and was not touched: .*padding") as caught:
        operation(*places, workers=0)
    assert str(caught.value).startswith(f"{source}: ")
    assert shard_of(source, 1).name in str(caught.value)
    assert "repair" in str(caught.value)
    assert tree(source) == before
    assert not out.exists()


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)


def _replace(path: Path) -> None:
    other = small(path.parent.parent / "other", 2, first=7)
    path.write_bytes(shard_of(other, 0).read_bytes())


@pytest.mark.parametrize("change", [_cut, _replace])
def test_a_shard_that_changes_after_it_was_verified_is_not_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    source = small(tmp_path / "a", 4, 2)
    assert shard_of(source, 1).stat().st_size == shard_of(source, 0).stat().st_size

    def verify_and_change(*given: Any) -> None:
        verify(*given)
        change(shard_of(source, 1))

    verify = require_sound
    monkeypatch.setattr(resharding, "require_sound", verify_and_change)
    with pytest.raises(ShardChanged, match=r"000000-001\.shard: .* changed after it was verified"):
        merge(tmp_path / "out", source, workers=0)
    assert not (tmp_path / "out").exists()
