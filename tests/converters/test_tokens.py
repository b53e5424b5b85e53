"""Tokens from raw files: documents, or so many at a time, and nothing of the stream is lost."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import Array
from shardio_converters.records import tokens as module
from tests.converters.helpers import check_refused, reasons, stored, write
from tests.converters.helpers import convert as convert_folder

pytestmark = pytest.mark.usefixtures("quick_disk")


convert = partial(convert_folder, kind="tokens")


def read(out: Path) -> list[list[int]]:
    return [sample["tokens"].tolist() for sample in stored(out)]


def llm_c(tokens: Any, *, magic: int = 20240520, version: int = 1, n_tokens: int = -1) -> bytes:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if n_tokens < 0 else n_tokens
    return header.tobytes() + np.asarray(tokens).tobytes()


@pytest.mark.parametrize("dtype", module.DTYPES)
@pytest.mark.parametrize("block", [1, 3, 7, 1 << 20])
def test_rows_of_tokens(
    block: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BLOCK_TOKENS", block)
    (tmp_path / "train.bin").write_bytes(np.arange(23).astype(dtype).tobytes())
    convert(tmp_path / "train.bin", tmp_path / "out", dtype=dtype, length=5)
    with shardio.open(tmp_path / "out") as dataset:
        assert dataset.schema["tokens"] == Array(dtype, (None,))
    made = [*range(23)]
    assert read(tmp_path / "out") == [made[i : i + 5] for i in range(0, 23, 5)]


@pytest.mark.parametrize("block", [1, 2, 5, 1 << 20])
@pytest.mark.parametrize(
    ("stream", "documents"),
    [
        ([1, 2, 0, 3, 0, 4], [[1, 2, 0], [3, 0], [4]]),
        ([1, 0, 0, 2, 0], [[1, 0], [0], [2, 0]]),
        ([0, 1, 2, 0, 3], [[0, 1, 2], [0, 3]]),
        ([0, 0, 1, 0], [[0], [0, 1], [0]]),
        ([1, 2, 3], [[1, 2, 3]]),
    ],
)
def test_a_token_divides_documents_and_is_kept(
    stream: list[int],
    documents: list[list[int]],
    block: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_BLOCK_TOKENS", block)
    (tmp_path / "train.bin").write_bytes(np.array(stream, "uint16").tobytes())
    convert(tmp_path / "train.bin", tmp_path / "out", dtype="uint16", eot=0)
    assert read(tmp_path / "out") == documents


def test_headers_of_llm_c_are_no_tokens(tmp_path: Path) -> None:
    for magic, version, dtype in ((20240520, 1, "uint16"), (20240801, 7, "uint32")):
        content = llm_c(np.arange(9, dtype=dtype), magic=magic, version=version)
        (tmp_path / "x.bin").write_bytes(content)
        convert(tmp_path / "x.bin", tmp_path / dtype, dtype=dtype, length=9)
        with shardio.open(tmp_path / dtype) as dataset:
            assert dataset.schema["tokens"] == Array(dtype, (None,))
        assert read(tmp_path / dtype) == [[*range(9)]]


def test_files_that_are_not_as_they_say_are_listed(tmp_path: Path) -> None:
    good = np.arange(4, dtype="uint16")
    files: dict[str, str | bytes] = {
        "good.bin": good.tobytes(),
        "none.bin": b"",
        "odd.bin": b"123",
        "cut.bin": llm_c(good)[:-1],
        "more.bin": llm_c(good, n_tokens=3),
        "version.bin": llm_c(good, version=2),
        "wide.bin": llm_c(good, magic=20240801, version=7),
        "meta.pkl": b"pickle",
    }
    write(tmp_path / "in", files)
    report = convert(tmp_path / "in", tmp_path / "out", dtype="uint16")
    assert report.counts == {"converted": 1, "empty": 1, "broken": 5, "unsupported": 1}
    assert reasons(report) == {
        "odd.bin": "3 bytes are not a whole number of uint16",
        "cut.bin": "expected 4 tokens of uint16, found 7 bytes",
        "more.bin": "expected 3 tokens of uint16, found 8 bytes",
        "version.bin": "unknown llm.c header: begins with [20240520, 2, 4]",
        "wide.bin": "expected tokens of uint16, found uint32",
    }


def test_options_that_cannot_be_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"1234")
    refused: list[tuple[dict[str, Any], str]] = [
        ({}, "dtype (--dtype) is None; it must be one of uint8, uint16, uint32, int32, int64"),
        ({"dtype": "float32"}, "is 'float32'; it must be one of"),
        ({"dtype": "uint16", "eot": -1}, "eot is -1"),
        ({"dtype": "uint16", "eot": 65_536}, "eot is 65536: out of range for uint16"),
        ({"dtype": "uint16", "length": 0}, "length is 0"),
        ({"dtype": "uint16", "length": 8, "eot": 1}, "eot and length are mutually exclusive"),
    ]
    check_refused(tmp_path / "x.bin", tmp_path / "out", refused, kind="tokens")
