"""Options for a Ray cluster are checked before anything is created."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import shardio
from shardio.errors import InvalidArgument, UnsupportedEnvironment
from shardio.maintenance import add_column, compute_stats, verify_dataset
from tests.loading import write_dataset


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return write_dataset(tmp_path / "set", 3)


def calls(folder: str, out: Path, **options: Any) -> list[Any]:
    """Return calls of everything that can run on a cluster."""
    return [
        lambda: shardio.convert(Path(folder).parent, out, kind="arrays", **options),
        lambda: shardio.convert([1], out, samples=lambda n: {"n": n}, **options),
        lambda: verify_dataset(folder, **options),
        lambda: compute_stats(folder, **options),
        lambda: add_column(folder, "n", shardio.Array("int64"), len, **options),
    ]


def test_missing_ray_is_named(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for call in calls(folder, tmp_path / "out", engine="ray"):
        with pytest.raises(UnsupportedEnvironment, match=r"pip install '\.\[ray\]'"):
            call()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "spark"}, "engine must be 'local' or 'ray'; found 'spark'"),
        ({"address": "there:1"}, "address 'there:1' is only valid with engine='ray'"),
    ],
)
def test_wrong_options(folder: str, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    for call in calls(folder, tmp_path / "out", **options):
        with pytest.raises(InvalidArgument, match=message):
            call()


def test_unsupported_options(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    with pytest.raises(InvalidArgument, match="workers is 0; with engine='ray' it must be 1"):
        shardio.convert(folder, tmp_path / "out", kind="arrays", engine="ray", workers=0)
    with pytest.raises(InvalidArgument, match="engine: only for a function"):
        add_column(folder, "n", shardio.Array("int64"), range(3), engine="ray")
    with pytest.raises(InvalidArgument, match="gpus is 1; only engine='ray' supports GPUs"):
        add_column(folder, "n", shardio.Array("int64"), len, gpus=1)
    with pytest.raises(InvalidArgument, match="engine: not for samples from an iterable"):
        shardio.convert([{"n": 1}], tmp_path / "out", engine="ray")
