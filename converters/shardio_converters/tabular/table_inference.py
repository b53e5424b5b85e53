"""Infer table fields from all values of all tables, without keeping the values."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from shardio import Input, InvalidArgument, MediaError
from shardio_converters.inference import InputProbe
from shardio_converters.schema_spec import (
    are_compatible_names,
    check_names,
    format_spec,
    parse_schema,
)
from shardio_converters.tabular.column_values import (
    BOOL,
    FLOAT,
    INT,
    KIND_BY_DTYPE,
    MAX_EXACT,
    TEXT,
    as_numbers,
    cell_kind,
)
from shardio_converters.tabular.table_files import (
    SUFFIXES,
    RowBlock,
    columns_of,
    file_spec,
    is_csv,
    is_table,
    read_blocks,
)

_MAX_NAMES: Final = 256  # the maximum number of names in a record; with more, it becomes JSON
_MAX_NESTED: Final = 17

_LIST, _RECORD, _OTHER = "list", "record", "other"
_KINDS: Final = {bool: BOOL, int: INT, float: FLOAT, str: TEXT, dict: _RECORD, list: _LIST}

Dims = tuple[int | None, ...]


class ColumnInference:
    """The inferred type of a column. A table is a column of records; `members` are its columns."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._kinds: set[str] = set()  # the kinds of the JSON values so far
        self._cell_kinds: set[str] = set()  # the kinds of the CSV cells so far
        self._list_kinds: set[str] = set()  # the kinds of the elements of lists
        self._has_cells = self._has_empty_list = False
        self._n_given = self._n_empty = 0
        self._least = self._most = 0  # of whole numbers
        self._dims: Dims | None = None  # of lists that are not empty
        self.members: dict[str, ColumnInference] = {}

    def add_block(self, block: RowBlock, *, is_csv: bool) -> None:
        """Add the rows of a block of a table."""
        self._n_given += len(block.lines)
        for name, values in block.columns.items():
            column = self._member(name)
            (column._add_cells if is_csv else column._add_values)(values)

    def merge(self, other: ColumnInference) -> None:
        """Add the observations of another column."""
        self._kinds |= other._kinds
        self._cell_kinds |= other._cell_kinds
        self._list_kinds |= other._list_kinds
        self._has_cells |= other._has_cells
        self._has_empty_list |= other._has_empty_list
        self._n_given += other._n_given
        self._n_empty += other._n_empty
        self._add_range((other._least, other._most))
        if other._dims is not None:
            self._add_dims(other._dims)
        for name, column in other.members.items():
            self._member(name).merge(column)

    def as_specs(self) -> dict[str, str]:
        """Return the field specs of a table; columns missing in some rows are optional."""
        found: dict[str, str] = {}
        for name, column in self.members.items():
            found |= column._specs(name, self._n_given)
        return found

    def _member(self, name: str) -> ColumnInference:
        if name not in self.members:
            self.members[name] = ColumnInference(self._depth + 1)
        return self.members[name]

    def _add_cells(self, cells: Sequence[str]) -> None:
        self._has_cells = True
        self._n_given += len(cells)
        self._n_empty += cells.count("")
        if TEXT not in self._cell_kinds and any(cells):
            kind = cell_kind(cells)
            self._cell_kinds.add(kind)
            if kind in (INT, FLOAT):
                whole = (cell for cell in map(str.strip, cells) if cell.lstrip("+-").isdigit())
                self._add_range([*map(int, whole)])

    def _add_values(self, values: Sequence[Any]) -> None:
        self._n_given += len(values) - values.count(None)
        types = {*map(type, values)} - {type(None)}
        self._kinds |= {_KINDS[each] for each in types}
        if int in types:
            self._add_range([each for each in values if type(each) is int])
        if list in types and _OTHER not in self._list_kinds:
            for each in values:
                if type(each) is list:
                    self._add_list(each)
        if dict in types and len(self.members) <= _MAX_NAMES and self._depth < _MAX_NESTED:
            records = [each for each in values if type(each) is dict]
            for name, inner in columns_of(records).items():
                self._member(name)._add_values(inner)

    def _add_list(self, values: list[Any]) -> None:
        array = as_numbers(values) if values else None
        if not values:
            self._has_empty_list = True
        elif array is None:
            self._list_kinds.add(_OTHER)
        else:
            if array.size:  # an array without elements matches any dtype
                kind = KIND_BY_DTYPE[array.dtype.kind]
                self._list_kinds.add(kind)
                if kind == INT:
                    self._add_range((int(array.min()), int(array.max())))
            self._add_dims(array.shape)

    def _add_range(self, numbers: Sequence[int]) -> None:
        self._least = min(self._least, min(numbers, default=0))
        self._most = max(self._most, max(numbers, default=0))

    def _add_dims(self, dims: Dims) -> None:
        known = self._dims or dims
        if len(known) != len(dims):
            self._list_kinds.add(_OTHER)
        else:
            self._dims = tuple(
                n if n == was and n else None for n, was in zip(dims, known, strict=True)
            )

    def _specs(self, name: str, n_rows: int) -> dict[str, str]:
        if self._kinds == {_RECORD} and not self._has_cells and self._is_record():
            found: dict[str, str] = {}
            for key, column in self.members.items():
                found |= column._specs(f"{name}.{key}", n_rows)
            return found
        word, dims = self._type()
        n_there = self._n_given - (self._n_empty if word != TEXT else 0)
        return {name: format_spec(word, dims, optional=n_there < n_rows)}

    def _is_record(self) -> bool:
        return 0 < len(self.members) <= _MAX_NAMES and all(
            "." not in name and are_compatible_names([name]) for name in self.members
        )

    def _type(self) -> tuple[str, Dims]:
        """Return a dtype, "bool", "text" or "json", and the dimensions."""
        cells = self._cell_kinds
        if not (cells <= {INT, FLOAT} or cells == {BOOL}):
            cells = {TEXT}
        kinds = self._kinds | cells
        if kinds == {_LIST}:
            word = self._word(self._list_kinds)
            if not word or self._dims is None:
                return "json", ()
            return word, (None, *self._dims[1:]) if self._has_empty_list else self._dims
        is_text = kinds == {TEXT} or (self._has_cells and not self._kinds)
        return self._word(kinds) or (TEXT if is_text else "json"), ()

    def _word(self, kinds: set[str]) -> str:
        """Return the dtype of numbers or bools; "" if none represents them all exactly."""
        if kinds == {INT}:
            if -(1 << 63) <= self._least and self._most < 1 << 63:
                return "int64"
            return "uint64" if self._least >= 0 and self._most < 1 << 64 else ""
        if kinds in ({FLOAT}, {INT, FLOAT}):
            return "float64" if max(-self._least, self._most) <= MAX_EXACT else ""
        return BOOL if kinds == {BOOL} else ""


