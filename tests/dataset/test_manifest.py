from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardio import Array, Schema, Text, Video, __version__
from shardio.dataset.generation import Generation, lineage_of
from shardio.dataset.manifest import (
    generation_numbers,
    load,
    publish,
    publish_next,
    refuse_existing,
)
from shardio.dataset.selection import RowRuns
from shardio.dataset.writer import DatasetWriter
from shardio.errors import (
    DatasetConflict,
    DatasetCorrupt,
    DatasetExists,
    DatasetNotFound,
    InvalidArgument,
    SchemaError,
    ShardUnsupported,
)
from shardio.shard.writer import ShardSummary
from shardio.storage import fs
from tests.maintenance.datasets import forge, generation_file, tree

pytestmark = pytest.mark.usefixtures("quick_disk")

SCHEMA = Schema({"label": Array("int64"), "größe": Text()})
SHARDS = (
    ShardSummary("000000-000.shard", 7, 12288, "00112233445566778899aabbccddeeff"),
    ShardSummary("000001-000.shard", 0, 8192, "ffeeddccbbaa99887766554433221100"),
)
DETAILS: dict[str, Any] = {
    "classes": ["ant", "Bär", 'a "quote"'],
    "inputs": [{"path": "ant/a.mp4", "outcome": "converted", "samples": 7}],
    "converter": {"name": "videos", "options": {"frames": 16, "scale": 0.5}},
    "versions": {"av": "1.2.3"},
}


def publish_in(folder: Path, **changes: Any) -> Generation:
    details = {**DETAILS, **changes}
    return publish(folder, schema=SCHEMA, shards=details.pop("shards", SHARDS), **details)


@pytest.fixture
def published(tmp_path: Path) -> Path:
    publish_in(tmp_path)
    return tmp_path


# What is written.


def test_a_generation_is_read_back_as_it_was_published(tmp_path: Path) -> None:
    generation = publish_in(tmp_path)
    found = load(tmp_path)
    assert found == generation
    assert found.n_samples == 7
    assert (found.classes, [*found.shards]) == (tuple(DETAILS["classes"]), [*SHARDS])
    assert (found.number, found.lineage) == (1, lineage_of(SCHEMA, SHARDS))
    assert found.schema == found.full_schema == SCHEMA
    assert [*found.inputs] == DETAILS["inputs"]
    assert found.converter == DETAILS["converter"]
    assert found.versions == {"shardio": __version__, "av": "1.2.3"}
    assert (found.subsets, found.stats, found.operation, found.column_groups) == ({}, {}, {}, ())
    assert found.view == {"kind": "rows"}
    assert found.names == [shard.name for shard in SHARDS]
    assert [*found.files] == [(shard, SCHEMA) for shard in SHARDS]
    assert found.description == {
        "classes": found.classes,
        "inputs": found.inputs,
        "converter": found.converter,
        "versions": found.versions,
        "view": found.view,
    }
    assert (len(found.shards), found.shards.n_bytes) == (2, 20480)
    content = json.loads(generation_file(tmp_path).read_text())
    optional = {"subsets", "stats", "operation", "column_groups", "required"}
    assert not optional & content.keys()


def test_what_a_generation_says_of_subsets_and_statistics_is_read_back(tmp_path: Path) -> None:
    rows, stats = RowRuns([1, 4], [2, 1]), {"whole": {"label": {"mean": 0.5}}}
    first = publish_in(tmp_path)
    publish_next(tmp_path, first, subsets={"some": rows}, stats=stats, operation={"name": "split"})
    found = load(tmp_path)
    assert found.subsets == {"some": rows}
    assert found.stats == stats
    assert found.operation == {"name": "split"}
    assert (found.number, found.classes) == (2, first.classes)
    assert [*found.inputs] == DETAILS["inputs"]
    assert found.converter == DETAILS["converter"]
    content = json.loads(generation_file(tmp_path, 2).read_text())
    assert content["subsets"] == {"some": {"rows": "1 2 1 1", "samples": 3}}


