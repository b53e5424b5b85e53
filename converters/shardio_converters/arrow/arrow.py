"""Rows of tables: Parquet, Arrow and Feather, and what Hugging Face's `datasets` saves."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, ClassVar, Final

from shardio import Input, InvalidArgument, MediaError, Outcome
from shardio_converters.arrow.fields import (
    ArrowInference,
    Nulls,
    is_null_record,
    nulls_of,
    refuse_other_meaning,
    refuse_other_type,
)
from shardio_converters.arrow.files import (
    STATE,
    SUFFIXES,
    is_table,
    open_table,
    refuse_missing_tables,
)
from shardio_converters.inference import SchemaProbe
from shardio_converters.row_samples import row_samples
from shardio_converters.schema_spec import STEP_S, Field, InferringConverter
from shardio_converters.tabular.arrow_columns import ArrowColumn, columns_of, values_of

_DESCRIBE: Final = (STATE, "dataset_info.json", "dataset_dict.json")
"""What Hugging Face's `datasets` saves beside the tables."""


@dataclass(frozen=True, kw_only=True)
class Arrow(InferringConverter):
    """Makes a sample of each row; columns keep their names, those of a struct are a nested record.

    `columns` are those that are taken, all by default. `fields` says what they are, as
    `{"x": "float32[3,*]", "note": "text?"}`; by default the files do. `units` and `classes` follow
    from the files: what whole numbers count that were times there, and what the numbers of a
    column `label` stand for.

    Fields: the columns; and of these, those whose names no column has: `label` int64; `source`, the
    file's name below the source folder.

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
        """Give the converter with `fields`, `units` and `classes` as the inputs have them.

        Raises:
            InvalidArgument: none of them is a table that can be read.
        """
        if self.fields is not None and self.units is not None and self.classes is not None:
            return self
        found, looks = ArrowInference(), SchemaProbe(inputs)
        for one in filter(is_table, looks.files()):
            with looks.at(one), open_table(one.path, one.name) as table:
                columns = columns_of(table.schema, self.columns, self.fields)
                found.add(columns, nulls_of(table, columns) if self.fields is None else Nulls())
        if not found.as_specs() and self.fields is None:
            raise looks.none_of("Parquet, Arrow or Feather that can be read and has columns")
        return replace(
            self,
            fields=self.fields or found.as_specs(),
            units=self.units or found.units or None,
            classes=self.classes or found.classes or None,
        )

    def class_names(self) -> Sequence[str] | None:
        """Give what the numbers of `label` stand for where they are the file's own, not folders."""
        return None if "label" in self.beside() else tuple(self.classes or ())

    def libraries(self) -> Mapping[str, str]:
        """Give the version of what reads the files."""
        return {"pyarrow": version("pyarrow")}

    def samples(self, source: Input) -> Generator[Mapping[str, Any], None, Outcome]:
        """Yield the samples of a file."""
        name = os.path.basename(source.name)
        if name in _DESCRIBE:
            refuse_missing_tables(source)
            return Outcome("part", "describes the tables of its folder")
        if not is_table(source):
            is_other = name.lower().endswith(SUFFIXES)
            reason = f"{STATE} beside it does not list it" if is_other else "no table"
            return Outcome("unsupported", reason)
        about = self.values_beside(source)
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
        """The field of each column, in their order.

        Raises:
            MediaError: a column is none of the fields, or another, or one is missing.
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
