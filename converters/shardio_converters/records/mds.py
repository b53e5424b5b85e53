"""MosaicML's MDS shards, read without the streaming package and without pickle."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from shardio import Input, InvalidArgument, MediaError, Outcome
from shardio_converters.inference import SchemaInference, infer_fields
from shardio_converters.records.mds_files import INDEX, SUFFIXES, check_index, open_shard
from shardio_converters.schema_spec import Field, InferringConverter


@dataclass(frozen=True, kw_only=True)
class Mds(InferringConverter):
    """A converter that makes one sample per sample of MDS shards; each shard is an input.

    A shard describes its own columns. It is checked against the `index.json` in its folder: its
    size, checksums if present, and that all shards exist. `fields` declares the columns, such as
    `{"tokens": "uint16[*]", "image": "image"}`. By default, fields follow from the encodings; for
    arrays with a shape per sample, all samples are read, and a dimension that differs varies.

    Fields: the columns; and, if no column has that name: `label` int64; `source`, the shard's name
    below the source folder.
    """

    kind: ClassVar[str] = "mds"
    version: ClassVar[str] = "1"

    def check_field(self, name: str, word: str, field: Field) -> None:
        """Check that columns can be converted to a field of this type."""
        if field.item or field.is_streamed:
            raise InvalidArgument(
                f"field {name!r}: found {field.word()}; expected an array, text, "
                "json, image or bytes"
            )

    def fitted(self, inputs: Sequence[Input]) -> Mds:
        """Return the converter with `fields` inferred from the shards."""
        what = "MDS shard with samples that can be read"
        return replace(self, fields=self.fields or infer_fields(inputs, _fields_of, what))

    def ordered(self, fields: Mapping[str, str]) -> dict[str, str]:
        """Return all field specs; `label` and `source` come first, even if they are columns."""
        there = {*fields, *self.additional_fields()}
        return {**{name: word for name, word in self.about().items() if name in there}, **fields}

    def samples(self, source: Input) -> Generator[Mapping[str, Any], None, Outcome]:
        """Yield the samples of a shard."""
        if os.path.basename(source.name) == INDEX:
            n_shards = check_index(source.path)
            if not n_shards:
                return Outcome("unsupported", "does not name an MDS shard")
            return Outcome("part", f"of the {n_shards:,} shards beside it")
        if not source.name.lower().endswith(SUFFIXES):
            return Outcome("unsupported", "not an MDS shard")
        if source.path.endswith(SUFFIXES[1:]) and os.path.exists(os.path.splitext(source.path)[0]):
            beside = os.path.splitext(os.path.basename(source.name))[0]
            return Outcome("part", f"of {beside} beside it, which is the same uncompressed")
        schema, fields = self.schema(), self.fields or {}
        about = self.additional_values(source)
        n_samples = 0
        with ExitStack() as files:
            columns, rows = open_shard(source.path, source.name, files)
            names = {one.name for one in columns}
            if others := sorted(names - fields.keys()):
                raise MediaError(f"column {others[0]!r}: expected one of {', '.join(fields)}")
            self.refuse_missing(names, "column")
            about |= dict.fromkeys(fields.keys() - names)
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
        return Outcome("converted") if n_samples else Outcome("empty", "holds no sample")


def _fields_of(source: Input) -> SchemaInference:
    """Return the columns of a shard; samples are read only if shapes vary per sample."""
    found = SchemaInference()
    if not source.name.lower().endswith(SUFFIXES):
        return found
    with ExitStack() as files:
        columns, rows = open_shard(source.path, source.name, files, is_checked=False)
        for row in rows:
            pairs = zip(columns, row, strict=True)
            found.add({one.name: one.facts or one.facts_of(data) for one, data in pairs})
            if all(column.facts for column in columns):
                break
    return found