def test_keys_that_are_numbers_come_back_as_strings(tmp_path: Path) -> None:
    publish_in(tmp_path, converter={"options": {2: "b", 10: "a"}})
    assert load(tmp_path).converter == {"options": {"2": "b", "10": "a"}}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        *(
            ({"converter": {"option": value}}, SchemaError, "cannot be written as JSON")
            for value in (float("nan"), object, {1: 0, "a": 1}, "\ud800")
        ),
        *(({"classes": names}, InvalidArgument, "classes") for names in ("abc", [1, 2], [b"a"])),
    ],
    ids=range(7),
)
def test_unstorable_details_refused(tmp_path: Path, changes: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        publish_in(tmp_path, **changes)
    assert tree(tmp_path) == {}


# The lineage.


def test_the_lineage_depends_on_schema_and_shard_ids_only(tmp_path: Path) -> None:
    plain = publish_in(tmp_path / "a").lineage
    renamed = tuple(ShardSummary("x" + s.name, s.n_samples, s.n_bytes, s.id) for s in SHARDS)
    assert publish_in(tmp_path / "b", shards=renamed, classes=[], inputs=[]).lineage == plain
    assert publish_in(tmp_path / "c", shards=SHARDS[::-1]).lineage != plain
    assert lineage_of(Schema({"label": Array("int32"), "größe": Text()}), SHARDS) != plain


# Damage.


@pytest.mark.parametrize("name", ["dataset.json", "generations/000001.json"])
@pytest.mark.parametrize("flip", [0x01, 0x20, 0x80, 0xFF], ids=hex)
def test_every_changed_byte_is_noticed(published: Path, name: str, flip: int) -> None:
    path = published / name
    raw = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        for i in range(len(raw)):
            os.pwrite(file.fileno(), bytes([raw[i] ^ flip]), i)
            with pytest.raises(DatasetCorrupt, match=path.name):
                load(published)
            os.pwrite(file.fileno(), raw[i : i + 1], i)
    assert path.read_bytes() == raw


@pytest.mark.parametrize("name", ["dataset.json", "generations/000001.json"])
def test_every_truncation_and_every_addition_is_noticed(published: Path, name: str) -> None:
    path = published / name
    raw = path.read_bytes()
    cut = (raw[:n] for n in range(len(raw)))
    for other in (*cut, raw + b"\n", raw + b" ", b"\n" + raw, raw * 2):
        path.write_bytes(other)
        with pytest.raises(DatasetCorrupt) as caught:
            load(published)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [b"null", b"[]", b'"digest"', b"1", b"{}", b"[" * 100_000, b"\xff\xfe", b"1" * 5000, b"NaN"],
    ids=lambda content: repr(content[:12]),
)
def test_a_file_of_something_else_is_corrupt(published: Path, content: bytes) -> None:
    (published / "dataset.json").write_bytes(content)
    with pytest.raises(DatasetCorrupt) as caught:
        load(published)
    assert str(caught.value).startswith(f"{published / 'dataset.json'}: ")
    assert (published / "dataset.json").read_bytes() == content


def test_a_key_given_twice_is_noticed(published: Path) -> None:
    path = published / "dataset.json"
    path.write_bytes(path.read_bytes().replace(b'"version": 1', b'"version": 1,\n "version": 1'))
    with pytest.raises(DatasetCorrupt) as caught:
        load(published)
    assert str(caught.value).startswith(f"{path}: ")


def test_the_message_names_both_digests(published: Path) -> None:
    path = generation_file(published)
    path.write_bytes(path.read_bytes().replace(b'"samples": 7', b'"samples": 8', 1))
    with pytest.raises(DatasetCorrupt, match=r"expected digest [0-9a-f]{16}, found [0-9a-f]{16}"):
        load(published)


def test_a_missing_generation_is_named(published: Path) -> None:
    generation_file(published).unlink()
    with pytest.raises(DatasetCorrupt, match=r"000001\.json: generation 1 is missing"):
        load(published)
    assert generation_numbers(published) == []


# Files that are whole, and break a rule all the same.


GONE = object()
"""Stands for an entry that is left out."""
NAMES: list[Any] = ["../000000-000.shard", "/etc/000000-000.shard", "a/b.shard", "a\0.shard", ""]
NAMES += ["..", "000000-000", "000000-000.shard/", "ä" * 125 + ".shard", ["a.shard"], 7, None]
COUNTS = [-1, 1.0, True, "7", None, 1 << 64, 10**30]
NO_HEX = ["", "0" * 15, "0" * 17, "A" * 16, "0" * 15 + "g", " " + "0" * 15]
KEYS = ["shards", "schema", "classes", "inputs", "lineage", "generation", "converter", "versions"]
WRONG = [GONE, None, 3, "text", [1], [None], [[["deep"]]], True, 0.5]

