"""Tables of Arrow: Parquet, Arrow, Feather and saved Hugging Face `datasets`; one sample per row.

Fields are inferred from all files and compared with those of each.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any, ClassVar, Final

import pyarrow as pa
import pyarrow.compute as pc

from shardio import Array, Input, InvalidArgument, Json, List, MediaError, Outcome
from shardio_converters.inference import InputProbe, common_dtype, common_spec
from shardio_converters.schema_spec import STEP_S, Field, InferringConverter, are_compatible_names
from shardio_converters.tabular.arrow_columns import (
    UNKNOWN,
    ArrowColumn,
    array_at,
    check_json,
    columns_of,
    dims_of,
    has_nulls_inside,
    is_list,
    is_struct,
    values_of,
)
from shardio_converters.tabular.arrow_files import (
    STATE,
    SUFFIXES,
    ArrowTable,
    ParquetTable,
    is_table,
    open_table,
    refuse_missing_tables,
)
from shardio_converters.tabular.rows import row_samples


@dataclass
class Nulls:
    """Columns that have nulls, and columns that have lists containing nulls."""

    missing: set[str] = field(default_factory=set)
    inside: set[str] = field(default_factory=set)


def nulls_of(table: ParquetTable | ArrowTable, columns: Sequence[ArrowColumn]) -> Nulls:
    """Return the columns of a table that have nulls.

    Columns are read until nothing more can be learnt. Statistics of Parquet would be faster, but if
    they contradict the schema, pyarrow 26 crashes the process that asks for them.
    """
    sure = {one.name for one in table.schema if not (one.nullable or pa.types.is_nested(one.type))}
    left = {column.name: column for column in columns if column.top not in sure}
    found = Nulls()
    batches = table.batches(sorted({column.top for column in left.values()})) if left else ()
    for batch in batches:
        for name, column in [*left.items()]:
            array = array_at(batch, column)
            if array.null_count or _lacks_files(array):
                found.missing.add(name)
            if has_nulls_inside(array):
                found.inside.add(name)
            if name in found.missing and (name in found.inside or not is_list(column.type)):
                del left[name]
        if not left:
            break
    return found


def _lacks_files(array: pa.Array) -> bool:
    """Return True if a column of files with paths lacks the bytes of some."""
    return is_struct(array.type) and bool(pc.struct_field(array, "bytes").null_count)


class ArrowInference:
    """Fields merged over files; the first file that has a column defines its field.

    Other numeric dtypes widen the field.
    """

    def __init__(self) -> None:
        self._columns: dict[str, ArrowColumn] = {}
        self._counts: Counter[str] = Counter()
        self._nulls = Nulls()
        self.n_files = 0

    def add(self, columns: Sequence[ArrowColumn], nulls: Nulls) -> None:
        """Add the columns of a file, unless they conflict with those of earlier files."""
        known = self._columns
        columns = [one for one in columns if not is_null_record(one, known)]
        new = {column.name for column in columns}
        known = {name: one for name, one in known.items() if not is_null_record(one, new)}
        for column in columns:
            was = known.get(column.name, column)
            if UNKNOWN in (was.word, column.word):
                continue
            same = (was.unit, was.classes) == (column.unit, column.classes)
            if not same or common_spec(was.word, column.word) is None:
                return
        if not new <= known.keys() and not are_compatible_names(known.keys() | new):
            return
        self._columns = known
        self.n_files += 1
        for column in columns:
            self._counts[column.name] += 1
            was = known.setdefault(column.name, column)
            if was.word == UNKNOWN:
                known[column.name] = column
            elif word := common_spec(was.word, column.word):
                known[column.name] = replace(was, word=word)
            if column.word == UNKNOWN:
                self._nulls.missing.add(column.name)
        self._nulls.missing |= nulls.missing
        self._nulls.inside |= nulls.inside

    def as_specs(self) -> dict[str, str]:
        """Return the field specs; columns with nulls, or missing from some files, are optional."""
        found = {}
        for name, column in self._columns.items():
            is_json = column.word == UNKNOWN or name in self._nulls.inside
            word = "json" if is_json and not column.unit else column.word
            is_optional = name in self._nulls.missing or self._counts[name] < self.n_files
            found[name] = f"{word}{'?' if is_optional else ''}"
        return found

    @property
    def units(self) -> dict[str, str]:
        """Units of integers that were times, by column."""
        return {name: column.unit for name, column in self._columns.items() if column.unit}

    @property
    def classes(self) -> list[str]:
        """Class names of the column `label`."""
        return [*self._columns["label"].classes] if "label" in self._columns else []


def is_null_record(column: ArrowColumn, names: Iterable[str]) -> bool:
    """Return True if an all-null column is a nested record according to the field names."""
    return column.word == UNKNOWN and any(name.startswith(f"{column.name}.") for name in names)


def refuse_other_type(column: ArrowColumn, known: Field, spec: str) -> None:
    """Require that a column can be stored in a field.

    Raises:
        MediaError: it cannot.
    """
    word = spec.removesuffix("?")
    if column.word == word or (column.word == UNKNOWN and known.optional):
        return
    if isinstance(known, Json):
        check_json(column.name, column.type)
        return
    if column.word == "bytes" and word in ("image", "audio", "video"):
        return
    dims, _ = dims_of(column.name, column.type)
    array = known.element if isinstance(known, List) else known
    wanted = (
        (None, *known.element.shape) if isinstance(known, List) else getattr(known, "shape", ())
    )
    is_same = isinstance(array, Array) and array.dtype == _stored_as(column, array.dtype)
    is_fitting = len(dims) == len(wanted) and all(
        want in (None, n) or n is None for n, want in zip(dims, wanted, strict=True)
    )
    if not (is_same and is_fitting):
        raise MediaError(f"column {column.name!r}: expected {spec}, found {column.word}")


def _stored_as(column: ArrowColumn, dtype: str) -> str | None:
    """Return the common dtype of a column's numbers and another dtype; times stay as they are."""
    own = column.word.removeprefix("list[").partition("[")[0].rstrip("]")
    return own if column.unit else common_dtype(own, dtype)


