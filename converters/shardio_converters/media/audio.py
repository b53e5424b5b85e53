"""Sound: the packets of its files untouched, any span of which is decoded when it is loaded."""

from __future__ import annotations

import errno
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

from shardio import (
    Array,
    Audio,
    EncodedStream,
    Input,
    MediaError,
    Outcome,
    Schema,
    Text,
)
from shardio.media import (
    HEAD_BYTES,
    has_media_signature,
    has_media_suffix,
    library_versions,
    part_of,
    sound_of,
)

_NO_SOUND = "no sound"


@dataclass(frozen=True, kw_only=True)
class AudioFiles:
    """Makes a sample of every file with sound, videos included: of the first stream of several.

    Every packet is decoded once, so that a damaged file is found.

    Fields: `audio`; `label` int64; `source`, the file's name below the source folder.
    """

    kind: ClassVar[str] = "audio"
    version: ClassVar[str] = "1"

    def schema(self) -> Schema:
        """Give the fields of a sample."""
        return Schema({"audio": Audio(), "label": Array("int64"), "source": Text()})

    def libraries(self) -> Mapping[str, str]:
        """Give the versions of PyAV and FFmpeg, which tell what is sound and what is damage."""
        return library_versions()

    def samples(self, source: Input) -> Generator[Mapping[str, Any], None, Outcome]:
        """Yield the one sample of a file."""
        if not is_media(source):
            return Outcome("unsupported", _NO_SOUND)
        stream = sound_of(source.path)
        if stream is None:
            return Outcome("unsupported", _NO_SOUND)
        yield {"audio": stream, "label": source.label, "source": source.name}
        return Outcome("converted", detail={**facts_of(stream), "samples": stream.n_frames})


def is_media(source: Input) -> bool:
    """Whether the file is one that should hold video or sound, by its bytes or its suffix.

    Raises:
        MediaError: it cannot be read, so nobody knows.
    """
    try:
        with open(source.path, "rb") as file:
            return has_media_signature(file.read(HEAD_BYTES)) or has_media_suffix(source.name)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP) and not has_media_suffix(source.name):
            return False  # a link to nowhere: there is nothing to be read
        raise MediaError(f"{source.path}: cannot be read: {error.strerror}") from error


_AUDIO_FACTS = {"codec": "codec", "rate": "rate", "layout": "layout", "audio_streams": "streams"}


class AudioTrack:
    """The sound of a video file, if it is wanted and there is any; the first stream of several.

    One that is damaged is none: what is kept of the file, if anything is, is then its pictures.
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
        """What a sample has that is a video."""
        return {"audio": self.stream} if self._is_wanted else {}

    def part(self, begin: Fraction, seconds: Fraction) -> dict[str, EncodedStream | None]:
        """What a sample has that is a clip, from a time on the video's clock."""
        if not self._is_wanted:
            return {}
        stream = self.stream
        return {"audio": None if stream is None else part_of(stream, begin, seconds)}

    def facts(self) -> dict[str, Any]:
        """What is worth recording of it; None where the file has none."""
        if not self._is_wanted:
            return {}
        return {"sound": None if self.stream is None else facts_of(self.stream)}


def facts_of(stream: EncodedStream) -> dict[str, Any]:
    """What is worth recording of a sound; `streams` where a file has several."""
    told = stream.parameters
    return {name: told[key] for key, name in _AUDIO_FACTS.items() if key in told}


def with_sound(
    samples: Generator[Mapping[str, Any], None, Outcome], sound: AudioTrack
) -> Generator[Mapping[str, Any], None, Outcome]:
    """Yield the samples of a file, and say of its sound what there is to be said.

    Raises:
        MediaError: the file is damaged.
    """
    outcome = yield from samples
    if sound.failure is not None:
        # The pictures that there are may be kept, so that what is known of them is told.
        if outcome.kind == "broken":
            return outcome
        reason = str(sound.failure).removeprefix(f"{sound.path}: ")
        return Outcome("broken", reason, outcome.detail)
    return Outcome(outcome.kind, outcome.reason, {**outcome.detail, **sound.facts()})