SUBSETS: list[Any] = [None, [], {}, {"samples": 3}, {"rows": "0 2 3 1"}]
SUBSETS += [{"samples": 2, "rows": "0 2 3 1"}, {"samples": 8, "rows": "0 8"}]
SUBSETS += [{"samples": n, "rows": rows} for n, rows in ((1, [0, 1]), (1.0, "0 1"), (True, "0 1"))]

Rules = dict[str, list[tuple[tuple[str | int, ...], list[Any]]]]
GENERATIONS: Rules = {
    "is not a shard name": [(("shards", 0, "name"), NAMES)],
    "named twice": [(("shards", 1, "name"), ["000000-000.shard"])],
    "counts": [(("shards", 0, "samples"), COUNTS), (("shards", 0, "bytes"), COUNTS)],
    "lineage of 16 hex digits": [(("lineage",), NO_HEX)],
    "id of 32 hex digits": [(("shards", 0, "id"), [wrong * 2 for wrong in NO_HEX])],
    **{f"{key}.* left out": [((key,), [{}])] for key in ("subsets", "stats", "operation")},
    **{f"{key}.* left out": [((key,), [[]])] for key in ("column_groups", "required")},
    r"000001\.json": [
        *(((key,), WRONG) for key in KEYS),
        *(((key,), [{"a": 1}]) for key in KEYS[:-2]),
        *((("shards", 1, key), [GONE]) for key in ("name", "samples", "bytes", "id")),
        (("format_version",), [GONE]),
    ],
    r"000001\.json: input 0: 'path' and 'outcome' must be texts": [
        (("inputs", 0, "path"), [None, 7, GONE]),
        (("inputs", 0, "outcome"), [None, ["converted"], GONE]),
        (("inputs", 0, "reason"), [None, 7]),
        (("inputs", 0, "samples"), ["7", True]),
    ],
    "options must be a dict": [(("converter", "options"), [None, [1], "frames", 7])],
    "is not a version": [(("format_version",), ["", "x.1", "-1.0", 1, None, "².0"])],
    "subset 'some'": [(("subsets",), [{"some": subset} for subset in SUBSETS])],
    **{
        f"{key!r} must be a dict": [((key,), [None, [], "x", 1])]
        for key in ("subsets", "stats", "operation")
    },
    "a view with a kind": [(("view",), [None, "rows", {}, {"kind": None}, {"kind": ["rows"]}])],
}
POINTERS: Rules = {
    "expected a generation": [(("generation",), [0, -1, True, 1.0, "1", None, 10**6, 10**4000])],
    "expected lineage": [(("lineage",), ["0" * 16])],
    "expected format 'shardio dataset'": [(("format",), ["other"])],
    "expected a version": [(("version",), [None, "1", 1.0, True])],
}
VIEWS = [{"kind": "later"}, {"kind": "rows", "step": 2}, {"kind": "clips", "x": 1}]
LATER_GENERATIONS: Rules = {
    r"format 2\.0": [(("format_version",), ["2.0"])],
    "view": [(("view",), VIEWS)],
    "000001.json: field 'größe' has field type 60": [(("schema", "fields", 1, "type"), [60])],
}
LATER_POINTERS: Rules = {"version 2, this shardio reads 1": [(("version",), [2])]}


def cases(name: str, rules: Rules, error: type[Exception]) -> list[Any]:
    return [
        (name, path, value, error, message)
        for message, entries in rules.items()
        for path, values in entries
        for value in values
    ]


@pytest.mark.parametrize(
    ("name", "path", "value", "error", "message"),
    [
        *cases("generations/000001.json", GENERATIONS, DatasetCorrupt),
        *cases("generations/000001.json", LATER_GENERATIONS, ShardUnsupported),
        *cases("dataset.json", POINTERS, DatasetCorrupt),
        *cases("dataset.json", LATER_POINTERS, ShardUnsupported),
    ],
)
def test_a_file_that_breaks_a_rule_is_refused_with_the_reason(
    published: Path, name: str, path: Any, value: Any, error: type[Exception], message: str
) -> None:
    def change(content: Any) -> None:
        *outer, last = path
        for key in outer:
            content = content[key]
        content[last] = value
        if value is GONE:
            del content[last]

    forge(published / name, change)
    with pytest.raises(error, match=message) as caught:
        load(published)
    assert str(caught.value).startswith(f"{published / name}: ")


