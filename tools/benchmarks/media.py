"""Video clips and pictures: decoding alone, on one core; size and speed of each store."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final
from unittest import mock

import av
import numpy as np
import simplejpeg

import shardio
from benchmarks.child import NotMeasured
from benchmarks.clip_peers import FRAMES, SIZE, OpenFiles, by_pyav
from benchmarks.clip_stores import STORES, file_lane, store_lanes
from benchmarks.data import filmed_videos
from benchmarks.harness import Bench, Lane, Lanes, Limit, case
from benchmarks.image_peers import ffcv_decoder
from shardio.errors import MediaError
from shardio.format.types.streams import EncodedStream
from shardio.media import encoding
from shardio.media.clip_decoder import ClipDecoder, FrameTable
from shardio.media.decoders import numbered_packet, open_video_decoder
from shardio.media.demuxing import demux
from shardio.media.image import decode_crop, decode_image, encode_jpeg
from shardio.media.media_files import VideoFile
from shardio.media.pixels import FrameConverter, Pixels

SIDE = 224
Pictures = list[tuple[int, Pixels | None]]


@dataclass(frozen=True)
class Film:
    """A video in three forms: its file, the packets of the file, and small groups of pictures."""

    path: str
    times: np.ndarray
    packets: EncodedStream
    small: EncodedStream


@dataclass(frozen=True)
class Clip:
    """A film, and the numbers of some of its frames."""

    film: Film
    frames: np.ndarray


def _pictures(path: str) -> tuple[Pictures, Fraction]:
    with VideoFile(path) as video:
        return list(video.pictures(SIZE, pixels="yuv420")), video.time_base


def _load(bench: Bench, folder: Path) -> list[Film]:
    """Read every video that is long enough."""
    found = []
    for path in sorted(folder.rglob("*.*")):
        try:
            packets = demux(str(path))
        except MediaError as error:
            bench.note(f"left out: {error}")
            continue
        if packets.n_frames >= FRAMES:
            pictures, time_base = _pictures(str(path))
            small = encoding.encode(pictures, SIZE, SIZE, time_base)
            times = np.array([time for time, _ in pictures])
            found.append(Film(str(path), times, packets, small))
    n_frames = sum(film.small.n_frames for film in found)
    n_bytes = sum(len(film.small.data) for film in found)
    bench.note(
        f"{len(found)} videos, {n_frames} frames; h264: {n_bytes / n_frames:.0f} bytes a frame"
    )
    return found


def _draw(films: list[Film], n: int, stride: int, seed: int) -> list[Clip]:
    """Draw clips, uniformly over all frames that can start one."""
    rng = random.Random(seed)
    span = (FRAMES - 1) * stride + 1
    starts = [max(0, film.packets.n_frames - span + 1) for film in films]
    return [
        Clip(film, np.arange(FRAMES) * stride + rng.randrange(film.packets.n_frames - span + 1))
        for film in rng.choices(films, starts, k=n)
    ]


def _turns(films: list[Film], n: int, stride: int, times: int = 1) -> Iterator[list[Clip]]:
    """Yield clips for each turn, the same for every method."""
    for seed in itertools.count():
        yield _draw(films, n, stride, seed) * times


def _pyav(clips: list[Clip]) -> None:
    for clip in clips:
        start, stride = int(clip.film.times[clip.frames[0]]), int(clip.frames[1] - clip.frames[0])
        by_pyav(clip.film.path, start, stride)


def _torchcodec(clips: list[Clip]) -> None:
    """Decode with torchcodec, and resize with torch, on one thread."""
    torch, decoders = import_module("torch"), import_module("torchcodec.decoders")
    torch.set_num_threads(1)
    for clip in clips:
        decoder = decoders.VideoDecoder(
            clip.film.path, num_ffmpeg_threads=1, seek_mode="approximate"
        )
        last = (decoder.metadata.num_frames or 1) - 1
        frames = decoder.get_frames_at([min(int(n), last) for n in clip.frames]).data
        torch.nn.functional.interpolate(frames.float(), (SIZE, SIZE), mode="bilinear").byte()


class Ours:
    """shardio's decoder, which stays open as it does in a worker."""

    def __init__(self, *, loop_filter: bool = True) -> None:
        self._decoder = ClipDecoder(64, loop_filter=loop_filter)
        self._rgb = np.empty((FRAMES, SIZE, SIZE, 3), np.uint8)
        self._yuv = np.empty((FRAMES, SIZE * 3 // 2, SIZE), np.uint8)
        self._bare: dict[int, Any] = {}
        self._converter = FrameConverter()

    def packets(self, clips: list[Clip]) -> Pixels:
        """Decode independent clips from the files' own packets; return the pixels of the last."""
        for clip in clips:
            self._decoder.decode(clip.film.packets, clip.frames, self._rgb)
        return self._rgb

    def rgb(self, clips: list[Clip], pixels: str = "rgb") -> None:
        """Decode independent clips from small groups of pictures."""
        for clip in clips:
            self._decoder.decode(clip.film.small, clip.frames, self._rgb, pixels=pixels)

    def yuv(self, clips: list[Clip]) -> None:
        """Decode the clips of `rgb` to planes of YUV."""
        for clip in clips:
            self._decoder.decode(clip.film.small, clip.frames, self._yuv, pixels="yuv420")

    def epoch(self, clips: list[Clip]) -> None:
        """Decode the clips of each film together."""
        by_film: dict[str, list[Clip]] = {}
        for clip in clips:
            by_film.setdefault(clip.film.path, []).append(clip)
        for each in by_film.values():
            outs = [(clip.frames, np.empty_like(self._rgb)) for clip in each]
            self._decoder.decode_many(each[0].film.packets, outs)

    def bare(self, clips: list[Clip]) -> None:
        """Decode only: the decoder's frames are discarded."""
        for _ in self._frames(clips):
            pass

    def bare_rgb(self, clips: list[Clip]) -> None:
        """Decode and convert with swscale only."""
        for frame in self._frames(clips):
            self._converter.rgb(frame, SIZE, SIZE)[0](frame)

    def _frames(self, clips: list[Clip]) -> Iterator[av.VideoFrame]:
        for clip in clips:
            stream = clip.film.small
            if id(stream) not in self._bare:
                codec = open_video_decoder(stream.parameters, stream.extradata)
                self._bare[id(stream)] = codec, FrameTable(stream.packets, stream.n_frames)
            codec, table = self._bare[id(stream)]
            content = memoryview(stream.data[:])
            for run in table.runs(clip.frames):
                codec.flush_buffers()
                for n in table.packets_to_decode(run):
                    begin = int(table.offsets[n])
                    packet = numbered_packet(n, content[begin : begin + int(table.sizes[n])])
                    yield from (frame for frame in codec.decode(packet) if frame.pts in run.wanted)
                yield from (frame for frame in codec.decode(None) if frame.pts in run.wanted)


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Stay on one core, because the figures of this module are per core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@case(
    Limit("packets", "clips/s", "pyav", at_least=1.4),
    Limit("packets", "clips/s", "torchcodec", at_least=1.4),
    Limit("packets, epoch", "clips/s", "pyav", at_least=3.0),
    Limit("h264 rgb", "clips/s", "pyav", at_least=55),
    Limit("h264 yuv", "clips/s", "pyav", at_least=100),
    Limit("h264 rgb-fast", "clips/s", "pyav", at_least=68),
    Limit("h264 rgb-fast", "clips/s", "h264 by torchcodec", at_least=1.0),
    Limit("h264 yuv", "clips/s", "h264 by pyav", at_least=1.4),
    rounds=20,
)
def clips(bench: Bench, *, videos: str = "", stride: int = 1, n: int = 12) -> Lanes:
    """Compare random clips from packets and from `h264` with reopening the files, on one core."""
    films, ours = _load(bench, filmed_videos(videos)), Ours()
    peers = OpenFiles(bench.temporary(), [film.small for film in films])
    lanes: dict[str, Lane] = {}
    methods: dict[str, tuple[Callable[[list[Clip]], object], int]] = {"pyav": (_pyav, 1)}
    methods["h264 by pyav"] = partial(_by_peer, peers.by_pyav), 8
    try:
        import_module("torchcodec.decoders")
        methods["torchcodec"] = _torchcodec, 1
        methods["h264 by torchcodec"] = partial(_by_peer, peers.by_torchcodec), 8
    except (ImportError, OSError, RuntimeError) as error:
        bench.note(f"without torchcodec: {str(error).splitlines()[0]}")
    methods |= {"packets": (ours.packets, 1), "h264 rgb": (ours.rgb, 8), "h264 yuv": (ours.yuv, 8)}
    methods["h264 rgb-fast"] = partial(ours.rgb, pixels="rgb-fast"), 8
    methods |= {"h264 bare": (ours.bare, 8), "h264 bare rgb": (ours.bare_rgb, 8)}
    for name, (method, times) in methods.items():
        turns = _turns(films, n, stride, times)
        method(next(turns))  # opens the decoders
        lanes[name] = partial(_clips_rate, method, turns)
    span = FRAMES * stride
    whole = [
        Clip(film, np.arange(start, start + span, stride))
        for film in films
        for start in range(0, film.packets.n_frames - (FRAMES - 1) * stride, span)
    ]
    lanes["packets, epoch"] = partial(_clips_rate, ours.epoch, itertools.repeat(whole))
    with one_core():
        yield lanes


def _by_peer(decode: Callable[[EncodedStream, np.ndarray], None], clips: list[Clip]) -> None:
    for clip in clips:
        decode(clip.film.small, clip.frames)


def _clips_rate(
    method: Callable[[list[Clip]], object], turns: Iterator[list[Clip]]
) -> Mapping[str, float]:
    given = next(turns)
    start_s = time.process_time()
    method(given)
    return {"clips/s": len(given) / (time.process_time() - start_s)}


@case(Limit("unfiltered", "clips/s", "filtered", at_least=1.05), rounds=10)
def loop_filter(bench: Bench, *, videos: str = "", stride: int = 1, n: int = 24) -> Lanes:
    """Compare clips from packets with and without the loop filter: speed, and difference."""
    films = _load(bench, filmed_videos(videos))
    filtered, unfiltered = Ours(), Ours(loop_filter=False)
    squares = [
        ((filtered.packets([clip]).astype(int) - unfiltered.packets([clip])) ** 2).mean()
        for clip in _draw(films, n, stride, 0)
    ]
    changed = [float(10 * np.log10(255**2 / each)) for each in squares if each]
    if not changed:
        raise NotMeasured("no clip changes without the loop filter")
    bench.note(
        f"{len(changed)} of {n} clips change; their PSNR at {SIZE} x {SIZE}: median "
        f"{np.median(changed):.1f} dB, lowest {min(changed):.1f} dB"
    )
    lanes: dict[str, Lane] = {}
    for name, one in {"filtered": filtered, "unfiltered": unfiltered}.items():
        lanes[name] = partial(_clips_rate, one.packets, _turns(films, n, stride))
    with one_core():
        yield lanes


# Settings of the encoder.

PLAIN: Final = {
    "preset": "veryfast",
    "tune": "fastdecode",
    "crf": "20",
    "bf": "0",
    "sc_threshold": "0",
}
SETTINGS: Final[dict[str, Mapping[str, str] | None]] = {  # None: what `StreamEncoder` does
    "plain": {},
    "as stored": None,
    "a keyframe every 8": {"g": "8"},
    "crf 23": {"crf": "23"},
    "crf 26": {"crf": "26"},
    "CABAC": {"x264-params": "cabac=1"},
    "deblocking": {"x264-params": "no-deblock=0"},
    "no psychovisual tuning": {"x264-params": "aq-mode=0:psy=0", "crf": "22"},
    "no transform of 8 x 8": {"x264-params": "8x8dct=0"},
    "preset slow, crf 21": {"preset": "slow", "crf": "21"},
}


@case(rounds=10)
def settings(bench: Bench, *, videos: str = "", stride: int = 1) -> Lanes:
    """Compare settings of x264: time to decode the same clips, bytes per frame, PSNR."""
    films, ours = _load(bench, filmed_videos(videos)), Ours()
    pictures = [_pictures(film.path)[0] for film in films]
    lanes: dict[str, Lane] = {}
    for name in SETTINGS:
        pairs = zip(films, pictures, strict=True)
        made = [replace(film, small=_encoded(each, film.small, name)) for film, each in pairs]
        n_bytes = sum(len(film.small.data) for film in made)
        facts = {
            "bytes/frame": n_bytes / sum(film.small.n_frames for film in made),
            "dB": _psnr(made, pictures),
        }
        turns = _turns(made, 24, stride)
        ours.bare(next(turns))  # opens the decoders
        lanes[name] = partial(_decoding_ms, ours, turns, facts)
    with one_core():
        yield lanes


def _decoding_ms(
    ours: Ours, turns: Iterator[list[Clip]], facts: Mapping[str, float]
) -> Mapping[str, float]:
    given = next(turns)
    start_s = time.process_time()
    ours.bare(given)
    return {"CPU ms/clip": (time.process_time() - start_s) / len(given) * 1e3, **facts}


def _encoded(pictures: Pictures, like: EncodedStream, name: str) -> EncodedStream:
    """Encode pictures with the settings of this name."""
    changes = SETTINGS[name]
    if changes is None:
        return encoding.encode(pictures, SIZE, SIZE, like.time_base)
    gop = int(changes.get("g", "16"))
    options = {**PLAIN, "keyint_min": str(gop), **changes, "g": str(gop)}
    encoder = ("libx264", lambda gop, crf: options)
    with mock.patch.dict(encoding._ENCODERS, {"h264": encoder}):
        return encoding.encode(pictures, SIZE, SIZE, like.time_base, gop=gop)


def _psnr(films: list[Film], pictures: list[Pictures]) -> float:
    """Return the PSNR of the luma of all frames; every frame has the same weight."""
    errors: list[float] = []
    for film, wanted in zip(films, pictures, strict=True):
        stream = film.small
        found = np.empty((stream.n_frames, SIZE * 3 // 2, SIZE), np.uint8)
        with ClipDecoder() as decoder:
            decoder.decode(stream, range(stream.n_frames), found, pixels="yuv420")
        pairs = zip(found, wanted, strict=True)
        squares = [
            ((one[:SIZE].astype(int) - other[:SIZE]) ** 2).mean()
            for one, (_, other) in pairs
            if other is not None
        ]
        errors += [float(np.mean(squares))] * stream.n_frames
    return float(10 * np.log10(255**2 / np.mean(errors)))


# Stores.


@case(
    *(
        Limit(f"{store}, drawn, RGB", "clips/s", "the files, by PyAV", at_least=1)
        for store in STORES
        if store != "raw"
    ),
    Limit("raw, stored clips", "clips/s", "the files, by PyAV", at_least=1),
    Limit("planes, drawn, YUV", "clips/s", "h264, drawn, YUV", at_least=1.3),
    Limit("planes, drawn, RGB", "clips/s", "h264, drawn, RGB", at_least=1),
    Limit("planes, raw, drawn, YUV", "clips/s", "planes, drawn, YUV", at_least=2),
    rounds=2,
)
def stores(
    bench: Bench, *, videos: str = "", seconds: float = 8.0, stride: int = 1, size: int = SIZE
) -> Lanes:
    """Measure the bytes per frame and PSNR of every store, and the clips per second of a core."""
    source, place = filmed_videos(videos), bench.temporary()
    for store, options in STORES.items():
        shardio.convert(source, place / store, kind="videos", size=size, **options)
    with one_core():
        lanes = file_lane(source, stride, seconds)
        for store in STORES:
            lanes |= store_lanes(place, store, stride, seconds, size)
        yield lanes


# Pictures.


def drawn_pictures(n: int) -> Pixels:
    """Return coarse squares with noise over them, like the pictures of the race."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 255, (n, 28, 28, 3), np.uint8)
    noise = rng.integers(0, 16, (n, SIDE, SIDE, 3), np.uint8)
    drawn: Pixels = coarse.repeat(8, 1).repeat(8, 2) // 2 + noise
    return drawn


@case(
    Limit("4:4:4, simplejpeg", "µs/picture", "4:4:4, shardio", at_least=0.92),
    Limit("4:2:0, simplejpeg", "µs/picture", "4:2:0, shardio", at_least=0.92),
    Limit("4:2:0, ffcv", "µs/picture", "4:2:0, shardio", at_least=0.9),
    rounds=40,
)
def pictures(bench: Bench) -> Lanes:
    """Compare decoding JPEGs of 224 x 224 with simplejpeg and with FFCV's decoder."""
    decoders: dict[str, Callable[[bytes, Any], object]] = {
        "shardio": lambda content, out: decode_image(content, out=out),
        "simplejpeg": lambda content, out: simplejpeg.decode_jpeg(content, buffer=out),
        "shardio crop, resized": lambda content, out: decode_crop(
            content, (20, 30, 180, 170), (SIDE, SIDE), out=out
        ),
    }
    if (ffcv := ffcv_decoder()) is None:
        bench.note("without FFCV: set RACE_PYTHON_FFCV to an interpreter that has it")
    else:
        decoders["ffcv"] = ffcv
    drawn = drawn_pictures(64)
    block: Any = np.zeros_like(drawn)
    for subsampling in ("444", "420"):
        files = [encode_jpeg(each, quality=90, subsampling=subsampling) for each in drawn]
        yield {
            f"{':'.join(subsampling)}, {name}": partial(_decoding_us, decode, files, block)
            for name, decode in decoders.items()
        }


def _decoding_us(
    decode: Callable[[bytes, Any], object], files: list[bytes], block: Any
) -> Mapping[str, float]:
    start_s = time.perf_counter()
    for content, out in zip(files, block, strict=True):
        decode(content, out)
    return {"µs/picture": (time.perf_counter() - start_s) * 1e6 / len(files)}
