"""Videos are stored as videos: untouched, or encoded anew; clips of them are those of `raw`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from av.video.reformatter import Interpolation

import shardio
from shardio import DatasetWriter, InvalidArgument, MediaError, Schema, Video
from shardio.errors import UnsupportedEnvironment
from shardio.export import export
from shardio.format.types import streams
from shardio.format.types.streams import PacketFlag, packet_flags
from shardio.maintenance import merge, reshard, verify_dataset
from shardio.media import ClipDecoder, demux, encoding
from shardio_converters.media.videos import Videos
from tests.converters.stores import STORES, on_every_store, with_the_broken
from tests.media_made import Image, scene, write_cut, write_sound, write_video

pytestmark = pytest.mark.usefixtures("quick_disk")

SMALL: dict[str, Any] = {"frames": 4, "step": 3, "size": 32}
VIEW = {"kind": "clips", "frames": 4, "stride": 1, "step": 3, "size": [32, 32]}
TIMES = [7, 9, 14, 20, 21, 30, 32, 40, 41, 45, 47]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Videos of two classes; one too short for a clip, one cut off, one of sound, one of text."""
    folder = tmp_path_factory.mktemp("videos")
    write_video(folder / "a" / "one.mp4", scene(30), codec_options={"bf": "2"})
    write_video(folder / "a" / "two.mkv", scene(11), times=TIMES, time_base=Fraction(1, 50))
    write_video(folder / "b" / "tall.mp4", scene(9, 64, 96), rotation=90)
    write_video(folder / "b" / "short.mp4", scene(3))
    whole = write_video(folder / "b" / "cut.mp4", scene(20)).read_bytes()
    (folder / "b" / "cut.mp4").write_bytes(whole[:-900])
    write_sound(folder / "sound.wav")
    (folder / "notes.txt").write_text("notes")
    return folder