def test_no_dataset_has_more_samples_than_an_order_can_permute(published: Path) -> None:
    forge(generation_file(published), lambda g: g["shards"][0].update(samples=1 << 48))
    assert load(published).n_samples == 1 << 48
    forge(generation_file(published), lambda g: g["shards"][1].update(samples=1))
    with pytest.raises(DatasetCorrupt, match="at most") as caught:
        load(published)
    path = generation_file(published)
    assert str(caught.value) == f"{path}: {(1 << 48) + 1} samples; at most 2^48 are possible"


def deep(n: int) -> object:
    value: object = 7
    for _ in range(n):
        value = [value]
    return value


def test_generation_nests_at_most_256_deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish_in(tmp_path / "a", converter={"options": {"deep": deep(253)}})
    assert load(tmp_path / "a").converter == {"options": {"deep": deep(253)}}
    with pytest.raises(SchemaError, match="nested more than 256 deep"):
        publish_in(tmp_path / "b", converter={"options": {"deep": deep(254)}})
    with monkeypatch.context() as patch:
        patch.setattr(fs, "_TOO_DEEP", b"no such line")
        publish_in(tmp_path / "c", converter={"options": {"deep": deep(254)}})
    with pytest.raises(DatasetCorrupt, match="nested more than 256 deep"):
        load(tmp_path / "c")


def test_a_generation_under_another_number_is_corrupt(published: Path) -> None:
    os.rename(generation_file(published), generation_file(published, 2))
    forge(published / "dataset.json", lambda p: p.update(generation=2))
    with pytest.raises(DatasetCorrupt, match=r"000002\.json: says that it is generation 1"):
        load(published)
    assert generation_numbers(published) == [2]


def test_a_dataset_that_no_converter_made_needs_no_options(published: Path) -> None:
    forge(generation_file(published), lambda g: g.update(converter={}))
    assert load(published).converter == {}


def put_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(path.parent):
        made.bind(path.name)  # a whole path may be too long for a socket's address


@pytest.mark.parametrize("name", ["dataset.json", "generations/000001.json"])
@pytest.mark.parametrize("put", [Path.mkdir, os.mkfifo, put_socket])
def test_non_files_are_refused(published: Path, name: str, put: Callable[[Path], object]) -> None:
    (published / name).unlink()
    put(published / name)
    with pytest.raises(DatasetCorrupt, match=f"{name}: is a .* expected a file"):
        load(published)


# Later versions.


def test_a_generation_of_a_later_minor_format_is_read(published: Path) -> None:
    forge(generation_file(published), lambda g: g.update(format_version="1.9", later="ignored"))
    assert load(published).shards == SHARDS


CLIPS = {"kind": "clips", "frames": 4, "stride": 2, "step": 5}


@pytest.mark.parametrize("size", [{}, {"size": [32, 48]}])
def test_a_view_of_clips_is_read_as_it_was_published(tmp_path: Path, size: dict[str, Any]) -> None:
    schema = Schema({"video": Video(), "label": Array("int64")})
    publish(tmp_path / "a", schema=schema, shards=SHARDS, view={**CLIPS, **size})
    assert load(tmp_path / "a").view == {**CLIPS, **size}
    assert publish_next(tmp_path / "a", load(tmp_path / "a")).view == {**CLIPS, **size}


@pytest.mark.parametrize(
    "wrong", [{"frames": 0}, {"step": True}, {"stride": None}, {"size": [3]}, {"size": [0, 4]}]
)
def test_invalid_view_of_clips_is_corrupt(tmp_path: Path, wrong: dict[str, Any]) -> None:
    schema = Schema({"video": Video()})
    publish(tmp_path / "a", schema=schema, shards=SHARDS, view=CLIPS)
    forge(generation_file(tmp_path / "a"), lambda g: g["view"].update(wrong))
    with pytest.raises(DatasetCorrupt, match=f"000001.json: view .*: {next(iter(wrong))} must be"):
        load(tmp_path / "a")
    with pytest.raises(InvalidArgument, match=f"{next(iter(wrong))} must be"):
        publish(tmp_path / "b", schema=schema, shards=SHARDS, view={**CLIPS, **wrong})


def test_clips_are_of_one_field_of_videos(published: Path, tmp_path: Path) -> None:
    forge(generation_file(published), lambda g: g.update(view=CLIPS))
    with pytest.raises(DatasetCorrupt, match="clips need one field of videos; the schema has 0"):
        load(published)
    with pytest.raises(InvalidArgument, match="unknown view kind"):
        publish_in(tmp_path / "b", view={"kind": "later"})


