"""Datasets of small pictures and clips, and the images that `shardio inspect` writes of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shardio import DatasetWriter, Schema, ShardReader
from shardio_tools import cli

Pixels = npt.NDArray[np.uint8]

N_CLIPS = 7
MARK = (224, 64, 48)
"""The colour that crosses out damage."""


def clip(i: int, n_frames: int = 6) -> Pixels:
    """Return frames of 16 x 24 pixels, each of one colour."""
    frames = np.zeros((n_frames, 16, 24, 3), np.uint8)
    frames[...] = [20 + 30 * i, 0, 90]
    frames[..., 1] += (40 * np.arange(n_frames, dtype=np.uint8))[:, None, None]
    frames[:, :4, :4] = 255
    return frames


def write(folder: Path, fields: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> Path:
    """Write a dataset of the given samples, one in each shard."""
    with DatasetWriter(folder, Schema(dict(fields)), shard_bytes=1, classes=["cat", "dog"]) as out:
        for sample in samples:
            out.append(sample)
    return folder


def of_one(tmp_path: Path, kind: Any, value: Any) -> Path:
    """Write a dataset of one sample with one field."""
    return write(tmp_path / "one", {"x": kind}, [{"x": value}])


def inspect(*arguments: object, code: int = 0) -> None:
    assert cli.main(["inspect", *map(str, arguments)]) == code


def inspect_json(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> Any:
    inspect(*arguments, "--json", code=code)
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    inspect(*arguments, code=2)
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err


def pixels(path: Path) -> Pixels:
    """Return the pixels of a picture as RGB."""
    from PIL import Image as Pillow

    with Pillow.open(path) as picture:
        return np.asarray(picture.convert("RGB"))


def frames(path: Path) -> tuple[list[Pixels], list[int]]:
    """Return every frame of an animation and its duration in milliseconds."""
    from PIL import Image as Pillow
    from PIL import ImageSequence

    found, durations = [], []
    with Pillow.open(path) as picture:
        for frame in ImageSequence.Iterator(picture):
            found.append(np.asarray(frame.convert("RGB")))
            durations.append(int(frame.info["duration"]))
    return found, durations


def damage(path: Path, section: str, offset: int = 0) -> None:
    """Change one byte of a section of a shard."""
    with ShardReader(path) as reader:
        (place,) = [s.offset for s in reader.sections if s.name == section][:1]
    content = bytearray(path.read_bytes())
    content[place + offset] ^= 0x55
    path.write_bytes(content)


def shard(dataset: Path, i: int) -> Path:
    return sorted(dataset.glob("*.shard"))[i]
