"""Pictures, clips, videos and sheets of samples, as `inspect` writes them to files."""

from __future__ import annotations

import errno
import os
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image as Pillow
from PIL import ImageSequence

import shardio
from shardio import Array, Bytes, Image, List, ShardReader, Text, Video
from shardio.media import ClipDecoder, StreamEncoder, decode_image, encode_jpeg, pillow_image
from shardio_tools.inspect import image_files, render
from shardio_tools.inspect.image_files import CAPTION, GAP, draw_sheet
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

GREY = np.arange(16 * 24, dtype=np.uint16).reshape(16, 24).astype(np.uint8)
COLOUR = clip(2)[1]


@pytest.mark.parametrize(
    ("shape", "value", "expected"),
    [
        ((16, 24, 3), COLOUR, COLOUR),
        ((3, 16, 24), COLOUR.transpose(2, 0, 1), COLOUR),
        ((None, None, 3), COLOUR, COLOUR),
        ((16, 24), GREY, np.stack([GREY] * 3, axis=-1)),
        ((16, 24, 1), GREY[..., None], np.stack([GREY] * 3, axis=-1)),
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


@pytest.mark.parametrize("suffix", [".gif", ".webp", ".png", ".PNG"])
def test_a_clip_is_written_as_an_animation_at_its_own_pace(
    suffix: str, clips: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / f"out{suffix}"
    inspect(clips, "--sample", 2, "--image", out)
    line = f"wrote {out}: 24 × 16 pixels, frames of sample 2, 6 frames from 0 to 5 of 6"
    assert line in capsys.readouterr().out.splitlines()
    found, durations = frames(out)
    assert durations == [200] * 6
    # GIF has 256 colours, WebP loses some.
    near = 0 if suffix.lower() == ".png" else 12
    assert np.abs(np.stack(found).astype(int) - clip(2)).max(initial=0, where=_flat(24)) <= near


def _flat(width: int) -> npt.NDArray[np.bool_]:
    """Mask of pixels in areas of one colour, far from an edge."""
    flat = np.zeros((1, 16, width, 1), np.bool_)
    flat[:, 8:, 8:] = True
    return flat


def test_a_clip_is_written_as_a_film(clips: Path, tmp_path: Path) -> None:
    inspect(clips, "--image", tmp_path / "out.mp4")
    with av.open(str(tmp_path / "out.mp4")) as container:
        shown = list(container.decode(video=0))
    assert [frame.time for frame in shown] == pytest.approx(0.2 * np.arange(6))
    found = np.stack([frame.to_ndarray(format="rgb24") for frame in shown])
    assert np.abs(found.astype(int) - clip(0)).max(initial=0, where=_flat(24)) < 20


def test_a_film_has_even_sides(tmp_path: Path) -> None:
    odd = np.ascontiguousarray(clip(0)[:, :15, :23])
    folder = of_one(tmp_path, Array("uint8", odd.shape), odd)
    inspect(folder, "--image", tmp_path / "out.mp4")
    with av.open(str(tmp_path / "out.mp4")) as container:
        stream = container.streams.video[0]
        assert (stream.height, stream.width, stream.frames) == (14, 22, 6)


def test_where_nothing_says_when_frames_are_shown_there_are_25_in_a_second(tmp_path: Path) -> None:
    grey = np.ascontiguousarray(clip(0)[..., 1])
    folder = of_one(tmp_path, Array("uint8", grey.shape), grey)
    inspect(folder, "--image", tmp_path / "out.png")
    found, durations = frames(tmp_path / "out.png")
    assert durations == [40] * 6 and np.array_equal(np.stack(found)[..., 0], grey)


def test_the_options_say_which_frames_are_written(clips: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.png"
    inspect(clips, "--image", out, "--frame", -2)
    assert np.array_equal(pixels(out), clip(0)[4])
    with Pillow.open(out) as picture:
        assert getattr(picture, "n_frames", 1) == 1
    for text, numbers in (("1:4", [1, 2, 3]), (":-1:2", [0, 2, 4]), ("4:", [4, 5])):
        inspect(clips, "--image", out, "--clip", text, "--overwrite")
        found, durations = frames(out)
        assert np.array_equal(np.stack(found), clip(0)[numbers])
        assert durations == [200 * (numbers[1] - numbers[0])] * len(numbers)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--frame", 6], "there is no frame 6; the sample has 6"),
        (["--clip", "9:"], "--clip selects none of the sample's 6 frames"),
        (["--clip", "5"], "such as 0:64:2; found '5'"),
        (["--clip", "0:5:0"], "such as 0:64:2"),
        (["--clip", "a:b"], "such as 0:64:2"),
        (["--clip", "0:2", "--frame", 1], "exclude each other"),
        (["--side", 7], "--side must be from 8"),
        (["--field", "pts"], "--field pts: not a field that can be shown; there are: frames"),
        (["--field", "no"], "--field no: not a field"),
    ],
)
def test_frames_and_fields_that_are_not_there_are_refused(
    arguments: list[object],
    said: str,
    clips: Path,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    assert said in refused(capsys, clips, "--image", tmp_path / "out.png", *arguments)
    assert not (tmp_path / "out.png").exists()


def test_what_has_no_frames_has_no_numbers_of_frames(tmp_path: Path, capsys: Capture) -> None:
    folder = of_one(tmp_path, Image(), encode_jpeg(COLOUR))
    said = refused(capsys, folder, "--image", tmp_path / "out.png", "--frame", 0)
    assert "field 'x' holds pictures" in said
    said = refused(capsys, folder, "--image", tmp_path / "out.mp4")
    assert "a single picture must be one of .png, .jpg" in said


def test_a_clip_is_no_jpeg(clips: Path, tmp_path: Path, capsys: Capture) -> None:
    said = refused(capsys, clips, "--image", tmp_path / "out.jpg")
    assert "an animation must be one of .gif, .webp, .png, .mp4; --frame N writes one" in said


def test_of_a_video_any_frames_are_decoded(video: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.png"
    inspect(video, "--image", out, "--clip", "5:25:7")
    expected = np.empty((3, 16, 32, 3), np.uint8)
    with shardio.open(video) as dataset, ClipDecoder() as decoder:
        decoder.decode(dataset[0]["video"], [5, 12, 19], expected)
    found, durations = frames(out)
    assert np.array_equal(np.stack(found), expected) and durations == [700] * 3


def test_a_long_video_is_thinned_to_so_many_frames(
    video: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render, "N_FRAMES", 8)
    facts = inspect_json(capsys, video, "--image", tmp_path / "out.gif")["image"]
    assert (facts["frames"], facts["of_frames"]) == (list(range(0, 30, 4)), 30)
    assert frames(tmp_path / "out.gif")[1] == [400] * 8


def test_more_than_fits_in_memory_is_refused(
    video: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render, "MAX_PIXELS", 10 * 16 * 32)
    said = refused(capsys, video, "--image", tmp_path / "out.gif", "--clip", ":11")
    assert "11 frames of 32 x 16 pixels are more than fit in memory" in said
    inspect(video, "--image", tmp_path / "out.gif", "--clip", ":10")
    inspect(video, "--image", tmp_path / "small.gif", "--side", 16)


@pytest.mark.parametrize("is_encoded", [False, True])
def test_a_list_of_pictures_is_a_clip(is_encoded: object, tmp_path: Path) -> None:
    pictures = [clip(1)[0], clip(4)[0], np.ascontiguousarray(clip(6)[0][:8])]
    value: list[Any] = pictures
    if is_encoded:
        value = [np.frombuffer(encode_jpeg(one, subsampling="444"), np.uint8) for one in pictures]
    kind = List(Array("uint8", (None,) if is_encoded else (None, None, 3)))
    inspect(of_one(tmp_path, kind, value), "--image", tmp_path / "out.png")
    found, _ = frames(tmp_path / "out.png")
    last = np.zeros((16, 24, 3), np.uint8)
    last[4:12] = pictures[2]  # one of another size lies in the middle
    for one, expected in zip(found, [*pictures[:2], last], strict=True):
        assert np.abs(one.astype(int) - expected).max(initial=0, where=_flat(24)[0, ::-1]) < 8


def test_a_side_shrinks_what_is_written(clips: Path, tmp_path: Path) -> None:
    inspect(clips, "--image", tmp_path / "out.png", "--frame", 0, "--side", 12)
    assert pixels(tmp_path / "out.png").shape == (8, 12, 3)
    inspect(clips, "--image", tmp_path / "as-is.png", "--frame", 0, "--side", 100)
    assert pixels(tmp_path / "as-is.png").shape == (16, 24, 3)


def test_where_several_fields_hold_pictures_one_is_named(tmp_path: Path, capsys: Capture) -> None:
    fields = {"a": Array("uint8", (16, 24)), "b": Array("uint8", (16, 24, 3))}
    folder = write(tmp_path / "two", fields, [{"a": GREY, "b": COLOUR}])
    out = tmp_path / "out.png"
    assert "several fields hold pictures (a, b)" in refused(capsys, folder, "--image", out)
    inspect(folder, "--image", out, "--field", "b")
    assert np.array_equal(pixels(out), COLOUR)
    inspect(folder, "--image", out, "--field", "a", "--overwrite")
    assert np.array_equal(pixels(out)[..., 0], GREY)


def test_a_shard_alone_has_pictures_too(clips: Path, tmp_path: Path) -> None:
    inspect(shard(clips, 5), "--image", tmp_path / "out.png", "--frame", 0)
    assert np.array_equal(pixels(tmp_path / "out.png"), clip(5)[0])


def test_a_file_is_replaced_only_if_that_is_asked_for(
    clips: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "out.png"
    out.write_text("mine")
    assert "pass --overwrite to replace a file" in refused(capsys, clips, "--image", out)
    assert out.read_text() == "mine"
    inspect(clips, "--image", out, "--frame", 0, "--overwrite")
    assert np.array_equal(pixels(out), clip(0)[0])
    capsys.readouterr()
    (tmp_path / "folder.png").mkdir()
    refused(capsys, clips, "--image", tmp_path / "folder.png", "--overwrite")


def test_nothing_is_written_into_a_dataset(clips: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "link").symlink_to(clips)
    (clips / "deep").mkdir()
    before = sorted(clips.rglob("*"))
    for place in (clips, clips / "deep", tmp_path / "link"):
        for path in (clips, shard(clips, 0)):
            for option in ("--image", "--sheet"):
                said = refused(capsys, path, option, place / "out.png")
                assert "is a dataset folder: name another folder" in said
    assert sorted(clips.rglob("*")) == before


@pytest.mark.parametrize(
    ("option", "name", "said"),
    [
        (
            "--image",
            "out.bmp",
            "unknown picture suffix; expected one of .gif, .jpeg, .jpg, .mp4, .png, .webp",
        ),
        ("--image", "out", "unknown picture suffix; expected one of"),
        ("--image", "no/out.png", "not found"),
        ("--sheet", "out.mp4", "a sheet must be one of .png"),
        ("--image", "", "unknown picture suffix"),
        ("--sheet", "", "unknown picture suffix"),
        ("--frame", "0", "--frame needs --image"),
        ("--clip", "1:2", "--clip needs --image"),
        ("--field", "x", "--field needs --image or --sheet"),
        ("--side", "9", "--side needs --image or --sheet"),
        ("--count", "9", "--count needs --sheet"),
    ],
)
def test_a_name_that_cannot_be_written_is_refused_at_once(
    option: str, name: str, said: str, tmp_path: Path, capsys: Capture
) -> None:
    value = tmp_path / name if "." in name or name == "out" else name
    assert said in refused(capsys, tmp_path / "no dataset", option, value)


def test_a_disk_that_refuses_leaves_nothing(
    clips: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, place = tmp_path / "new" / "out.png", tmp_path / "new"
    place.mkdir()

    def refusing(code: int) -> Any:
        def link(source: str, target: str) -> None:
            raise OSError(code, os.strerror(code))

        return link

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", refusing(errno.ENOSPC))
        inspect(clips, "--image", out, code=3)
        assert capsys.readouterr().err == f"shardio: {out}: No space left on device\n"
        assert not any(place.iterdir())
        # A file system without links has files all the same.
        patch.setattr(os, "link", refusing(errno.EPERM))
        inspect(clips, "--image", out)
    assert [one.name for one in place.iterdir()] == ["out.png"] and len(frames(out)[0]) == 6


def test_a_name_that_is_taken_meanwhile_stays_who_took_it(tmp_path: Path) -> None:
    (tmp_path / "out.png").write_text("mine")
    with pytest.raises(shardio.InvalidArgument, match="already exists: pass --overwrite"):
        image_files.write_whole(str(tmp_path / "out.png"), b"new", may_replace=False)
    assert [one.read_text() for one in tmp_path.iterdir()] == ["mine"]


# --- sheets, and damaged pictures -------------------------------------------------------------

DAMAGED = 3


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
        [(f"{i}  {'dog' if i % 2 else 'cat'}", clip(i)[3]) for i in range(7)], 160
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
        return tile(draw_sheet([(text, picture)], 96), 0, 1, 96)[1]

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
