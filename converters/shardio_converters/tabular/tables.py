"""CSV and JSON Lines tables: one sample per row, with the files that the row references."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any, ClassVar

from shardio import Input, InvalidArgument, MediaError, Outcome
from shardio_converters.schema_spec import REFERENCES, Field, InferringConverter, schema_of
from shardio_converters.tabular.column_values import values_of
from shardio_converters.tabular.table_files import (
    RowBlock,
    is_csv,
    is_table,
    leaves_of,
    name_of,
    read_blocks,
    read_files,
)
from shardio_converters.tabular.table_inference import infer_table_fields, values_by_name


@dataclass(frozen=True, kw_only=True)
class Tables(InferringConverter):
    """A converter that makes one sample per row; columns keep their names.

    By default, fields are inferred from all rows of all tables. If a column is declared as `file`,
    `image`, `video` or `audio`, or is one of the `references`, its values are paths of files,
    relative to the table; the files must belong to the source, and their contents are stored.
    """

    kind: ClassVar[str] = "tables"
    version: ClassVar[str] = "1"
    splits_by_file_name: ClassVar[bool] = True
    keeps_order: ClassVar[bool] = True

    references: Sequence[str] | None = field(
        default=None, metadata={"flag": "--reference", "metavar": "COLUMN"}
    )
    """A column of file names; the files are stored instead; repeatable."""

    def __post_init__(self) -> None:
        if self.references is not None:
            names = self.references
            if isinstance(names, str) or not all(isinstance(name, str) for name in names):
                raise InvalidArgument(f"references is {names!r}; expected a list of column names")
            object.__setattr__(self, "references", sorted({*names}))
        super().__post_init__()
        if self.fields is not None:
            self.schema()

    def check_field(self, name: str, word: str, field: Field) -> None:
        """Check that a column, or the files it references, can be converted to a field."""
        word = word.strip()
        if field.item:
            raise InvalidArgument(f"field {name!r}: found {word!r}; use an array, or 'json'")
        if word.startswith(("bytes", "bfloat16")):
            raise InvalidArgument(f"field {name!r}: found {word!r}; in tables, use 'file'")
        if name in (self.references or ()) and _is_in_cells(field):
            raise InvalidArgument(
                f"field {name!r}: found {word!r}; expected one of {', '.join(REFERENCES)}"
            )

    def fitted(self, inputs: Sequence[Input]) -> Tables:
        """Return the converter with `fields` inferred from all rows of all inputs."""
        if self.fields is not None:
            return self
        return replace(self, fields=infer_table_fields(inputs, self.references or ()))

    def parts(self, inputs: Sequence[Input]) -> dict[str, list[str]]:
        """Map the names of tables to the inputs that they reference."""
        names = {
            name for name, word in (self.fields or {}).items() if word.rstrip("?") in REFERENCES
        }
        names |= {*(self.references or ())}
        known = {one.name for one in inputs}
        found: dict[str, list[str]] = {}
        for table in inputs if names else ():
            if is_table(table.name) and os.path.isfile(table.path):
                named = {name_of(table, each) for each in _references(table, names)}
                if there := sorted(named & known - {table.name}):
                    found[table.name] = there
        return found

    def samples(self, source: Input) -> Generator[Mapping[str, Any], None, Outcome]:
        """Yield the samples of a table."""
        if not is_table(source.name):
            return Outcome("unsupported", "not a table")
        about = self.additional_values(source)
        parts = {one.name: one for one in source.parts}
        n_together = 1 if parts else 256  # hold the files of one sample at a time
        n_samples = 0
        for block in read_blocks(source.path, source.name):
            columns = dict(self._values(source, block, parts))
            yield from row_samples(columns, about, len(block.lines), n_together)
            n_samples += len(block.lines)
        return Outcome("converted") if n_samples else Outcome("empty", "holds no row")

    def _values(
        self, source: Input, block: RowBlock, parts: Mapping[str, Input]
    ) -> Iterator[tuple[str, Iterable[Any]]]:
        schema, cells = schema_of(self.fields or {}), is_csv(source.name)
        columns = leaves_of(block.columns, block.lines, schema)
        for name in schema:
            field = schema[name]
            if name not in columns:
                if not field.optional:
                    line = f"line {block.lines[0]}, " if block.lines else ""
                    raise MediaError(f"{line}column {name!r} is missing")
                yield name, repeat(None)
            elif _is_in_cells(field):
                yield name, values_of(name, field, columns[name], block.lines, is_csv=cells)
            elif not field.item:
                yield name, read_files(source, name, field, columns[name], block.lines, parts)


def _is_in_cells(field: Field) -> bool:
    return bool(field.array or field.is_json or field.is_utf8)


def _references(table: Input, names: set[str]) -> Iterator[str]:
    """Yield the file names in the columns `names`; end at damage, which `samples` reports later."""
    try:
        for block in read_blocks(table.path, table.name):
            for name in names:
                yield from (
                    each for each in values_by_name(block, name) if isinstance(each, str) and each
                )
    except (MediaError, OSError):
        return


def row_samples(
    columns: Mapping[str, Iterable[Any]],
    about: Mapping[str, Any],
    n_rows: int,
    n_together: int = 256,
) -> Iterator[dict[str, Any]]:
    """Yield `n_rows` samples from columns; `about` holds the values that all samples share.

    `n_together` samples at a time are filled, column by column: `dict(zip(...))` for each sample
    would take four times as long.
    """
    template = {**dict.fromkeys(columns), **about}
    left = {name: iter(values) for name, values in columns.items()}
    for first in range(0, n_rows, n_together):
        samples = [template.copy() for _ in range(min(n_together, n_rows - first))]
        for name, values in left.items():
            for sample, value in zip(samples, values, strict=False):
                sample[name] = value
        yield from samples
