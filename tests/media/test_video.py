"""Whole files: frames, times, and every way in which a file can be broken."""

from __future__ import annotations

import gc
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from shardio.errors import MediaError
from shardio.media.demuxing import demux, times_of
from shardio.media.media_files import VideoFile, library_versions
from tests.media.test_demuxing import B_FRAMES, VARIANTS, by_packets, damaged, made
from tests.media_made import plain_decode, scene, write_cut, write_gif, write_sound, write_video


def decode(path: Path | str, size: int = 48) -> tuple[list[np.ndarray], list[int], Fraction]:
    with VideoFile(str(path)) as video:
        found = list(video.pictures(size))
    pictures = [picture for _, picture in found if picture is not None]
    return pictures, [time for time, _ in found], video.time_base


def assert_same_as_plain_decode(path: Path | str) -> tuple[list[np.ndarray], list[int]]:
    """Compare pictures and times with those of a plain decode, and return them."""
    pictures, times, time_base = decode(path)
    wanted, wanted_times, wanted_base = plain_decode(path, 48)
    assert len(pictures) == len(wanted)
    for n, (found, plain) in enumerate(zip(pictures, wanted, strict=True)):
        assert np.array_equal(found, plain), f"{path}, frame {n}"
    assert (times, time_base) == (sorted(t for t in wanted_times if t is not None), wanted_base)
    return pictures, times


@pytest.mark.parametrize("variant", sorted(VARIANTS.keys() - {"no container"}))
def test_pictures_and_times_are_those_of_a_plain_decode(variant: str, tmp_path: Path) -> None:
    assert_same_as_plain_decode(made(variant, tmp_path))


def test_odd_sizes_decode(tmp_path: Path) -> None:
    path = write_video(tmp_path / "odd.mkv", scene(5, 101, 75), pixel_format="yuv444p")
    assert_same_as_plain_decode(path)


