"""Parquet, Arrow, Feather and saved Hugging Face `datasets`; one sample per row."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, ClassVar, Final

from shardio import Input, MediaError, Outcome
from shardio_converters.inference import InputProbe, is_null_record
from shardio_converters.options import column_names
from shardio_converters.schema_spec import STEP_S, Field, InferringConverter
from shardio_converters.tabular.tables import row_samples

if TYPE_CHECKING:  # pyarrow is imported on use, so that options can be listed without it
    from shardio_converters.tabular.arrow_columns import ArrowColumn
    from shardio_converters.tabular.arrow_inference import FrameColumn, ReadRows

# Files that Hugging Face's `datasets` saves beside the tables
_DESCRIBE: Final = ("state.json", "dataset_info.json", "dataset_dict.json")


@dataclass(frozen=True, kw_only=True)
class Arrow(InferringConverter):
    """A converter that makes one sample per row; a struct column becomes a nested record.

    By default, `fields`, `units` and `classes` are inferred from the files.
    """

    kind: ClassVar[str] = "arrow"
    version: ClassVar[str] = "1"
    splits_by_file_name: ClassVar[bool] = True
    keeps_order: ClassVar[bool] = True
    step_s: ClassVar[float] = STEP_S

    columns: Sequence[str] | None = field(
        default=None, metadata={"flag": "--column", "metavar": "COLUMN"}
    )
    """Convert this column or feature; repeatable (default: all)."""
    units: Mapping[str, str] | None = field(default=None, metadata={"flag": None})
    """Units of the columns with times, stored as integers; not a command-line option."""
    classes: Sequence[str] | None = field(default=None, metadata={"flag": None})
    """Class names for the numbers in a column `label`; not a command-line option."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", column_names(self.columns, "columns"))
        super().__post_init__()

    def fitted(self, inputs: Sequence[Input]) -> Arrow:
        """Return the converter with `fields`, `units` and `classes` inferred from the inputs."""
        if self.fields is not None and self.units is not None and self.classes is not None:
            return self
        from shardio_converters.tabular.arrow_columns import columns_of
        from shardio_converters.tabular.arrow_files import is_table, open_table
        from shardio_converters.tabular.arrow_inference import ArrowInference, nulls_of

        found, probe = ArrowInference(), InputProbe(inputs)
        for one in filter(is_table, probe.files()):
            with probe.skip_broken(one), open_table(one.path, one.name) as table:
                columns = columns_of(table.schema, self.columns, self.fields)
                nulls = nulls_of(table, columns) if self.fields is None else ((), ())
                found.add(columns, *nulls)
        if not found.as_specs() and self.fields is None:
            raise probe.nothing_usable("Parquet, Arrow or Feather that can be read and has columns")
        return replace(
            self,
            fields=self.fields or found.as_specs(),
            units=self.units or found.units or None,
            classes=self.classes or found.classes or None,
        )

    @staticmethod
    def frame_columns(
        frame: Any, refused: str, read: ReadRows | None = None
    ) -> tuple[int, list[FrameColumn]]:
        """Return the number of rows and the columns of a frame; `refused` is the error's text.

        Values come from `read`, if it is given, instead of the frame.
        """
        from shardio_converters.tabular.arrow_inference import frame_columns, read_frame

        table = read_frame(frame, refused)
        return table.num_rows, [*frame_columns(table, read)]

    def subset_folders(self, inputs: Sequence[Input]) -> Mapping[str, str]:
        """Return the folders of the splits that each `dataset_dict.json` lists."""
        from shardio_converters.tabular.arrow_files import SPLITS, listed_splits

        found: dict[str, str] = {}
        for one in inputs:
            folder, name = os.path.split(one.name)
            if name == SPLITS:
                for split in listed_splits(one.path):
                    found[os.path.join(folder, split)] = split
        return found

    def class_names(self) -> Sequence[str] | None:
        """Return the classes of a column `label`; None if labels come from folders."""
        return None if "label" in self.additional_fields() else tuple(self.classes or ())

    def libraries(self) -> Mapping[str, str]:
        """Return the version of pyarrow."""
        return {"pyarrow": version("pyarrow")}

    def samples(self, source: Input) -> Generator[Mapping[str, Any], None, Outcome]:
        """Yield the samples of a file."""
        from shardio_converters.tabular import arrow_files as files
        from shardio_converters.tabular.arrow_columns import columns_of, values_of

        name = os.path.basename(source.name)
        if name in _DESCRIBE:
            files.refuse_missing_tables(source)
            return Outcome("part", "describes the tables of its folder")
        if not files.is_table(source):
            is_other = name.lower().endswith(files.SUFFIXES)
            reason = f"{files.STATE} beside it does not list it" if is_other else "not a table"
            return Outcome("unsupported", reason)
        about = self.additional_values(source)
        n_samples = 0
        with files.open_table(source.path, source.name) as table:
            columns = [
                one
                for one in columns_of(table.schema, self.columns, self.fields)
                if not is_null_record(one.name, one.spec, self.fields or ())
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
        from shardio_converters.tabular.arrow_inference import (
            refuse_other_type,
            refuse_other_unit_or_classes,
        )

        schema, fields = self.schema(), self.fields or {}
        found: dict[str, Any] = {}
        for column in columns:
            if column.name not in fields:
                raise MediaError(f"column {column.name!r}: {column.spec}, expected no such column")
            found[column.name] = schema[column.name]
            refuse_other_type(column, schema[column.name], fields[column.name])
            refuse_other_unit_or_classes(column, self.units or {}, self.classes or ())
        self.refuse_missing(found, "column")
        return found
