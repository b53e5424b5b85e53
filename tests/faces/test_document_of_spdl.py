"""The document of SPDL's DataLoader holds here: signature, meaning, and its example."""

from __future__ import annotations

import glob
import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio import DataLoader
from shardio.media import encode_jpeg, load_image

DOCUMENTED: dict[str, Any] = {
    "preprocessor": None,
    "batch_size": None,
    "drop_last": False,
    "aggregator": None,
    "transfer_fn": None,
    "buffer_size": 3,
    "num_threads": 8,
    "timeout": None,
    "output_order": "completion",
}


def test_parameters_and_defaults_are_those_of_the_document() -> None:
    source, *others = inspect.signature(DataLoader).parameters.values()
    assert (source.name, source.kind) == ("src", source.POSITIONAL_OR_KEYWORD)
    assert all(each.kind is each.KEYWORD_ONLY for each in others)
    assert {each.name: each.default for each in others[: len(DOCUMENTED)]} == DOCUMENTED


def test_an_aggregator_is_a_function_of_a_list_async_or_not() -> None:
    async def total(items: list[int]) -> int:
        return sum(items)

    for aggregator in (sum, total):
        loader = DataLoader(range(5), batch_size=2, aggregator=aggregator, output_order="input")
        assert list(loader) == [1, 5, 4]


def test_the_transfer_function_gets_what_the_aggregator_gives() -> None:
    loader = DataLoader(range(4), batch_size=2, aggregator=sum, transfer_fn=str, num_threads=1)
    assert list(loader) == ["1", "5"]


@pytest.fixture
def root_dir(tmp_path: Path) -> str:
    for i in range(20):
        path = tmp_path / str(i % 3) / f"{i}.JPEG"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encode_jpeg(np.full((60, 80, 3), 10 * i, np.uint8)))
    return str(tmp_path)


def test_the_documents_example_of_pictures(root_dir: str) -> None:
    def source(root_dir: str) -> Iterable[str]:
        yield from glob.iglob(f"{root_dir}/**/*.JPEG", recursive=True)

    width, height, batch_size = 24, 16, 8

    def decode_image(path: str) -> np.ndarray[Any, Any]:
        return load_image(path, np.empty((height, width, 3), np.uint8), fit="stretch")

    def batchify(data: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        return np.stack(data)

    def transfer(cpu_buffer: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return cpu_buffer.copy()

    dataloader = DataLoader(
        src=source(root_dir),
        preprocessor=decode_image,
        batch_size=batch_size,
        aggregator=batchify,
        transfer_fn=transfer,
    )
    batches = list(dataloader)
    assert sorted(len(batch) for batch in batches) == [4, 8, 8]
    levels = sorted(int(picture.mean().round()) for batch in batches for picture in batch)
    assert levels == pytest.approx([10 * i for i in range(20)], abs=2)