def test_a_stream_without_any_times_is_counted_up(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.h264", scene(5))
    _, times, time_base = decode(path)
    assert times[0] == 0
    assert [b - a for a, b in zip(times, times[1:], strict=False)] == [times[1]] * 4
    assert times[1] * time_base == Fraction(1, 25)


def test_times_that_a_container_lacks_are_counted_back(tmp_path: Path) -> None:
    path = write_cut(tmp_path / "a.mkv", scene(40), 14, codec_options=B_FRAMES)
    _, plain, _ = plain_decode(path, 48)
    assert plain[:14] == [None] * 14 and plain[14:] == list(range(0, 26 * 40, 40))
    _, times, _ = decode(path)
    assert times == list(range(-14 * 40, 26 * 40, 40))


def test_a_file_that_lacks_times_and_breaks_gives_what_comes_before(tmp_path: Path) -> None:
    path = write_cut(tmp_path / "a.mkv", scene(40), 14, codec_options={**B_FRAMES, "crf": "10"})
    stream = demux(str(path))
    content = bytearray(path.read_bytes())
    begin, end = (int(stream.packets["offset"][n]) for n in (30, 31))
    place = content.index(stream.data[begin:end])
    content[place + 5 : place + end - begin] = bytes(end - begin - 5)
    path.write_bytes(content)
    times = list[int]()
    with VideoFile(str(path)) as video, pytest.raises(MediaError, match=r"breaks after \d+ frames"):
        times.extend(time for time, _ in video.pictures(48))
    assert len(times) > 14 and times == [40 * n for n in range(-14, len(times) - 14)]


def test_a_transparent_gif_lies_over_black_and_keeps_its_delays(tmp_path: Path) -> None:
    image = np.zeros((40, 60), np.uint8)
    image[:20, :30], image[20:, :30], image[:, 30:] = 1, 2, 3
    pictures, times, _ = decode(write_gif(tmp_path / "a.gif", [image, image], [4, 7]), 40)
    assert times == [0, 4]
    assert pictures[0][2, 2].tolist() == [255, 0, 0] and pictures[0][37, 2].tolist() == [0, 255, 0]
    assert pictures[0][:, 25:].max() == 0


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        (
            "a.mkv",
            {"n_streams": 2, "with_sound": True},
            {"stream": 0, "video_streams": 2, "width": 96, "range": "limited", "matrix": "bt601"},
        ),
        (
            "a.mp4",
            {"rotation": 90, "full_range": True, "matrix": 1, "aspect": Fraction(4, 3)},
            {"rotation": 90, "pixel_aspect": "4:3", "range": "full", "matrix": "bt709"},
        ),
    ],
)
def test_what_was_chosen_and_normalised_is_recorded(
    tmp_path: Path, name: str, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    with VideoFile(str(write_video(tmp_path / name, scene(3), **options))) as video:
        assert len(list(video.pictures(32))) == 3
        assert expected.items() <= video.facts().items()


@pytest.mark.parametrize(
    ("name", "options", "seconds"),
    [
        ("a.mp4", {}, 2),
        ("a.mp4", {"times": range(100, 150)}, 2),
        ("a.mkv", {}, 2),
        ("a.mkv", {"times": range(250_000, 250_050)}, 2),
        ("a.ts", {}, 2),
        ("a.h264", {}, None),
    ],
)
def test_the_duration_is_what_the_container_declares(
    tmp_path: Path, name: str, options: dict[str, Any], seconds: int | None
) -> None:
    with VideoFile(str(write_video(tmp_path / name, scene(50), **options))) as video:
        assert video.seconds == seconds


def test_only_wanted_frames_are_converted(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mp4", scene(9))
    with VideoFile(str(path)) as video:
        found = [picture is not None for _, picture in video.pictures(32, lambda n: n % 3 == 0)]
    assert found == [True, False, False] * 3


def test_decoded_frames_are_freed_without_the_cycle_collector(tmp_path: Path) -> None:
    path = write_video(tmp_path / "v.mp4", scene(24))
    with VideoFile(str(path)) as video:
        gc.collect()
        gc.disable()
        try:
            pictures = list(video.pictures(48))
            n_frames = sum(isinstance(each, av.VideoFrame) for each in gc.get_objects())
        finally:
            gc.enable()
    # Each picture keeps the small frame that it was scaled into; of the decoded ones, that whose
    # side data was read may wait for the collector.
    assert n_frames <= len(pictures) + 2 == 26


def test_names_that_look_like_protocols_or_patterns_are_names(tmp_path: Path) -> None:
    for name in ("http:a%03d.mp4", "concat:b|c.mp4", "-", "tab\tand ü.mp4"):
        path = write_video(tmp_path / "plain.mp4", scene(2)).rename(tmp_path / name)
        assert len(decode(path)[0]) == 2


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"just some notes here\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\na.ts\n",
        random.Random(3).randbytes(8192),
    ],
)
def test_what_is_no_video_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.mp4").write_bytes(content)
    with pytest.raises(MediaError, match=r"a\.mp4: not a readable video"):
        VideoFile(str(tmp_path / "a.mp4"))
    with pytest.raises(MediaError, match="media in memory: not a readable video"):
        demux(content)


@pytest.mark.parametrize("name", ["a.wav", "a.m4a"])
def test_sound_alone_is_no_video(tmp_path: Path, name: str) -> None:
    path = str(write_sound(tmp_path / name))
    for read in (VideoFile, demux):
        with pytest.raises(MediaError, match=r"no video stream \(streams: audio\)"):
            read(path)


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        VideoFile(str(tmp_path / "none.mp4"))


