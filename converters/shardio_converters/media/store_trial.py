"""Estimate the size and speed of each store from the beginnings of a few videos."""

from __future__ import annotations

import math
import os
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice
from typing import TYPE_CHECKING, Final

import numpy as np

from shardio import EncodedStream, Input, InvalidArgument, MediaError, media
from shardio.conversion import StoreChoice, StoreEstimate, choose_store
from shardio_converters.media.audio import is_media

if TYPE_CHECKING:
    from shardio_converters.media.videos import Videos

SECONDS: Final = 3
"""The seconds of a video that are stored as a trial, in addition to one clip."""
PACKET_SECONDS: Final = 30
"""The same for the store `packets`: keyframes may be 10 s apart, and the clips that come soon after
one take the least time."""
MAX_VIDEOS: Final = 8
"""The number of videos after which the trial ends."""
MAX_TRIED: Final = 16
"""The maximum number of files that are opened, including those that give no clip."""
MAX_SECONDS: Final = 15.0
"""The time after which no other file is opened, once one has given a clip."""
_MAX_COPIED: Final = 24
"""The maximum number of clips whose copies measure the speed of the store `raw`."""
_COPIED_BYTES: Final = 64 << 20
"""The maximum total size of these clips."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """The beginning of a video in a store, and the estimated size of the whole video there.

    `stream` is None for the store `raw`, whose samples are arrays.
    """

    n_bytes: float
    stream: EncodedStream | None = None


Trial = Mapping[str, Beginning | str]
"""The beginning of a video by store, or the reason why the store cannot represent the video."""


def choose_by_trial(wanted: Videos, inputs: Sequence[Input]) -> StoreChoice:
    """Choose a store for `wanted.disk` and `wanted.rate`, after a trial with some of the inputs.

    Raises:
        InvalidArgument: no store meets the limits, or none of the inputs that were tried is a video
            of at least one clip.
    """
    from shardio.measuring import machine_limits

    # Recognize videos by their names if any file has such a name: opening each of 100,000 files
    # would take minutes.
    named = [one for one in inputs if _is_video_name(one.name)] or [*inputs]
    candidates = wanted.candidates()
    trials, n_bytes_tried = _try_inputs(candidates, named)
    scale = sum(one.n_bytes for one in named) / max(1, n_bytes_tried)
    stride = f" with a stride of {wanted.stride}" if wanted.stride > 1 else ""
    return choose_store(
        [_estimate(each, trials, scale) for each in candidates],
        disk=wanted.disk,
        rate=wanted.rate,
        n_cores=machine_limits().n_usable_cpus,
        basis=(
            f"random clips of {wanted.frames} frames{stride}, {wanted.size} x {wanted.size}, in "
            f"RGB; from the beginnings of {len(trials)} of {len(named):,} videos"
        ),
    )


def _is_video_name(name: str) -> bool:
    return media.has_media_suffix(name) and not media.has_sound_suffix(name)


def _try_inputs(candidates: Sequence[Videos], inputs: Sequence[Input]) -> tuple[list[Trial], int]:
    """Try up to MAX_TRIED inputs; return the trials of those that give a clip.

    Also return the total size of all inputs that were tried. Those without a clip count, too,
    because such files occur among the others as well, and give no samples.

    Raises:
        InvalidArgument: none of them gives a clip.
    """
    n = min(MAX_TRIED, len(inputs))
    spread = [inputs[(2 * k + 1) * len(inputs) // (2 * n)] for k in range(n)]
    found, failures, n_bytes_tried = list[Trial](), list[str](), 0
    end_s = time.monotonic() + MAX_SECONDS
    # In this order, the first few inputs are spread over the source, too, if the trial ends early.
    for one in (each for first in (0, 2, 1, 3) for each in spread[first::4]):
        n_bytes_tried += one.n_bytes
        try:
            found.append(_try_input(candidates, one))
        except (MediaError, OSError) as error:
            failures.append(_reason(error, one))
        if found and (len(found) == MAX_VIDEOS or time.monotonic() > end_s):
            break
    if not found:
        raise InvalidArgument(
            "store='auto' (--store auto): none of the files that were tried is a video of at least "
            f"one clip: {failures[0]}; name a store, such as h264"
        )
    return found, n_bytes_tried


def _reason(error: Exception, one: Input) -> str:
    return f"{one.name}: {str(error).removeprefix(f'{one.path}: ')}"


def _try_input(candidates: Sequence[Videos], one: Input) -> Trial:
    """Store the beginning of a video in each store; raise MediaError if it gives no clip."""
    if not stat.S_ISREG(os.stat(one.path).st_mode):  # opening a pipe could block forever
        raise MediaError("not a regular file")
    if not is_media(one):
        raise MediaError("not a video")
    sound = media.sound_of(one.path) if candidates[0].audio else None
    n_sound_bytes = 0 if sound is None else _stream_bytes(sound)
    found: dict[str, Beginning | str] = {}
    for converter in candidates:
        try:
            beginning = store_beginning(converter, one)
        except MediaError as error:
            # Packets cannot represent every video. Other stores fail only if the video is broken.
            if converter.store != "packets" or len(candidates) == 1:
                raise
            found[converter.store] = _reason(error, one)
        else:
            found[converter.store] = replace(beginning, n_bytes=beginning.n_bytes + n_sound_bytes)
    return found


def store_beginning(converter: Videos, one: Input) -> Beginning:
    """Store the first clip of a video and some seconds after it; estimate the size of all of it.

    Raises:
        MediaError: this part of the video is damaged, the store cannot represent it, or the video
            is shorter than a clip.
    """
    with media.VideoFile(one.path) as video:
        interval = video.interval if converter.fps is None else 1 / Fraction(converter.fps)
        seconds = PACKET_SECONDS if converter.store == "packets" else SECONDS
        n_max = converter.span + math.ceil(seconds / interval)
        stream = None
        if converter.store == "raw":
            pictures, rising = converter.pictures(video, "rgb"), media.MonotonicTimestamps()
            times = [rising(shown) for shown, _ in islice(pictures, n_max)]
            n_read = len(times)
        elif converter.store == "packets":
            stream, _ = converter.packets(one.path, n_max)
            times, n_read = media.times_of(stream).tolist(), len(stream.packets)
        else:
            stream, _, failure = converter.encode(video, n_max)
            if failure is not None:
                raise failure
            times, n_read = media.times_of(stream).tolist(), stream.n_frames
        if len(times) < converter.span:
            raise MediaError(f"{len(times)} frames; one clip spans {converter.span}")
        stored_s = (times[-1] - times[0]) * video.time_base + interval
        whole_s = stored_s if n_read < n_max else video.seconds or _seconds_by_size(video, one)
    ratio = max(1.0, float(whole_s / stored_s))
    if stream is not None:
        return Beginning(ratio * _stream_bytes(stream), stream)
    n_clips = (round(ratio * len(times)) - converter.span) // (converter.step or 1) + 1
    return Beginning(n_clips * math.prod(_clip_shape(converter)))


def _seconds_by_size(video: media.VideoFile, one: Input) -> Fraction:
    """Return a duration for a file that declares none, such as a recording of a browser."""
    n_packets = math.ceil(PACKET_SECONDS / video.interval)
    stream = media.demux(one.path, check=False, n_packets=n_packets)
    times = media.times_of(stream).tolist()
    read_s = (times[-1] - times[0]) * stream.time_base + video.interval
    return Fraction(read_s * one.n_bytes / len(stream.data))


def _stream_bytes(stream: EncodedStream) -> int:
    return len(stream.data) + stream.packets.nbytes


def _clip_shape(converter: Videos) -> tuple[int, ...]:
    return converter.frames, converter.size, converter.size, 3


def _estimate(converter: Videos, trials: Sequence[Trial], scale: float) -> StoreEstimate:
    """Return the estimate for a store; the size is `scale` times that of the tried videos."""
    from shardio.measuring import measure_clips

    store, found = converter.store, list[Beginning]()
    for trial in trials:
        beginning = trial[store]
        if isinstance(beginning, str):
            return StoreEstimate(store, 0, 0.0, problem=f"not measured: {beginning}")
        found.append(beginning)
    clips: list[EncodedStream | np.ndarray]
    clips = [each.stream for each in found if each.stream is not None]
    if not clips:
        shape = _clip_shape(converter)
        n = max(1, min(_MAX_COPIED, _COPIED_BYTES // math.prod(shape)))
        clips = [np.ones(shape, np.uint8) for _ in range(n)]
    try:
        rate = measure_clips(clips, converter.view())
    except MediaError as error:  # packets may be damaged after the frames that were decoded before
        return StoreEstimate(store, 0, 0.0, problem=f"not measured: {error}")
    n_bytes = round(scale * sum(each.n_bytes for each in found))
    return StoreEstimate(store, n_bytes, rate, _loss(converter))


def _loss(converter: Videos) -> str:
    """Return a clause that describes how stored frames differ from those of the source."""
    if converter.store == "packets":
        return "its packets are those of the files"
    if converter.store == "raw":
        return "its frames are exact, but only these clips can be loaded"
    if converter.store == "planes":
        return "its frames lose only the chroma that 4:2:0 leaves out"
    kind = "crf" if converter.store == "h264" else "quality"
    return f"it is lossy ({converter.codec or converter.store}, {kind} {converter.quality})"
