"""Conversion and verification, compared with the simplest ways to do the same."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import mmap
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash
from PIL import Image

from benchmarks import child, data, plain_media
from benchmarks.child import NotMeasured
from benchmarks.converter_kinds import arrays, episodes, media, records, shards, stores, tables
from benchmarks.converter_kinds.kind import Kind
from benchmarks.data import MIB, DatasetSpec, Sample, filmed_videos, sample_videos
from benchmarks.harness import Bench, Lane, Lanes, Limit, WrongResult, case
from shardio import Array, Bytes, Input
from shardio.conversion.converter import fit_converter, make_converter
from shardio.conversion.inputs import join_parts, list_inputs
from shardio.dataset.manifest import load, publish
from shardio.maintenance import verify_dataset
from shardio.media.image import encode_jpeg

SIZE: Final = 112
N_CPUS: Final = len(os.sched_getaffinity(0))


def _conversion(source: Path, out: Path, **options: Any) -> Mapping[str, float]:
    """Time a conversion in a fresh process; its dataset is removed afterwards."""
    found = child.call_timed(child.convert, str(source), str(out), options)
    shutil.rmtree(out, ignore_errors=True)
    return found


def _plainly(
    work: str, files: list[Path], workers: int, out: Path, *more: object
) -> Mapping[str, float]:
    """Do plain work on every file, in a process whose workers import little."""
    arguments = work, list(map(str, files)), workers, str(out), *more
    found = child.call_timed(plain_media.on_files, *arguments)
    shutil.rmtree(out, ignore_errors=True)
    return found


def _multiply(videos: Path, n_copies: int, folder: Path) -> list[Path]:
    """Return the files of `videos` `n_copies` times over: copied once, then linked."""
    shutil.copytree(videos, folder / "00")
    for copy in range(1, n_copies):
        shutil.copytree(folder / "00", folder / f"{copy:02d}", copy_function=os.link)
    return sorted(path for path in folder.rglob("*") if path.is_file())


# Videos to frames, compared with a bare loop.


@case(Limit("bare loop", "s", "convert", at_least=0.85), rounds=3)
def raw(
    bench: Bench, *, videos: str = "", copies: int = 20, workers: int = N_CPUS, folder: str = ""
) -> Lanes:
    """Compare converting videos to raw frames with a loop that decodes, resizes and crops."""
    place = bench.temporary(folder or None)
    paths = _multiply(sample_videos(bench.cache, videos), copies, place / "in")
    options: dict[str, Any] = {"store": "raw", "size": SIZE, "workers": workers}

    yield {
        "bare loop": partial(_plainly, "decode", paths, workers, place / "out"),
        "convert": partial(_conversion, place / "in", place / "out", **options),
    }


# Other stores and images, compared with ffmpeg and with copies. All lanes sync their files.


@case(
    Limit("ffmpeg -threads N", "s", "h264", at_least=1.2),
    Limit("N ffmpeg", "CPU s", "h264", at_least=0.85),
    rounds=3,
)
def h264(bench: Bench, *, videos: str = "", copies: int = 3, workers: int = N_CPUS) -> Lanes:
    """Compare converting videos to `h264` with the command line of ffmpeg, with the same settings.

    ffmpeg encodes one video at a time with N threads, or N videos at a time with one thread each.
    """
    program, place = _ffmpeg(), bench.temporary()
    files, out = _multiply(filmed_videos(videos), copies, place / "in"), place / "out"
    yield {
        "ffmpeg -threads N": partial(_plainly, "encode", files, 1, out, program, workers),
        "N ffmpeg": partial(_plainly, "encode", files, workers, out, program, 1),
        "h264": partial(_conversion, place / "in", out, store="h264", frames=1, workers=workers),
    }


def _ffmpeg() -> str:
    """Return the path of ffmpeg: the one on PATH, or that of the package imageio-ffmpeg."""
    if found := shutil.which("ffmpeg"):
        return found
    try:
        from imageio_ffmpeg import get_ffmpeg_exe

        return str(get_ffmpeg_exe())
    except (ImportError, RuntimeError) as error:
        raise NotMeasured("ffmpeg is not installed") from error


@case(
    Limit("PyAV", "s", "packets", at_least=0.5),
    Limit("PyAV", "CPU s", "packets", at_least=0.65),
    rounds=5,
)
def packets(bench: Bench, *, videos: str = "", copies: int = 20, workers: int = N_CPUS) -> Lanes:
    """Compare converting videos to `packets` with a copy, and with PyAV's packets alone.

    None of them decodes all frames.
    """
    place = bench.temporary()
    files, out = _multiply(filmed_videos(videos), copies, place / "in"), place / "out"
    options: dict[str, Any] = {"store": "packets", "check": False, "frames": 1, "workers": workers}
    yield {
        "copy": partial(_plainly, "copy", files, workers, out),
        "PyAV": partial(_plainly, "demux", files, workers, out),
        "packets": partial(_conversion, place / "in", out, **options),
    }


@case(
    *(Limit("decoded copy", unit, "images", at_least=0.9) for unit in ("s", "CPU s")),
    Limit("copy", "CPU s", "images", at_least=0.65),
    rounds=5,
)
def images(bench: Bench, *, pictures: str = "", workers: int = N_CPUS) -> Lanes:
    """Compare converting images, which decodes each of them, with copying and hashing them."""
    folder = Path(pictures) if pictures else bench.cache.made("photos", _SOURCE, _write_photos)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    out = bench.temporary() / "out"
    yield {
        "copy": partial(_plainly, "copy", files, workers, out),
        "decoded copy": partial(_plainly, "copy decoded", files, workers, out),
        "images": partial(_conversion, folder, out, workers=workers),
    }


def _write_photos(folder: Path) -> None:
    """Write JPEGs of about 50 KB, with areas and noise as in photographs."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(1500):
        areas = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8)).resize((512, 384))
        noise = rng.normal(0, 5, (384, 512, 1))
        photo = np.clip(np.asarray(areas) + noise, 0, 255).astype(np.uint8)
        (folder / f"{number:04d}.jpg").write_bytes(encode_jpeg(photo))