CUT: dict[str, tuple[str, dict[str, Any]]] = {
    "mp4, index first": ("a.mp4", {"container_options": {"movflags": "faststart"}}),
    "mp4, index last": ("a.mp4", {}),
    "fragmented": ("a.mp4", {"container_options": {"movflags": "frag_keyframe+empty_moov"}}),
    "matroska": ("a.mkv", {}),
    "AVI": ("a.avi", {"codec": "mpeg4"}),
    "FLV": ("a.flv", {}),
}


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("variant", CUT)
def test_a_cut_file_is_broken(tmp_path: Path, variant: str, share: float) -> None:
    name, options = CUT[variant]
    path = write_video(tmp_path / name, scene(60), codec_options={"g": "12"}, **options)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(MediaError):
        decode(path)
    with pytest.raises(MediaError, match=name):
        demux(str(path), check=False)  # without decoding it


def test_an_flv_cut_between_two_packets_is_broken(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.flv", scene(60), codec_options={"g": "12"})
    whole = path.read_bytes()
    for kept in range(len(whole) // 2, len(whole) // 2 + 300):  # some are ends of packets
        path.write_bytes(whole[:kept])
        with pytest.raises(MediaError):
            decode(path)
    path.write_bytes(whole[:-4])  # all frames are there
    with pytest.raises(MediaError, match="4 bytes"):
        decode(path)
    path.write_bytes(whole + b"more")  # which players ignore
    assert len(decode(path)[0]) == 60


def test_what_precedes_the_break_is_whole_and_the_error_counts_it(tmp_path: Path) -> None:
    path = write_video(
        tmp_path / "a.mp4",
        scene(60),
        codec_options={"g": "12", "bf": "0"},
        container_options={"movflags": "faststart"},
    )
    wanted, _, _ = plain_decode(path, 48)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * 0.7)])
    found = []
    with VideoFile(str(path)) as video, pytest.raises(MediaError) as caught:
        for _, picture in video.pictures(48):
            found.append(picture)
    assert 0 < len(found) < 60
    assert f"breaks after {len(found)} frames" in str(caught.value)
    for picture, plain in zip(found, wanted, strict=False):
        assert picture is not None and np.array_equal(picture, plain)


def test_damage_that_ffmpeg_would_conceal_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MediaError, match="breaks after"):
        decode(damaged(tmp_path))


def test_standard_error_stays_empty(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    test_damage_that_ffmpeg_would_conceal_is_an_error(tmp_path)
    assert capfd.readouterr() == ("", "")


def test_random_damage_gives_frames_or_a_media_error_and_nothing_else(tmp_path: Path) -> None:
    rng = random.Random(5)
    path = write_video(tmp_path / "damaged.mp4", scene(8, 48, 32))
    whole = path.read_bytes()
    for n in range(60):
        content = bytearray(whole[: rng.randrange(1, len(whole) + 1)] if n % 3 == 0 else whole)
        for _ in range(rng.choice((1, 5, 50))):
            content[rng.randrange(len(content))] = rng.randrange(256)
        path.write_bytes(content)
        try:
            assert all(picture.shape == (48, 48, 3) for picture in decode(path)[0])
        except MediaError as error:
            assert str(path) in str(error)
        try:
            stream = demux(bytes(content), check=bool(n % 2))
            by_packets(stream, [0, stream.n_frames - 1], 16)
        except MediaError as error:
            assert str(error)


def test_the_versions_that_decide_over_pixels_are_named() -> None:
    assert set(library_versions()) == {"av", "libavformat", "libavcodec", "libswscale"}


@pytest.mark.slow
def test_every_real_clip_decodes_as_plainly_and_by_packets(media_root: Path) -> None:
    rng = random.Random(11)
    for path in sorted((media_root / "clips").rglob("*.*")):
        pictures, times = assert_same_as_plain_decode(path)
        stream = demux(str(path))
        assert times_of(stream).tolist() == times, path
        for stride in (1, 2, 7):
            start = rng.randrange(len(pictures))
            frames = list(range(start, min(len(pictures), start + 4 * stride), stride))
            wanted = np.stack([pictures[n] for n in frames])
            assert np.array_equal(by_packets(stream, frames), wanted), (path, frames)


def test_the_file_with_reordered_packets_is_not_broken(media_root: Path) -> None:
    assert_same_as_plain_decode(media_root / "broken" / "unordered.mov")
