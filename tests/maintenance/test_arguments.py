"""Operations that are given other things than paths of folders answer with the right call."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import shardio
from shardio import InvalidArgument, maintenance
from shardio.export import export

API: Any = maintenance  # without its types, which refuse these calls
EXPORT: Any = export
URL = "s3://bucket/set"
PARTS = {"a": 0.5, "b": 0.5}
FIELD = shardio.Array("int64")
OF_SOURCES: dict[str, Any] = {
    "merge(out, a, b)": lambda source: API.merge("new", source),
    "reshard(source, out)": lambda source: API.reshard(source, "new"),
    "repair(source, out)": lambda source: API.repair(source, "new"),
    "compact(folder)": API.compact,
    "split(folder, parts)": lambda source: API.split(source, PARTS),
    "add_column(folder, name, field, values)": lambda source: API.add_column(
        source, "n", FIELD, [0]
    ),
    "compute_stats(folder)": API.compute_stats,
    "diff(a, b)": lambda source: API.diff(source, source),
    "verify_dataset(folder)": API.verify_dataset,
    "verify_shard(path)": API.verify_shard,
    "survey_shard(path)": API.survey_shard,
}
OF_OUTPUTS: dict[str, Any] = {
    "merge(out, a, b)": lambda path, out: API.merge(out, path),
    "reshard(source, out)": API.reshard,
    "repair(source, out)": API.repair,
    "export(dataset, out, format)": lambda path, out: EXPORT(path, out, "files"),
}
CALLS: dict[str, tuple[Any, str]] = {
    "sources": (lambda path: API.merge(out="new", sources=[path]), "write merge(out, a, b)"),
    "no source": (lambda path: API.merge("new"), "write merge(out, a, b)"),
    "nothing": (lambda path: API.merge(), "merge needs out: write merge(out, *sources)"),
    "no out": (lambda path: API.reshard(path), "reshard needs out: write reshard(source, out)"),
    "n_shards": (lambda path: API.reshard(path, "new", n_shards=4), "write shard_bytes="),
    "num_proc": (lambda path: API.compute_stats(path, num_proc=4), "write workers="),
    "parts": (lambda path: API.split(path), 'such as split(folder, {"train": 0.9, "val": 0.1})'),
    "lengths": (lambda path: API.split(path, [0.9, 0.1]), 'such as {"train": 0.9, "val": 0.1}; f'),
    "test_size": (lambda path: API.split(path, test_size=0.1), 'split(folder, {"train": 0.9, "v'),
    "values": (lambda path: API.add_column(path, "n", [0]), 'shardio.Array("float32"), values)'),
    "format": (lambda path: EXPORT(path, "new"), "format is one of 'files', 'parquet', 'webdat"),
}


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    shardio.convert([{"x": 1}], "set")
    return "set"


@pytest.mark.parametrize("call", OF_SOURCES)
def test_sources_are_paths_of_this_machine(call: str, path: str) -> None:
    name = call.partition("(")[0]
    with shardio.open(path) as dataset:
        for wrong, end in ((None, ""), (3, ""), ([path], ""), (dataset, ": pass 'set', its path")):
            text = f"{name} takes paths: write {call}; found {wrong!r}{end}"
            with pytest.raises(InvalidArgument, match=f"{re.escape(text)}$"):
                OF_SOURCES[call](wrong)
    with pytest.raises(InvalidArgument, match=f"{URL}: {name} needs a local path: copy the datas"):
        OF_SOURCES[call](URL)


@pytest.mark.parametrize("call", OF_OUTPUTS)
def test_outputs_are_paths_of_this_machine(call: str, path: str, tmp_path: Path) -> None:
    name = call.partition("(")[0]
    with pytest.raises(InvalidArgument, match=re.escape(f"write {call}; found None")):
        OF_OUTPUTS[call](path, None)
    with pytest.raises(InvalidArgument, match=f"{URL}: {name} needs a local path: write to one"):
        OF_OUTPUTS[call](path, URL)
    assert [each.name for each in tmp_path.iterdir()] == ["set"]


@pytest.mark.parametrize("name", CALLS)
def test_calls_by_habit_are_answered_with_the_right_call(name: str, path: str) -> None:
    call, words = CALLS[name]
    with pytest.raises((TypeError, InvalidArgument), match=re.escape(words)):
        call(path)
    assert not Path("new").exists()
