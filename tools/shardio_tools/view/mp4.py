"""Media of samples as files of which any range can be read: videos, sound and images.

Videos and sound are MP4 files that `shardio.media.Mp4File` computes from the tables of packets;
nothing is decoded. Sound in a codec that browsers do not play in MP4 is a WAV file, of which only
the samples in a range are decoded.
"""

from __future__ import annotations

import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

import shardio
from shardio.errors import ShardNotFound
from shardio.media import (
    AudioDecoder,
    Mp4File,
    can_be_mp4,
    decode_image,
    has_image_signature,
    probe,
    to_jpeg,
)
from shardio_tools.view.stored import (
    check_pixels,
    decode_sound,
    field_of,
    locate,
    present_value,
    sound_format,
    stored_value,
)

_VERSION: Final = 1
"""The version of the files that are made here, which is a part of their ETags."""
_TABLE_BYTES: Final = 32 << 20
"""The maximum size of the tables of MP4 files that are kept in memory."""
_WAV_HEAD: Final = 44
_MAX_WAV: Final = (1 << 32) - 1
IMAGE_TYPES: Final = {
    "AVIF": ("image/avif", ".avif"),
    "BMP": ("image/bmp", ".bmp"),
    "GIF": ("image/gif", ".gif"),
    "JPEG": ("image/jpeg", ".jpg"),
    "PNG": ("image/png", ".png"),
    "WEBP": ("image/webp", ".webp"),
}
"""The media types and file suffixes of the formats that browsers show, by Pillow's names."""


@dataclass(frozen=True)
class MediaBytes:
    """A file with the media of one field of a sample; `read(start, stop)` returns a range of it.

    `data` is the whole file, where it is in memory anyway: an image.
    """

    size: int
    etag: str
    media_type: str
    read: Callable[[int, int], bytes]
    data: bytes | None = None


class _Tables:
    """The tables of the MP4 files that were used last, by ETag. Thread-safe."""

    def __init__(self, max_bytes: int = _TABLE_BYTES) -> None:
        self._max_bytes, self._n_bytes = max_bytes, 0
        self._lock = threading.Lock()
        self._files: OrderedDict[str, Mp4File] = OrderedDict()

    def get(self, key: str) -> Mp4File | None:
        """Return the tables of a file; None if they are not kept."""
        with self._lock:
            found = self._files.get(key)
            if found is not None:
                self._files.move_to_end(key)
            return found

    def add(self, key: str, file: Mp4File) -> None:
        """Keep the tables of a file."""
        with self._lock:
            if key not in self._files:
                self._files[key] = file.with_streams()
                self._n_bytes += file.n_table_bytes
            while self._n_bytes > self._max_bytes:
                self._n_bytes -= self._files.popitem(last=False)[1].n_table_bytes


_TABLES: Final = _Tables()


def open_media(dataset: Any, row: int, field: str) -> MediaBytes:
    """Return the media of a field of a sample as a file. It borrows the dataset.

    Raises:
        InvalidArgument: there is no such sample or field; the value is missing; or browsers do not
            play or show values of the field.
        ShardCorrupt, MediaError, …: the value is damaged.
    """
    kind = field_of(dataset, field)
    medium = kind.medium
    value = present_value(dataset, row, field)
    etag = _etag(dataset, row, field)
    if isinstance(value, bytes):
        if medium != "image" and not has_image_signature(value[:64]):
            raise shardio.InvalidArgument(f"sample {row:,}: the field {field!r} has no image")
        return _image_media(value, etag)
    if medium == "audio" and not can_be_mp4(value):
        return _wav_media(value, etag)
    if medium is None or not can_be_mp4(value):
        codec = value.parameters.get("codec") if medium else kind.things
        raise shardio.InvalidArgument(
            f"sample {row:,}: browsers do not play {codec}, as in the field {field!r}"
        )
    if medium == "audio":
        return _mp4_media(etag, None, value)
    name, sound = _sound_beside(dataset, row, field)
    if sound is not None:
        etag = _etag(dataset, row, field, name)
    return _mp4_media(etag, value, sound)


