"""Pictures, animations and sheets of samples, as `inspect` writes them to files."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image as Pillow
from PIL import ImageSequence

import shardio
from shardio import Array, Bytes, Image, List, Text, Video
from shardio.format.layout import Kind
from shardio.media import ClipDecoder, StreamEncoder, decode_image, encode_jpeg, pillow_image
from shardio_tools import cli
from shardio_tools.inspect import pictures
from shardio_tools.inspect.pictures import CAPTION, GAP, draw_sheet
from tests.maintenance.datasets import place
from tests.shards import flip

Capture = pytest.CaptureFixture[str]
Pixels = npt.NDArray[np.uint8]

pytestmark = pytest.mark.usefixtures("quick_disk")

N_CLIPS = 7
DAMAGED = 3
MARK = (224, 64, 48)
"""The colour that crosses out damage."""


def clip(i: int) -> Pixels:
    """Return six frames of 16 x 24 pixels, each of one colour."""
    frames = np.zeros((6, 16, 24, 3), np.uint8)
    frames[...] = [20 + 30 * i, 0, 90]
    frames[..., 1] += (40 * np.arange(6, dtype=np.uint8))[:, None, None]
    frames[:, :4, :4] = 255
    return frames


GREY = np.arange(16 * 24, dtype=np.uint16).reshape(16, 24).astype(np.uint8)
COLOUR = clip(2)[1]


def write(folder: Path, fields: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> Path:
    """Write a dataset of the given samples, one in each shard."""
    schema = shardio.Schema(dict(fields))
    with shardio.DatasetWriter(folder, schema, shard_bytes=1, classes=["cat", "dog"]) as out:
        for sample in samples:
            out.append(sample)
    return folder


def of_one(tmp_path: Path, kind: Any, value: Any) -> Path:
    """Write a dataset of one sample with one field."""
    return write(tmp_path / "one", {"x": kind}, [{"x": value}])


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    """Clips in two classes."""
    fields = {"frames": Array("uint8", (6, 16, 24, 3)), "label": Array("int64")}
    samples = [{"frames": clip(i), "label": i % 2} for i in range(N_CLIPS)]
    return write(tmp_path / "clips", fields, samples)


def encoded(n_frames: int, gop: int) -> shardio.EncodedStream:
    """Return a video of 32 x 16 pixels, ten frames per second."""
    encoder = StreamEncoder(32, 16, Fraction(1, 10), gop=gop, crf=10)
    for i in range(n_frames):
        encoder.add(i, np.full((16, 32, 3), 8 * i, np.uint8))
    return encoder.finish()


def inspect(*arguments: object, code: int = 0) -> None:
    assert cli.main(["inspect", *map(str, arguments)]) == code


def inspect_json(capsys: Capture, *arguments: object, code: int = 0) -> Any:
    inspect(*arguments, "--json", code=code)
    return json.loads(capsys.readouterr().out)


def refused(capsys: Capture, *arguments: object) -> str:
    inspect(*arguments, code=2)
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err


def pixels(path: Path) -> Pixels:
    """Return the pixels of a picture as RGB."""
    with Pillow.open(path) as picture:
        assert getattr(picture, "n_frames", 1) == 1
        return np.asarray(picture.convert("RGB"))


def frames(path: Path) -> tuple[list[Pixels], list[int]]:
    """Return every frame of an animation and its duration in milliseconds."""
    found, durations = [], []
    with Pillow.open(path) as picture:
        for frame in ImageSequence.Iterator(picture):
            found.append(np.asarray(frame.convert("RGB")))
            durations.append(int(frame.info["duration"]))
    return found, durations


def shard(dataset: Path, i: int) -> Path:
    return sorted(dataset.glob("*.shard"))[i]


@pytest.mark.parametrize(
    ("shape", "value", "expected"),
    [
        ((16, 24, 3), COLOUR, COLOUR),
        ((3, 16, 24), COLOUR.transpose(2, 0, 1), COLOUR),
        ((None, None, 3), COLOUR, COLOUR),
        ((16, 24), GREY, np.stack([GREY] * 3, axis=-1)),
        ((16, 24, 1), GREY[..., None], np.stack([GREY] * 3, axis=-1)),
        ((1, 1, 16, 24), GREY[None, None], np.stack([GREY] * 3, axis=-1)),
    ],
)
def test_an_array_of_pixels_is_written_as_a_picture(
    shape: tuple[int | None, ...], value: Pixels, expected: Pixels, tmp_path: Path
) -> None:
    folder = of_one(tmp_path, Array("uint8", shape), value)
    inspect(folder, "--image", tmp_path / "out.png")
    assert np.array_equal(pixels(tmp_path / "out.png"), expected)


@pytest.mark.parametrize("kind", [Image(), Bytes(), Array("uint8", (None,))])
def test_a_file_that_is_stored_is_written_as_its_pixels(kind: Any, tmp_path: Path) -> None:
    data = encode_jpeg(COLOUR)
    value = np.frombuffer(data, np.uint8) if isinstance(kind, Array) else data
    folder = of_one(tmp_path, kind, value)
    inspect(folder, "--image", tmp_path / "out.png", "--field", "x")
    assert np.array_equal(pixels(tmp_path / "out.png"), decode_image(data))


@pytest.mark.parametrize("is_encoded", [False, True])
def test_a_list_of_pictures_is_a_clip(is_encoded: object, tmp_path: Path, capsys: Capture) -> None:
    shown = [clip(1)[0], clip(4)[0], np.ascontiguousarray(clip(6)[0][:8])]
    value: list[Any] = shown
    if is_encoded:
        value = [np.frombuffer(encode_jpeg(one, subsampling="444"), np.uint8) for one in shown]
        value = [value[0][:40], *value]
    kind = List(Array("uint8", (None,) if is_encoded else (None, None, 3)))
    folder, n_damaged = of_one(tmp_path, kind, value), len(value) - 3
    facts = inspect_json(capsys, folder, "--image", tmp_path / "out.png", code=n_damaged)
    assert facts["image"]["damaged"] == list(range(n_damaged))
    found = frames(tmp_path / "out.png")[0][n_damaged:]
    last = np.zeros((16, 24, 3), np.uint8)
    last[4:12] = shown[2]  # one of another size lies in the middle
    for one, expected in zip(found, [*shown[:2], last], strict=True):
        assert np.abs(one.astype(int) - expected)[:8, 8:].max() < 8  # far from an edge


def test_a_file_is_replaced_only_if_that_is_asked_for(
    clips: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.png"
    out.write_text("mine")
    assert "pass --overwrite to replace a file" in refused(capsys, clips, "--image", out)
    assert out.read_text() == "mine"
    inspect(clips, "--image", out, "--frame", -2, "--overwrite")
    assert np.array_equal(pixels(out), clip(0)[4])
    capsys.readouterr()
    (tmp_path / "folder.png").mkdir()
    refused(capsys, clips, "--image", tmp_path / "folder.png", "--overwrite")
    # Another process writes there after the check.
    out.write_text("mine")
    monkeypatch.setattr(pictures, "_check_target", lambda *_: None)
    for option in ("--image", "--sheet"):
        assert "pass --overwrite to replace a file" in refused(capsys, clips, option, out)
    assert out.read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"clips", "folder.png", "out.png"}


def test_nothing_is_written_into_a_dataset(clips: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "link").symlink_to(clips)
    (clips / "deep").mkdir()
    before = sorted(clips.rglob("*"))
    for inside in (clips, clips / "deep", tmp_path / "link"):
        for path, option in ((clips, "--sheet"), (shard(clips, 0), "--image")):
            said = refused(capsys, path, option, inside / "out.png")
            assert "is a dataset folder: name another folder" in said
    assert sorted(clips.rglob("*")) == before


@pytest.mark.parametrize("suffix", [".gif", ".webp", ".png", ".PNG"])
def test_a_clip_is_animated(suffix: str, clips: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / f"out{suffix}"
    inspect(shard(clips, 2), "--image", out)
    line = f"wrote {out}: 16 high × 24 wide, frames of sample 0, 6 of 6 frames"
    assert line in capsys.readouterr().out.splitlines()
    found, durations = frames(out)
    assert durations == [40] * 6
    # GIF has 256 colours, WebP loses some.
    near = 0 if suffix.lower() == ".png" else 12
    difference = np.abs(np.stack(found).astype(int) - clip(2))
    assert difference[:, 8:, 8:].max() <= near  # far from an edge


@pytest.mark.parametrize("n_frames", [6, 3])
def test_grey_frames_are_an_animation(n_frames: int, tmp_path: Path) -> None:
    grey = np.ascontiguousarray(clip(0)[:n_frames, ..., 1])
    kind = Array("uint8", (None, 16, 24))
    inspect(of_one(tmp_path, kind, grey), "--image", tmp_path / "out.png")
    assert np.array_equal(np.stack(frames(tmp_path / "out.png")[0])[..., 0], grey)


def test_thins_long_video(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "N_FRAMES", 8)
    out, folder = tmp_path / "out.png", of_one(tmp_path, Video(), encoded(30, 10))
    facts = inspect_json(capsys, folder, "--image", out)["image"]
    numbers = list(range(0, 30, 4))
    assert (facts["frames"], facts["of_frames"]) == (numbers, 30)
    expected = np.empty((8, 16, 32, 3), np.uint8)
    with shardio.open(folder) as dataset, ClipDecoder() as decoder:
        decoder.decode(dataset[0]["x"], numbers, expected)
    found, durations = frames(out)
    assert durations == [400] * 8 and np.array_equal(np.stack(found), expected)


def test_where_several_fields_hold_pictures_one_is_named(tmp_path: Path, capsys: Capture) -> None:
    fields = {"a": Array("uint8", (16, 24)), "b": Array("uint8", (16, 24, 3))}
    folder = write(tmp_path / "two", fields, [{"a": GREY, "b": COLOUR}])
    out = tmp_path / "out.png"
    assert "several fields hold pictures (a, b)" in refused(capsys, folder, "--image", out)
    inspect(folder, "--image", out, "--field", "b")
    assert np.array_equal(pixels(out), COLOUR)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--image out.png --frame 6", "there is no frame 6; the sample has 6"),
        ("--image out.png --field label", "--field label: not a field that can be shown; there"),
        ("--image out.png --field no", "--field no: not a field that can be shown"),
        ("--image out.jpg", "out.jpg: JPEG holds no animation: name a .png, .webp or .gif, or one"),
        ("--image out.bmp", "--image: expected a file name that ends in .png, .webp, .gif, .jpg"),
        ("--image out.mp4", "found 'out.mp4'"),
        ("--image=", "--image: expected a file name that ends in .png"),
        ("--sheet=", "--sheet: expected a file name that ends in .png"),
        ("--image no/out.png", "not found"),
        ("--image out.png --sheet ./out.png", "named by both --image and --sheet"),
        ("--frame 0", "--frame needs --image"),
        ("--frame 0 --sheet out.png", "--frame needs --image"),
        ("--field frames", "--field needs --image or --sheet"),
        ("--overwrite", "--overwrite needs --image or --sheet"),
    ],
)
def test_options_that_fit_nothing_are_refused_before_anything_is_written(
    arguments: str,
    said: str,
    clips: Path,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert said in refused(capsys, clips, *arguments.split())
    assert not any((tmp_path / "here").iterdir())


def test_a_picture_beyond_its_format_is_refused(tmp_path: Path, capsys: Capture) -> None:
    folder = of_one(tmp_path, Image(), encode_jpeg(np.zeros((1, 16_384, 3), np.uint8)))
    said = "WEBP holds at most 16,383 x 16,383 pixels, and the picture has 16,384 x 1: name a .png"
    assert said in refused(capsys, folder, "--image", tmp_path / "out.webp")
    inspect(folder, "--image", tmp_path / "out.png")


def test_a_disk_that_refuses_leaves_nothing(
    clips: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, folder = tmp_path / "new" / "out.png", tmp_path / "new"
    folder.mkdir()

    def refuse(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", refuse)
    inspect(clips, "--image", out, "--overwrite", code=3)
    assert capsys.readouterr().err == f"shardio: {out}: No space left on device\n"
    assert not any(folder.iterdir())


def test_a_sheet_takes_samples_evenly_from_all(tmp_path: Path, capsys: Capture) -> None:
    fields = {"x": Array("uint8", (16, 24))}
    folder = write(tmp_path / "many", fields, [{"x": GREY}] * 72)
    out = tmp_path / "out.jpg"
    facts = inspect_json(capsys, folder, "--sheet", out)["sheet"]
    assert facts["samples"] == list(range(1, 72, 3)) and facts["damaged"] == []
    assert (facts["height"], facts["width"], 3) == pixels(out).shape


def tile(drawn: Pixels, i: int, n_columns: int, side: int) -> tuple[Pixels, Pixels]:
    """Return a tile of a sheet, and its caption."""
    top, left = i // n_columns * (side + GAP + CAPTION) + GAP, i % n_columns * (side + GAP) + GAP
    caption = drawn[top + side : top + side + CAPTION, left : left + side]
    return drawn[top : top + side, left : left + side], caption


def test_a_sheet_has_numbers_and_classes(clips: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out.png"
    inspect(clips, "--sheet", out)
    assert f"wrote {out}: " in (said := capsys.readouterr().out) and "7 samples" in said
    drawn = pixels(out)
    # 24 x 16 pixels, six times as large.
    expected = draw_sheet([(f"{i}  {'dog' if i % 2 else 'cat'}", clip(i)[3]) for i in range(7)])
    assert np.array_equal(drawn, expected)
    one, caption = tile(drawn, 1, 4, 144)
    assert (one[100, 100] == clip(1)[3, 10, 15]).all() and (one[20, 5] == (24, 24, 24)).all()
    others = [tile(drawn, i, 4, 144)[1] for i in (0, 3)]
    assert all(not np.array_equal(caption, other) for other in others)


def test_captions_are_escaped_and_cut() -> None:
    picture = np.zeros((96, 96, 3), np.uint8)

    def caption(text: str) -> Pixels:
        return tile(draw_sheet([(text, picture)]), 0, 1, 96)[1]

    assert np.array_equal(caption("a\x1b\n"), caption(r"a\x1b\n"))
    assert np.array_equal(caption("猫"), caption(r"\u732b"))
    assert np.array_equal(caption("w" * 99), caption("w" * 500))
    assert not np.array_equal(caption("w" * 99), caption("w"))


def test_damaged_samples_are_crossed_out(clips: Path, tmp_path: Path, capsys: Capture) -> None:
    flip(shard(clips, DAMAGED), place(shard(clips, DAMAGED), Kind.COLUMN, "frames")[0])
    out = tmp_path / "out.png"
    facts = inspect_json(capsys, clips, "--sheet", out, code=1)
    assert facts["sheet"]["damaged"] == [DAMAGED]
    (finding,) = facts["damage"]
    assert (Path(finding["path"]), finding["field"]) == (shard(clips, DAMAGED), "frames")
    drawn = pixels(out)
    marked = [i for i in range(N_CLIPS) if (tile(drawn, i, 4, 144)[0] == MARK).all(-1).any()]
    assert marked == [DAMAGED]
    assert (tile(drawn, 4, 4, 144)[0][100, 100] == clip(4)[3, 10, 15]).all()


@pytest.mark.parametrize("how", ["missing", "first page"])
def test_unopened_shard_hides_none(how: str, clips: Path, tmp_path: Path, capsys: Capture) -> None:
    path = shard(clips, DAMAGED)
    path.unlink() if how == "missing" else flip(path, 30)
    facts = inspect_json(capsys, clips, "--sheet", tmp_path / "out.png", code=1)
    assert facts["sheet"]["damaged"] == [DAMAGED]
    assert [finding["path"] for finding in facts["damage"]] == [str(path)]
    arguments = ("--sample", DAMAGED, "--image", tmp_path / "not.png")
    assert inspect_json(capsys, clips, *arguments, code=1)["image"] is None
    inspect(clips, *arguments, code=1)
    assert f"{tmp_path / 'not.png'}: not written; see the damage" in capsys.readouterr().out
    assert not (tmp_path / "not.png").exists()


def test_damage_elsewhere_leaves_the_picture(clips: Path, tmp_path: Path, capsys: Capture) -> None:
    flip(shard(clips, 2), place(shard(clips, 2), Kind.COLUMN, "label")[0])
    arguments = ("--sheet", tmp_path / "all.png", "--image", tmp_path / "out.png", "--sample", 2)
    facts = inspect_json(capsys, clips, *arguments, code=1)
    assert facts["sheet"]["damaged"] == facts["image"]["damaged"] == []
    assert [finding["field"] for finding in facts["damage"]] == ["label"]
    assert facts["sample"]["fields"]["label"] is None
    assert np.array_equal(np.stack(frames(tmp_path / "out.png")[0]), clip(2))


def test_no_sheet_without_a_manifest(clips: Path, tmp_path: Path, capsys: Capture) -> None:
    (clips / "dataset.json").unlink()
    inspect(clips, "--sheet", tmp_path / "out.png", code=1)
    assert "out.png: not written; see the damage" in capsys.readouterr().out
    refused(capsys, clips, "--sheet", clips / "out.png")


def test_a_damaged_video_shows_what_decodes(tmp_path: Path, capsys: Capture) -> None:
    stream = encoded(15, 5)
    # Noise in the place of the second keyframe.
    offset, end = stream.packets["offset"][5:7].tolist()
    data = bytearray(stream.data[:])
    data[offset:end] = b"\xff" * (end - offset)
    broken = shardio.EncodedStream(
        **{name: getattr(stream, name) for name in stream.__slots__ if name != "data"},
        data=bytes(data),
    )
    folder = of_one(tmp_path, Video(), broken)
    out = tmp_path / "out.png"
    facts = inspect_json(capsys, folder, "--image", out, code=1)
    assert facts["image"]["damaged"] == [5, 6, 7, 8, 9]
    (finding,) = facts["damage"]
    assert (finding["code"], finding["field"], finding["sample"]) == ("media", "x", 0)
    with Pillow.open(out) as picture:
        shown = [np.asarray(one.convert("RGB")) for one in ImageSequence.Iterator(picture)]
    assert np.abs(shown[-1][8, 8].astype(int) - 8 * 14).max() < 8
    assert any((one == MARK).all(-1).any() for one in shown)
    inspect(folder, "--image", tmp_path / "one.png", "--frame", 7, code=1)
    assert not (tmp_path / "one.png").exists()


def test_what_a_sample_lacks_is_no_damage(tmp_path: Path, capsys: Capture) -> None:
    kind = Image(optional=True)
    folder = write(tmp_path / "some", {"x": kind}, [{"x": encode_jpeg(COLOUR)}, {"x": None}])
    out = tmp_path / "out.png"
    assert inspect_json(capsys, folder, "--sheet", out)["sheet"]["damaged"] == []
    assert not (pixels(out) == MARK).all(-1).any()
    said = refused(capsys, folder, "--image", tmp_path / "not.png", "--sample", 1)
    assert "sample 1 has nothing to show in field 'x'" in said
    said = refused(capsys, folder, "--image", tmp_path / "not.png", "--frame", 0)
    assert "field 'x' holds pictures; --frame is for clips and videos" in said


def test_a_dataset_without_pictures_says_so(tmp_path: Path, capsys: Capture) -> None:
    folder = of_one(tmp_path, Text(), "no picture")
    said = refused(capsys, folder, "--sheet", tmp_path / "out.png")
    assert said.endswith(": no field holds pictures\n")
    files = write(tmp_path / "files", {"x": Bytes()}, [{"x": b"?"}])
    said = refused(capsys, files, "--sheet", tmp_path / "out.png")
    assert "no field holds pictures; if x has picture files, choose one with --field NAME" in said
    empty = write(tmp_path / "empty", {"x": Image()}, [])
    for option in ("--sheet", "--image"):
        said = refused(capsys, empty, option, tmp_path / "out.png")
        assert "there is no sample to show" in said


def test_without_pillow_the_extra_is_named(
    clips: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    pillow_image.cache_clear()
    for option in ("--image", "--sheet"):
        inspect(clips, option, tmp_path / "out.png", code=3)
        out, err = capsys.readouterr()
        assert out == "" and "pip install '.[images]'" in err
    pillow_image.cache_clear()
    inspect(clips)
