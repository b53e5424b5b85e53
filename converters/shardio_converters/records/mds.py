"""MosaicML's MDS shards, with no package of theirs and without pickle."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, ClassVar, Final

import numpy as np

from shardio import Image, Input, InvalidArgument, MediaError, Outcome, Schema
from shardio_converters.field_specs import make_schema
from shardio_converters.records.mds_columns import Column, check_field
from shardio_converters.records.mds_files import INDEX, SUFFIXES, check_index, open_shard
from shardio_converters.records.tar_members import FoundFields

_ABOUT: Final[Mapping[str, str]] = {"label": "int64", "source": "text"}


@dataclass(frozen=True, kw_only=True)
class Mds:
    """Makes a sample of each one in MDS shards; each shard is an input.

    A shard says itself what its columns are. `index.json` beside it is compared with it: size,
    checksums where they are given, and that all shards are there. `fields` says what columns
    become, as `{"tokens": "uint16[*]", "image": "image"}`; by default their encodings do, and of
    arrays whose shape is with each sample all samples: a dimension that differs varies.

    Fields: the columns; and of these, those whose names no column has: `label` int64; `source`,
    the shard's name below the source folder.

    Raises:
        InvalidArgument: an option is not acceptable.
    """

    kind: ClassVar[str] = "mds"
    version: ClassVar[str] = "1"

    fields: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if self.fields is None:
            return
        for name, field in make_schema(self.fields).items():
            check_field(name, field)
        # As they are recorded, so that an append has them in the same order.
        object.__setattr__(self, "fields", dict(sorted(self.fields.items())))

    def fitted(self, inputs: Sequence[Input]) -> Mds:
        """Give the converter with `fields` as the shards have them.

        Raises:
            InvalidArgument: none of them is a shard that can be read.
        """
        if self.fields is not None:
            return self
        found, reason = FoundFields(), ""
        for one in inputs:
            if not one.name.lower().endswith(SUFFIXES) or not os.path.isfile(one.path):
                continue
            try:
                found.merge(_fields_of(one))
            except (MediaError, OSError) as error:
                reason = reason or f"; {one.name}: {error}".replace(one.path, one.name)
        if not found.n_samples:
            raise InvalidArgument(
                "no MDS shard with samples that can be read, so fields cannot be told; "
                f"files looked at: {len(inputs):,}{reason}"
            )
        return replace(self, fields=found.as_specs())

    def schema(self) -> Schema:
        """Give the fields of a sample."""
        if self.fields is None:
            raise InvalidArgument("fields are not known: they follow from the files, or are given")
        return make_schema({**_ABOUT, **self.fields})

    def libraries(self) -> Mapping[str, str]:
        """Give the versions of what tells the facts of pictures."""
        found = make_schema(self.fields).values() if self.fields else ()
        is_needed = any(isinstance(field, Image) for field in found)
        return {name: version(name) for name in ("pillow", "simplejpeg")} if is_needed else {}

    def samples(self, source: Input) -> Generator[Mapping[str, Any], None, Outcome]:
        """Yield the samples of a shard."""
        if os.path.basename(source.name) == INDEX:
            n_shards = check_index(source.path)
            return (
                Outcome("part", f"of the {n_shards:,} shards beside it")
                if n_shards
                else Outcome("not_video", "names no MDS shard")
            )
        if not source.name.lower().endswith(SUFFIXES):
            return Outcome("not_video", "not an MDS shard")
        if source.path.endswith(SUFFIXES[1:]) and os.path.exists(os.path.splitext(source.path)[0]):
            beside = os.path.splitext(os.path.basename(source.name))[0]
            return Outcome("part", f"of {beside} beside it, which is the same uncompressed")
        schema, fields = self.schema(), self.fields or {}
        every = {"label": np.int64(source.label), "source": source.name}
        about = {name: value for name, value in every.items() if name not in fields}
        n_samples = 0
        with ExitStack() as files:
            columns, rows = open_shard(source.path, source.name, files)
            _refuse_others(columns, schema, fields)
            about |= dict.fromkeys(fields.keys() - {one.name for one in columns})
            taken = [(one, one.decoder(schema[one.name])) for one in columns]
            for row in rows:
                sample = dict(about)
                for (column, decode), data in zip(taken, row, strict=True):
                    try:
                        sample[column.name] = decode(data)
                    except MediaError as error:
                        raise MediaError(
                            f"sample {n_samples:,}, column {column.name!r}: {error}"
                        ) from error
                yield sample
                n_samples += 1
        return Outcome("converted") if n_samples else Outcome("too_short", "holds no sample")


def _fields_of(source: Input) -> FoundFields:
    """The columns of a shard; samples are read only if their shapes are with them."""
    found = FoundFields()
    with ExitStack() as files:
        columns, rows = open_shard(source.path, source.name, files, is_checked=False)
        if all(column.facts for column in columns):
            for _ in rows:
                found.add({one.name: one.facts for one in columns if one.facts})
                break
            return found
        for row in rows:
            found.add(
                {
                    one.name: one.facts or one.facts_of(data)
                    for one, data in zip(columns, row, strict=True)
                }
            )
    return found


def _refuse_others(columns: Sequence[Column], schema: Schema, fields: Mapping[str, str]) -> None:
    names = {one.name for one in columns}
    if others := sorted(names - fields.keys()):
        raise MediaError(f"columns {', '.join(others)}: expected none but {', '.join(fields)}")
    if missing := sorted(n for n in fields.keys() - names if not schema[n].optional):
        raise MediaError(f"columns {', '.join(missing)} are missing")
