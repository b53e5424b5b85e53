"""Appending: existing samples keep their places, and each new one is added once."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

import shardio
from shardio import Array, DatasetWriter, Input, InvalidArgument, Schema, Text
from shardio.conversion import Progress, execution
from shardio.conversion.inputs import list_inputs
from shardio.dataset import manifest
from shardio.dataset.manifest import load, publish_next
from shardio.errors import (
    DatasetConflict,
    DatasetCorrupt,
    DatasetExists,
    DatasetNotFound,
    SchemaError,
)
from shardio.maintenance import add_column, compute_stats, merge, split, verify_dataset
from shardio.storage.fs import read_checksummed_json, to_checksummed_json
from tests.lines import (
    OLD,
    Lines,
    append,
    column,
    contents,
    convert,
    during,
    interrupt_after,
    killed,
    leave_killed,
    outcomes,
    texts,
    write,
)

pytestmark = pytest.mark.usefixtures("warm_zygote")

MORE = {"a/0.txt": "eight", "bb/6.txt": "nine ten", "e/7.txt": "", "z/8.txt": "eleven"}
NEW = "eight nine ten eleven".split()


@pytest.fixture
def out(lines: Path, tmp_path: Path) -> Path:
    """Return a dataset of the lines, whose source has since gained MORE."""
    convert(lines, tmp_path / "out")
    write(lines, MORE)
    return tmp_path / "out"


@pytest.fixture
def whole(lines: Path, out: Path, tmp_path: Path) -> dict[str, bytes]:
    """Return the files of an undisturbed append."""
    shutil.copytree(out, tmp_path / "whole")
    append(lines, tmp_path / "whole")
    return contents(tmp_path / "whole")


# What comes of it.


def test_new_samples_follow_the_existing_ones(lines: Path, out: Path) -> None:
    before, first = contents(out), shardio.open(out)
    report = append(lines, out)
    with shardio.open(out) as dataset:
        assert [sample["text"] for sample in dataset] == OLD + NEW
        assert (dataset.generation, dataset.lineage) == (2, first.lineage)
        assert dataset.operation["name"] == "append"
    assert [sample["text"] for sample in first] == OLD
    now = contents(out)
    assert {name: now[name] for name in before if name != "dataset.json"} == {
        name: content for name, content in before.items() if name != "dataset.json"
    }
    assert (report.n_samples, report.n_samples_before, report.generation) == (4, 7, 2)
    assert (report.dataset, report.kind, report.stopped) == (out, "lines", False)
    assert (report.stats_dropped, report.subsets, report.broken) == (False, {}, ())
    new = [name for name in now if name.endswith(".shard") and name not in before]
    assert report.n_bytes == sum(len(now[name]) for name in new)
    assert verify_dataset(out, workers=0).findings == ()


def test_only_inputs_without_samples_are_converted(lines: Path, out: Path, read: list[str]) -> None:
    before = shardio.open(out).inputs
    report = append(lines, out)
    after = shardio.open(out).inputs
    assert after[: len(before)] == before
    assert [entry["path"] for entry in after[len(before) :]] == list(MORE)
    assert sorted(read) == sorted([*MORE, "a/2.txt", "b/readme", "d/5.txt"])
    assert outcomes(report) == {
        **dict.fromkeys(["a/0.txt", "bb/6.txt", "z/8.txt"], "converted"),
        **dict.fromkeys(["a/1.txt", "b/3.txt", "c/4.txt", "top.txt"], "duplicate"),
        **dict.fromkeys(["a/2.txt", "d/5.txt", "e/7.txt"], "empty"),
        "b/readme": "unsupported",
    }
    assert [one.n_samples for one in report.inputs if one.outcome == "duplicate"] == [0] * 4
    listed = list_inputs(str(lines)).inputs
    assert [one.name for one in report.inputs] == [one.name for one in listed]


def test_classes_keep_their_numbers_and_new_ones_follow(lines: Path, out: Path) -> None:
    report = append(lines, out)
    assert shardio.open(out).classes == ("a", "b", "c", "d", "bb", "e", "z") == report.classes
    assert column(out, "label") == [0, 0, 1, 2, 2, 2, -1] + [0, 4, 4, 6]
    assert {one.name: one.label for one in report.inputs}["bb/6.txt"] == 4


def test_labels_from_a_file_keep_the_class_numbers(lines: Path, out: Path, tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("path,label\nz/8.txt,new\na/0.txt,c\na/1.txt,b\n")
    append(lines, out, labels=tmp_path / "labels.csv")
    assert shardio.open(out).classes == ("a", "b", "c", "d", "new")
    assert column(out, "label")[7:] == [2, -1, -1, 4]


@pytest.mark.parametrize("n_workers", [0, 2])
def test_without_new_samples_nothing_is_published(lines: Path, out: Path, n_workers: int) -> None:
    append(lines, out)
    before = contents(out)
    write(lines, {"new/7.txt": "!", "new/8.txt": ""})
    for _ in range(2):
        report = append(lines, out, workers=n_workers)
        assert (report.n_samples, report.generation, report.n_samples_before) == (0, 2, 11)
        assert outcomes(report)["new/7.txt"] == "broken"
        assert outcomes(report)["new/8.txt"] == "empty"
        assert contents(out) == before
    write(lines, {"new/7.txt": "twelve"})
    assert append(lines, out).generation == 3 and texts(out)[-1] == "twelve"


def test_an_input_without_samples_is_converted_again(lines: Path, out: Path) -> None:
    write(lines, {"a/2.txt": "mended", "b/9.txt": "broken !"})
    append(lines, out)
    entries = {entry["path"]: entry for entry in shardio.open(out).inputs}
    assert (entries["a/2.txt"]["samples"], entries["b/9.txt"]["outcome"]) == (1, "broken")
    write(lines, {"b/9.txt": "unbroken"})
    report = append(lines, out)
    assert report.counts["converted"] == 1 and texts(out)[-1] == "unbroken"
    paths = [entry["path"] for entry in shardio.open(out).inputs]
    assert len(paths) == len({*paths})


def test_an_append_that_stops_is_continued_by_the_next(lines: Path, out: Path) -> None:
    write(lines, {"bb/6.txt": "!"})
    report = append(lines, out, on_error="stop")
    assert report.stopped and texts(out) == [*OLD, "eight"]
    assert (report.n_samples, report.n_samples_before) == (1, 7)
    assert [source.reason for source in report.broken] == ["breaks after 0 lines"]
    assert outcomes(report)["z/8.txt"] == "not_processed"
    write(lines, {"bb/6.txt": "nine ten"})
    report = append(lines, out, on_error="stop")
    assert not report.stopped and texts(out) == OLD + NEW


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("ONE two", r"hash [0-9a-f]{16}, [0-9a-f]{16} when it was converted"),
        ("one two more", "12 bytes, 7 when it was converted"),
    ],
)
def test_modified_inputs_stay_so(lines: Path, out: Path, content: str, reason: str) -> None:
    (lines / "a" / "1.txt").write_text(content)
    report = append(lines, out)
    (modified,) = report.modified
    assert modified.name == "a/1.txt" and not report.broken
    assert re.fullmatch(reason, modified.reason)
    assert texts(out) == OLD + NEW
    entries = {entry["path"]: entry for entry in shardio.open(out).inputs}
    assert entries["a/1.txt"]["bytes"] == 7
    assert (entries["a/1.txt"]["outcome"], entries["a/1.txt"]["samples"]) == ("converted", 2)
    assert (modified.n_samples, report.n_samples) == (0, 4)


def test_files_may_grow_later(lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def grow(source: Input) -> None:
        if source.name == "a/1.txt":
            (lines / "c" / "4.txt").write_text("four five six and more")

    during(monkeypatch, grow)
    report = convert(lines, tmp_path / "out")
    sizes = {source.name: source.n_bytes for source in report.inputs}
    assert sizes["c/4.txt"] == len("four five six and more")
    assert not append(lines, tmp_path / "out").modified


def test_a_file_without_a_recorded_hash_is_known_by_its_name(lines: Path, out: Path) -> None:
    inputs = [
        {key: value for key, value in entry.items() if key not in ("hash", "bytes")}
        for entry in load(out).inputs
    ]
    publish_next(out, load(out), inputs=tuple(inputs))
    (lines / "a" / "1.txt").write_text("another content")
    report = append(lines, out)
    assert not report.modified and texts(out) == OLD + NEW


def test_every_state_of_a_merged_name_is_known(lines: Path, out: Path, tmp_path: Path) -> None:
    write(tmp_path / "second", {"a/1.txt": "other", "b/3.txt": "three"})
    convert(tmp_path / "second", tmp_path / "of second")
    merge(tmp_path / "both", out, tmp_path / "of second", workers=0)
    assert append(lines, tmp_path / "both", kind="lines").counts["duplicate"] == 4
    assert append(tmp_path / "second", tmp_path / "both", kind="lines").counts == {"duplicate": 2}
    write(tmp_path / "second", {"a/1.txt": "third"})
    (modified,) = append(tmp_path / "second", tmp_path / "both", kind="lines").modified
    assert modified.name == "a/1.txt"


# What must fit.


def test_options_default_to_those_of_the_dataset(lines: Path, tmp_path: Path) -> None:
    convert(lines, tmp_path / "out", repeat=2, keep_partial=True, shard_bytes=5000)
    write(lines, {"z/8.txt": "eight !"})
    append(lines, tmp_path / "out")
    assert texts(tmp_path / "out")[-2:] == ["eight", "eight"]
    options = shardio.open(tmp_path / "out").converter["options"]
    assert (options["repeat"], options["keep_partial"], options["shard_bytes"]) == (2, True, 5000)
    assert shardio.open(tmp_path / "out").operation["options"]["shard_bytes"] == 256 << 20


def test_shard_bytes_and_on_error_may_differ(lines: Path, out: Path) -> None:
    write(lines, {"z/9.txt": "a b c d"})
    append(lines, out, shard_bytes=5000, on_error="stop")
    assert len(shardio.open(out).shards) > 8
    assert shardio.open(out).operation["options"] == {"on_error": "stop", "shard_bytes": 5000}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"repeat": 2}, "repeat was 1, is 2"),
        ({"keep_partial": True}, "keep_partial was False, is True"),
        ({"kind": "videos"}, "converter was 'lines', is 'videos'"),
    ],
)
def test_other_options_fail(lines: Path, out: Path, options: dict[str, Any], named: str) -> None:
    before = contents(out)
    message = f"{named}.*; convert with the options of the dataset, or into"
    with pytest.raises(InvalidArgument, match=message):
        append(lines, out, **options)
    assert contents(out) == before


def test_another_version_fails(lines: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lines, "version", "8")
    with pytest.raises(InvalidArgument, match="version of the converter was '7', is '8'"):
        append(lines, out)
    assert texts(out) == OLD
    assert load(out).number == 1


def test_versions_are_recorded(lines: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lines, "libraries", lambda _: {"alphabet": "27"})
    append(lines, out)
    assert shardio.open(out).versions["alphabet"] == "27"
    assert shardio.open(out, generation=1).versions["alphabet"] == "26"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (
            {"text": Text(), "label": Array("int32"), "pad": Array("uint8", (5000,))},
            "field 'label': expected .*int32.* as in the dataset, found .*int64",
        ),
        ({"text": Text(), "label": Array("int64")}, "field 'pad': expected missing.* found .*5000"),
        (
            {"label": Array("int64"), "text": Text(), "pad": Array("uint8", (5000,))},
            "expected the order label, text, pad; found text, label, pad",
        ),
    ],
)
def test_other_fields_fail(lines: Path, tmp_path: Path, fields: dict[str, Any], named: str) -> None:
    DatasetWriter(tmp_path / "out", Schema(fields)).close()
    before = contents(tmp_path / "out")
    with pytest.raises(InvalidArgument, match=named) as caught:
        append(lines, tmp_path / "out", kind="lines")
    assert str(caught.value).startswith(f"{tmp_path / 'out'}: ")
    assert contents(tmp_path / "out") == before


def test_labels_without_class_names_are_not_mixed_with_classes(lines: Path, tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "out", Lines().schema()) as writer:
        writer.append({"text": "zero", "label": 5, "pad": [0] * 5000})
    what = "has labels but no class names, while the source has the classes 'a', 'b'"
    with pytest.raises(InvalidArgument, match=what):
        append(lines, tmp_path / "out", kind="lines")
    append(lines / "a", tmp_path / "out", kind="lines")
    assert column(tmp_path / "out", "label") == [5, -1, -1]


def test_an_append_needs_a_dataset(lines: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "missing", tmp_path / "empty"):
        with pytest.raises(DatasetNotFound, match=r"no dataset to append to; leave out append"):
            append(lines, out, kind="lines")
        with pytest.raises(DatasetNotFound, match=r"no dataset to append to; leave out append"):
            shardio.convert([{"n": 1}], out, append=True)
    assert not (tmp_path / "missing").exists() and not [*(tmp_path / "empty").iterdir()]


def test_a_dataset_with_added_columns_is_refused(lines: Path, out: Path) -> None:
    for name in ("depth", "flow"):
        add_column(out, name, Array("int64"), range(len(shardio.open(out))))
    before = contents(out)
    with pytest.raises(InvalidArgument, match=r"added columns \(depth, flow\), .* and merge both"):
        append(lines, out)
    with pytest.raises(InvalidArgument, match=r"added columns \(depth, flow\), .* and merge both"):
        shardio.convert([{"n": 1}], out, append=True)
    assert contents(out) == before


# Subsets and statistics.


def test_subsets_stay_and_outdated_statistics_are_dropped(lines: Path, out: Path) -> None:
    split(out, {"train": 0.5, "val": 0.5})
    compute_stats(out)
    compute_stats(out, subset="val")
    val = [sample["text"] for sample in shardio.open(out, subset="val")]
    write(lines / "only", {"a/0.txt": "new"})
    report = append(lines / "only", out)
    stats = shardio.open(out).stats
    assert report.stats_dropped and stats.keys() == {"subsets"} and "val" in stats["subsets"]
    assert [sample["text"] for sample in shardio.open(out, subset="val")] == val
    assert not append(lines / "only", out).stats_dropped
    append(lines, out)  # it has other classes, which statistics count
    assert shardio.open(out).stats == {} and shardio.open(out).subsets == {"train": 4, "val": 3}


# Interruptions.


@pytest.mark.parametrize(
    ("n_inputs", "workers", "then"), [*((n, 0, 0) for n in (4, 5, 6, 7)), (6, 2, 0), (6, 0, 2)]
)
def test_an_interrupted_append_is_resumed_to_the_same_bytes(
    lines: Path, out: Path, whole: dict[str, bytes], n_inputs: int, workers: int, then: int
) -> None:
    before = contents(out)
    with pytest.raises(KeyboardInterrupt) as caught:
        append(lines, out, progress=interrupt_after(n_inputs), workers=workers)
    now = contents(out)
    assert {name: now[name] for name in before} == before and texts(out) == OLD
    assert r"(--append --resume) continues from them" in caught.value.__notes__[0]
    append(lines, out, resume=True, workers=then)
    assert contents(out) == whole


def test_an_interrupted_append_is_reported_with_hints(lines: Path, out: Path) -> None:
    before = contents(out)
    leave_killed(lines, out, execution, "publish_next", append=True)
    interrupted = r"holds an interrupted append; .* \(--append --resume\) .*, delete /.*"
    for options in ({}, {"resume": True}, {"append": True}):
        with pytest.raises(DatasetExists, match=interrupted):
            convert(lines, out, **options)
    shutil.rmtree(out / ".conversion")  # as the message says
    assert contents(out) == before
    append(lines, out)
    assert texts(out) == OLD + NEW


def test_overwrite_replaces_an_interrupted_append(lines: Path, out: Path, tmp_path: Path) -> None:
    leave_killed(lines, out, execution, "publish_next", append=True)
    convert(lines, out, overwrite=True)
    convert(lines, tmp_path / "model")
    assert contents(out) == contents(tmp_path / "model")


def test_an_interrupted_conversion_must_be_resumed_before_an_append(lines: Path, out: Path) -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        convert(lines, out, overwrite=True, progress=interrupt_after(8))
    assert "resume (--resume) continues" in caught.value.__notes__[0]
    assert texts(out) == OLD, "the dataset that is to be replaced can still be read"
    for resume in (False, True):
        with pytest.raises(DatasetExists, match=r"resume it \(--resume\) before appending"):
            append(lines, out, resume=resume)
    convert(lines, out, resume=True)
    assert append(lines, out).n_samples == 0


def test_shards_of_a_killed_writer_and_foreign_files_stay(lines: Path, out: Path) -> None:
    others = {"g000002-000000-000.shard": "left", "notes.txt": "mine"}
    write(out, others)
    append(lines, out)
    assert texts(out) == OLD + NEW
    assert {name: (out / name).read_text() for name in others} == others


# Others who publish meanwhile.


def test_a_generation_published_meanwhile_is_kept(lines: Path, out: Path) -> None:
    def meanwhile(state: Progress) -> None:
        if state.n_inputs_done == state.n_inputs:
            split(out, {"train": 0.5, "val": 0.5})

    report = append(lines, out, progress=meanwhile)
    assert report.generation == 3 and texts(out) == OLD + NEW
    assert shardio.open(out).subsets == {"train": 4, "val": 3}


def test_a_concurrent_commit_wins(
    lines: Path, out: Path, monkeypatch: pytest.MonkeyPatch, read: list[str]
) -> None:
    def late(*given: Any, **changes: Any) -> Any:
        split(out, {"train": 0.5, "val": 0.5})
        return publish_next(*given, **changes)

    with monkeypatch.context() as patch:
        patch.setattr(execution, "publish_next", late)
        with pytest.raises(DatasetConflict, match="another writer published") as caught:
            append(lines, out)
    assert str(out) in str(caught.value)
    assert texts(out) == OLD
    assert load(out).number == 2
    read.clear()
    append(lines, out, resume=True)
    assert read == [] and texts(out) == OLD + NEW
    assert shardio.open(out).subsets == {"train": 4, "val": 3}


def test_classes_published_meanwhile_are_a_conflict(lines: Path, out: Path) -> None:
    def meanwhile(state: Progress) -> None:
        if state.n_inputs_done == state.n_inputs:
            publish_next(out, load(out), classes=("a", "b", "c", "d", "theirs"))

    message = "differs in lineage, fields or classes .* append again"
    with pytest.raises(DatasetConflict, match=message):
        append(lines, out, progress=meanwhile)
    append(lines, out, resume=True)
    assert column(out, "label")[7:] == [0, 5, 5, 7] and texts(out) == OLD + NEW


@pytest.mark.parametrize("of", ["files", "samples"])
def test_undone_if_killed(lines: Path, out: Path, monkeypatch: pytest.MonkeyPatch, of: str) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "_write_pointer", killed)
        patch.setattr(manifest, "_published_number", lambda _: 2)  # nobody cleans up
        with pytest.raises(KeyboardInterrupt):
            split(out, {"train": 0.5, "val": 0.5})
    (out / "generations" / ".000003.json.0.tmp").touch()
    if of == "files":
        report = append(lines, out)
    else:
        sample = {"text": "eight", "label": 0, "pad": [0] * 5000}
        report = shardio.convert([sample], out, append=True)
    assert report.generation == 2 and shardio.open(out).subsets == {}
    assert texts(out)[:8] == [*OLD, "eight"] and len(os.listdir(out / "generations")) == 2


# Samples from an iterable.


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    shardio.convert(({"n": n, "t": str(n)} for n in range(5)), tmp_path / "numbers")
    return tmp_path / "numbers"


def test_samples_are_appended_with_the_schema_of_the_dataset(numbers: Path) -> None:
    compute_stats(numbers)
    more = ({"n": n, "t": str(n)} for n in range(5, 9))
    report = shardio.convert(more, numbers, append=True, shard_bytes=8)
    assert (report.n_samples, report.n_samples_before, report.generation) == (4, 5, 3)
    assert column(numbers, "n") == [*range(9)] and report.stats_dropped
    with shardio.open(numbers) as dataset:
        assert dataset.operation == {"name": "append", "options": {"shard_bytes": 8}}
        assert len(dataset.shards) == 5 and dataset.stats == {}
        assert report.n_bytes == sum(shard.n_bytes for shard in dataset.shards[1:])
    assert verify_dataset(numbers, workers=0).findings == ()


def test_without_samples_there_is_no_generation(numbers: Path) -> None:
    before = contents(numbers)
    report = shardio.convert([], numbers, append=True)
    assert (report.n_samples, report.generation) == (0, 1) and contents(numbers) == before


@pytest.mark.parametrize("sample", [{"n": 1}, {"n": "x", "t": "x"}, {"n": 1, "t": "x", "u": 1}])
def test_a_misfit_leaves_the_dataset_unchanged(numbers: Path, sample: dict[str, Any]) -> None:
    before = contents(numbers)
    with pytest.raises(SchemaError) as caught:
        shardio.convert([{"n": 7, "t": "7"}, sample], numbers, append=True)
    assert str(caught.value).startswith(f"{numbers}, sample 1: ")
    assert contents(numbers) == before


def test_a_given_schema_must_equal_that_of_the_dataset(numbers: Path) -> None:
    other = Schema({"n": Array("int32"), "t": Text()})
    with pytest.raises(InvalidArgument, match="field 'n': expected .*int64.*, found .*int32"):
        shardio.convert([{"n": 7, "t": "7"}], numbers, append=True, schema=other)
    same = shardio.open(numbers).schema
    shardio.convert([{"n": 5, "t": "5"}], numbers, append=True, schema=same)
    assert column(numbers, "n") == [*range(6)]


def test_samples_follow_those_that_others_append_meanwhile(numbers: Path) -> None:
    def samples() -> Generator[dict[str, Any], None, None]:
        yield {"n": 6, "t": "6"}
        shardio.convert([{"n": 5, "t": "5"}], numbers, append=True)
        split(numbers, {"train": 1.0})

    report = shardio.convert(samples(), numbers, append=True)
    assert column(numbers, "n") == [*range(7)] and report.generation == 4
    assert shardio.open(numbers).subsets == {"train": 6}


@pytest.mark.parametrize(("key", "value"), [("hash", 7), ("bytes", "7"), ("bytes", True)])
def test_an_append_compares_recorded_sizes_and_hashes(out: Path, key: str, value: object) -> None:
    place = out / "generations" / "000001.json"
    content = read_checksummed_json(place)
    content["inputs"][0][key] = value
    place.write_bytes(to_checksummed_json(content))
    with pytest.raises(
        DatasetCorrupt, match="'hash' must be texts, 'samples' and 'bytes' must be counts"
    ):
        load(out)
