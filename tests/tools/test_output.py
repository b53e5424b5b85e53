from __future__ import annotations

import io
import json
import sys

import pytest

from shardio._base.progress import format_size
from shardio_tools import output

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (format_size(0), "0 bytes"),
        (format_size(1023), "1,023 bytes"),
        (format_size(1024), "1.0 KiB"),
        (format_size(5 << 30), "5.0 GiB"),
        (format_size(2000 << 40), "2,000.0 TiB"),
        (output.format_duration(0.04), "0.1 s"),
        (output.format_duration(0.16), "0.2 s"),
        (output.format_duration(59.9), "59.9 s"),
        (output.format_duration(61), "1 min 01 s"),
        (output.format_duration(3600 * 26 + 120), "26 h 02 min"),
        (output.format_count(1, "file"), "1 file"),
        (output.format_count(0, "file"), "0 files"),
        (output.format_count(2000, "class", "classes"), "2,000 classes"),
        (output.shorten("abcdef", 6), "abcdef"),
        (output.shorten("abcdefg", 6), "abcde…"),
        (output.escaped("größe\n名前\x1b[2J"), "größe\\n名前\\x1b[2J"),
    ],
)
def test_values_are_said_in_words(found: str, said: str) -> None:
    assert found == said


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-16", "utf-8"])
def test_json_is_json_in_every_encoding(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding, errors="backslashreplace")
    monkeypatch.setattr(sys, "stdout", stream)
    text = "é 名前 😀 \x1b \\"
    output.print_json({"größe": text, "a": float("nan"), "b": [float("inf"), (1.5, None)]})
    stream.flush()
    found = json.loads(raw.getvalue().decode(encoding), parse_constant=pytest.fail)
    assert found == {"größe": text, "a": "nan", "b": ["inf", [1.5, None]]}
