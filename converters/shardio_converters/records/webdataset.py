"""WebDataset tars: members of one key are a sample."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, ClassVar, Final

import numpy as np

from shardio import Audio, Image, Input, InvalidArgument, MediaError, Outcome, Schema, Video
from shardio.media import library_versions
from shardio_converters.field_specs import make_schema
from shardio_converters.records.tar_files import Member, is_tar, open_tar
from shardio_converters.records.tar_members import (
    FoundFields,
    Samples,
    check_field,
    facts_of,
    value_of,
)

_ABOUT: Final[Mapping[str, str]] = {"key": "text", "label": "int64", "source": "text"}


@dataclass(frozen=True, kw_only=True)
class WebDataset:
    """Makes a sample of the members of a tar that have one key, and follow one another.

    The key is a member's name up to the first dot behind the last slash, the field what is behind
    that dot. `fields` says what they are, as `{"cls": "int64", "jpg": "image", "x.npy":
    "float32[3,*]?"}`; by default the ends of names do, and of arrays their headers: a dimension
    that differs varies, a field that some samples lack may be missing.

    Fields: the members'; and of these, those whose names no member has: `key` text; `label` int64;
    `source`, the tar's name below the source folder.

    Raises:
        InvalidArgument: an option is not acceptable.
    """

    kind: ClassVar[str] = "webdataset"
    version: ClassVar[str] = "1"

    fields: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if self.fields is None:
            return
        for name, field in make_schema(self.fields).items():
            check_field(name, field)
        # As they are recorded, so that an append has them in the same order.
        object.__setattr__(self, "fields", dict(sorted(self.fields.items())))

    def fitted(self, inputs: Sequence[Input]) -> WebDataset:
        """Give the converter with `fields` as the inputs have them; all are read to their ends.

        Raises:
            InvalidArgument: none of them is a tar that can be read.
        """
        if self.fields is not None:
            return self
        found, reason = FoundFields(), ""
        for one in inputs:
            if not os.path.isfile(one.path):  # opening a pipe would wait for its writer
                continue
            try:
                found.merge(_fields_of(one))
            except (MediaError, OSError) as error:
                reason = reason or f"; {one.name}: {error}".replace(one.path, one.name)
        if not found.n_samples:
            raise InvalidArgument(
                "no tar of samples that can be read, so fields cannot be told; "
                f"files looked at: {len(inputs):,}{reason}"
            )
        return replace(self, fields=found.as_specs())

    def schema(self) -> Schema:
        """Give the fields of a sample."""
        if self.fields is None:
            raise InvalidArgument("fields are not known: they follow from the files, or are given")
        return make_schema({**self._about(), **self.fields})

    def _about(self) -> dict[str, str]:
        """What a sample has beside the members'."""
        taken = {name.partition(".")[0] for name in self.fields or ()}
        return {name: spec for name, spec in _ABOUT.items() if name not in taken}

    def libraries(self) -> Mapping[str, str]:
        """Give the versions of what tells the facts of pictures, videos and sound."""
        found = [*make_schema(self.fields).values()] if self.fields else []
        streams = any(isinstance(field, Audio | Video) for field in found)
        pictures = any(isinstance(field, Image) for field in found)
        return {
            **(library_versions() if streams else {}),
            **({name: version(name) for name in ("pillow", "simplejpeg")} if pictures else {}),
        }

    def samples(self, source: Input) -> Generator[Mapping[str, Any], None, Outcome]:
        """Yield the samples of a tar."""
        if not is_tar(source.name):
            return Outcome("not_video", "not a tar")
        schema, fields = self.schema(), self.fields or {}
        every = {"key": "", "label": np.int64(source.label), "source": source.name}
        about = {name: every[name] for name in self._about()}
        optional = {name: None for name in fields if schema[name].optional}
        required = fields.keys() - optional.keys()

        def take(name: str, member: Member) -> Any:
            if name not in fields:
                facts_of(name, member)  # which may say why
                raise MediaError(f"expected one of {', '.join(fields)}")
            return value_of(name, schema[name], member)

        n_samples = 0
        with ExitStack() as files:
            found = Samples(open_tar(source.path, source.name, files), take)
            for key, sample in found:
                if missing := required - sample.keys():
                    raise MediaError(f"sample {key!r} lacks {', '.join(sorted(missing))}")
                if "key" in about:
                    about["key"] = key
                yield {**optional, **sample, **about}
                n_samples += 1
        detail = {"members_aside": found.n_aside} if found.n_aside else {}
        if not n_samples:
            return Outcome("too_short", "holds no sample", detail=detail)
        return Outcome("converted", detail=detail)


def _fields_of(source: Input) -> FoundFields:
    """The fields of a tar that is not damaged."""
    found = FoundFields()
    if is_tar(source.name):
        with ExitStack() as files:
            for _, sample in Samples(open_tar(source.path, source.name, files), facts_of):
                found.add(sample)
    return found
