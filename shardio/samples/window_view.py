"""WindowView: windows of tokens, over all documents of a dataset, as samples."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from shardio._base.classes import cached_property
from shardio.dataset.dataset import Dataset, ShardSamples, scan
from shardio.errors import InvalidArgument
from shardio.format.checksum import distinct
from shardio.format.schema import Schema
from shardio.format.types import Field
from shardio.samples.field_sources import FieldSource
from shardio.samples.media import AudioSpec
from shardio.samples.packing import Pack, PackedWindows
from shardio.samples.token_source import TokenSource
from shardio.samples.view import Maker, SampleView, Table, Tables
from shardio.shard.verification import Rows


class WindowView(SampleView):
    """A view whose samples are windows of tokens of one field. It borrows the dataset.

    On first use, the lengths of documents are read from the index, 32 bytes per document, unless
    the field has a fixed shape. The documents of each source of a mixture are packed separately.

    Args:
        dataset: the dataset with the documents.
        pack: the options of the windows; `pack.field` is optional if only one field can be packed.

    Raises:
        InvalidArgument: the field cannot be packed with these options. On first use: the tokens do
            not fill a window.
        ShardCorrupt: (on first use) the index of the documents is damaged.
    """

    spans_rows = True

    def __init__(self, dataset: Dataset, pack: Pack) -> None:
        super().__init__(dataset)
        self.packing = resolve_pack(dataset.schema, pack)
        """The options of the windows, with the field of tokens."""

    @classmethod
    def of_tables(cls, pack: Pack, dataset: Dataset, tables: Tables) -> WindowView:
        """Return a view of `dataset` from the options and the tables of an equal view."""
        found = cls(dataset, pack)
        sources = dataset.rows.source_counts
        found.__dict__["windows"] = PackedWindows(pack, tables["ends"], sources, tables["firsts"])
        return found

    @cached_property
    def windows(self) -> PackedWindows:
        """The windows, by their index."""
        dataset, pack = self.dataset, self.packing
        lengths = _lengths(dataset, pack) + (pack.eot is not None)
        ends = np.cumsum(lengths, dtype=np.int64)
        found = PackedWindows(pack, ends, dataset.rows.source_counts)
        dataset.rows.check_sources(found.n_windows, "its tokens do not fill a window")
        if lengths.any() and not len(found):
            whole = ' with rest="drop"' if pack.rest == "drop" else ""
            raise InvalidArgument(
                f"{dataset.path}: the {int(lengths.sum())} tokens of field {pack.name!r} are not "
                f"enough for a window of {pack.reach}{whole}"
            )
        return found

    @property
    def is_read(self) -> bool:
        """True if the lengths of the documents were read."""
        return "windows" in self.__dict__

    def __reduce__(self) -> tuple[Any, ...]:
        return WindowView, (self.dataset, self.packing)

    def __len__(self) -> int:
        return len(self.windows)

    def __repr__(self) -> str:
        count = f"{len(self)} " if self.is_read else ""
        return (
            f"WindowView({count}windows of {self.packing.length} tokens, of {self.packing.name!r} "
            f"in {self.dataset!r})"
        )

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of the dataset that a sample is derived from."""
        return (self.packing.name,)

    def chosen(self, names: tuple[str, ...], *, is_asked: bool) -> tuple[str, ...]:
        """Return the fields that the view must read if a loader is to read the fields `names`."""
        others = [name for name in names if name != self.packing.name]
        if others and is_asked:
            raise InvalidArgument(
                f"a sample is a window, made of many rows' {self.packing.name!r}: leave {others} "
                "out of fields"
            )
        return self.fields

    def on(self, dataset: Dataset) -> WindowView:
        """Return a view of another dataset with the same options."""
        return WindowView(dataset, self.packing)

    @property
    def maker(self) -> Maker:
        """A function that creates an equal view from its `tables`."""
        return functools.partial(WindowView.of_tables, self.packing)

    def tables(self) -> Mapping[str, Table]:
        """Return the tables from which another process creates the view again."""
        return {
            "ends": Table(self.windows.ends, "where each document ends"),
            "firsts": Table(self.windows.firsts, "which document each window begins in"),
        }

    def delivered(self, schema: Schema) -> Schema:
        """Return the schema of the view's samples, given the schema of the stored fields."""
        return self.packing.delivered(schema)

    def sources(self, audio: AudioSpec) -> dict[str, FieldSource]:
        """Return the source of the view's windows, by the stored field."""
        return {self.packing.name: TokenSource(self.dataset, self.windows)}

    @property
    def identity(self) -> str:
        """Text that distinguishes the view from other views of the same dataset."""
        return f"{self.dataset.rows.view_id} {self.packing.identity}".lstrip()

    @property
    def source_ends(self) -> Rows:
        """The cumulative sample counts of a mixture's sources."""
        return np.cumsum(self.windows.n_windows)

    def at(self, numbers: Rows) -> Rows:
        """Return the row in which each window begins."""
        return self.dataset.rows.at(self.windows.firsts[numbers])

    def covered_rows(self, numbers: Rows) -> Rows:
        """Return the row of every document that is in one of these windows, even in part."""
        return self.dataset.rows.at(distinct(self.windows.parts(numbers).documents))

    @property
    def stream_tokens(self) -> tuple[int, ...] | None:
        """The token count of each source, if the last window is padded; else None."""
        return self.windows.n_tokens if self.packing.rest == "pad" else None

    def no_shards_reason(self) -> str | None:
        """Return the reason why the samples are not in the order of the shards, or None."""
        return "a window of tokens may begin in one shard and end in another"