@pytest.fixture(scope="module")
def out(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return on_every_store(root, tmp_path_factory, **SMALL)


def pictures(stream: shardio.EncodedStream, frames: range, size: int = 32) -> Image:
    found = np.empty((len(frames), size, size, 3), np.uint8)
    with ClipDecoder() as decoder:
        decoder.decode(stream, list(frames), found)
    return found


def psnr(a: Image, b: Image) -> float:
    return float(10 * np.log10(255**2 / np.mean((a.astype(float) - b) ** 2)))


def one(path: Path, out: Path, **options: Any) -> tuple[shardio.ConversionReport, Any]:
    """Convert one file; the report, and its video."""
    report = shardio.convert(path, out, workers=0, **{**SMALL, **options})
    with shardio.open(out) as dataset:
        sample = dataset[0]
        stream = sample["frames"]
        return report, shardio.EncodedStream(
            **{n: getattr(stream, n) for n in shardio.EncodedStream.__slots__ if n != "data"},
            data=bytes(stream.data[:]),
        )


@pytest.mark.parametrize("store", STORES[1:])
def test_the_default_view_has_the_clips_of_raw(out: Callable[[str], Path], store: str) -> None:
    with shardio.open(out("raw")) as raw, shardio.open(out(store)) as dataset:
        assert dict(dataset.view) == VIEW
        assert [e["outcome"] for e in dataset.inputs] == [e["outcome"] for e in raw.inputs]
        row = 0
        for video in dataset:
            stream = video["frames"]
            shown = np.sort(stream.packets["pts"])
            for start in range(0, stream.n_frames - 3, 3):
                clip = raw[row]
                assert (clip["label"], clip["source"]) == (video["label"], video["source"])
                assert clip["pts"].tolist() == shown[start : start + 4].tolist()
                assert Fraction(*map(int, clip["time_base"])) == stream.time_base
                found = pictures(stream, range(start, start + 4))
                if store == "packets":
                    assert np.array_equal(found, clip["frames"])
                else:  # of a garish scene at 32 pixels; its neighbours are far off
                    others = psnr(found, np.roll(clip["frames"], 1, axis=0))
                    assert psnr(found, clip["frames"]) > max(20, others + 4)
                row += 1
        assert row == len(raw) == sum(e.get("detail", {}).get("clips", 0) for e in dataset.inputs)


@pytest.mark.parametrize("store", STORES)
def test_frames_keep_times_where_the_first_lack(tmp_path: Path, store: str) -> None:
    path = write_cut(tmp_path / "a.mkv", scene(30), 10, codec_options={"bf": "3"})
    out = tmp_path / "out"
    report = shardio.convert(path, out, workers=0, store=store, **{**SMALL, "frames": 30})
    assert "retimed" not in report.inputs[0].detail
    if store == "raw":
        with shardio.open(out) as dataset:
            times = dataset[0]["pts"]
    else:
        clips = shardio.open(out).clips(30, size=(32, 32), times=True)
        with shardio.ShardLoader(clips, batch_size=1, num_workers=0) as loader:
            times = next(iter(loader))["frames_pts"][0]
    assert times.tolist() == [40 * n for n in range(-10, 20)]


def batches(folder: Path) -> list[Any]:
    """Return the shuffled batches of the default view, without their pixels."""
    with shardio.ShardLoader(folder, 3, num_workers=0, output="numpy", shuffle=True) as loader:
        return [
            (len(loader), b.indices.tolist(), b["label"].tolist(), b["source"], b["frames"].shape)
            for b in loader
        ]


@pytest.mark.parametrize("store", STORES[1:])
def test_every_store_has_the_same_clips(out: Callable[[str], Path], store: str) -> None:
    expected = batches(out("raw"))
    assert len(expected) > 3 and batches(out(store)) == expected


def test_encoded_videos_have_the_size_asked_for(out: Callable[[str], Path]) -> None:
    sizes = {}
    for store in STORES[1:]:
        with shardio.open(out(store)) as dataset:
            sizes[store] = [(v["frames"].width, v["frames"].height) for v in dataset]
    assert sizes["planes"] == sizes["jpeg"] == sizes["h264"] == [(32, 32)] * 3
    assert sizes["packets"] == [(96, 64), (96, 64), (96, 64)]  # the third is turned


def test_what_was_normalised_is_recorded_on_every_store(out: Callable[[str], Path]) -> None:
    for store in STORES:
        with shardio.open(out(store)) as dataset:
            facts = {entry["path"]: entry.get("detail", {}) for entry in dataset.inputs}
        turned = facts["b/tall.mp4"]
        assert (turned["rotation"], turned["range"], turned["frames"]) == (90, "limited", 9)


def test_packets_are_the_bytes_of_the_file(root: Path, out: Callable[[str], Path]) -> None:
    with shardio.open(out("packets")) as dataset:
        data = bytes(dataset[0]["frames"].data[:])
    assert data[:500] in (root / "a" / "one.mp4").read_bytes()


def test_options_of_other_stores_leave_raw_as_it_was_recorded(out: Callable[[str], Path]) -> None:
    with shardio.open(out("raw")) as raw, shardio.open(out("h264")) as coded:
        assert raw.converter["options"].keys() == {
            *("frames", "stride", "step", "size", "store"),
            *("keep_partial", "on_error", "shard_bytes"),
        }
        assert dict(raw.view) == {"kind": "rows"}
        extra = coded.converter["options"].items() - raw.converter["options"].items()
        assert extra == {("store", "h264"), ("codec", "h264"), ("gop", 16), ("quality", 19)}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"store": "raw", "gop": 8}, "gop is for store 'h264' or 'planes'; found"),
        ({"store": "packets", "quality": 8}, "quality is for store 'h264' or 'jpeg'"),
        ({"store": "jpeg", "check": True}, "check is for store 'packets'"),
        ({"store": "packets", "fps": 5}, "fps is for store 'raw' or .* 'h264'"),
        ({"store": "h264", "codec": "vp9"}, "codec is 'vp9'; it must be one of h264, hevc, av1"),
        ({"store": "h264", "quality": 52}, "quality is 52; .* from 0 up to 51"),
        ({"store": "jpeg", "quality": 0}, "quality is 0; .* from 1 up to 100"),
        ({"store": "h264", "gop": 0}, "gop is 0"),
        ({"store": "h264", "size": 113}, "size is 113; .* even, from 16 to 8192; .*--store raw"),
        ({"store": "h264", "size": 14}, "size is 14; .* even, from 16 to"),
        ({"store": "h264", "size": 8194}, "size is 8194; .* even, from 16 to 8192; .*--store raw"),
        ({"store": "planes", "quality": 8}, "quality is for store 'h264' or 'jpeg'"),
        ({"store": "planes", "codec": "hevc"}, "codec is 'hevc'; it must be one of zstd, raw"),
        ({"store": "h264", "codec": "zstd"}, "codec is 'zstd'; it must be one of h264, hevc"),
        ({"store": "planes", "gop": 0}, "gop is 0"),
        ({"store": "planes", "size": 33}, "size is 33; .* 'planes' it must be even; .*--store raw"),
        ({"frames": 0}, "must be a whole number from 1 up"),
        ({"step": 0}, "must be a whole number from 1 up"),
        ({"size": 1.5}, "must be a whole number from 1 up"),
        ({"frames": True}, "must be a whole number from 1 up"),
        ({"store": "mp4"}, "store is 'mp4'; it must be one of raw, planes, jpeg"),
        ({"fps": "fast"}, "fps is 'fast'; it must be a number of frames per second"),
        ({"fps": 0}, "fps is 0"),
        ({"store": "packets", "check": 1}, "check is 1; it must be True or False"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        Videos(**options)


def test_options_that_say_the_same_are_the_same() -> None:
    assert Videos() == Videos(store="h264", codec="h264", gop=16, quality=19, step=16)
    assert Videos(store="h264", codec="av1").quality == 30
    assert Videos(store="jpeg").quality == 90
    assert Videos(store="planes") == Videos(store="planes", codec="zstd", gop=4)
    assert Videos(fps="12.50") == Videos(fps=12.5) == Videos(fps="25/2")


def test_gop_places_keyframes_and_quality_decides_bytes(root: Path, tmp_path: Path) -> None:
    path = root / "a" / "one.mp4"
    _, fine = one(path, tmp_path / "fine", store="h264", gop=7, quality=10)
    _, coarse = one(path, tmp_path / "coarse", store="h264", gop=10, quality=40)
    keys = [np.flatnonzero(packet_flags(s.packets) & PacketFlag.KEY) for s in (fine, coarse)]
    assert [found.tolist() for found in keys] == [[0, 7, 14, 21, 28], [0, 10, 20]]
    assert len(fine.data) > 2 * len(coarse.data)
    _, fine = one(path, tmp_path / "j95", store="jpeg", quality=95)
    _, coarse = one(path, tmp_path / "j30", store="jpeg", quality=30)
    assert len(fine.data) > len(coarse.data) + 30 * 100


@pytest.mark.parametrize("codec", ["h264", "hevc", "av1"])
def test_a_video_is_encoded_by_the_codec_asked_for(root: Path, tmp_path: Path, codec: str) -> None:
    _, stream = one(root / "a" / "two.mkv", tmp_path / "out", store="h264", codec=codec)
    assert stream.parameters["codec"] == codec
    shown = sorted(stream.packets["pts"].tolist())
    assert shown == [time * 20 for time in TIMES]  # of Matroska's 1/1000


@pytest.mark.parametrize("store", STORES[:-1])
def test_fps_takes_the_first_frame_of_each_interval(root: Path, tmp_path: Path, store: str) -> None:
    # 10 a second: intervals of 5 ticks, from 7 on: 7-11, 12-16, 17-21, ...
    taken = [7, 14, 20, 30, 32, 40, 45, 47]
    out = tmp_path / "out"
    path = root / "a" / "two.mkv"
    shardio.convert(path, out, workers=0, store=store, fps=10, frames=8, size=32)
    with shardio.open(out) as dataset:
        pts = dataset[0]["pts"] if store == "raw" else dataset[0]["frames"].packets["pts"]
        assert sorted(pts.tolist()) == [time * 20 for time in taken]
        assert dataset.inputs[0]["detail"]["frames"] == 8


@pytest.mark.parametrize("store", STORES)
def test_a_video_out_of_all_proportion_is_broken_on_every_store(tmp_path: Path, store: str) -> None:
    write_video(tmp_path / "in" / "strip.mkv", scene(4, 1536, 2), codec="ffv1")
    report = shardio.convert(tmp_path / "in", tmp_path / "out", workers=0, store=store, **SMALL)
    (found,) = report.inputs
    limit = "over 16384" if store == "packets" else "at most 16384"
    assert found.outcome == "broken" and limit in str(found.reason)


def test_damage_that_only_decoding_shows_is_found_where_frames_are_decoded(tmp_path: Path) -> None:
    path = write_video(tmp_path / "in" / "a.mp4", scene(40))
    content = bytearray(path.read_bytes())
    stream = demux(str(path))
    last = bytes(stream.data[int(stream.packets["offset"][30]) :])
    at = content.find(last)
    content[at + 5 : at + 40] = bytes(35)
    path.write_bytes(content)
    ways: tuple[dict[str, Any], ...] = (
        {"store": "packets"},
        {"store": "packets", "check": True},
        {"store": "h264"},
        {"store": "raw"},
    )
    found = [
        shardio.convert(tmp_path / "in", tmp_path / f"{n}", workers=0, **SMALL, **options).counts
        for n, options in enumerate(ways)
    ]
    assert found == [{"converted": 1}, *[{"broken": 1}] * 3]


@pytest.mark.parametrize("store", ["planes", "jpeg", "h264"])
def test_what_precedes_a_break_is_kept_if_asked_for(tmp_path: Path, store: str) -> None:
    path = write_video(tmp_path / "a.mkv", scene(60), codec_options={"g": "10", "bf": "0"})
    path.write_bytes(path.read_bytes()[:-3000])
    for keeps in (False, True):
        out = tmp_path / str(keeps)
        report = shardio.convert(path, out, workers=0, keep_partial=keeps, store=store, **SMALL)
        assert report.counts == {"broken": 1} and report.n_samples == keeps
    with shardio.open(tmp_path / "True") as dataset:
        (kept,) = [sample["frames"].n_frames for sample in dataset]
    options: dict[str, Any] = {"store": "raw", "keep_partial": True, **SMALL}
    raw = shardio.convert(path, tmp_path / "raw", workers=0, **options)
    with shardio.open(tmp_path / "raw") as dataset:
        n_clips = len(dataset)
    assert raw.counts == {"broken": 1} and not (tmp_path / "False").exists()
    assert 4 <= kept < 60
    assert n_clips == (kept - 4) // 3 + 1


@pytest.mark.parametrize("store", ["planes", "h264"])
def test_the_view_stays_through_surgery(
    out: Callable[[str], Path], tmp_path: Path, store: str
) -> None:
    merge(tmp_path / "merged", out(store), out(store), workers=0)
    reshard(out(store), tmp_path / "cut", shard_bytes=2000, workers=0)
    for name in ("merged", "cut"):
        with shardio.open(tmp_path / name) as dataset, shardio.open(out(store)) as before:
            assert dataset.view == before.view
            assert pictures(dataset[1]["frames"], range(11)).tobytes() == (
                pictures(before[1]["frames"], range(11)).tobytes()
            )
        assert not verify_dataset(tmp_path / name, workers=0).findings


def scaled_by_ffmpeg(path: Path, size: tuple[int, int], crop: tuple[slice, slice]) -> list[Image]:
    """Return the frames of a file, scaled by PyAV alone straight to 4:2:0, and cropped."""
    rows, columns = crop
    flags = "BILINEAR", "ACCURATE_RND", "BITEXACT", "FULL_CHR_H_INT", "FULL_CHR_H_INP"
    how = int(sum(Interpolation[each] for each in flags))
    found = []
    with av.open(str(path)) as container:
        for frame in container.decode(video=0):
            small = frame.reformat(*size, "yuv420p", interpolation=how).to_ndarray()
            luma, (blue, red) = small[: size[1]], small[size[1] :].reshape(2, size[1] // 2, -1)
            halves = [slice(each.start // 2, each.stop // 2) for each in (rows, columns)]
            chroma = np.hstack([blue[*halves], red[*halves]])
            found.append(np.vstack([luma[rows, columns], chroma]))
    return found


@pytest.mark.parametrize("options", [{}, {"gop": 1}, {"codec": "raw"}], ids=repr)
def test_planes_are_those_of_an_independent_scaler(
    root: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    path = root / "a" / "one.mp4"
    wanted = scaled_by_ffmpeg(path, (48, 32), (slice(0, 32), slice(8, 40)))
    _, stream = one(path, tmp_path / "out", store="planes", **options)
    found = np.empty((30, 48, 32), np.uint8)
    with ClipDecoder() as decoder:
        decoder.decode(stream, range(30), found, pixels="yuv420")
    assert np.array_equal(found, wanted)


def test_planes_are_exported_as_videos_of_the_same_pictures(
    out: Callable[[str], Path], tmp_path: Path
) -> None:
    export(out("planes"), tmp_path / "files", "files")
    with shardio.open(out("planes")) as dataset:
        for sample in dataset:
            stream, place = sample["frames"], Path(sample["source"]).with_suffix(".mp4")
            copy = demux(str(tmp_path / "files" / place))
            frames = range(stream.n_frames)
            assert np.array_equal(pictures(copy, frames), pictures(stream, frames))


def test_a_loader_names_the_packet_of_planes_that_is_damaged(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_check_planes", lambda *_: None)  # a writer would refuse it
    _, stream = one(root / "a" / "one.mp4", tmp_path / "sound", store="planes")
    data = bytearray(stream.data)
    at = int(stream.packets["offset"][9])
    data[at : at + 4] = b"none"
    with DatasetWriter(tmp_path / "out", Schema({"frames": Video()})) as writer:
        writer.append({"frames": stream})
        writer.append({"frames": replace(stream, data=bytes(data))})
    clips = shardio.open(tmp_path / "out").clips(4, size=(32, 32))
    expected = r"\.shard, field 'frames', sample 1: .*packet 9 of planes: .*zstd frame"
    with shardio.ShardLoader(clips, 1, num_workers=0) as loader:
        with pytest.raises(MediaError, match=expected):
            for _ in loader:
                pass


def test_no_encoder(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(encoding._ENCODERS, "h264", ("libnone", {}))
    with pytest.raises(UnsupportedEnvironment, match="no encoder libnone here.*; --store raw "):
        shardio.convert(root / "a", tmp_path / "out", workers=0, **SMALL)
    with pytest.raises(UnsupportedEnvironment, match="no encoder libnone here.*; --store raw "):
        shardio.convert(root / "a", tmp_path / "out", store="auto", rate=1, workers=0, **SMALL)
    assert not (tmp_path / "out").exists()


@pytest.mark.process
def test_packets_of_real_files_beside_raw(media_root: Path, tmp_path: Path) -> None:
    root = with_the_broken(media_root, tmp_path / "all")
    report = shardio.convert(root, tmp_path / "out", store="packets")
    assert report.counts == {"converted": 14, "empty": 5, "broken": 6}
    found = {one.name: one.outcome for one in report.inputs}
    assert found["broken/corrupted.mp4"] == "converted"  # raw says: broken, after 28 frames
    clips = [one for one in report.inputs if one.name.startswith("clips/")]
    assert sum(one.detail.get("clips", 0) for one in clips) == 138  # as of raw


def test_appending_takes_the_options_of_the_store(root: Path, tmp_path: Path) -> None:
    out, more = tmp_path / "out", tmp_path / "more"
    shardio.convert(root / "a", out, workers=0, store="h264", gop=5, **SMALL)
    write_video(more / "new.mp4", scene(12))
    report = shardio.convert(more, out, workers=0, append=True)
    assert (report.n_samples_before, report.n_samples, report.view["kind"]) == (2, 1, "clips")
    with shardio.open(out) as dataset:
        keys = packet_flags(dataset[2]["frames"].packets) & PacketFlag.KEY
        assert np.flatnonzero(keys).tolist() == [0, 5, 10]
        assert dataset.view["kind"] == "clips"
    with pytest.raises(InvalidArgument, match="differ.* dataset: store was 'h264', is 'raw'"):
        shardio.convert(more, out, workers=0, append=True, store="raw")
