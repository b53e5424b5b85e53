"""Files that a table names: found among the inputs, and read as what a field is to hold."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from shardio import Audio, Bytes, Image, Input, MediaError, Video
from shardio.media import (
    decode_image,
    demux,
    has_image_suffix,
    has_media_suffix,
    has_sound_suffix,
)

FILE: Final = "file"
FileField = Audio | Bytes | Image | Video


def name_of(table: Input, reference: str) -> str:
    """The name of an input, as one beside a table is called in it: `images/1.png`, `../1.png`."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(table.name), reference))


def file_spec(references: Sequence[str] | set[str]) -> str:
    """What fields of files with such names are: all pictures, sound or videos, else any files."""
    if all(map(has_image_suffix, references)):
        return "image"
    if all(map(has_sound_suffix, references)):
        return "audio"
    if any(map(has_sound_suffix, references)) or any(map(has_image_suffix, references)):
        return FILE
    return "video" if all(map(has_media_suffix, references)) else FILE


def read_files(
    table: Input,
    name: str,
    field: FileField,
    column: Sequence[Any],
    lines: Sequence[int],
    parts: Mapping[str, Input],
) -> Iterator[Any]:
    """The values of a field, each read when it is asked for.

    Raises:
        MediaError: a row names no file of the source, or one that is damaged; it says which line.
    """
    for line, reference in zip(lines, column, strict=True):
        try:
            yield _read(table, field, reference, parts)
        except MediaError as error:
            raise MediaError(f"line {line}, column {name!r}: {error}") from error


def _read(table: Input, field: FileField, reference: Any, parts: Mapping[str, Input]) -> Any:
    if reference in (None, ""):
        if field.optional:
            return None
        raise MediaError("is missing; expected the name of a file")
    if type(reference) is not str:
        raise MediaError(f"expected the name of a file, found {reference!r:.40}")
    one = parts.get("" if posixpath.isabs(reference) else name_of(table, reference))
    if one is None:
        raise MediaError(
            f"{reference!r}: no file of the source; expected a path from the table's folder to one"
        )
    if isinstance(field, Audio | Video):
        return demux(one.path, type(field).__name__.lower(), name=one.name)
    with open(one.path, "rb") as file:
        data = file.read()
    if isinstance(field, Image):
        try:
            decode_image(data)  # so that a damaged one is found
        except MediaError as error:
            raise MediaError(f"{reference!r}: {error}") from error
    return data
