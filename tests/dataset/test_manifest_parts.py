"""Long lists of a generation lie in parts beside it: files that are named for their content."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio import Array, Schema, Text
from shardio import open as open_dataset
from shardio.dataset import external_lists
from shardio.dataset.external_lists import InputList, ShardList
from shardio.dataset.generation import ColumnGroup, Generation
from shardio.dataset.manifest import load, load_generation, publish, publish_next, recover, withdraw
from shardio.dataset.selection import RowRuns
from shardio.errors import DatasetConflict, DatasetCorrupt, SchemaError, ShardUnsupported
from shardio.maintenance import add_column, compute_stats, verify_dataset
from shardio.shard.writer import ShardSummary
from tests.faults.failing import FailingDisk, before_calls
from tests.loading import write_dataset
from tests.maintenance.datasets import forge, generation_file, tree

pytestmark = pytest.mark.usefixtures("quick_disk")

SCHEMA = Schema({"label": Array("int64"), "größe": Text()})
SHARDS = tuple(
    ShardSummary(f"größe {i}.shard", 10 * i, 4096 + i, f"{i + 1:032x}") for i in range(7)
)
INPUTS = tuple(
    {"path": f"a/Bär {i}", "outcome": "converted", "samples": i, "detail": {"2": 0.5, "10": [i]}}
    for i in range(9)
)


@pytest.fixture(autouse=True)
def lists_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_lists, "MAX_INLINE_ENTRIES", 4)


def publish_in(folder: Path, **changes: Any) -> Generation:
    details: dict[str, Any] = {"shards": SHARDS, "inputs": INPUTS, **changes}
    return publish(folder, schema=SCHEMA, **details)


def parts_in(folder: Path) -> list[str]:
    return sorted(n for n in os.listdir(folder / "generations") if not n.endswith(".json"))


def part(folder: Path, kind: str) -> Path:
    (found,) = (folder / "generations").glob(f"*.{kind}")
    return found


def forge_part(folder: Path, kind: str, content: bytes) -> None:
    """Write another external list, which the generation names as its own writer would have."""
    named: dict[str, bytes] = {}
    forge(
        generation_file(folder),
        lambda g: g.update(
            {kind: external_lists.add_external_list(named, kind, content, g[kind]["count"])}
        ),
    )
    ((name, _),) = named.items()
    (folder / "generations" / name).write_bytes(content)


@pytest.fixture
def published(tmp_path: Path) -> Path:
    publish_in(tmp_path)
    return tmp_path


def test_long_lists_are_read_back_as_they_were_published(tmp_path: Path) -> None:
    generation = publish_in(tmp_path)
    found = load(tmp_path)
    assert found == generation and generation == found
    assert [*found.shards] == [*SHARDS] and found.inputs == INPUTS
    assert found.shards == ShardList.of(SHARDS) != ShardList.of(SHARDS[::-1])
    assert found.shards.file is not None and isinstance(found.inputs, InputList)
    assert found.n_samples == 210 and found.shards.samples.tolist() == [10 * i for i in range(7)]
    assert (found.shards[-1], found.shards[2:4]) == (SHARDS[-1], SHARDS[2:4])
    assert found.names == [shard.name for shard in SHARDS]
    assert repr(found.shards) == "ShardList(7 shards)"
    assert found.shards.n_bytes == sum(shard.n_bytes for shard in SHARDS)
    assert repr(found.inputs).startswith("InputList(9 entries, ")
    assert found.inputs != INPUTS[:-1]
    assert {file.count for file in found.external_lists} == {7, 9}
    assert [file.read() != b"" for file in found.external_lists] == [True, True]
    assert [*found.files] == [(shard, SCHEMA) for shard in SHARDS]
    with pytest.raises(IndexError):
        found.shards[7]
    suffixes = {path.suffix for path in (tmp_path / "generations").iterdir()}
    assert suffixes == {".json", ".shards", ".inputs"}
    content = json.loads((tmp_path / "generations/000001.json").read_text())
    assert content["required"] == ["external_lists"]


def test_a_list_that_is_not_long_stays_in_the_generation(tmp_path: Path) -> None:
    publish_in(tmp_path, shards=SHARDS[:4], inputs=INPUTS[:4])
    content = json.loads((tmp_path / "generations/000001.json").read_text())
    assert "required" not in content and parts_in(tmp_path) == []
    assert len(content["shards"]) == len(content["inputs"]) == 4
    publish_in(tmp_path / "b", inputs=INPUTS[:4])
    assert [Path(name).suffix for name in parts_in(tmp_path / "b")] == [".shards"]


def test_next_generation_reuses_parts(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = parts_in(published)
    monkeypatch.setattr(InputList, "entries", property(lambda _: pytest.fail("inputs are read")))
    second = publish_next(published, load(published), classes=("ant",))
    assert parts_in(published) == before
    monkeypatch.undo()
    third = publish_next(published, second, shards=(*second.shards, *SHARDS[:0]))
    assert parts_in(published) == before
    assert load(published) == third


def test_growing_list_moves_to_a_part(tmp_path: Path) -> None:
    first = publish_in(tmp_path, shards=SHARDS[:3], inputs=INPUTS[:3])
    second = publish_next(tmp_path, first, shards=SHARDS, inputs=INPUTS)
    third = publish_next(tmp_path, second, subsets={"some": RowRuns([0], [9])})
    assert [load_generation(tmp_path, n) for n in (1, 2, 3)] == [first, second, third]
    assert len(parts_in(tmp_path)) == 2


def test_side_shards_lie_in_a_part_of_their_own(tmp_path: Path) -> None:
    beside = tuple(
        ShardSummary(f"s{i}.shard", shard.n_samples, 1, f"{i + 99:032x}")
        for i, shard in enumerate(SHARDS)
    )
    side = ColumnGroup(Schema({"x": Text()}), ShardList.of(beside))
    found = publish_next(tmp_path, publish_in(tmp_path), column_groups=(side,))
    assert load(tmp_path) == found
    files = [*load(tmp_path).files]
    assert len(files) == 14 and files[8][0] == beside[1]
    content = json.loads((tmp_path / "generations/000002.json").read_text())
    assert content["required"] == ["external_lists", "column_groups"]
    assert [Path(name).suffix for name in parts_in(tmp_path)].count(".shards") == 2
    # Those of sides are named, too: who publishes next removes neither.
    following = publish_next(tmp_path, found, classes=("ant",))
    assert load(tmp_path) == following and load_generation(tmp_path, 2) == found


def test_inputs_are_read_on_access(published: Path) -> None:
    place = part(published, "inputs")
    place.write_bytes(place.read_bytes().replace(b"converted", b"convertee", 1))
    with open_dataset(published) as dataset:
        assert len(dataset.inputs) == 9
        with pytest.raises(DatasetCorrupt, match=f"{place.name}: changed since it was written"):
            _ = dataset.inputs[0]
    place.unlink()
    with pytest.raises(DatasetCorrupt, match=f"{place.name}: is missing"):
        list(load(published).inputs)


def test_opening_builds_no_shard_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = [ShardSummary(f"{i}.shard", 3, 4096, f"{i:032x}") for i in range(1000)]
    publish_in(tmp_path, shards=shards)
    monkeypatch.setattr(external_lists, "ShardSummary", lambda *_: pytest.fail("one is described"))
    with open_dataset(tmp_path) as dataset:
        assert (len(dataset), len(dataset.shards)) == (3000, 1000)
        assert dataset.locate(np.array([0, 2999])).tolist() == [0, 999]


def read_lists(folder: Path) -> tuple[int, int]:
    """Load the generation and read all its inputs; return the lengths of both lists."""
    found = load(folder)
    return len(found.names), len(list(found.inputs))


@pytest.mark.parametrize(("kind", "n"), [("shards", 7), ("inputs", 9)])
def test_damage_of_any_byte_of_a_list_is_found(published: Path, kind: str, n: int) -> None:
    place = part(published, kind)
    whole = place.read_bytes()
    damaged = (whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(len(whole)))
    for other in (*damaged, whole[:-1], whole + b"\0", b""):
        place.write_bytes(other)
        with pytest.raises(
            DatasetCorrupt, match=f"{place.name}: changed since it was written"
        ) as c:
            read_lists(published)
        expected = f"expected {len(whole)} bytes with id {place.stem}, found {len(other)} bytes"
        assert expected in str(c.value)
    place.unlink()
    with pytest.raises(DatasetCorrupt, match=f"is missing; a generation keeps a list of {n} there"):
        read_lists(published)


def columns(n_samples: int = 1, n_bytes: int = 1, names: bytes = b"") -> bytes:
    numbers = np.array([n_samples] * 7 + [n_bytes] * 7, "<i8").tobytes()
    return numbers + bytes(16 * 7) + (names or b"".join(b"%d.shard\0" % i for i in range(7)))


INPUT = b'{"outcome":"x","path":"y"'


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        ("shards", b"short", "too short for 7 shards"),
        ("shards", columns(n_samples=-1), "must be counts"),
        ("shards", columns(n_bytes=-1), "must be counts"),
        ("shards", columns(names=b"a.shard\0" * 6), "expected 7 names"),
        ("shards", columns(names=b"a.shard\0" * 8), "expected 7 names"),
        ("shards", columns(names=b"a.shard\0" * 7 + b"x"), "expected 7 names"),
        ("shards", columns(names=b"a.shard\0" * 6 + b"a.txt\0"), "expected 7 names"),
        ("shards", columns(names=b"/a.shard\0" * 7), "expected 7 names"),
        ("shards", columns(names=b"a.shard\0" * 7), "a shard is named twice"),
        ("shards", columns(names=b"\xff.shard\0" * 7), "not UTF-8"),
        ("shards", columns(names=b"a" * 250 + b".shard\0" + b"a.shard\0" * 6), "more than 255"),
        ("shards", columns(n_samples=1 << 46), "at most 2\\^48"),
        ("inputs", b"{", "not lines of JSON"),
        ("inputs", b"[]\n" * 9, "must be a dict"),
        ("inputs", (INPUT + b"}\n") * 8, "expected 9 lines"),
        ("inputs", b'{"path":"y","outcome":"x"}\n' * 9, "canonical"),
        (
            "inputs",
            b'{"outcome":"x","path":7}\n' * 9,
            "input 0: 'path' and 'outcome' must be texts",
        ),
        ("inputs", (INPUT + b',"z":NaN}\n') * 9, "not lines of JSON"),
        ("inputs", INPUT + b',"z":' + b"[" * 300 + b"]" * 300 + b"}\n", "nested more than 256"),
    ],
)
def test_invalid_list_is_corrupt(published: Path, kind: str, content: bytes, message: str) -> None:
    forge_part(published, kind, content)
    place = generation_file(published) if "twice" in message or "2\\^" in message else None
    with pytest.raises(DatasetCorrupt, match=message) as caught:
        read_lists(published)
    names = (
        [f"{place}: "]
        if place
        else [f"{published / 'generations' / n}: " for n in parts_in(published)]
    )
    assert str(caught.value).startswith(tuple(names))


def test_a_name_may_have_255_bytes(published: Path) -> None:
    names = b"a" * 249 + b".shard\0" + b"".join(b"%d.shard\0" % i for i in range(6))
    forge_part(published, "shards", columns(names=names))
    assert len(load(published).shards[0].name) == 255


@pytest.mark.parametrize(
    "wrong",
    [{}, {"id": "../../x"}, {"id": "A" * 32}, {"bytes": -1}, {"count": True}, {"count": 0}],
    ids=repr,
)
@pytest.mark.parametrize("kind", ["shards", "inputs"])
def test_invalid_reference_is_corrupt(published: Path, wrong: dict[str, object], kind: str) -> None:
    forge(
        generation_file(published),
        lambda g: g.update({kind: {**g[kind], **wrong} if wrong else {}}),
    )
    with pytest.raises(DatasetCorrupt, match=f"{kind} must be a list, or refer to an external"):
        load(published)


def test_required_must_say_that_there_are_parts(published: Path) -> None:
    forge(generation_file(published), lambda g: g.pop("required"))
    with pytest.raises(DatasetCorrupt, match="must name 'external_lists' if a list is external"):
        load(published)
    forge(generation_file(published), lambda g: g.update(required=["external_lists", "later"]))
    with pytest.raises(ShardUnsupported, match="needs 'later'"):
        load(published)


def test_part_may_not_link_out(published: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    place = part(published, "shards")
    target = tmp_path_factory.mktemp("elsewhere") / "x"
    os.rename(place, target)
    place.symlink_to(target)
    with pytest.raises(DatasetCorrupt, match="leads out of the dataset"):
        load(published)


@pytest.mark.parametrize("inputs", [[{"path": "\ud800"}], [{"detail": {1, 2}}]], ids=repr)
def test_values_that_are_not_json_are_refused(tmp_path: Path, inputs: list[Any]) -> None:
    with pytest.raises(SchemaError, match="cannot be written"):
        publish_in(tmp_path, inputs=[*INPUTS, *inputs])
    assert list(tmp_path.iterdir()) == []


# Crashes and competitors.


def test_parts_synced_before_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FailingDisk()
    disk.install(monkeypatch)
    publish_in(tmp_path)
    calls = [f"{call.kind} {Path(call.path).suffix}" for call in disk.calls]
    written = ["create .tmp", "write .tmp", "fsync .tmp"]
    folder = f"fsync {tmp_path.suffix}"
    assert calls[-21:] == [
        *(*written, "rename .shards", folder),
        *(*written, "rename .inputs", folder),
        *(*written, "link .json", "unlink .tmp", folder),
        *(*written, "rename .json", folder),
    ]


class WorkerExit(BaseException):
    """The error that ends a writer in the middle."""


def test_killed_writer_leaves_the_old_or_the_new_generation(tmp_path: Path) -> None:
    outcomes = set()
    for n in range(1, 40):
        folder = tmp_path / str(n)
        first = publish_in(folder, inputs=INPUTS[:2])
        had = parts_in(folder)
        second = {"shards": SHARDS[:6], "inputs": INPUTS}
        n_left = itertools.count(1 - n)

        def die(*_: object, n_left: Iterator[int] = n_left) -> None:
            if next(n_left) >= 0:
                raise WorkerExit

        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(WorkerExit):
            before_calls(patch, die)
            publish_next(folder, first, **second)
        assert load(folder).number in (1, 2)
        found = recover(folder)
        outcomes.add(found.number)
        if found.number == 1:
            assert found == first and parts_in(folder) == had
            found = publish_next(folder, found, **second)
        assert [*found.shards] == [*SHARDS[:6]] and found.inputs == INPUTS
        assert not [name for name in os.listdir(folder / "generations") if name.startswith(".")]
    assert outcomes == {1, 2}


def test_failed_publish_leaves_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(OSError, match="No space"):
        publish_in(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_losing_publisher_leaves_only_the_parts_of_the_winner(published: Path) -> None:
    before = tree(published)
    for shards in (SHARDS[:5], SHARDS):
        with pytest.raises(DatasetConflict, match="generation 1 already exists") as caught:
            publish_in(published, shards=shards)
        assert str(caught.value).startswith(f"{published}: ")
        assert "another writer published first" in str(caught.value)
    assert tree(published) == before
    assert load(published).shards == SHARDS


def test_half_written_part_is_overwritten(published: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    (other / "generations").mkdir(parents=True)
    for name in parts_in(published):
        (other / "generations" / name).write_bytes(b"half")
    assert publish_in(other) == load(other)
    assert read_lists(other) == (7, 9)
    assert parts_in(other) == parts_in(published)


def test_a_generation_that_is_withdrawn_takes_its_parts_along(published: Path) -> None:
    lineage = load(published).lineage
    withdraw(published, "0" * 16)
    assert load(published).shards == SHARDS, "another dataset is not withdrawn"
    withdraw(published, lineage)
    assert not (published / "generations").exists()
    withdraw(published, lineage)
    assert not (published / "generations").exists()


def test_parts_stay_where_a_generation_cannot_be_read(published: Path) -> None:
    publish_next(published, load(published), classes=("ant",))
    (published / "generations" / "000001.json").write_text("{}")
    (published / "generations" / f"{'0' * 32}.shards").touch()
    before = parts_in(published)
    recover(published)
    assert parts_in(published) == before


def test_no_parts_no_older_generation_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = publish_in(tmp_path, shards=SHARDS[:1], inputs=())
    monkeypatch.setattr(external_lists, "read_checksummed_json", pytest.fail)
    assert publish_next(tmp_path, first, classes=("ant",)).number == 2


# Real datasets.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    samples = ({"label": i, "größe": str(i)} for i in range(12))
    made = Path(write_dataset(tmp_path / "d", 12, 6, SCHEMA, samples))
    publish_next(made, load(made), inputs=INPUTS)
    return made


def test_a_dataset_with_parts_is_read_and_its_audit_is_sound(folder: Path) -> None:
    assert len(parts_in(folder)) == 2
    with open_dataset(folder) as dataset:
        assert [int(sample["label"]) for sample in dataset] == list(range(12))
        assert dataset.locate(np.arange(12)).tolist() == [i // 2 for i in range(12)]
    report = verify_dataset(folder, workers=0)
    assert (report.findings, report.unknown, report.n_shards) == ((), (), 6)


def test_an_audit_names_the_part_that_is_damaged(folder: Path) -> None:
    publish_next(folder, load(folder), classes=("ant",))  # with the same inputs
    place = part(folder, "inputs")
    whole = place.read_bytes()
    place.write_bytes(whole[:-1])
    (finding,) = verify_dataset(folder, workers=0).findings
    assert (finding.path, finding.code) == (str(place), "dataset")
    assert finding.message.startswith("changed since it was written")
    place.write_bytes(whole)
    place = part(folder, "shards")
    place.write_bytes(place.read_bytes()[1:])
    found = verify_dataset(folder, workers=0).findings
    assert f"{place.name}: changed since it was written" in found[0].message


def test_an_audit_lists_a_part_that_no_generation_names(folder: Path) -> None:
    name = f"{'0' * 32}.shards"
    (folder / "generations" / name).touch()
    assert verify_dataset(folder, workers=0).unknown == (f"generations/{name}",)
    recover(folder)
    assert name not in parts_in(folder)
    (folder / "generations" / name).touch()
    publish_next(folder, load(folder), classes=("ant",))
    assert name not in parts_in(folder)


def test_inputs_that_are_damaged_are_met_before_the_work_not_behind_it(folder: Path) -> None:
    part(folder, "inputs").write_bytes(b"[]\n")

    def compute(_: object) -> None:
        pytest.fail("a value is computed")

    with pytest.raises(DatasetCorrupt, match="shardio repair recovers the samples"):
        add_column(folder, "x", Array("int64"), compute, batch_size=4, workers=0)
    with pytest.raises(DatasetCorrupt, match="changed since it was written"):
        compute_stats(folder, progress=lambda _: pytest.fail("a shard is counted"))
    assert load(folder).number == 2
