"""WebDataset tars: members of one key are a sample."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from shardio import Input, MediaError, Outcome
from shardio_converters.field_specs import Field
from shardio_converters.records.found_fields import FoundFields, tell_fields
from shardio_converters.records.tar_files import Member, is_tar, open_tar
from shardio_converters.records.tar_members import (
    Samples,
    check_field,
    facts_of,
    value_of,
)
from shardio_converters.told_fields import ToldFields


@dataclass(frozen=True, kw_only=True)
class WebDataset(ToldFields):
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

    def check_field(self, name: str, word: str, field: Field) -> None:
        """Make sure that members of this name can be what a field is."""
        check_field(name, field)

    def about(self) -> Mapping[str, str]:
        """What a sample has beside its members."""
        return {"key": "text", **super().about()}

    def in_order(self, fields: Mapping[str, str]) -> dict[str, str]:
        """All that a sample has, the members last."""
        return {**self.beside(), **fields}

    def fitted(self, inputs: Sequence[Input]) -> WebDataset:
        """Give the converter with `fields` as the inputs have them; all are read to their ends.

        Raises:
            InvalidArgument: none of them is a tar that can be read.
        """
        what = "tar of samples that can be read"
        return replace(self, fields=self.fields or tell_fields(inputs, _fields_of, what))

    def samples(self, source: Input) -> Generator[Mapping[str, Any], None, Outcome]:
        """Yield the samples of a tar."""
        if not is_tar(source.name):
            return Outcome("unsupported", "not a tar")
        schema, fields = self.schema(), self.fields or {}
        about = self.values_beside(source, key="")
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
            return Outcome("empty", "holds no sample", detail=detail)
        return Outcome("converted", detail=detail)


def _fields_of(source: Input) -> FoundFields:
    """The fields of a tar that is not damaged."""
    found = FoundFields()
    if is_tar(source.name):
        with ExitStack() as files:
            for _, sample in Samples(open_tar(source.path, source.name, files), facts_of):
                found.add(sample)
    return found
