"""The converter of audio files, which stores their packets unchanged.

`AudioTrack` is the audio of a video, for the converter of videos.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

from shardio import Array, Audio, Converter, EncodedStream, Input, MediaError, Outcome, Schema, Text
from shardio.media import (
    HEAD_BYTES,
    has_media_signature,
    has_media_suffix,
    library_versions,
    part_of,
    sound_of,
)
from shardio_converters.files import open_media

_NO_SOUND = "no sound"


@dataclass(frozen=True, kw_only=True)
class AudioFiles(Converter):
    """A converter that makes a sample of the first audio track of each file.

    Every packet is decoded once, to detect damaged files.

    Fields: `audio`; `label` int64; `source`, the file's path relative to the source folder.
    """

    kind: ClassVar[str] = "audio"
    version: ClassVar[str] = "1"

    def schema(self) -> Schema:
        """Return the fields of a sample."""
        return Schema({"audio": Audio(), "label": Array("int64"), "source": Text()})

    def libraries(self) -> Mapping[str, str]:
        """Return the versions of PyAV and FFmpeg, which determine the result."""
        return library_versions()

    def samples(self, source: Input) -> Generator[Mapping[str, Any], None, Outcome]:
        """Yield the sample of a file."""
        if not is_media(source):
            return Outcome("unsupported", _NO_SOUND)
        stream = sound_of(source.path)
        if stream is None:
            return Outcome("unsupported", _NO_SOUND)
        yield {"audio": stream, "label": source.label, "source": source.name}
        return Outcome("converted", detail={**facts_of(stream), "samples": stream.n_frames})


def is_media(source: Input) -> bool:
    """Return True if a file is video or audio by its first bytes or suffix."""
    promised = has_media_suffix(source.name)
    with open_media(source, is_promised=promised) as file:
        return promised or has_media_signature(file.read(HEAD_BYTES))


_AUDIO_FACTS = {"codec": "codec", "rate": "rate", "layout": "layout", "audio_streams": "streams"}


class AudioTrack:
    """The first audio track of a video file, if the file has one and it is wanted.

    A damaged track is dropped; the video is stored without it.
    """

    def __init__(self, path: str, *, is_wanted: bool) -> None:
        self.path, self._is_wanted = path, is_wanted
        self.stream: EncodedStream | None = None
        self.failure: MediaError | None = None
        try:
            self.stream = sound_of(path) if is_wanted else None
        except MediaError as error:
            self.failure = error

    def whole(self) -> dict[str, EncodedStream | None]:
        """Return the audio field of a sample that is a whole video."""
        return {"audio": self.stream} if self._is_wanted else {}

    def part(self, begin: Fraction, seconds: Fraction) -> dict[str, EncodedStream | None]:
        """Return the audio field of a clip that begins at a time on the video's clock."""
        if not self._is_wanted:
            return {}
        stream = self.stream
        return {"audio": None if stream is None else part_of(stream, begin, seconds)}

    def facts(self) -> dict[str, Any]:
        """Return the recorded facts about the track; None if the file has none."""
        if not self._is_wanted:
            return {}
        return {"sound": None if self.stream is None else facts_of(self.stream)}


def facts_of(stream: EncodedStream) -> dict[str, Any]:
    """Return the recorded facts about an audio stream; `streams` if the file has several."""
    parameters = stream.parameters
    return {name: parameters[key] for key, name in _AUDIO_FACTS.items() if key in parameters}


def with_sound(
    samples: Generator[Mapping[str, Any], None, Outcome], sound: AudioTrack
) -> Generator[Mapping[str, Any], None, Outcome]:
    """Yield the samples of a file; return their outcome with facts about the audio added."""
    outcome = yield from samples
    if sound.failure is not None:
        # Record the facts even so: the frames before the damage may be kept, with their audio.
        if outcome.kind == "broken":
            return outcome
        reason = str(sound.failure).removeprefix(f"{sound.path}: ")
        return Outcome("broken", reason, outcome.detail)
    return Outcome(outcome.kind, outcome.reason, {**outcome.detail, **sound.facts()})
