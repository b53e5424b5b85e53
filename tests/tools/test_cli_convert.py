from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import shardio
from shardio.conversion import BUILT_IN, converter_class
from shardio_converters.media.videos import LIMITS, Videos
from shardio_tools import cli, convert
from shardio_tools.converter_options import options_of
from tests.media_made import scene, write_sound, write_video

Capture = pytest.CaptureFixture[str]

pytestmark = pytest.mark.usefixtures("quick_disk")

SMALL = ("--frames", "4", "--size", "16", "--workers", "0")


def test_the_report_counts_every_file(videos: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out"
    assert cli.main(["convert", str(videos), str(out), *SMALL]) == 1
    report, err = capsys.readouterr()
    assert "converting: 100%" in err and "6 of 6 files, 3 samples, 1 broken" in err
    lines = report.splitlines()
    classes = ["  class  videos", "  cats        2", "  dogs        1", "  fish        0"]
    assert lines[:5] == ["3 classes", *classes]
    after = lines.index("Not a video: 1 file")
    assert lines[after + 1] == "  cats/notes.txt"
    after = lines.index("Too short for one clip: 1 file")
    assert lines[after + 1] == "  fish/short.mp4  3 frames; one clip spans 4"
    after = lines.index("Broken: 1 file")
    assert lines[after + 1].startswith("  fish/song.wav  no video stream")
    assert "Next" not in lines
    assert lines[-1].startswith("converted 3 of 6 files into 3 videos (5 clips), ")
    assert lines[-1].endswith(f": {out}")


def test_raw_clips_and_left_over_frames(videos: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out"
    assert cli.main(["convert", str(videos), str(out), *SMALL, "--store=raw"]) == 1
    lines = capsys.readouterr().out.splitlines()
    classes = ["  class  clips", "  cats       3", "  dogs       2", "  fish       0"]
    assert lines[:5] == ["3 classes", *classes]
    assert "  dropped  1 frame, too few for another clip, at the ends of 1 file" in lines
    assert lines[-1].startswith("converted 3 of 6 files into 5 clips, ")


def test_the_report_shows_why_a_store_was_chosen(
    videos: Path, tmp_path: Path, capsys: Capture
) -> None:
    command = ["convert", str(videos), str(tmp_path / "out"), *SMALL, "--store=auto"]
    assert cli.main([*command, "--disk", "1.5GB", "--rate", "0.001", "--gop", "4"]) == 1
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == "Stores"
    assert re.fullmatch("  store +size  clips/s per core", lines[1])
    assert [line.split()[0] for line in lines[2:4]] == ["planes", "h264"]
    assert sum(line.endswith("  chosen") for line in lines) == 1
    assert lines[4].startswith("  random clips of 4 frames, 16 x 16, in RGB; from the beginnings")
    assert " is the smallest store that takes at most 1.4 GiB and decodes 0.001 clips" in lines[5]
    assert lines[6:8] == ["", "3 classes"]
    chosen = lines[5].split()[0]
    assert f"converting to {chosen}: 100%" in err


def test_the_json_report_has_the_choice(videos: Path, tmp_path: Path, capsys: Capture) -> None:
    command = ["convert", str(videos), str(tmp_path / "out"), *SMALL, "--store=auto", "--json"]
    assert cli.main([*command, "--disk=1GB"]) == 1
    choice = json.loads(capsys.readouterr().out)["choice"]
    assert choice.keys() == {"store", "reason", "basis", "stores"}
    assert choice["reason"].startswith(f"{choice['store']} is the fastest store that takes at ")
    for one in choice["stores"]:
        assert one.keys() == {"store", "bytes", "clips_per_s", "problem"} and one["bytes"] > 0


def test_without_a_fitting_store_the_error_lists_all(
    videos: Path, tmp_path: Path, capsys: Capture
) -> None:
    command = ["convert", str(videos), str(tmp_path / "out"), *SMALL, "--store=auto"]
    assert cli.main([*command, "--disk", "10"]) == 2
    out, err = capsys.readouterr()
    first, basis, *stores = err.splitlines()
    assert out == "" and first.startswith("shardio: --store auto: no store takes at most 10 bytes;")
    assert basis.startswith("shardio: estimates for random clips of 4 frames, 16 x 16, in RGB; ")
    assert len(stores) == 5 and all(line.endswith("; too large") for line in stores)


@pytest.mark.parametrize("size", ["1.5XB", "-1", "many"])
def test_the_disk_space_is_a_size(size: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["convert", "videos", "out", f"--disk={size}"])
    assert f"expected bytes, such as 100MB or 64MiB; found {size!r}" in capsys.readouterr().err


def test_the_json_report_holds_every_input(videos: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out"
    assert cli.main(["convert", str(videos), str(out), *SMALL, "--store=raw", "--json"]) == 1
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert captured.err == ""
    assert report["files"] == {"converted": 3, "empty": 1, "broken": 1, "unsupported": 1}
    assert report["classes"] == {"cats": 3, "dogs": 2, "fish": 0}
    assert (report["clips"], report["dropped_frames"]) == (5, 1)
    assert report["dataset"] == str(out)
    on_disk = {str(p.relative_to(videos)) for p in videos.rglob("*.*")}
    assert {entry["path"] for entry in report["inputs"]} == on_disk


def test_quiet_prints_the_broken_files_only(videos: Path, tmp_path: Path, capsys: Capture) -> None:
    assert cli.main(["convert", str(videos), str(tmp_path / "out"), *SMALL, "--quiet"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("shardio: broken: fish/song.wav: ") and err.count("\n") == 1


def test_help_names_the_defaults_of_the_converter(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        cli.main(["convert", "--help"])
    words = " ".join(capsys.readouterr().out.split())
    defaults = Videos()
    assert f"frames per clip (default: {defaults.frames})" in words
    assert f"use every N-th frame for a clip (default: {defaults.stride})" in words
    assert f"height and width of a frame (default: {defaults.size})" in words
    assert defaults.step == defaults.frames * defaults.stride
    assert "(default: frames x stride, no overlap)" in words
    assert f"videos: {defaults.store} (default)" in words


@pytest.mark.parametrize("kind", BUILT_IN)
def test_the_command_has_an_option_for_each_of_a_converter(kind: str) -> None:
    parser = argparse.ArgumentParser()
    convert.add_arguments(parser)
    converter = converter_class(kind)
    known = {field.name for field in dataclasses.fields(converter)}  # type: ignore[arg-type]
    options = [*options_of(converter)]
    assert {each.name for each in options} == known - {"units", "classes"}  # from the files alone
    for each in options:
        assert each.helps[kind]
        action = parser._option_string_actions[each.flag]
        # Converters that share a flag parse it alike
        assert action.dest == f"converter.{each.name}"
        assert (action.type, action.choices) == (
            each.parsing.get("type"),
            each.parsing.get("choices"),
        )


def test_on_error_stops_at_or_skips_a_broken_file(tmp_path: Path, capsys: Capture) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("a.mp4", "c.mp4"):
        write_video(source / name, scene(4))
    write_sound(source / "b.wav")
    lengths = {}
    for choice in ("skip", "stop"):
        out = tmp_path / choice
        assert cli.main(["convert", str(source), str(out), *SMALL, "--on-error", choice]) == 1
        with shardio.open(out) as dataset:
            lengths[choice] = len(dataset)
    assert lengths == {"skip": 2, "stop": 1}
    report = capsys.readouterr().out.splitlines()
    assert "stopped at the first broken file; the files before it are published" in report
    assert report[report.index("Not reached: 1 file") + 1] == "  c.mp4"
    assert not any("class" in line for line in report)
    with shardio.open(tmp_path / "skip") as dataset:
        assert "label" not in dataset.schema


@pytest.mark.parametrize("option", ["frames", "stride", "step", "size"])
def test_numbers_have_limits(option: str, videos: Path, tmp_path: Path, capsys: Capture) -> None:
    source, out = str(videos / "dogs"), str(tmp_path / "out")
    for value in (LIMITS[option] + 1, 10**20):
        assert cli.main(["convert", source, out, *SMALL, f"--{option}={value}"]) == 2
        said = f"shardio: {option} is {value}; it must be a whole number from 1 up to"
        assert capsys.readouterr().err.startswith(said)
    at_the_limit: dict[str, Any] = {option: LIMITS[option], "store": "raw"}
    Videos(**at_the_limit)  # not run: of this size, pictures would fill the test's memory


@pytest.mark.parametrize("what", ["broken", "too short"])
def test_no_samples_no_dataset(what: str, videos: Path, tmp_path: Path, capsys: Capture) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    (source / "a.mp4").write_bytes(b"nothing of a video")
    options = [*SMALL, "--kind=videos"]
    if what == "too short":
        write_video(source / "a.mp4", scene(9))
        options.append("--frames=100")
    command = ["convert", str(source), str(out), *options]
    assert cli.main(command) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.lstrip().startswith("a.mp4  ") for line in lines)
    why = "1 broken" if what == "broken" else "1 too short for one clip"
    assert lines[-1] == f"1 file gave no sample ({why}): nothing was published, {out} is unchanged"
    assert not out.exists()
    assert cli.main([*command, "--quiet"]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.endswith(f"nothing was published, {out} is unchanged\n")
    assert cli.main([*command, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["generation"], report["samples"], report["bytes"]) == (0, 0, 0)
    assert cli.main(["convert", str(videos / "dogs"), str(out), *SMALL]) == 0
    assert cli.main([*command, "--overwrite"]) == 1
    assert capsys.readouterr().out.endswith(f"nothing was published, {out} is unchanged\n")
    assert cli.main(["inspect", str(out)]) == 0


def test_append_reports_new_and_changed(videos: Path, tmp_path: Path, capsys: Capture) -> None:
    source, out = tmp_path / "dogs", tmp_path / "out"
    shutil.copytree(videos / "dogs", source)
    assert cli.main(["convert", str(source), str(out), *SMALL]) == 0
    write_video(source / "new.mp4", scene(9))
    append = ["convert", str(source), str(out), "--append", "--workers=0"]
    capsys.readouterr()
    assert cli.main(append) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[lines.index("Already in the dataset: 1 file") + 1].startswith("  ")
    assert re.fullmatch(
        r"appended 1 of 2 files as 1 video \(2 clips\), .*, generation 2, 2 videos in all",
        lines[-1],
    )
    with (source / "new.mp4").open("ab") as file:
        file.write(b"\0")
    assert cli.main(append) == 1
    lines = capsys.readouterr().out.splitlines()
    after = lines.index("Changed since it was converted: 1 file")
    assert (
        lines[after + 1].startswith("  new.mp4  ")
        and "--append replaces no samples" in lines[after + 2]
    )
    assert lines[-1].startswith("appended 0 of 2 files as 0 videos (0 clips), 0 bytes, ")
    assert cli.main([*append, "--quiet"]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("shardio: modified: new.mp4: ")
    assert cli.main([*append, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["generation"], report["samples"], report["samples_before"]) == (2, 0, 2)
    assert report["files"] == {"duplicate": 1, "modified": 1}


def test_report_of_ratio_psnr_and_speed(videos: Path, tmp_path: Path, capsys: Capture) -> None:
    source, out = str(videos / "cats"), tmp_path / "out"
    cli.main(["convert", source, str(out), *SMALL])
    *_, title, size, psnr, speed, empty, last = capsys.readouterr().out.splitlines()
    assert (title, empty) == ("Result", "")
    assert re.fullmatch(r"  size     [\d.]+ KiB from [\d.]+ KiB: ratio [\d.]+", size)
    assert re.fullmatch(
        r"  quality  lossy: PSNR \d\d\.\d dB at the stored size "
        r"\(median of 2 files; least \d\d\.\d: [ab]\.mp4\); --store raw is exact",
        psnr,
    )
    assert re.fullmatch(r"  speed    [\d,.]+ random clips per second and core", speed)
    assert "into 2 videos (3 clips), " in last
    found = {}
    for quality in (5, 45):
        options = [*SMALL, "--store=h264", f"--quality={quality}", "--overwrite", "--json"]
        cli.main(["convert", source, str(out), *options])
        found[quality] = json.loads(capsys.readouterr().out)
        assert (found[quality]["samples"], found[quality]["clips"]) == (2, 3)
        assert found[quality]["source_bytes"] == sum(
            (videos / "cats" / name).stat().st_size for name in ("a.mp4", "b.mp4")
        )
        assert found[quality]["random_samples_per_s"] > 0
    assert found[5]["psnr_db"].keys() == {"a.mp4", "b.mp4"}
    for name in ("a.mp4", "b.mp4"):
        assert found[5]["psnr_db"][name] > found[45]["psnr_db"][name] + 5
    assert found[5]["bytes"] / found[5]["source_bytes"] == pytest.approx(found[5]["ratio"], 0.01)


@pytest.mark.parametrize("store", ["raw", "packets"])
def test_lossless_has_no_psnr(videos: Path, tmp_path: Path, capsys: Capture, store: str) -> None:
    source, out = str(videos / "cats"), str(tmp_path / "out")
    cli.main(["convert", source, out, *SMALL, f"--store={store}"])
    said = capsys.readouterr().out
    assert "random clips per second and core" in said and "lossy" not in said and "PSNR" not in said


def test_an_undecodable_video_has_a_hint(videos: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "in").mkdir()
    data = bytearray((videos / "cats" / "a.mp4").read_bytes())
    start = data.index(b"mdat")
    middle = start + (len(data) - start) // 3
    data[middle : middle + 60] = bytes(60)
    (tmp_path / "in" / "a.mp4").write_bytes(data)
    command = ["convert", str(tmp_path / "in"), str(tmp_path / "out"), *SMALL, "--store=packets"]
    assert cli.main(command) == 0
    said = capsys.readouterr().err
    assert "the result was not measured: a.mp4: packet " in said
    assert "with --check, shardio leaves such files out" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("no OUT", "no such file or folder to convert"),
        ("empty OUT", "holds no file"),
        ("pipe OUT", "pipe: neither a file nor a folder"),
        ("VIDEOS taken", "already holds data"),
        ("VIDEOS OUT --size=0", "size is 0"),
        ("VIDEOS OUT --shard-bytes=0", "shard_bytes must be an integer from 1 up; found 0"),
        ("VIDEOS OUT --kind=stamps", "'stamps'"),
        ("VIDEOS OUT --append", "holds no dataset to append to; leave out append (--append)"),
        ("t.csv OUT --schema=schema.json", "not JSON: duplicate key 'a'"),
    ],
)
def test_what_cannot_be_asked_for_is_one_line_and_exit_code_2(
    arguments: str,
    words: str,
    videos: Path,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("taken").mkdir()
    Path("taken/file").touch()
    Path("t.csv").write_text("a\n1\n")
    Path("schema.json").write_text('{"a": "int64", "a": "text"}')
    os.mkfifo("pipe")
    given = arguments.replace("VIDEOS", str(videos)).replace("OUT", "out")
    assert cli.main(["convert", *given.split(), "--workers=0"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert words in captured.err
    assert not Path("out").exists()
