"""Objects whose methods raise, as options and as results of functions: no bare error of theirs."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

import shardio
from shardio import InvalidArgument, ShardLoader
from shardio.errors import TransformError
from shardio.transforms import Compose, OnTensors
from tests.loading import TWO_FIELDS, two_fields, write_dataset


class WithoutRepr:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class WithoutClass:
    @property
    def __class__(self) -> Any:
        raise RuntimeError("no class")

    @__class__.setter
    def __class__(self, kind: Any) -> None:  # as type checkers want it
        raise RuntimeError("no class")

    def __call__(self, sample: Any) -> Any:
        return sample


class WithoutAttributes:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")

    def __call__(self, sample: Any) -> Any:
        return sample


KINDS = WithoutRepr, WithoutClass, WithoutAttributes
OPTIONS = [*inspect.signature(ShardLoader).parameters][2:]
API: Any = shardio  # without its types, which refuse these calls


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("hostile") / "set"
    return write_dataset(path, 6, 1, TWO_FIELDS, two_fields(6))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("option", OPTIONS)
def test_as_an_option(folder: str, option: str, kind: type) -> None:
    given = {"num_workers": 0, "output": "numpy", option: kind()}
    if option == "device":
        given["output"] = "tinygrad"
    if option == "max_skips":
        given["on_error"] = "skip"
    with pytest.raises(InvalidArgument, match=rf"(^|\b){option}\b"):
        API.ShardLoader(folder, 4, **given)


@pytest.mark.parametrize("kind", KINDS)
def test_in_transforms_and_as_a_path(kind: type) -> None:
    with pytest.raises(InvalidArgument, match="^(Compose|each transform)"):
        Compose(kind())
    with pytest.raises(InvalidArgument, match="^OnTensors"):
        OnTensors(kind())
    if kind is WithoutRepr:
        with pytest.raises(InvalidArgument, match="found an object of WithoutRepr, whose repr ra"):
            API.open(kind())


@pytest.mark.parametrize("option", ["transform", "batch_transform", "collate"])
@pytest.mark.parametrize("is_field", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_as_a_result(folder: str, option: str, kind: type, *, is_field: bool) -> None:
    def make(given: Any) -> Any:
        return {"x": kind()} if is_field else kind()

    loader = API.ShardLoader(folder, 4, num_workers=0, output="numpy", **{option: make})
    with loader, pytest.raises(TransformError, match=r"\n  at .*sample 0 of shard"):
        next(iter(loader))
