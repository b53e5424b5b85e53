"""Measurements of a dataset after its conversion: reading speed, and loss of picture quality.

The loss is measured as the PSNR, in dB, of the stored pictures against the original pictures.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from shardio._base.callers import expand_home
from shardio.conversion import ConversionReport, Input
from shardio.conversion.append import inherit_options
from shardio.conversion.converter import make_converter
from shardio.conversion.inputs import original_name, parse_pattern
from shardio.dataset.manifest import load
from shardio.errors import MediaError
from shardio.format.types.streams import EncodedStream
from shardio.media import AudioDecoder, ClipDecoder, decode_image
from shardio.samples.shard_dataset import ShardDataset

_MAX_COMPARED: Final = 5  # the maximum number of files whose PSNR is measured
_MAX_ROWS: Final = 24  # the maximum number of different rows that are read
_MAX_SAMPLES: Final = 200  # the maximum number of samples that are decoded
_BEST_DB: Final = 100.0  # used for equal pictures, whose PSNR is infinite, and as the maximum


@dataclass(frozen=True, slots=True)
class StoredReport:
    """Measurements of some samples of a converted dataset.

    `samples_per_s` is the number of random samples (clips if the default view has clips, otherwise
    rows) that one thread reads and decodes per second. `psnr_db` maps the names of the compared
    inputs to the PSNR of their stored pictures; the mapping is empty if none was compared: the
    conversion is lossless, or the converter cannot measure the loss.
    """

    samples_per_s: float
    psnr_db: Mapping[str, float]


def source_bytes(report: ConversionReport) -> int:
    """Return the total size of the inputs that gave samples to the conversion."""
    return sum(one.n_bytes for one in report.inputs if one.n_samples)


def measure_stored(
    report: ConversionReport, src: str | os.PathLike[str], *, seconds: float = 0.5
) -> StoredReport | None:
    """Measure some of the samples that a conversion of `src` has added to a dataset.

    `report` is the report on the conversion. Reading is timed for `seconds`, or until 200 samples
    are read. Return None if the conversion has added no samples.

    Raises:
        ShardioError, OSError: the dataset or an input cannot be read.
    """
    if not report.n_samples:
        return None
    with ShardDataset(report.dataset) as dataset:
        first = report.n_samples_before
        rows = range(first, first + report.n_samples)
        rate = _measure_rate(dataset, rows, seconds)
        return StoredReport(
            rate, dict(_compare_pictures(dataset, report, os.fspath(expand_home(src))))
        )


def _pick_evenly(items: Sequence[Any], n: int) -> list[Any]:
    """Return at most `n` of the items, at equal distances."""
    n = min(n, len(items))
    return [items[(2 * k + 1) * len(items) // (2 * n)] for k in range(n)]


def _measure_rate(dataset: ShardDataset, rows: Sequence[int], seconds: float) -> float:
    """Measure and return how many random samples this thread reads and decodes per second."""
    draw, view = random.Random(0), dataset.view
    chosen = rows if len(rows) <= _MAX_ROWS else draw.sample(rows, _MAX_ROWS)
    with ClipDecoder() as decoder, AudioDecoder() as sounds:
        decoders = [_sample_decoder(dataset, row, view, decoder, sounds, draw) for row in chosen]
        for row, decode in zip(chosen, decoders, strict=True):
            try:
                decode()
            except MediaError as error:
                raise MediaError(f"{dataset[row].get('source', row)}: {error}") from error
        return _calls_per_s(decoders, draw, seconds)


def measure_clips(
    videos: Sequence[EncodedStream | np.ndarray], view: Mapping[str, Any], *, seconds: float = 0.5
) -> float:
    """Measure and return how many random clips this thread decodes per second.

    Each of `videos` is a stream, or the pixels of a clip, which are copied. `view` is a view of
    clips, as a dataset records it. After one clip of each video, clips are decoded for `seconds` of
    CPU time, or until there are 200.
    """
    draw = random.Random(0)
    with ClipDecoder() as decoder:
        decoders: list[Callable[[], object]] = [
            each.copy
            if isinstance(each, np.ndarray)
            else partial(_decode_random_clip, each, view, decoder, draw)
            for each in videos
        ]
        for decode in decoders:
            decode()
        # Other programs that are running now do not run during training: measure CPU time.
        return _calls_per_s(decoders, draw, seconds, time.thread_time)


def _calls_per_s(
    functions: Sequence[Callable[[], object]],
    draw: random.Random,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Call functions at random, for `seconds` or 200 times; return the calls per second."""
    n_calls, start_s = 0, clock()
    while (elapsed_s := clock() - start_s) < seconds and n_calls < _MAX_SAMPLES:
        draw.choice(functions)()
        n_calls += 1
    return n_calls / max(elapsed_s, 1e-9)


def _sample_decoder(
    dataset: ShardDataset,
    row: int,
    view: Mapping[str, Any],
    decoder: ClipDecoder,
    sounds: AudioDecoder,
    draw: random.Random,
) -> Callable[[], None]:
    """Return a function that decodes a row or, if the view is clips, a random clip of its video."""
    video = next((name for name, f in dataset.schema.items() if f.medium == "video"), None)
    if video is not None and view["kind"] == "clips":
        stream = dataset[row][video]
        return lambda: _decode_random_clip(stream, view, decoder, draw)
    pictures = {name for name, field in dataset.schema.items() if field.medium == "image"}
    heard = {name for name, field in dataset.schema.items() if field.medium == "audio"}

    def decode() -> None:
        for name, value in dataset[row].items():
            if value is None:
                continue
            if name in pictures:
                decode_image(value)
            elif name in heard:
                sounds.decode(value, 0, value.n_frames)
            elif isinstance(value, np.ndarray):
                value.copy()

    return decode


def _decode_random_clip(
    stream: EncodedStream, view: Mapping[str, Any], decoder: ClipDecoder, draw: random.Random
) -> None:
    span = (view["frames"] - 1) * view["stride"] + 1
    if stream.n_frames < span:
        return
    start = draw.randrange(stream.n_frames - span + 1)
    height, width = view.get("size", (stream.height, stream.width))
    out = np.empty((view["frames"], height, width, 3), np.uint8)
    decoder.decode(stream, list(range(start, start + span, view["stride"])), out)


def _compare_pictures(
    dataset: ShardDataset, report: ConversionReport, src: str
) -> Iterator[tuple[str, float]]:
    """Yield the names of some inputs, each with the PSNR of the pictures stored for the input."""
    kind, options = inherit_options(load(report.dataset), report.kind, {})
    converter = make_converter(kind or report.kind, options)
    root = parse_pattern(src).root
    first_rows = itertools.accumulate(
        (one.n_samples for one in report.inputs), initial=report.n_samples_before
    )
    converted = [
        (one, row)
        for one, row in zip(report.inputs, first_rows, strict=False)
        if one.outcome == "converted" and one.n_samples
    ]
    for one, row in _pick_evenly(converted, _MAX_COMPARED):
        path = os.path.join(root, original_name(one.name)) if os.path.isdir(root) else root
        found = converter.error(Input(one.name, path, one.n_bytes, one.label), dataset[row])
        if found is not None:
            error, n_values = found
            psnr = _BEST_DB if not error else 10 * math.log10(255**2 * n_values / error)
            yield one.name, min(psnr, _BEST_DB)
