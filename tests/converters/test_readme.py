"""The converter that converters/README.md shows is one that works."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

import shardio
from shardio import Input, MediaError, Outcome

README = Path(__file__).resolve().parents[2] / "converters" / "README.md"


def test_the_converter_in_the_readme_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    module = types.ModuleType("my_package_lines")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look there
    exec(code, module.__dict__)
    lines = module.Lines(min_length=3)
    path = tmp_path / "a.txt"
    path.write_text("one\nit\nthree\n")
    samples = lines.samples(Input("a.txt", str(path), 13, 2))
    with shardio.ShardWriter(tmp_path / "a.shard", lines.schema()) as writer:
        for _ in range(2):
            writer.append(next(samples))
    with pytest.raises(StopIteration) as end:
        next(samples)
    assert end.value.value == Outcome("converted")
    with shardio.ShardReader(tmp_path / "a.shard") as reader:
        assert [sample["text"] for sample in reader] == ["one", "three"]
    path.write_bytes(b"\xff\n")
    with pytest.raises(MediaError, match="not UTF-8"):
        list(lines.samples(Input("a.txt", str(path), 2, 2)))
