"""The converter of audio files, and the audio tracks of videos; packets are stored unchanged."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

from shardio import (
    Array,
    Audio,
    Converter,
    EncodedStream,
    Input,
    MediaError,
    Outcome,
    Schema,
    Text,
    media,
)
from shardio_converters.files import open_media

_NO_SOUND = "no sound"


@dataclass(frozen=True, kw_only=True)
class AudioFiles(Converter):
    """A converter that makes one sample of each file, from the file's first audio track.

    Every packet is decoded once, to detect damage.
    """

    kind: ClassVar[str] = "audio"
    version: ClassVar[str] = "1"

    def schema(self) -> Schema:
        """Return the fields of a sample."""
        return Schema({"audio": Audio(), "label": Array("int64"), "source": Text()})

    def label_is_class(self) -> bool:
        """Return True: each sample has the label of its input."""
        return True

    def libraries(self) -> Mapping[str, str]:
        """Return the versions of PyAV and FFmpeg."""
        return media.library_versions()

    def samples(self, source: Input) -> Generator[Mapping[str, Any], None, Outcome]:
        """Yield the sample of a file."""
        if not is_media(source):
            return Outcome("unsupported", _NO_SOUND)
        stream = media.sound_of(source.path)
        if stream is None:
            return Outcome("unsupported", _NO_SOUND)
        yield {"audio": stream, "label": source.label, "source": source.name}
        return Outcome("converted", detail={**facts_of(stream), "samples": stream.n_frames})


def is_media(source: Input) -> bool:
    """Return True if the first bytes or the suffix of a file are those of video or audio."""
    has_suffix = media.has_media_suffix(source.name)
    with open_media(source, has_suffix=has_suffix) as file:
        return has_suffix or media.has_media_signature(file.read(media.HEAD_BYTES))


_AUDIO_FACTS = {"codec": "codec", "rate": "rate", "layout": "layout", "audio_streams": "streams"}


class AudioTrack:
    """The first audio track of a video file, if `is_wanted`.

    `stream` is None if there is no track, or if the track is damaged. In the second case, `failure`
    is the error, and the samples have no audio and are discarded unless `keep_partial` is set.
    """

    def __init__(self, path: str, *, is_wanted: bool) -> None:
        self.path, self._is_wanted = path, is_wanted
        self.stream: EncodedStream | None = None
        self.failure: MediaError | None = None
        try:
            self.stream = media.sound_of(path) if is_wanted else None
        except MediaError as error:
            self.failure = error

    def whole(self) -> dict[str, EncodedStream | None]:
        """Return the field `audio` of a whole video; {} if audio is not wanted."""
        return {"audio": self.stream} if self._is_wanted else {}

    def part(self, begin: Fraction, seconds: Fraction) -> dict[str, EncodedStream | None]:
        """Return the field `audio` of a clip that begins at `begin` and lasts `seconds`."""
        if not self._is_wanted:
            return {}
        stream = self.stream
        return {"audio": None if stream is None else media.part_of(stream, begin, seconds)}

    def facts(self) -> dict[str, Any]:
        """Return the track's facts for the report; {} if audio is not wanted."""
        if not self._is_wanted:
            return {}
        return {"sound": None if self.stream is None else facts_of(self.stream)}


def facts_of(stream: EncodedStream) -> dict[str, Any]:
    """Return the facts about an audio stream that are reported."""
    parameters = stream.parameters
    return {name: parameters[key] for key, name in _AUDIO_FACTS.items() if key in parameters}


def with_audio_facts(
    samples: Generator[Mapping[str, Any], None, Outcome], track: AudioTrack
) -> Generator[Mapping[str, Any], None, Outcome]:
    """Yield the samples of a video; add facts about its audio, or its damage, to the outcome."""
    outcome = yield from samples
    if track.failure is not None:
        if outcome.kind == "broken":  # The report names the damage of the video.
            return outcome
        reason = str(track.failure).removeprefix(f"{track.path}: ")
        return Outcome("broken", reason, outcome.detail)
    # Add the facts even if the video is broken: the frames before the damage may be kept, together
    # with their audio.
    return Outcome(outcome.kind, outcome.reason, {**outcome.detail, **track.facts()})
