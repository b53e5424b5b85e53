"""Looks at the samples of a dataset or a shard for what one field of them shows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import shardio
from shardio_tools._pictures import RenderOptions
from shardio_tools.frames import (
    Frame,
    FrameSequence,
    Pixels,
    SampleReader,
    can_hold_files,
    clip_times_s,
    frames_of,
    holds_pictures,
)
from shardio_tools.inspect_report import READING, Inspection


class FieldViewer:
    """Looks at one field of samples; what is damaged it puts among the findings."""

    def __init__(self, inspection: Inspection, samples: SampleReader, wish: RenderOptions) -> None:
        self.inspection, self.samples, self.path = inspection, samples, wish.path
        self.name = _chosen_field(wish.path, samples.schema, wish.field)

    def frames(self, number: int) -> FrameSequence | None:
        """What a sample has to show; None, and a finding, if that cannot be read.

        A sample that lacks the field has no frame.
        """
        path, row = self.samples.place(number, self.name)
        if path in self.inspection.bad_files:
            return None
        kind = self.samples.schema[self.name]
        try:
            value = self.samples.value(number, self.name)
            if value is None:
                return FrameSequence(
                    0, is_still=True, size=(0, 0), take=lambda numbers, size: iter(())
                )
            times_s = clip_times_s(*(self._beside(number, name) for name in ("pts", "time_base")))
            return frames_of(value, kind, times_s)
        except READING as error:
            self.inspection.note(path, error, field=self.name, sample=row)
        return None

    def _beside(self, number: int, name: str) -> Any:
        """Another field of a sample; None if there is none, or if it is damaged: a finding."""
        if name not in self.samples.schema.columns:
            return None
        path, row = self.samples.place(number, name)
        if path in self.inspection.bad_files:
            return None
        try:
            return self.samples.value(number, name)
        except READING as error:
            self.inspection.note(path, error, field=name, sample=row)
        return None

    def caption(self, number: int) -> str:
        """The number of a sample, and its class."""
        label = self._beside(number, "label")
        if label is None or label.shape or label.dtype.kind not in "iu" or label == -1:
            return f"{number}"
        names = self.samples.classes
        return f"{number}  {names[label] if 0 <= label < len(names) else label}"

    def sound(self, number: int, taken: Iterable[Frame]) -> list[Pixels | None]:
        """Frames of a sample, None for those that are damaged; a finding says why the first is."""
        frames = list(taken)
        errors = [frame for frame in frames if isinstance(frame, shardio.DataError)]
        if errors:
            path, row = self.samples.place(number, self.name)
            self.inspection.note(path, errors[0], field=self.name, sample=row)
        return [None if isinstance(frame, shardio.DataError) else frame for frame in frames]


def _chosen_field(path: str, schema: shardio.Schema, wished: str | None) -> str:
    """The field to show.

    Raises:
        InvalidArgument: there is none, or several and nobody says which; or not the one wished for.
    """
    names = [name for name, kind in schema.items() if holds_pictures(kind)]
    known = ", ".join(names) or "none"
    if wished is not None:
        if wished in names or (wished in schema and can_hold_files(schema[wished])):
            return wished
        raise shardio.InvalidArgument(
            f"{path}: --field {wished}: not a field that can be shown; there are: {known}"
        )
    if len(names) != 1:
        what = "several fields hold" if names else "no field holds"
        way = "--field NAME says which; it also takes one of bytes that are pictures' files"
        raise shardio.InvalidArgument(f"{path}: {what} pictures ({known}): {way}")
    return names[0]
