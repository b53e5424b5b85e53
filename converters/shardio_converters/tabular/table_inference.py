"""Infer table fields from all values of all tables, without keeping the values."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from shardio import Input, InvalidArgument, MediaError
from shardio_converters.inference import InputProbe
from shardio_converters.parsing import is_out_of_range
from shardio_converters.schema_spec import check_names, format_spec, parse_schema
from shardio_converters.tabular.column_values import (
    BOOL,
    FLOAT,
    INT,
    MAX_EXACT,
    TEXT,
    as_numbers,
    cell_kind,
)
from shardio_converters.tabular.table_files import (
    RowBlock,
    columns_of,
    file_spec,
    is_csv,
    is_table,
    read_blocks,
)

_MAX_NAMES: Final = 256
"""The maximum number of names in a nested record, over all rows; with more, it becomes JSON."""
_MAX_NESTED: Final = 16
_NO_NUMBERS: Final = "json"

_LIST, _RECORD = "list", "record"
_KINDS: Final = {bool: BOOL, int: INT, float: FLOAT, str: TEXT, dict: _RECORD, list: _LIST}

Dims = tuple[int | None, ...]


class TableInference:
    """The inferred columns of one table, or of several merged tables."""

    def __init__(self) -> None:
        self._columns: dict[str, _ColumnInference] = {}
        self._n_rows = 0

    @property
    def names(self) -> list[str]:
        """The column names."""
        return [*self._columns]

    def add(self, block: RowBlock, *, is_csv: bool) -> None:
        """Add the rows of a block."""
        self._n_rows += len(block.lines)
        for name, values in block.columns.items():
            column = self._columns.setdefault(name, _ColumnInference())
            (column.add_cells if is_csv else column.add_values)(values)

    def merge(self, other: TableInference) -> None:
        """Add the columns of another table."""
        self._n_rows += other._n_rows
        for name, column in other._columns.items():
            self._columns.setdefault(name, _ColumnInference()).merge(column)

    def as_specs(self) -> dict[str, str]:
        """Return the field specs; columns missing in some rows are optional."""
        found: dict[str, str] = {}
        for name, column in self._columns.items():
            found.update(column.specs(name, self._n_rows))
        return found


class _ColumnInference:
    """The inferred type of one column; for a nested record, also the types of its members."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._kinds: set[str] = set()  # the kinds of the JSON values so far
        self._cell_kind: str | None = None  # the kind of the CSV cells so far
        self._has_cells = False
        self._n_given = self._n_empty = 0
        self._least = self._most = 0
        self._lists = _Lists()
        self._inner: dict[str, _ColumnInference] = {}

    def add_cells(self, cells: Sequence[str]) -> None:
        """Add CSV cells."""
        self._has_cells = True
        self._n_given += len(cells)
        if self._cell_kind != TEXT:
            self._cell_kind = self._kind_of_cells(cells)
        self._n_empty += cells.count("")

    def _kind_of_cells(self, cells: Sequence[str]) -> str | None:
        kind = cell_kind(cells, self._cell_kind)
        if kind in (INT, FLOAT):
            numbers = [cell.strip() for cell in cells if cell]
            whole = [int(cell) for cell in numbers if cell.lstrip("+-").isdigit()]
            self._add_range(whole)
            if len(whole) < len(numbers) and any(
                is_out_of_range(one, float(one)) for one in numbers
            ):
                return TEXT
        return kind

    def add_values(self, values: Sequence[Any]) -> None:
        """Add JSON values; None is a missing value."""
        self._n_given += len(values) - values.count(None)
        types = {*map(type, values)} - {type(None)}
        self._kinds |= {_KINDS[each] for each in types}
        if int in types:
            self._add_range([each for each in values if type(each) is int])
        if list in types:
            for each in values:
                if type(each) is list:
                    self._lists.add(each)
        if dict in types and len(self._inner) <= _MAX_NAMES and self._depth < _MAX_NESTED:
            records = [each for each in values if type(each) is dict]
            for name, inner in columns_of(records).items():
                self._inner.setdefault(name, _ColumnInference(self._depth + 1)).add_values(inner)

    def merge(self, other: _ColumnInference) -> None:
        """Add the observations of another column."""
        self._kinds |= other._kinds
        both = {self._cell_kind, other._cell_kind} - {None}
        if len(both) == 2:
            self._cell_kind = FLOAT if both == {INT, FLOAT} else TEXT
        elif both:
            (self._cell_kind,) = both
        self._has_cells |= other._has_cells
        self._n_given += other._n_given
        self._n_empty += other._n_empty
        self._add_range((other._least, other._most))
        self._lists.merge(other._lists)
        for name, column in other._inner.items():
            self._inner.setdefault(name, _ColumnInference(self._depth + 1)).merge(column)

    def specs(self, name: str, n_rows: int) -> dict[str, str]:
        """Return the field spec, or the specs of a nested record; the tables have `n_rows` rows."""
        if self._kinds == {_RECORD} and not self._has_cells and self._is_record():
            found: dict[str, str] = {}
            for key, column in self._inner.items():
                found.update(column.specs(f"{name}.{key}", n_rows))
            return found
        word, dims = self._what()
        n_there = self._n_given - (self._n_empty if word != TEXT else 0)
        return {name: format_spec(word, dims, optional=n_there < n_rows)}

    def _is_record(self) -> bool:
        return 0 < len(self._inner) <= _MAX_NAMES and all(map(_is_name, self._inner))

    def _what(self) -> tuple[str, Dims]:
        kinds = self._kinds | ({self._cell_kind} if self._cell_kind else set())
        if kinds == {_LIST}:
            return self._lists.what()
        word = TEXT if not kinds and self._has_cells else self._number(kinds)
        if kinds in ({TEXT}, {BOOL}):
            (word,) = kinds
        return word or ("json" if self._kinds or not self._has_cells else TEXT), ()

    def _number(self, kinds: set[str]) -> str:
        """Return the dtype of numbers; "" for other values, or if no dtype represents them all."""
        if kinds == {INT}:
            if -(1 << 63) <= self._least and self._most < 1 << 63:
                return "int64"
            return "uint64" if self._least >= 0 and self._most < 1 << 64 else ""
        is_exact = max(-self._least, self._most) <= MAX_EXACT
        return "float64" if FLOAT in kinds and kinds <= {INT, FLOAT} and is_exact else ""

    def _add_range(self, numbers: Sequence[int]) -> None:
        self._least = min(self._least, min(numbers, default=0))
        self._most = max(self._most, max(numbers, default=0))


