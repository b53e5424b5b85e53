"""Write samples of Python objects in this process: to a new dataset, or to an existing one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from shardio.conversion.append import check_same_schema, known_classes, load_base, rebase
from shardio.conversion.classes import (
    check_label,
    check_label_field,
    random_split_details,
    subset_details,
    subset_sizes,
)
from shardio.conversion.execution import ConvertOptions
from shardio.conversion.journal import conversion_settings
from shardio.conversion.python_samples import infer_sample_schema, prepare_sample
from shardio.conversion.report import ConversionReport
from shardio.conversion.staging import REPLACE_HINT
from shardio.dataset.generation import Generation
from shardio.dataset.manifest import check_classes, holds_dataset, publish, refuse_existing
from shardio.dataset.writer import GenerationWriter
from shardio.errors import InvalidArgument, SchemaError
from shardio.format.schema import Schema
from shardio.shard.writer import check_schema

Rows = Iterator[tuple[str, Mapping[str, Any]]]
"""The subset and the sample of each row."""


class SamplePart(NamedTuple):
    """Samples of one subset; `subset` is "" for no subset.

    `schema` is a schema that can store the samples; None to infer it from the first sample.
    `classes` are the class names of the field `label`; `units` maps fields of times to their units.
    """

    samples: Iterable[Mapping[str, Any]]
    schema: Schema | None = None
    classes: tuple[str, ...] = ()
    subset: str = ""
    units: Mapping[str, str] = MappingProxyType({})


def write_samples(
    parts: Sequence[SamplePart], out: str, schema: Schema | None, options: ConvertOptions
) -> ConversionReport:
    """Write samples to a new dataset at `out`, or append them; without samples, publish nothing.

    Without `schema`, use the schemas of the parts, or infer one from the first sample.

    Raises:
        InvalidArgument: the parts do not match each other or the dataset in `out`, or there is
            neither a schema nor a sample.
        SchemaError: a sample does not match the schema.
    """
    start_s = time.monotonic()
    base = load_base(out) if options.append else None
    given = options.converter_options.get("classes")
    named = _merge_classes(parts) if given is None else check_classes(given)
    classes = known_classes(base, named, out)
    units = _merge_units(parts, base, out)
    schema = _known_schema(parts, schema, base, out)
    is_inferred = schema is None
    rows: Rows = ((part.subset, sample) for part in parts for sample in part.samples)
    if schema is None:
        schema, rows = _infer_schema(rows)
    check_schema(schema)
    if given is not None:
        check_label_field(schema)
    if base is None and not options.overwrite and holds_dataset(out):
        refuse_existing(out, hint=REPLACE_HINT)
    classes = classes if "label" in schema else ()
    n_labels = None if given is None else len(classes)
    run = _SampleRun(
        *(rows, schema, classes, units, base, options, out),
        is_inferred=is_inferred,
        n_labels=n_labels,
    )
    latest, found = run.replace_dataset() if options.overwrite else run.write(out)
    shards = found.shards if found else ()
    return ConversionReport(
        dataset=Path(out),
        kind="samples",
        n_samples=run.n_samples,
        n_bytes=sum(shard.n_bytes for shard in shards[len(latest.shards) if latest else 0 :]),
        elapsed_s=time.monotonic() - start_s,
        classes=found.classes if found else (),
        generation=found.number if found else 0,
        n_samples_before=latest.n_samples if latest else 0,
        stats_dropped=bool(latest and found and found.stats != latest.stats),
        subsets=subset_sizes(found),
    )


@dataclass
class _SampleRun:
    """One run that writes samples; `is_inferred` is True for the schema of the first sample.

    If the caller gives the names of the classes, labels must be less than `n_labels`, their number.
    A new dataset records `units` where a conversion of Arrow files records them: among the options
    of its converter.
    """

    rows: Rows
    schema: Schema
    classes: tuple[str, ...]
    units: Mapping[str, str]
    base: Generation | None
    options: ConvertOptions
    out: str
    n_samples: int = 0
    is_inferred: bool = False
    n_labels: int | None = None

    def write(self, folder: str | Path) -> tuple[Generation | None, Generation | None]:
        """Write all samples to `folder`; return the previous and the published generation."""
        base, shard_bytes = self.base, self.options.shard_bytes
        counts: Counter[str] = Counter()
        with GenerationWriter(
            folder, self.schema, shard_bytes=shard_bytes, previous=base, shown_path=self.out
        ) as output:
            for subset, sample in self.rows:
                self._append(output, sample)
                counts[subset] += 1
                self.n_samples += 1
            latest = None if base is None else rebase(base, Path(folder))
            if not self.n_samples:
                return latest, latest
            converter = {"options": {"units": self.units}} if self.units else {}
            details: dict[str, Any] = {"classes": self.classes, "converter": converter}
            if latest is not None:
                output.set_previous(latest)
                details = {
                    "classes": self.classes or latest.classes,
                    "stats": {key: value for key, value in latest.stats.items() if key != "whole"},
                    "operation": {"name": "append", "options": {"shard_bytes": shard_bytes}},
                }
            details |= subset_details([*counts.items()], latest)
            details |= random_split_details(
                self.options.split, self.options.split_seed, self.n_samples, self.out
            )
            return latest, output.publish(**details)

    def _append(self, output: GenerationWriter, sample: Mapping[str, Any]) -> None:
        try:
            output.append(_prepare(sample, self.schema, self.n_labels, self.n_samples))
        except SchemaError as error:
            if not self.is_inferred:
                raise
            hint = "the schema is that of the first sample; pass schema= for another"
            if "expected shape" in str(error):
                hint += ", with None for a dimension that varies"
            raise SchemaError(f"{error} ({hint})") from error

    def replace_dataset(self) -> tuple[None, Generation | None]:
        """Write a new dataset in the work folder, and replace the dataset in `out` with it."""
        with self.options.make_staging(self.out) as staging:
            staging.begin(conversion_settings({"name": "samples"}, {}), [])
            folder = staging.folder / _NEW_DATASET
            _, new = self.write(folder)
            if new is None:
                return None, None
            staging.link_shards([(f"{folder.name}/{one.name}", one.name) for one in new.shards])
            found = publish(
                staging.out,
                schema=new.schema,
                shards=list(new.shards),
                classes=new.classes,
                subsets=new.subsets,
                converter=new.converter,
                operation=new.operation,
            )
            staging.finish()
        return None, found


_NEW_DATASET: Final = "0" * 16
"""The name of the folder inside the work folder that contains a new dataset."""


def _merge_classes(parts: Sequence[SamplePart]) -> tuple[str, ...]:
    """Return the classes that all parts have; raise InvalidArgument if they differ."""
    classes = parts[0].classes
    for part in parts:
        if part.classes != classes:
            raise InvalidArgument(
                f"subset {part.subset!r}: found the classes {[*part.classes]}, expected "
                f"{[*classes]} as in {parts[0].subset!r}; convert the subsets separately"
            )
    return classes


def _merge_units(parts: Sequence[SamplePart], base: Generation | None, out: str) -> dict[str, str]:
    """Return the units of all parts and the dataset; raise InvalidArgument if they differ."""
    recorded = {} if base is None else base.converter.get("options", {}).get("units")
    units = dict(recorded or {})
    for part in parts:
        for name, unit in part.units.items():
            if units.setdefault(name, unit) != unit:
                raise InvalidArgument(
                    f"{out}: column {name!r}: expected {units[name]} as in earlier rows, found "
                    f"{unit}; convert the column first"
                )
    return units


def _known_schema(
    parts: Sequence[SamplePart], schema: Schema | None, base: Generation | None, out: str
) -> Schema | None:
    """Return the schema of the dataset, or that of the samples; None if it must be inferred."""
    if base is None:
        return _merge_schemas(parts) if schema is None else schema
    if schema is not None:
        check_same_schema(base.schema, schema, out)
    return base.schema


def _infer_schema(rows: Rows) -> tuple[Schema, Rows]:
    """Infer a schema from the first sample; return it and all rows, including the first one."""
    if (first := next(rows, None)) is None:
        raise InvalidArgument("no samples to infer the schema from; pass schema=")
    try:
        return infer_sample_schema(first[1]), chain((first,), rows)
    except SchemaError as error:
        raise SchemaError(f"sample 0: {error}") from error


def _merge_schemas(parts: Sequence[SamplePart]) -> Schema | None:
    """Return a schema that can store the samples of all parts whose schemas are known.

    A field is optional if it is optional in any part. Other differences raise InvalidArgument. If
    no schema is known, return None.
    """
    merged: Schema | None = None
    for part in parts:
        if part.schema is None:
            continue
        if merged is None:
            merged = part.schema
            continue
        part_schema, known = part.schema, merged
        optional = {
            name for s in (part_schema, known) for name, field in s.items() if field.optional
        }
        merged, found = (
            Schema({name: field.as_optional(name in optional) for name, field in s.items()})
            for s in (known, part_schema)
        )
        if merged != found:
            raise InvalidArgument(
                f"subset {part.subset!r}: found {found}, expected {merged} as in "
                f"{parts[0].subset!r}; convert the subsets separately, or pass schema="
            )
    return merged


def _prepare(
    sample: Mapping[str, Any], schema: Schema, n_labels: int | None, number: int
) -> Mapping[str, Any]:
    """Return a sample in the form that a writer accepts; an error names the sample and field."""
    try:
        prepared = prepare_sample(sample, schema)
        if n_labels is not None:
            check_label(prepared, n_labels)
        return prepared
    except SchemaError as error:
        raise SchemaError(f"sample {number}: {error}") from error
