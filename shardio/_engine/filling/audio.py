"""Decode stored sound, into the rows of a block or for the user's transform. Used by `fill`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio._base.classes import Closing
from shardio._base.statistics import DECODE, PHASE_TIMES, now_ns
from shardio._engine.filling.batch_spec import IndexChunk
from shardio._engine.filling.visual import ClipReader
from shardio.dataset.dataset import Dataset
from shardio.errors import InvalidArgument, MediaError
from shardio.format.streams import EncodedStream
from shardio.media.audio import AudioDecoder
from shardio.media.audio_packets import begin_of, sample_rate
from shardio.samples.media import AudioField, AudioSpec, n_samples
from shardio.shard.verification import Rows

Samples = npt.NDArray[Any]
Span = tuple[int, int]

_MOST_STREAMS: Final = 256
"""Each has a decoder of its own: 50 to 300 KB."""


class AudioReader(Closing):
    """A decoder of the sound in some fields of a dataset, which it borrows.

    It owns decoders until `close`, and is closed before the dataset.

    Args:
        dataset: holds the sound.
        hearing: the form in which it is delivered.
        clips: the decoder of the videos beside it, if samples are clips; borrowed.
    """

    def __init__(self, dataset: Dataset, hearing: AudioSpec, clips: ClipReader | None) -> None:
        self._dataset, self._clips = dataset, clips
        self._dtype = np.dtype(hearing.sound.dtype)
        self._is_drawn = hearing.sound.where == "random"
        self._fields = {field.name: field for field in hearing.fields}
        self.names = frozenset(self._fields)
        self.spans = {field.span: field.name for field in hearing.fields}
        """The fields that say where in the sound of another there is some, each with that one."""
        self._decoder = AudioDecoder(max_streams=_MOST_STREAMS)
        self._streams: OrderedDict[tuple[str, int, int], EncodedStream | None] = OrderedDict()

    def starts(self, stretch: IndexChunk, part: slice) -> list[int]:
        """Return the number that decides where each sample's sound begins: its clip, or a draw."""
        found = [0] * (part.stop - part.start)
        if self._clips is not None:
            found = stretch.cuts.starts[part].tolist()
        elif self._is_drawn:
            found = stretch.sound_draws[part].tolist()
        return found

    def decode(
        self, name: str, rows: Rows, shards: Rows, starts: Sequence[int]
    ) -> list[tuple[Samples, Span] | None]:
        """Return the sound of some samples, each with its span; None where there is none.

        Args:
            name: of the field.
            rows, shards: of the samples, in all shards.
            starts: from `starts`.

        Raises:
            ShardCorrupt, MediaError: naming the sample.
        """
        local = (rows - self._dataset.starts.take(shards)).tolist()
        places = zip(shards.tolist(), local, starts, strict=True)
        return [self.of_sample(name, *place) for place in places]

    def of_sample(self, name: str, shard: int, row: int, start: int) -> tuple[Samples, Span] | None:
        """Return the sound of one sample and its span; the row is within its shard.

        Raises:
            ShardCorrupt, MediaError: naming the sample.
        """
        stream = self._stream(name, shard, row)
        if stream is None:
            return None
        field = self._fields[name]
        start_ns = now_ns()
        try:
            begin, seconds = self._place(field, stream, shard, row, start)
            n = n_samples(seconds, field.rate) if field.n_samples is None else field.n_samples
            found, span = self._decoder.decode_at(
                stream, begin, n, rate=field.rate, channels=self._channels(field, stream)
            )
            if found.shape[1] != field.channels:
                raise MediaError(f"it has {found.shape[1]} channels; its index says {stream.width}")
        except (MediaError, InvalidArgument) as error:
            path = self._dataset.files.reader(shard, name).path
            raise MediaError(f"{path}, field {name!r}, sample {row}: {error}") from error
        PHASE_TIMES.sums_ns[DECODE] += now_ns() - start_ns
        return self._typed(found), span

    def fields_of(self, shard: int, row: int, start: int) -> dict[str, Any]:
        """Return the sound fields of a sample and their spans; absent sound is None or silence."""
        made: dict[str, Any] = {}
        for name, field in self._fields.items():
            found = self.of_sample(name, shard, row, start)
            samples, span = (self._nothing(field), (0, 0)) if found is None else found
            made[name], made[field.span] = samples, np.array(span, np.int64)
        return made

    def _nothing(self, field: AudioField) -> Samples | None:
        """Return the stand-in for absent sound."""
        if field.n_samples is None:
            return None
        return np.zeros((field.n_samples, field.channels), self._dtype)

    def _place(
        self, field: AudioField, stream: EncodedStream, shard: int, row: int, start: int
    ) -> tuple[Fraction, Fraction]:
        """From when on a sound is wanted, and for how many seconds where `field` does not say."""
        if self._clips is not None:
            return self._clips.moment(shard, row, start)
        begin, rate = begin_of(stream), sample_rate(stream)
        if self._is_drawn and field.n_samples is not None:
            n_starts = -(-stream.n_frames * field.rate // rate) - field.n_samples + 1
            begin += Fraction(start * max(1, n_starts) >> 64, field.rate)
        return begin, Fraction(stream.n_frames, rate)

    def _channels(self, field: AudioField, stream: EncodedStream) -> int | None:
        """Return the number of channels to decode to; None if the stream has the field's own."""
        return None if stream.width == field.channels else field.channels

    def _typed(self, found: npt.NDArray[np.float32]) -> Samples:
        if self._dtype == np.float32:
            return found
        scaled: Samples = np.rint(found * np.float32(32768)).clip(-32768, 32767).astype(np.int16)
        return scaled

    def _stream(self, name: str, shard: int, row: int) -> EncodedStream | None:
        """Return the stream of a sample, a recent one or read again; None if it has none."""
        key = name, shard, row
        if key in self._streams:
            self._streams.move_to_end(key)
            return self._streams[key]
        records, own = self._dataset.files.reader(shard, name).records, np.array([row])
        found = None
        if records.present(name, own)[0]:
            (found,) = records.values(name, own)
        self._streams[key] = found
        if len(self._streams) > _MOST_STREAMS:
            self._streams.popitem(last=False)
        return found

    def close(self) -> None:
        """Release the decoders, and the streams that are open."""
        self._decoder.close()
        self._streams.clear()