def refuse_other_meaning(
    column: ArrowColumn, units: Mapping[str, str], classes: Sequence[str]
) -> None:
    """Require numbers of a file to have the same unit and classes as in other files.

    Raises:
        MediaError: the unit or the classes differ.
    """
    expected = units.get(column.name, "")
    if column.unit != expected and column.word != UNKNOWN:
        raise MediaError(
            f"column {column.name!r}: expected {expected or 'no times'}, found "
            f"{column.unit or 'no times'}"
        )
    if column.name == "label" and column.classes != tuple(classes) and column.word != UNKNOWN:
        raise MediaError(
            f"column 'label': expected the classes {[*classes]}, found {[*column.classes]}"
        )


_DESCRIBE: Final = (STATE, "dataset_info.json", "dataset_dict.json")
"""Metadata files that Hugging Face's `datasets` saves beside the tables."""


@dataclass(frozen=True, kw_only=True)
class Arrow(InferringConverter):
    """A converter that makes one sample per row; a struct column becomes a nested record.

    `columns` are the columns to take, all by default. `fields` declares them, such as
    `{"x": "float32[3,*]", "note": "text?"}`; by default they follow from the files, and so do
    `units` (of integers that were times) and `classes` (names of the numbers in a column `label`).

    Fields: the columns; and unless a column has the name: `label` int64; `source`, the file's name
    below the source folder.

    Raises:
        InvalidArgument: an option is not acceptable.
    """

    kind: ClassVar[str] = "arrow"
    version: ClassVar[str] = "1"
    step_s: ClassVar[float] = STEP_S

    columns: Sequence[str] | None = None
    fields: Mapping[str, str] | None = None
    units: Mapping[str, str] | None = None
    classes: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.columns is not None:
            if not isinstance(self.columns, list | tuple) or not self.columns:
                raise InvalidArgument(f"columns is {self.columns!r}; expected names of columns")
            object.__setattr__(self, "columns", [*map(str, self.columns)])
        super().__post_init__()

    def fitted(self, inputs: Sequence[Input]) -> Arrow:
        """Return the converter with `fields`, `units` and `classes` inferred from the inputs.

        Raises:
            InvalidArgument: no input is a readable table.
        """
        if self.fields is not None and self.units is not None and self.classes is not None:
            return self
        found, probe = ArrowInference(), InputProbe(inputs)
        for one in filter(is_table, probe.files()):
            with probe.skip_broken(one), open_table(one.path, one.name) as table:
                columns = columns_of(table.schema, self.columns, self.fields)
                found.add(columns, nulls_of(table, columns) if self.fields is None else Nulls())
        if not found.as_specs() and self.fields is None:
            raise probe.nothing_usable("Parquet, Arrow or Feather that can be read and has columns")
        return replace(
            self,
            fields=self.fields or found.as_specs(),
            units=self.units or found.units or None,
            classes=self.classes or found.classes or None,
        )

    def class_names(self) -> Sequence[str] | None:
        """Return the class names of a column `label`; None if labels come from folders."""
        return None if "label" in self.additional_fields() else tuple(self.classes or ())

    def libraries(self) -> Mapping[str, str]:
        """Return the version of pyarrow."""
        return {"pyarrow": version("pyarrow")}

    def samples(self, source: Input) -> Generator[Mapping[str, Any], None, Outcome]:
        """Yield the samples of a file."""
        name = os.path.basename(source.name)
        if name in _DESCRIBE:
            refuse_missing_tables(source)
            return Outcome("part", "describes the tables of its folder")
        if not is_table(source):
            is_other = name.lower().endswith(SUFFIXES)
            reason = f"{STATE} beside it does not list it" if is_other else "not a table"
            return Outcome("unsupported", reason)
        about = self.additional_values(source)
        n_samples = 0
        with open_table(source.path, source.name) as table:
            columns = [
                one
                for one in columns_of(table.schema, self.columns, self.fields)
                if not is_null_record(one, self.fields or ())
            ]
            fields = self._fields_of(columns)
            about |= dict.fromkeys((self.fields or {}).keys() - fields.keys())
            for batch in table.batches(self.columns):
                values = {
                    one.name: values_of(batch, one, fields[one.name], n_samples) for one in columns
                }
                yield from row_samples(values, about, batch.num_rows)
                n_samples += batch.num_rows
        return Outcome("converted") if n_samples else Outcome("empty", "holds no row")

    def _fields_of(self, columns: Sequence[ArrowColumn]) -> dict[str, Field]:
        """Return the field of each column, in their order.

        Raises:
            MediaError: a column has no field or differs from it, or a column is missing.
        """
        schema, fields = self.schema(), self.fields or {}
        found: dict[str, Any] = {}
        for column in columns:
            if column.name not in fields:
                raise MediaError(
                    f"column {column.name!r}: found {column.word}, expected no such column"
                )
            found[column.name] = schema[column.name]
            refuse_other_type(column, schema[column.name], fields[column.name])
            refuse_other_meaning(column, self.units or {}, self.classes or ())
        for name in fields:
            if name not in found and not schema[name].optional:
                raise MediaError(f"column {name!r} is missing, found {', '.join(sorted(found))}")
        return found
