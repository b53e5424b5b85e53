"""The base of converters of record files: records as raw bytes, or as tf.train.Example."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Self

from shardio import Bytes, Input, InvalidArgument, MediaError, Outcome
from shardio_converters.inference import InputProbe, SchemaInference
from shardio_converters.options import check_choice
from shardio_converters.records import examples
from shardio_converters.schema_spec import Field, InferringConverter, schema_of

RECORDS: Final = ("example", "bytes")
RECORD_FIELD: Final = "record"  # the field name of a record stored as raw bytes


@dataclass(frozen=True, kw_only=True)
class RecordConverter(InferringConverter):
    """A base of converters that make one sample per record of a file.

    Records are parsed as tf.train.Example, whose features become fields, or stored as bytes in the
    field `record`. By default, they are parsed if the first record is an Example with features.
    Fields are inferred from all records.
    """

    kind: ClassVar[str]
    version: ClassVar[str] = "1"
    splits_by_file_name: ClassVar[bool] = True
    what: ClassVar[str]  # a plain-language name of the files

    records: str | None = field(default=None, metadata={"choices": RECORDS})
    """Records are tf.train.Example or bytes (default: detected from the first record)."""

    def __post_init__(self) -> None:
        if self.records is not None:
            check_choice("records", self.records, RECORDS)
        super().__post_init__()

    def check_field(self, name: str, word: str, field: Field) -> None:
        """Check that a feature, or a raw record, can be converted to a field."""
        if self.records == "bytes" and (name != RECORD_FIELD or field != Bytes()):
            raise InvalidArgument(
                f"records that are bytes have one field, {RECORD_FIELD!r}: 'bytes'"
            )
        if not examples.fits(field):
            raise InvalidArgument(
                f"field {name!r}: found {word!r}; expected bytes, text, image, json, "
                "list[uint8[*]], or an array with at most one varying dimension"
            )

    @abstractmethod
    def read(self, source: Input) -> Generator[bytes] | None:
        """Return a generator of the records of a file; None for a file of another kind."""

    def fitted(self, inputs: Sequence[Input]) -> Self:
        """Return the converter with `records` and `fields` inferred from the inputs."""
        if self.fields is not None:
            return replace(self, records=self.records or "example")
        found, records, probe = SchemaInference(None), self.records, InputProbe(inputs)
        for one in probe.files():
            of_file = SchemaInference(None)
            with probe.skip_broken(one):
                if records is None:
                    with closing(self._records(one)) as every:
                        first = next(every, None)
                    if first is not None:
                        records = RECORDS[not examples.is_example(first)]
                if records == "bytes":
                    break
                for record in self._records(one):
                    of_file.add(examples.facts_of(examples.read_example(record)))
                examples.merge_file(found, of_file)
        if records == "bytes":
            return replace(self, records=records, fields={RECORD_FIELD: "bytes"})
        if not found.n_samples:
            raise probe.nothing_usable(f"{self.what} that can be read and holds a record")
        try:
            specs = examples.specs_of(found)
            if not specs:
                raise InvalidArgument(f"the {found.n_samples:,} records have no feature")
            return replace(self, records="example", fields=specs)
        except (InvalidArgument, MediaError) as error:
            raise InvalidArgument(
                f"cannot map the features to field types: {error}; "
                "records='bytes' keeps records as they are"
            ) from error

    def _records(self, source: Input) -> Generator[bytes]:
        """Yield the records of a file; none for a file of another kind."""
        if (records := self.read(source)) is not None:
            with closing(records):
                yield from records

    def samples(self, source: Input) -> Generator[Mapping[str, Any], None, Outcome]:
        """Yield one sample per record of a file."""
        records = self.read(source)
        if records is None:
            return Outcome("unsupported", f"no {self.what}")
        about = self.additional_values(source)
        n_samples = 0
        with closing(records):
            make = self._maker()
            for record in records:
                try:
                    sample = make(record)
                except MediaError as error:
                    raise MediaError(f"record {n_samples:,}: {error}") from error
                sample.update(about)
                yield sample
                n_samples += 1
        return Outcome("converted") if n_samples else Outcome("empty", "holds no record")

    def _maker(self) -> Any:
        if self.records == "bytes":
            return lambda record: {RECORD_FIELD: record}
        schema = schema_of(self.fields or {})
        known = examples.makers(schema)
        names = {name.encode(): name for name in schema}
        required = {name.encode() for name, field in schema.items() if not field.optional}
        blank = dict.fromkeys(schema)

        def make(record: bytes) -> dict[str, Any]:
            features = examples.read_example(record)
            sample: dict[str, Any] = blank.copy()
            for name, values in features.items():
                if name not in known:
                    raise MediaError(f"feature {name.decode(errors='replace')!r} is not a field")
                try:
                    sample[names[name]] = known[name](values)
                except MediaError as error:
                    raise MediaError(f"feature {names[name]!r}: {error}") from error
            if len(features) < len(blank) and (missing := required - features.keys()):
                raise MediaError(f"feature {min(missing).decode()!r} is missing")
            return sample

        return make
