"""The column groups of a generation, and the features that it requires of a reader."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardio import Array
from shardio import open as open_dataset
from shardio.dataset.manifest import load
from shardio.errors import DatasetCorrupt, ShardUnsupported
from shardio.maintenance import add_column, verify_dataset
from tests.maintenance.datasets import LABELS, forge, generation_file, labelled, write

pytestmark = pytest.mark.usefixtures("quick_disk")

N = 6
Content = dict[str, Any]
Change = Callable[[Content], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards, and two columns beside them: generation 3."""
    made = write(tmp_path / "d", N, 2, schema=LABELS, samples=labelled(N))
    add_column(made, "x", Array("float32"), range(N))
    add_column(made, "deep.y", Array("int8"), range(N))
    return made


@pytest.mark.parametrize("required", [["column_groups", "tags"], ["tags"]])
def test_unknown_required_features_are_refused(folder: Path, required: list[str]) -> None:
    place = forge(generation_file(folder, 3), lambda g: g.update(required=required))
    with pytest.raises(ShardUnsupported, match=rf"{place}: needs 'tags', which this shardio"):
        open_dataset(folder)
    with open_dataset(folder, generation=2) as dataset:
        assert list(dataset.schema) == ["label", "source", "x"]
    (finding,) = [f for f in verify_dataset(folder, workers=0).findings if f.path.endswith("json")]
    assert finding.code == "unsupported"


def without(key: str) -> Change:
    return lambda g: g.pop(key)


def sides(change: Callable[[list[Content]], object]) -> Change:
    return lambda g: change(g["column_groups"])


def field_named(name: str) -> Change:
    return sides(lambda s: s[0]["schema"]["fields"][0].update(name=name))


def with_two_fields(s: list[Content]) -> None:
    second = copy.deepcopy(s[0]["schema"]["fields"][0]) | {"id": 1, "name": "z"}
    s[0]["schema"]["fields"].append(second)


MUST_NAME = "'required' must name 'external_lists' if a list is external, then 'column_groups' if"
BROKEN: dict[str, tuple[Change, str]] = {
    "nothing required": (without("required"), MUST_NAME),
    "no sides": (without("column_groups"), MUST_NAME),
    "empty sides": (lambda g: g.update(column_groups=[]), MUST_NAME),
    "twice": (lambda g: g.update(required=["column_groups"] * 2), "are column groups, each once"),
    "a text": (lambda g: g.update(required="column_groups"), "must be a list of names"),
    "no names": (lambda g: g.update(required=[1]), "'required' must be a list of names"),
    "no list": (lambda g: g.update(column_groups={"x": 1}), "'column_groups' must be a list"),
    "no dict": (lambda g: g.update(column_groups=["x"]), "group must be a dict with shards"),
    "no shards": (sides(lambda s: s[0].update(shards=7)), "group must be a dict with shards"),
    "no schema": (sides(lambda s: s[0].pop("schema")), "not a generation: KeyError"),
    "a schema": (sides(lambda s: s[0].update(schema=7)), "not a generation: SchemaError"),
    "two fields": (sides(with_two_fields), "a column group has one field; found 'x', 'z'"),
    "one less": (
        sides(lambda s: s[1]["shards"].pop()),
        r"field 'deep.y': expected \d+ shards, with",
    ),
    "counts": (
        sides(lambda s: s[1]["shards"][0].update(samples=4)),
        r"field 'deep.y': expected \d+ shards, with",
    ),
    "outside": (sides(lambda s: s[1]["shards"][0].update(name="../x.shard")), "not a shard name"),
    "shared": (sides(lambda s: s[0].update(shards=s[1]["shards"])), "a shard is named twice"),
    "a main one": (sides(lambda s: s[1]["shards"][0].update(name="000000-000.shard")), "twice"),
    "known": (field_named("label"), "there is a field 'label' already"),
    "added before": (field_named("deep.y"), "there is a field 'deep.y' already"),
    "below": (field_named("source.x"), "names of fields and of nested records"),
}


@pytest.mark.parametrize(("change", "message"), BROKEN.values(), ids=BROKEN)
def test_invalid_column_groups_are_corrupt(folder: Path, change: Change, message: str) -> None:
    place = forge(generation_file(folder, 3), change)
    with pytest.raises(DatasetCorrupt, match=message) as caught:
        load(folder)
    assert str(place) in str(caught.value)


def test_a_field_of_a_newer_version_is_refused(folder: Path) -> None:
    forge(generation_file(folder, 3), sides(lambda s: s[0]["schema"]["fields"][0].update(type=9)))
    with pytest.raises(ShardUnsupported, match=r"000003\.json: field 'x' has field type 9"):
        load(folder)
