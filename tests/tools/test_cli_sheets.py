"""Sheets of samples, and damaged pictures."""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow
from PIL import ImageSequence

import shardio
from shardio import Array, Image, List, ShardReader, Text, Video
from shardio.media import StreamEncoder, encode_jpeg, pillow_image
from shardio_tools.inspect.image_files import CAPTION, GAP, Tile, draw_sheet
from tests.pictures_seen import (
    MARK,
    N_CLIPS,
    Pixels,
    clip,
    damage,
    frames,
    inspect,
    inspect_json,
    of_one,
    pixels,
    refused,
    shard,
    write,
)

Capture = pytest.CaptureFixture[str]

pytestmark = pytest.mark.usefixtures("quick_disk")

DAMAGED = 3
COLOUR = clip(2)[1]


def tile(drawn: Pixels, i: int, n_columns: int, side: int) -> tuple[Pixels, Pixels]:
    """Return a tile of a sheet, and its caption."""
    top, left = i // n_columns * (side + GAP + CAPTION) + GAP, i % n_columns * (side + GAP) + GAP
    caption = drawn[top + side : top + side + CAPTION, left : left + side]
    return drawn[top : top + side, left : left + side], caption


def test_a_sheet_shows_samples_with_numbers_and_classes(
    clips: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "out.png"
    inspect(clips, "--sheet", out)
    assert f"wrote {out}: " in (said := capsys.readouterr().out) and "7 samples" in said
    drawn = pixels(out)
    # 24 x 16 pixels, six times as large.
    expected = draw_sheet(
        [Tile(f"{i}  {'dog' if i % 2 else 'cat'}", clip(i)[3]) for i in range(7)], 160
    )
    assert np.array_equal(drawn, expected)
    one, caption = tile(drawn, 1, 4, 144)
    assert (one[100, 100] == clip(1)[3, 10, 15]).all() and (one[20, 5] == (24, 24, 24)).all()
    others = [tile(drawn, i, 4, 144)[1] for i in (0, 3)]
    assert all(not np.array_equal(caption, other) for other in others)


def test_a_sheet_takes_samples_evenly_from_all(
    clips: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "out.jpg"
    facts = inspect_json(capsys, clips, "--sheet", out, "--count", 3, "--side", 96)["sheet"]
    assert facts["samples"] == [1, 3, 5] and facts["damaged"] == []
    shape = pixels(out).shape
    assert (facts["height"], facts["width"], 3) == shape
    inspect(clips, "--sheet", out, "--count", 3, "--side", 48, "--overwrite")
    assert pixels(out).shape[1] < shape[1]


def test_captions_are_escaped_and_shortened() -> None:
    picture = np.zeros((96, 96, 3), np.uint8)

    def caption(text: str) -> Pixels:
        return tile(draw_sheet([Tile(text, picture)], 96), 0, 1, 96)[1]

    assert np.array_equal(caption("a\x1b\n"), caption(r"a\x1b\n"))
    assert np.array_equal(caption("猫"), caption(r"\u732b"))
    assert np.array_equal(caption("w" * 99), caption("w" * 500))
    assert not np.array_equal(caption("w" * 99), caption("w"))


def test_a_damaged_sample_is_crossed_out_and_listed(
    clips: Path, tmp_path: Path, capsys: Capture
) -> None:
    damage(shard(clips, DAMAGED), "column")
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
def test_a_shard_that_does_not_open_hides_no_other(
    how: str, clips: Path, tmp_path: Path, capsys: Capture
) -> None:
    place = shard(clips, DAMAGED)
    if how == "missing":
        place.unlink()
    else:
        content = bytearray(place.read_bytes())
        content[30] ^= 1
        place.write_bytes(content)
    facts = inspect_json(capsys, clips, "--sheet", tmp_path / "out.png", code=1)
    assert facts["sheet"]["damaged"] == [DAMAGED]
    assert [finding["path"] for finding in facts["damage"]] == [str(place)]
    arguments = ("--sample", DAMAGED, "--image", tmp_path / "not.png")
    assert inspect_json(capsys, clips, *arguments, code=1)["image"] is None
    inspect(clips, *arguments, code=1)
    assert f"{tmp_path / 'not.png'}: not written; see the damage" in capsys.readouterr().out
    assert not (tmp_path / "not.png").exists()


@pytest.mark.parametrize("name", ["label", "pts"])
def test_what_is_damaged_beside_a_picture_leaves_it(
    name: str, clips: Path, tmp_path: Path, capsys: Capture
) -> None:
    with ShardReader(shard(clips, 2)) as reader:
        place = reader.column_section(name).offset
    content = bytearray(shard(clips, 2).read_bytes())
    content[place] ^= 1
    shard(clips, 2).write_bytes(content)
    arguments = ("--sheet", tmp_path / "all.png", "--image", tmp_path / "out.png", "--sample", 2)
    facts = inspect_json(capsys, clips, *arguments, code=1)
    assert facts["sheet"]["damaged"] == facts["image"]["damaged"] == []
    assert {finding["field"] for finding in facts["damage"]} == {name}
    assert facts["sample"]["fields"][name] is None
    found, durations = frames(tmp_path / "out.png")
    assert np.array_equal(np.stack(found), clip(2))
    assert durations == [40 if name == "pts" else 200] * 6


def test_without_its_manifest_a_dataset_has_no_numbers_to_show(
    clips: Path, tmp_path: Path, capsys: Capture
) -> None:
    (clips / "dataset.json").unlink()
    inspect(clips, "--sheet", tmp_path / "out.png", code=1)
    assert "out.png: not written; see the damage" in capsys.readouterr().out
    refused(capsys, clips, "--sheet", clips / "out.png")


def test_frames_of_a_damaged_video_are_shown_as_far_as_they_decode(
    tmp_path: Path, capsys: Capture
) -> None:
    encoder = StreamEncoder(32, 16, Fraction(1, 10), gop=5)
    for i in range(15):
        encoder.add(i, np.full((16, 32, 3), 16 * i, np.uint8))
    stream = encoder.finish()
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
    assert (finding["code"], finding["field"], finding["sample"]) == ("MediaError", "x", 0)
    with Pillow.open(out) as picture:
        shown = [np.asarray(one.convert("RGB")) for one in ImageSequence.Iterator(picture)]
    assert np.abs(shown[-1][8, 8].astype(int) - 16 * 14).max() < 8
    assert any((one == MARK).all(-1).any() for one in shown)
    inspect(folder, "--image", tmp_path / "one.png", "--frame", 7, code=1)
    assert not (tmp_path / "one.png").exists()


def test_a_damaged_picture_of_a_list_is_marked_between_the_others(
    tmp_path: Path, capsys: Capture
) -> None:
    files = [np.frombuffer(encode_jpeg(one), np.uint8) for one in clip(0)]
    files[0] = files[0][:40]
    files[3] = np.frombuffer(b"no picture at all", np.uint8)
    folder = of_one(tmp_path, List(Array("uint8", (None,))), files)
    facts = inspect_json(capsys, folder, "--image", tmp_path / "out.gif", code=1)
    assert facts["image"]["damaged"] == [0, 3] and len(frames(tmp_path / "out.gif")[0]) == 6


def test_what_a_sample_lacks_is_no_damage(tmp_path: Path, capsys: Capture) -> None:
    kind = Image(optional=True)
    folder = write(tmp_path / "some", {"x": kind}, [{"x": encode_jpeg(COLOUR)}, {"x": None}])
    out = tmp_path / "out.png"
    assert inspect_json(capsys, folder, "--sheet", out)["sheet"]["damaged"] == []
    assert not (pixels(out) == MARK).all(-1).any()
    said = refused(capsys, folder, "--image", tmp_path / "not.png", "--sample", 1)
    assert "sample 1 has nothing to show in field 'x'" in said


def test_a_dataset_without_pictures_says_so(tmp_path: Path, capsys: Capture) -> None:
    folder = of_one(tmp_path, Text(), "no picture")
    assert "no field holds pictures (none)" in refused(
        capsys, folder, "--sheet", tmp_path / "out.png"
    )
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


def test_both_files_must_not_be_one(clips: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out.png"
    assert "given for both --image and --sheet" in refused(
        capsys, clips, "--image", out, "--sheet", out
    )