def infer_table_fields(inputs: Sequence[Input], references: Sequence[str]) -> dict[str, str]:
    """Return the field specs inferred from all readable tables."""
    found = ColumnInference()
    named: dict[str, set[str | None]] = {name: set() for name in references}
    probe = InputProbe(inputs)
    for one in probe.files():
        if not is_table(one.name):
            continue
        with probe.skip_broken(one):
            table, names = _infer_table(one, references)
            if table.members:
                check_names(dict.fromkeys([*found.members, *table.members]), "columns")
            found.merge(table)
            for name in references:
                named[name] |= names[name]
    if not found.members:
        raise probe.nothing_usable(f"table in {', '.join(SUFFIXES)} with columns")
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
    column, *keys = name.split(".")
    values = block.columns.get(column, ())
    for key in keys:
        values = [each.get(key) if isinstance(each, Mapping) else None for each in values]
    return values


def _suffixes_in(values: Sequence[Any]) -> set[str | None]:
    """Return the suffixes of file names as names, such as `x.png`; None for other values."""
    return {
        f"x{os.path.splitext(each)[1].lower()}" if isinstance(each, str) and each else None
        for each in values
    }


def _infer_table(
    one: Input, references: Sequence[str]
) -> tuple[ColumnInference, dict[str, set[str | None]]]:
    table, n_names = ColumnInference(), 0
    named: dict[str, set[str | None]] = {name: set() for name in references}
    for block in read_blocks(one.path, one.name):
        table.add_block(block, is_csv=is_csv(one.name))
        if len(table.members) > n_names:
            check_names(table.members, "columns")
            n_names = len(table.members)
        for name, found in named.items():
            found |= _suffixes_in(values_by_name(block, name))
    try:
        if table.members:
            parse_schema(table.as_specs())
    except InvalidArgument as error:
        raise MediaError(str(error)) from error
    return table, named
