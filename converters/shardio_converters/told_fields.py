"""What converters share whose fields are told from the files, or given as the option `fields`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, Final

import numpy as np

from shardio import Audio, Image, Input, InvalidArgument, Schema, Video
from shardio.media import library_versions
from shardio_converters.field_specs import Field, parse_schema, schema_of

STEP_S: Final = 120.0
"""What a library in C may take over a step; damaged HDF5 can have its library go in circles."""


class InferringConverter:
    """A converter with an option `fields`: what a sample has, each in a word; None: files say it.

    Beside them a sample has what `about` says, but for names that fields have.
    """

    fields: Mapping[str, str] | None

    def __post_init__(self) -> None:
        """Check the fields, and sort them: an append, which has them as recorded, has them so."""
        if self.fields is None:
            return
        for name, field in parse_schema(self.fields).items():
            self.check_field(name, self.fields[name], field)
        object.__setattr__(self, "fields", dict(sorted(self.fields.items())))

    def check_field(self, name: str, word: str, field: Field) -> None:
        """Make sure that the files can have the field that a word stands for.

        Raises:
            InvalidArgument: they cannot.
        """

    def about(self) -> Mapping[str, str]:
        """What a sample has beside its fields, where none has its name."""
        return {"label": "int64", "source": "text"}

    def beside(self) -> dict[str, str]:
        """What a sample has beside its fields."""
        taken = {name.partition(".")[0] for name in self.fields or ()}
        return {name: spec for name, spec in self.about().items() if name not in taken}

    def values_beside(self, source: Input, /, **others: Any) -> dict[str, Any]:
        """The values of what a sample has beside its fields: those of an input, and others."""
        every = {"label": np.int64(source.label), "source": source.name, **others}
        return {name: every[name] for name in self.beside()}

    def schema(self) -> Schema:
        """Give the fields of a sample."""
        if self.fields is None:
            raise InvalidArgument("fields are not known: they follow from the files, or are given")
        return schema_of(self.in_order(self.fields))

    def in_order(self, fields: Mapping[str, str]) -> dict[str, str]:
        """All that a sample has, in the order that a dataset has it in."""
        return {**fields, **self.beside()}

    def class_names(self) -> Sequence[str] | None:
        """Give nothing where labels are the files' own: then folders are no classes."""
        return None if "label" in self.beside() else ()

    def libraries(self) -> Mapping[str, str]:
        """Give the versions of what looks into pictures, videos and sound, where fields are."""
        found = [*schema_of(self.fields).values()] if self.fields else []
        streams = any(isinstance(field, Audio | Video) for field in found)
        pictures = any(isinstance(field, Image) for field in found)
        return {
            **(library_versions() if streams else {}),
            **({name: version(name) for name in ("pillow", "simplejpeg")} if pictures else {}),
        }