def _etag(dataset: Any, row: int, *fields: str) -> str:
    """Return the ETag of a file that is made from some fields of a sample."""
    (shard, local), names = locate(dataset, row), list(dataset.schema)
    ids = (f"{dataset.reader(shard, each).id}-{names.index(each)}" for each in fields)
    return f'"{"-".join(ids)}-{local}-{_VERSION}"'


def _mp4_media(etag: str, video: Any, sound: Any = None) -> MediaBytes:
    """Return an MP4 file; without the sound, if a file with it cannot be made."""
    tables = _TABLES.get(etag)
    if tables is None:
        try:
            made = Mp4File(video, sound)
        except shardio.MediaError:
            if video is None or sound is None:
                raise
            made = Mp4File(video)
        _TABLES.add(etag, made)
    else:
        made = tables.with_streams(video, sound if tables.n_tracks > (video is not None) else None)
    return MediaBytes(made.size, etag, made.media_type, made.read)


def media_type(dataset: Any, row: int, field: str) -> str | None:
    """Return the media type with the codecs of a video or a sound; None if browsers play none.

    Raises:
        ShardCorrupt, …: the value is damaged.
    """
    try:
        return open_media(dataset, row, field).media_type
    except (shardio.InvalidArgument, shardio.MediaError):
        return None


def sound_field(schema: Mapping[str, Any], video: str) -> str | None:
    """Return the field of sound that is played with a video; None if there is none.

    That is a field of sound in the same record, such as `front.sound` for `front.video`; else, for
    the first field of videos, the first field of sound that is in no record.
    """
    sounds = [name for name, field in schema.items() if field.medium == "audio"]
    group = video.rpartition(".")[0]
    beside = [name for name in sounds if name.rpartition(".")[0] == group]
    videos = [name for name, field in schema.items() if field.medium == "video"]
    same = [name for name in videos if name.rpartition(".")[0] == group]
    if beside:
        return beside[0] if same[0] == video else None
    alone = [name for name in sounds if "." not in name]
    return alone[0] if alone and videos[0] == video else None


def _sound_beside(dataset: Any, row: int, video: str) -> tuple[str, Any]:
    """Return the field and the value of the sound to play with a video.

    The value is None if there is none, or if MP4 cannot store it.
    """
    name = sound_field(dataset.schema, video)
    if name is None:
        return "", None
    try:
        sound = stored_value(dataset, row, name)
    except (shardio.DataError, ShardNotFound):  # the error is shown at the field of the sound
        return name, None
    return name, sound if sound is not None and can_be_mp4(sound) else None


def _image_media(value: bytes, etag: str) -> MediaBytes:
    facts = probe(value)
    known = IMAGE_TYPES.get(facts.format)
    if known is None:
        check_pixels(facts)
        shown, kind = to_jpeg(decode_image(value)), "image/jpeg"
    else:
        shown, kind = value, known[0]
    return MediaBytes(len(shown), etag, kind, lambda start, stop: shown[start:stop], shown)


def _wav_media(sound: Any, etag: str) -> MediaBytes:
    """Return a sound as a WAV file of 16-bit samples; `read` decodes the samples of a range."""
    (rate, n_channels), n_samples = sound_format(sound), sound.n_frames
    sample_bytes = 2 * n_channels
    n_samples = min(n_samples, (_MAX_WAV - _WAV_HEAD) // sample_bytes)
    n_bytes = n_samples * sample_bytes
    format_ = struct.pack("<HHIIHH", 1, n_channels, rate, rate * sample_bytes, sample_bytes, 16)
    head = struct.pack("<4sI4s4sI", b"RIFF", n_bytes + 36, b"WAVE", b"fmt ", 16)
    head += format_ + struct.pack("<4sI", b"data", n_bytes)

    def read(start: int, stop: int) -> bytes:
        low, high = max(0, start - _WAV_HEAD), max(0, stop - _WAV_HEAD)
        first, last = low // sample_bytes, -(-high // sample_bytes)
        if first >= last:
            return head[start:stop]
        with AudioDecoder() as decoder:
            samples = decode_sound(decoder, sound, first, last)
        values = np.rint(samples * np.float32(32768)).clip(-32768, 32767)
        found: bytes = values.astype("<i2").tobytes()[low - first * sample_bytes :]
        return head[start:stop] + found[: high - low]

    return MediaBytes(_WAV_HEAD + n_bytes, etag, "audio/wav", read)
