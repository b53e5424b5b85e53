"""Conversions in this process, their reasons, and plain values, for tests of converters."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import InvalidArgument

DTYPES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()


def convert(src: Path, out: Path, **options: Any) -> shardio.ConversionReport:
    return shardio.convert(src, out, **{"workers": 0, **options})


def stored(out: Path) -> list[dict[str, Any]]:
    with shardio.open(out) as dataset:
        return [dict(sample) for sample in dataset]


def reasons(report: shardio.ConversionReport) -> dict[str, str]:
    return {one.name: one.reason for one in report.broken}


def only_reason(report: shardio.ConversionReport) -> str:
    (one,) = report.broken
    return one.reason


def check_broken(
    root: Path, out: Path, files: Mapping[str, tuple[str | bytes, str]], **options: Any
) -> shardio.ConversionReport:
    """Convert files beside others, and check that each is broken for its reason."""
    write(root, {name: content for name, (content, _) in files.items()})
    report = convert(root, out, **options)
    found = reasons(report)
    assert {n: found.get(n) for n, (_, why) in files.items() if why not in found.get(n, "")} == {}
    return report


def check_refused(
    src: Path, out: Path, cases: Iterable[tuple[dict[str, Any], str]], **more: Any
) -> None:
    """Check that options are refused, each with its reason, and that nothing is written."""
    for options, reason in cases:
        with pytest.raises(InvalidArgument) as error:
            convert(src, out, **more, **options)
        assert reason in str(error.value)
    assert not out.exists()


def plain(value: Any) -> Any:
    """Return a value without NumPy's types."""
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [plain(one) for one in value]
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def write(root: Path, files: Mapping[str, str | bytes]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