def resolve_pack(schema: Schema, pack: Pack) -> Pack:
    """Return the options of windows with `field` set to the field of tokens."""
    name = pack.field
    if name is None:
        could = [each for each in schema if _not_packable_reason(schema[each]) is None]
        if len(could) != 1:
            raise InvalidArgument(
                "pack needs one field of tokens, integers in one dimension; these are: "
                f"{', '.join(could) or 'none'}: choose one with dataset.pack(field, length=…)"
            )
        (name,) = could
    if name not in schema:
        raise InvalidArgument(f"pack: there is no field {name!r}; there are {', '.join(schema)}")
    array, why_not = schema[name].array, _not_packable_reason(schema[name])
    if why_not is not None or array is None:
        raise InvalidArgument(f"pack: field {name!r} {why_not}; found {schema[name]!r}")
    limits = np.iinfo(array.numpy)
    for option, token in (("eot", pack.eot), ("pad", pack.pad)):
        if token is not None and not limits.min <= token <= limits.max:
            raise InvalidArgument(
                f"pack: {option} must be a token that field {name!r} of {array.dtype} can have, "
                f"from {limits.min} to {limits.max}; found {token}"
            )
    return replace(pack, field=name)


def _not_packable_reason(field: Field) -> str | None:
    """Return the reason why a field cannot be packed; None if it can."""
    array = field.array
    if array is None or array.numpy.kind not in "iu" or array.dtype == "bfloat16":
        return "must be an array of integers, to be packed as tokens"
    if len(array.shape) != 1:
        return "must have one dimension, the tokens of a document, to be packed"
    if field.optional:
        return "must not be optional: a missing document has no tokens to pack"
    return None


def _lengths(dataset: Dataset, pack: Pack) -> Rows:
    """Return the number of tokens of the document in each selected row."""
    name, field, n = pack.name, pack.documents(dataset.schema), len(dataset)
    if field.is_fixed:
        return np.full(n, field.shape[0], np.int64)
    lengths, itemsize = np.zeros(n, np.int64), field.numpy.itemsize

    def look(part: ShardSamples) -> Rows:
        n_bytes: Rows = part.reader(name).records.entries(name, part.rows)["n_bytes"]
        return n_bytes.astype(np.int64) // itemsize

    for part, found in scan(dataset, look):
        lengths[part.numbers] = found
    return lengths