_SOURCE: Final = inspect.getsource(_write_photos)


# Converters, compared with the libraries of their files.

KINDS: Final[dict[str, Kind]] = {
    name: kind
    for some in (arrays, stores, records, tables, shards, episodes, media)
    for name, kind in some.KINDS.items()
}


@case(
    *(Limit(f"{n}, library", "CPU s", n, at_least=kind.least) for n, kind in KINDS.items()),
    rounds=5,
)
def converters(bench: Bench, *, kind: str = "") -> Lanes:
    """Compare reading files of every kind with the library that they are made for."""
    for name, each in {kind: KINDS[kind]}.items() if kind else KINDS.items():
        place = bench.temporary("/dev/shm")
        try:
            each.make(place)
            source = make_converter(each.converter, each.options)
            found = join_parts(list_inputs(str(place)), source).inputs
            files = [one for one in found if not one.part_of]
            converter = fit_converter(source, files)
            for _ in each.load(files[0].path):
                break
        except ModuleNotFoundError as error:
            bench.note(f"{name}: not measured: {error}")
            continue
        yield {
            f"{name}, library": partial(_read, _loading(each), files),
            name: partial(_read, converter.samples, files),
        }
        shutil.rmtree(place)


def _loading(kind: Kind) -> Callable[[Input], Iterable[Any]]:
    return lambda one: kind.load(one.path)


def _read(read: Callable[[Input], Iterable[Any]], files: list[Input]) -> Mapping[str, float]:
    start_s = time.process_time()
    for one in files:
        for _ in read(one):
            pass
    return {"CPU s": time.process_time() - start_s}


# Verification, compared with reading and hashing.


def _picture(i: int) -> Sample:
    size = 10_000 + i * 7919 % 40_000
    return {"picture": data.noise((size,), i).tobytes(), "label": i}