# Where there is no dataset.


def test_a_folder_that_is_missing_empty_or_a_file_holds_no_dataset(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "0.shard").touch()
    with pytest.raises(DatasetNotFound, match=f"0.shard: .*ShardReader, .*the folder '{tmp_path}'"):
        load(tmp_path / "0.shard")
    for path, text in (
        (tmp_path / "missing", "there is no such folder"),
        (tmp_path, "holds no dataset.json: not a dataset, or never finished"),
        (tmp_path / "file", "this is a file, not a dataset; to load files of other kinds, convert"),
    ):
        with pytest.raises(DatasetNotFound) as caught:
            load(path)
        assert str(caught.value).startswith(f"{path}: {text}")
    (tmp_path / "0.shard").rename(tmp_path / "a.jpg")
    with pytest.raises(DatasetNotFound) as caught:
        load(tmp_path)
    assert str(caught.value).endswith(f"convert them first: shardio convert {tmp_path} OUT")
    publish_in(tmp_path / "inner")
    with pytest.raises(DatasetNotFound, match=f"did you mean '{tmp_path / 'inner'}'"):
        load(tmp_path)
    with pytest.raises(DatasetNotFound, match=f"open its dataset, the folder '{tmp_path}/inner'$"):
        load(tmp_path / "inner" / "dataset.json")


def test_a_subset_that_is_given_as_a_folder_is_recognized(published: Path) -> None:
    publish_next(published, load(published), subsets={"val": RowRuns([0], [2])})
    with pytest.raises(DatasetNotFound) as caught:
        load(published / "val")
    assert str(caught.value) == (
        f"{published / 'val'}: there is no such folder: write "
        f"shardio.open({str(published)!r}, subset='val')"
    )
    with pytest.raises(DatasetNotFound, match="there is no such folder$"):
        load(published / "other")


def test_a_new_dataset_needs_a_folder_that_is_missing_or_empty(tmp_path: Path) -> None:
    refuse_existing(tmp_path / "missing")
    refuse_existing(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(DatasetExists, match=r"full: already holds data \(x, 1 entries"):
        refuse_existing(tmp_path / "full")
    with pytest.raises(DatasetExists, match="is a file"):
        refuse_existing(tmp_path / "full" / "x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DatasetExists, match="link"):
        refuse_existing(tmp_path / "link")
    publish_in(tmp_path / "done")
    with pytest.raises(DatasetExists, match="already holds a dataset"):
        refuse_existing(tmp_path / "done")


# Crashes and competitors.


def test_second_writer_in_a_folder_is_refused(tmp_path: Path) -> None:
    schema = Schema({"x": Array("int64")})
    with DatasetWriter(tmp_path, schema) as first:
        first.append({"x": 1})
        before = tree(tmp_path)
        with pytest.raises(DatasetExists, match="another operation is writing here; wait for it"):
            DatasetWriter(tmp_path, schema)
        assert tree(tmp_path) == before
    assert load(tmp_path).n_samples == 1


def test_a_writer_that_meets_anothers_shard_is_told_so(tmp_path: Path) -> None:
    writer = DatasetWriter(tmp_path, Schema({"x": Array("int64")}))
    writer.append({"x": 2})
    (tmp_path / "000000-000.shard").write_bytes(b"another's")
    with pytest.raises(DatasetConflict, match="created by another writer") as caught:
        writer.close()
    assert isinstance(caught.value, FileExistsError)
    assert str(caught.value).startswith(f"{tmp_path / '000000-000.shard'}: ")
    assert "choose another folder" in str(caught.value)
    assert tree(tmp_path) == {"000000-000.shard": b"another's"}


@pytest.mark.process
def test_what_a_killed_writer_has_left_is_removed_by_the_next(tmp_path: Path) -> None:
    schema = Schema({"x": Array("int64")})
    pid = os.fork()
    if pid == 0:
        DatasetWriter(tmp_path, schema, shard_bytes=8).append({"x": 1})
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert [path.name for path in tmp_path.glob(".shardio-staging-*/*")] == ["000000.shard"]
    with DatasetWriter(tmp_path, schema) as writer:
        writer.append({"x": 2})
    assert sorted(tree(tmp_path)) == ["000000-000.shard", "dataset.json", "generations/000001.json"]