class _Lists:
    """The inferred type of a column of lists: arrays of numbers, or JSON."""

    def __init__(self) -> None:
        self._dtypes: set[str] = set()
        self._dims: Dims | None = None
        self._has_empty = False
        self._largest = 0

    def add(self, values: list[Any]) -> None:
        """Add a list."""
        if _NO_NUMBERS in self._dtypes:
            return
        if not values:
            self._has_empty = True
            return
        array = as_numbers(values)
        if array is None:
            self._dtypes.add(_NO_NUMBERS)
            return
        if array.size:  # an array without elements matches any dtype
            self._dtypes.add(array.dtype.name)
        if array.size and array.dtype.kind in "iu":
            self._largest = max(self._largest, int(array.max()), -int(array.min()))
        self._add_dims(array.shape)

    def merge(self, other: _Lists) -> None:
        """Add the observations of another column."""
        self._dtypes |= other._dtypes
        self._has_empty |= other._has_empty
        self._largest = max(self._largest, other._largest)
        if other._dims is not None:
            self._add_dims(other._dims)

    def _add_dims(self, dims: Dims) -> None:
        known = self._dims or dims
        if len(known) != len(dims):
            self._dtypes.add(_NO_NUMBERS)
        else:
            self._dims = tuple(
                n if n == was and n else None for n, was in zip(dims, known, strict=True)
            )

    def what(self) -> tuple[str, Dims]:
        """Return the dtype or "json", and the dimensions."""
        dtype = next(iter(self._dtypes)) if len(self._dtypes) == 1 else _NO_NUMBERS
        if self._dtypes == {"int64", "float64"} and self._largest <= MAX_EXACT:
            dtype = "float64"
        if dtype == _NO_NUMBERS or self._dims is None:
            return "json", ()
        return dtype, (None, *self._dims[1:]) if self._has_empty else self._dims


@lru_cache(maxsize=4096)
def _is_name(name: str) -> bool:
    """Return True if a name in an object can be a field of a nested record."""
    try:
        parse_schema({name: "json"})
    except InvalidArgument:
        return False
    return "." not in name


def infer_table_fields(inputs: Sequence[Input], references: Sequence[str]) -> dict[str, str]:
    """Return the field specs inferred from all readable tables."""
    found = TableInference()
    named: dict[str, set[str | None]] = {name: set() for name in references}
    n_files, probe = 0, InputProbe(inputs)
    for one in probe.files():
        if not is_table(one.name):
            continue
        with probe.skip_broken(one):
            columns, names = _infer_table(one, references)
            if columns.names:
                check_names(dict.fromkeys([*found.names, *columns.names]), "columns")
            n_files += bool(columns.names)
            found.merge(columns)
            for name in references:
                named[name] |= names[name]
    if not n_files:
        raise probe.nothing_usable(
            "table in .csv, .tsv, .jsonl or .ndjson that can be read and has columns"
        )
    fields = found.as_specs()
    for name in references:
        if name not in fields:
            raise InvalidArgument(
                f"references: no table has a column {name!r}; there are {', '.join(sorted(fields))}"
            )
        is_optional = None in named[name] or fields[name].endswith("?")
        fields[name] = file_spec({*filter(None, named[name])}) + "?" * is_optional
    parse_schema(fields)
    return fields


def values_by_name(block: RowBlock, name: str) -> Sequence[Any]:
    """Return a column or, for a dotted name, a member of its objects; () if there is none."""
    if name in block.columns:
        return block.columns[name]
    column, _, inner = name.partition(".")
    values = block.columns.get(column, ())
    while inner:
        key, _, inner = inner.partition(".")
        values = [each.get(key) if isinstance(each, dict) else None for each in values]
    return values


def _suffixes_in(values: Sequence[Any]) -> set[str | None]:
    """Return the suffixes of file names; None for values that are not file names.

    Each suffix is returned as a name that has it, such as `x.png`.
    """
    return {
        f"x{os.path.splitext(each)[1].lower()}" if isinstance(each, str) and each else None
        for each in values
    }


def _infer_table(
    one: Input, references: Sequence[str]
) -> tuple[TableInference, dict[str, set[str | None]]]:
    """Return the inferred columns of a table, and the suffixes of files by column of references.

    Raises:
        MediaError: the table cannot be read to its end, or its columns cannot be fields.
    """
    columns, n_names = TableInference(), 0
    named: dict[str, set[str | None]] = {name: set() for name in references}
    for block in read_blocks(one.path, one.name):
        columns.add(block, is_csv=is_csv(one.name))
        if len(columns.names) > n_names:
            check_names(columns.names, "columns")
            n_names = len(columns.names)
        for name, found in named.items():
            found |= _suffixes_in(values_by_name(block, name))
    try:
        if columns.names:
            parse_schema(columns.as_specs())
    except InvalidArgument as error:
        raise MediaError(str(error)) from error
    return columns, named