def _embedding(i: int) -> Sample:
    return {"embedding": data.noise((3072,), i).view(np.float32), "label": i}


def _clip(i: int) -> Sample:
    return {name: data.clip(i)[name] for name in ("frames", "label", "source")}


_CLIP_SCHEMA: Final = {name: data.CLIPS[name] for name in ("frames", "label", "source")}
VERIFIED: Final[dict[str, tuple[dict[str, Any], Callable[[int], Sample], int]]] = {
    "clips": (_CLIP_SCHEMA, _clip, int(np.prod(data.CLIP))),
    "pictures": ({"picture": Bytes(), "label": Array("int64")}, _picture, 30_000),
    "embeddings": (
        {"embedding": Array("float32", (768,)), "label": Array("int64")},
        _embedding,
        3072,
    ),
}
"""Schema, samples, and the approximate bytes that most hashes cover."""


@case(*(Limit(name, "GiB/s", f"{name}, whole", at_least=0.8) for name in VERIFIED))
def verify(bench: Bench, *, mib: int = 512, times: int = 64) -> Lanes:
    """Compare verification of cached files with hashing them whole, and in the format's units."""
    for name, (schema, sample, n_bytes) in VERIFIED.items():
        spec = DatasetSpec(schema, sample, mib * MIB // n_bytes)
        folder = bench.cache.dataset(f"verified-{name}", spec)
        many = bench.temporary(str(bench.cache.folder)) / "many"
        _name_often(folder, times, many)
        unit = min(n_bytes, MIB)
        lanes: dict[str, Lane] = {
            f"{name}, whole": partial(_hash_rate, many, MIB),
            name: partial(_verify_rate, many),
            f"{name}, units": partial(_hash_rate, many, unit),
        }
        for lane in lanes.values():
            lane()  # fills the page cache, and imports what is imported on first use
        yield lanes


def _name_often(folder: Path, n_times: int, out: Path) -> None:
    """Make a dataset `n_times` as large, with links to its shards."""
    one, many = load(folder), []
    out.mkdir()
    for number in range(n_times):
        for shard in one.shards:
            name = f"{number:03d}-{shard.name}"
            os.link(folder / shard.name, out / name)
            many.append(dataclasses.replace(shard, name=name))
    publish(out, schema=one.schema, shards=many)


@functools.cache
def _piece(unit_bytes: int) -> tuple[memoryview, list[memoryview]]:
    """Return the buffer into which a process reads its files, and its units.

    The buffer begins at the start of a page, because some processors copy to other addresses at a
    quarter of the speed.
    """
    buffer = memoryview(mmap.mmap(-1, MIB))
    starts = range(0, MIB - unit_bytes + 1, unit_bytes)
    units = [buffer[start : start + unit_bytes] for start in starts]
    return buffer[: len(units) * unit_bytes], units


def hash_file(unit_bytes: int, path: str) -> int:
    """Read a file in pieces and hash each in units; return its number of bytes."""
    filled, units = _piece(unit_bytes)
    hash_, n_bytes = xxhash.xxh3_64_intdigest, 0
    with open(path, "rb", buffering=0) as file:
        while n := file.readinto(filled):
            list(map(hash_, units))
            n_bytes += n
    return n_bytes


def _hash_rate(folder: Path, unit_bytes: int) -> Mapping[str, float]:
    paths = sorted(map(str, folder.glob("*.shard")))
    start_s = time.perf_counter()
    with multiprocessing.get_context("fork").Pool(min(N_CPUS, len(paths))) as pool:
        n_bytes = sum(pool.imap_unordered(partial(hash_file, unit_bytes), paths))
    return {"GiB/s": n_bytes / (time.perf_counter() - start_s) / (1 << 30)}


def _verify_rate(folder: Path) -> Mapping[str, float]:
    start_s = time.perf_counter()
    report = verify_dataset(folder)
    if report.findings:
        raise WrongResult(f"{folder}: {report.findings[0]}")
    return {"GiB/s": report.n_bytes / (time.perf_counter() - start_s) / (1 << 30)}
