"""A computed MP4 file has the stored packets, with their bytes and times, and any range of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from shardio import EncodedStream, InvalidArgument, MediaError
from shardio.format.types.streams import PacketFlag, pack_packets, packet_flags, packet_sizes
from shardio.media import begin_of, demux, encode, mp4, sound_of
from shardio.media.bitstream import has_start_codes, packet_units
from shardio.media.mp4 import Mp4File, can_be_mp4
from tests.media_made import scene, write_cut, write_flash, write_video

X265 = {"x265-params": "log-level=none"}


def _file(
    tmp_path: Path, video: EncodedStream | None, sound: EncodedStream | None = None
) -> tuple[Path, Mp4File]:
    made = Mp4File(video, sound)
    data = made.read(0, made.size)
    assert len(data) == made.size
    rng = np.random.default_rng(0)
    for start, stop in np.sort(rng.integers(0, made.size + 1, (80, 2)), axis=1).tolist():
        assert made.read(start, stop) == data[start:stop]
    path = tmp_path / "made.mp4"
    path.write_bytes(data)
    return path, made


def _units(stream: EncodedStream) -> list[list[bytes]]:
    """Return the units of each packet, without filler."""
    data, codec = bytes(stream.data[:]), str(stream.parameters["codec"])
    found = []
    for offset, size in zip(stream.packets["offset"], packet_sizes(stream.packets), strict=True):
        packet = data[int(offset) : int(offset) + int(size)]
        units = packet_units(codec, stream.extradata, packet)
        found.append([each for each in units if each[0] & 31 != 12 and each[0] >> 1 & 63 != 38])
    return found


def _seconds(stream: EncodedStream) -> list[Fraction]:
    pts = stream.packets["pts"].astype(np.int64)
    is_shown = packet_flags(stream.packets) & PacketFlag.HIDDEN == 0
    return [int(each - pts[is_shown].min()) * stream.time_base for each in pts]


def _check_video(path: Path, video: EncodedStream) -> None:
    again = demux(str(path))
    assert (again.n_frames, again.width, again.height) == (
        video.n_frames,
        video.width,
        video.height,
    )
    if has_start_codes(str(video.parameters["codec"]), video.extradata):
        assert _units(again) == _units(video)
    else:
        assert bytes(again.data[:]) == bytes(video.data[:])
    assert _seconds(again) == _seconds(video)
    assert np.array_equal(packet_flags(again.packets), packet_flags(video.packets))
    with av.open(str(path)) as container:
        length = (container.duration or 0) / 1_000_000
        if not container.streams.audio:
            assert abs(length - float(video.duration * video.time_base)) < 1e-5


@pytest.mark.parametrize(
    ("codec", "options", "suffix", "name"),
    [
        ("libx264", {}, ".mp4", "avc1.64000a"),
        ("libx264", {"bf": "0", "profile": "baseline"}, ".ts", "avc1.42c00a"),
        ("libx264", {"x264-params": "slices=4"}, ".ts", "avc1.64000a"),
        ("libx265", X265, ".mp4", "hvc1.1.6.L30.90"),
        ("libx265", X265, ".ts", "hvc1.1.6.L30.90"),
        ("libsvtav1", {"preset": "12"}, ".mp4", "av01.0.00M.08"),
        ("libvpx-vp9", {}, ".mkv", "vp09.00.10.08"),
    ],
)
def test_a_file_has_the_packets_and_times_of_its_source(
    tmp_path: Path, codec: str, options: dict[str, str], suffix: str, name: str
) -> None:
    source = write_video(tmp_path / f"a{suffix}", scene(40), codec=codec, codec_options=options)
    video = demux(str(source))
    path, made = _file(tmp_path, video)
    assert made.media_type == f'video/mp4; codecs="{name}"'
    _check_video(path, video)


@pytest.mark.parametrize("codec", ["h264", "hevc", "av1"])
def test_the_videos_that_conversions_encode_can_be_played(tmp_path: Path, codec: str) -> None:
    video = encode(enumerate(scene(40)), 96, 64, Fraction(1001, 30000), codec=codec)
    path, _ = _file(tmp_path, video)
    _check_video(path, video)


def test_frames_at_uneven_times_keep_them(tmp_path: Path) -> None:
    times = [0, 3, 4, 10, 11, 60, 200]
    source = write_video(
        tmp_path / "a.mp4", scene(7), times=times, time_base=Fraction(1, 30), rotation=90
    )
    video = demux(str(source))
    path, _ = _file(tmp_path, video)
    _check_video(path, video)
    assert sorted(_seconds(demux(str(path)))) == [Fraction(each, 30) for each in times]


def test_a_single_frame_without_a_duration_is_shown(tmp_path: Path) -> None:
    video = encode(enumerate(scene(1)), 96, 64, Fraction(1, 25))
    packets = video.packets.copy()
    packets["duration"] = 0
    path, _ = _file(tmp_path, replace(video, packets=packets, duration=0))
    with av.open(str(path)) as container:
        assert [frame.pts for frame in container.decode(video=0)] == [0]


def test_frames_that_an_edit_hides_stay_hidden(tmp_path: Path) -> None:
    video = demux(str(write_cut(tmp_path / "a.mkv", scene(30), 7)))
    packets = video.packets.copy()
    packets["stored"][:5] |= np.uint64(int(PacketFlag.HIDDEN) << 48)
    is_shown = packet_flags(packets) & PacketFlag.HIDDEN == 0
    cut = replace(video, packets=packets, n_frames=int(is_shown.sum()), duration=0)
    path, _ = _file(tmp_path, cut)
    with av.open(str(path)) as container:
        shown = [frame.pts for frame in container.decode(video=0)]
    assert len(shown) == cut.n_frames and shown[0] == 0


@pytest.mark.parametrize(
    ("codec", "suffix", "rate", "sound_from"),
    [
        ("aac", ".mp4", 16_000, Fraction(0)),
        ("aac", ".ts", 16_000, Fraction(0)),
        ("libopus", ".mkv", 48_000, Fraction(1, 2)),
        ("flac", ".mkv", 16_000, Fraction(1, 4)),
    ],
)
def test_sound_is_heard_at_its_time_beside_the_video(
    tmp_path: Path, codec: str, suffix: str, rate: int, sound_from: Fraction
) -> None:
    source = write_flash(
        tmp_path / f"a{suffix}", codec=codec, rate=rate, sound_from=sound_from, layouts=("stereo",)
    )
    video, sound = demux(str(source)), sound_of(str(source))
    assert sound is not None
    path, _ = _file(tmp_path, video, sound)
    _check_video(path, video)
    again = sound_of(str(path))
    assert again is not None
    heard = [_click(str(each)) for each in (source, path)]
    assert abs(heard[0] - heard[1]) <= (0.001 if suffix == ".mkv" else 1 / rate)
    if suffix != ".ts":
        assert bytes(again.data[:]) == bytes(sound.data[:])
        assert begin_of(again) == begin_of(sound)


def _click(path: str) -> float:
    """Return the time of the loudest sample, relative to the first frame, in seconds."""
    with av.open(path) as container:
        frame = next(container.decode(video=0))
        first = float((frame.pts or 0) * (frame.time_base or 0))
    loudest, at = 0.0, 0.0
    with av.open(path) as container:
        for sound in container.decode(audio=0):
            values: Any = sound.to_ndarray()
            values = np.abs(values[0].astype(np.float64))
            if values.max() > loudest:
                loudest = float(values.max())
                at = float((sound.pts or 0) * (sound.time_base or 0))
                at += (
                    int(values.argmax()) // (1 if sound.format.is_planar else 2) / sound.sample_rate
                )
    return at - first


def test_sound_alone_is_an_audio_file(tmp_path: Path) -> None:
    source = write_flash(tmp_path / "a.mp4", codec="aac")
    sound = sound_of(str(source))
    assert sound is not None
    path, made = _file(tmp_path, None, sound)
    assert made.media_type == 'audio/mp4; codecs="mp4a.40.2"'
    again = sound_of(str(path))
    assert again is not None and bytes(again.data[:]) == bytes(sound.data[:])
    assert again.n_frames == sound.n_frames


def test_more_units_than_in_the_first_packets_are_an_error(tmp_path: Path) -> None:
    video = encode(enumerate(scene(40)), 96, 64, Fraction(1, 25))
    data = bytes(video.data[:])
    sizes = packet_sizes(video.packets)
    begin = int(sizes[:-1].sum())
    data = data[:begin] + b"\0\0\1\x09\xf0" * 100
    sizes[-1] = 500
    packets = video.packets
    table = pack_packets(sizes, packet_flags(packets), packets["pts"], packets["duration"])
    made = Mp4File(replace(video, packets=table, data=data))
    assert len(made.read(0, made.size - 600)) == made.size - 600
    with pytest.raises(MediaError, match="more NAL units than the first 32"):
        made.read(0, made.size)


def _mjpeg(video: EncodedStream) -> EncodedStream:
    return replace(video, parameters={**video.parameters, "codec": "mjpeg"})


def _empty(video: EncodedStream) -> EncodedStream:
    return replace(video, packets=video.packets[:0], data=b"", n_frames=0)


def _without_frame(video: EncodedStream) -> EncodedStream:
    packets = video.packets.copy()
    packets["stored"] |= np.uint64(int(PacketFlag.HIDDEN) << 48)
    return replace(video, packets=packets, n_frames=0)


def _slow(video: EncodedStream) -> EncodedStream:
    packets = video.packets.copy()
    packets["pts"] *= 1 << 40
    return replace(video, packets=packets)


def _endless(video: EncodedStream) -> EncodedStream:
    return replace(video, duration=(1 << 64) - 1, time_base=Fraction(9, 25))


def _far(video: EncodedStream) -> EncodedStream:
    packets = video.packets.copy()
    packets["pts"][-1] = (1 << 63) - 1
    return replace(video, packets=packets)


def _another_kind(video: EncodedStream) -> EncodedStream:
    return replace(video, parameters={**video.parameters, "codec": "flac"})


def _nameless(video: EncodedStream) -> EncodedStream:
    return replace(video, parameters={"codec": "h264"})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_mjpeg, "browsers play no mjpeg in MP4"),
        (_empty, "a video without a frame"),
        (_without_frame, "a video without a frame"),
        (_slow, "MP4 cannot store its times"),
        (_far, "MP4 cannot store its times"),
        (_another_kind, "MP4 cannot store its packets: a parameter of the stream"),
        (_endless, "MP4 cannot store its times"),
        (_nameless, "MP4 cannot store its packets: a parameter of the stream"),
        (lambda v: replace(v, time_base=Fraction(1, (1 << 32) - 1)), "MP4 cannot store its times"),
    ],
)
def test_a_stream_that_mp4_cannot_have_is_an_error(
    change: Callable[[EncodedStream], EncodedStream], expected: str
) -> None:
    video = change(encode(enumerate(scene(4)), 96, 64, Fraction(1, 25)))
    with pytest.raises(MediaError, match=expected):
        Mp4File(video)


def test_tables_are_kept_without_the_packets_and_bound_to_equal_streams_later(
    tmp_path: Path,
) -> None:
    source = str(write_flash(tmp_path / "a.ts", codec="aac"))
    video, sound = demux(source), sound_of(source)
    made = Mp4File(video, sound)
    whole, tables = made.read(0, made.size), made.with_streams()
    assert tables.n_tracks == 2
    n_head_bytes = whole.index(b"mdat") + 4
    assert tables.read(0, n_head_bytes) == whole[:n_head_bytes]
    assert n_head_bytes < tables.n_table_bytes < 20_000
    with pytest.raises(InvalidArgument, match="file has no streams"):
        tables.read(0, made.size)
    assert tables.with_streams(demux(source), sound_of(source)).read(0, made.size) == whole
    assert made.read(0, made.size) == whole
    for other in (_empty(video), sound):
        with pytest.raises(InvalidArgument, match="not those of the file"):
            tables.with_streams(other, sound)
    for file, streams in ((Mp4File(video), (video, sound)), (made, (video,))):
        with pytest.raises(InvalidArgument, match="not those of the file"):
            file.with_streams(*streams)


def test_the_codec_decides_if_browsers_may_play_a_stream() -> None:
    video = encode(enumerate(scene(2)), 96, 64, Fraction(1, 25))
    assert can_be_mp4(video) and not can_be_mp4(_mjpeg(video)) and not can_be_mp4(_empty(video))


@pytest.mark.parametrize(
    ("kind", "box", "n_bytes"),
    [
        *((b"avc1", b"avcC", 4), (b"hvc1", b"hvcC", 13), (b"av01", b"av1C", 3)),
        *((b"vp09", b"vpcC", 7), (b"mp4a", b"esds", 8)),
    ],
)
def test_a_record_of_a_codec_that_is_cut_off_is_an_error(
    kind: bytes, box: bytes, n_bytes: int
) -> None:
    record = bytes([0, 0, 0, 0, 3, 128, 1, 9]) if box == b"esds" else bytes(n_bytes)
    for n in range(n_bytes):
        with pytest.raises(MediaError, match="without a whole|is cut off"):
            mp4._codec_name(bytes(20) + kind + box + record[:n])
    if box == b"esds":
        for rest in (b"\3\x80\x80\x80", b"\3\1\0\0\0\4"):
            with pytest.raises(MediaError, match="is cut off"):
                mp4._codec_name(bytes(20) + kind + box + bytes(4) + rest)
    else:
        assert mp4._codec_name(bytes(20) + kind + box + record).startswith(kind.decode() + ".")


def test_a_range_outside_the_file_is_an_error() -> None:
    made = Mp4File(encode(enumerate(scene(2)), 96, 64, Fraction(1, 25)))
    for start, stop in ((-1, 4), (5, 4), (0, made.size + 1)):
        with pytest.raises(InvalidArgument, match=f"within the file's {made.size} bytes; found"):
            made.read(start, stop)
    assert made.read(made.size, made.size) == b""
    with pytest.raises(InvalidArgument, match="needs a video or a sound"):
        Mp4File()


class _Counted:
    """Packets of zeros that count what is read."""

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes, self.n_read = n_bytes, 0

    def __len__(self) -> int:
        return self.n_bytes

    def __getitem__(self, part: slice) -> bytes:
        start, stop, _ = part.indices(self.n_bytes)
        self.n_read += stop - start
        return bytes(stop - start)


def test_a_seek_in_a_long_video_reads_only_the_packets_in_the_range(tmp_path: Path) -> None:
    source = demux(str(write_video(tmp_path / "a.mp4", scene(50))))
    n = 3600 * 25 // 50
    packets = np.tile(source.packets, n)
    packets["pts"] += np.repeat(np.arange(n) * source.duration, 50)
    sizes = np.full(len(packets), 1 << 16)
    table = pack_packets(sizes, packet_flags(packets), packets["pts"], packets["duration"])
    data = _Counted(int(sizes.sum()))
    video = replace(
        source, packets=table, data=data, n_frames=len(table), duration=n * source.duration
    )
    made = Mp4File(video)
    assert data.n_read == 1 << 16  # the first packet, for the description of the codec
    assert made.size > 1 << 32
    assert len(made.read(made.size - 1000, made.size)) == 1000
    assert len(made.read(made.size // 2, made.size // 2 + 1000)) == 1000
    assert data.n_read == (1 << 16) + 2000
    n_head_bytes = made.read(0, 2_000_000).index(b"mdat") + 12  # with the size in 64 bits
    head = made.read(0, n_head_bytes)
    assert head[-16:-8] == b"\0\0\0\1mdat"
    assert int.from_bytes(head[-8:]) == made.size - n_head_bytes + 16


_HOSTILE = (0, 1, -1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 62) + 1, (1 << 63) - 1)
_VALUES: tuple[Any, ...] = (
    None,
    0,
    -1,
    "x",
    [1] * 9,
    1 << 40,
    "1:0",
    {},
    "av1",
    "flac",
    "hevc",
    "opus",
)


def _hostile(stream: EncodedStream, rng: np.random.Generator) -> EncodedStream:
    """Return a stream with a change that a damaged or crafted table can have."""
    packets, i = stream.packets.copy(), int(rng.integers(len(stream.packets)))
    number = _HOSTILE[rng.integers(len(_HOSTILE))]
    kind = rng.integers(6)
    if kind == 0:
        packets["pts"][i] = number
    elif kind == 1:
        packets["duration"][i] = abs(number)
    elif kind == 2:
        packets["stored"][i] ^= np.uint64(int(rng.integers(8)) << 48)
    elif kind == 3:
        base = [max(1, abs(_HOSTILE[each]) & 0xFFFFFFFF) for each in rng.integers(9, size=2)]
        return replace(stream, time_base=Fraction(*base))
    elif kind == 4:
        return replace(stream, duration=abs(number))
    else:
        names = [*stream.parameters, "begin", "skip", "samples", "display"]
        name, value = names[rng.integers(len(names))], _VALUES[rng.integers(len(_VALUES))]
        return replace(stream, parameters={**stream.parameters, name: value})
    return replace(stream, packets=packets)


@pytest.mark.parametrize("seed", range(4))
def test_any_damage_of_the_tables_is_an_error_or_a_file(tmp_path: Path, seed: int) -> None:
    source, rng = str(write_flash(tmp_path / "a.mp4", codec="aac")), np.random.default_rng(seed)
    videos = demux(source), encode(enumerate(scene(9)), 96, 64, Fraction(1, 25))
    sound = sound_of(source)
    n_made = n_refused = 0
    for n in range(100):
        video, beside = videos[n % 2], sound if n % 3 else None
        if beside is not None and n % 4:
            beside = _hostile(beside, rng)
        else:
            video = _hostile(video, rng)
        try:
            made = Mp4File(None if n % 7 == 5 and beside else video, beside)
            assert len(made.read(0, made.size)) == made.size and made.media_type
            n_made += 1
        except MediaError:
            n_refused += 1
    assert n_made > 10 and n_refused > 10
