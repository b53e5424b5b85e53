"""Infer the fields of Arrow columns from files or a data frame; check a file against them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from shardio import InvalidArgument, MediaError
from shardio_converters.inference import UNKNOWN, DtypeShape, SchemaInference, common_dtype
from shardio_converters.schema_spec import Field, parse_field
from shardio_converters.tabular.arrow_columns import (
    ArrowColumn,
    array_at,
    check_json,
    columns_of_type,
    dims_of,
    features_of,
    has_nulls_inside,
    is_list,
    values_of,
)
from shardio_converters.tabular.arrow_files import OpenTable


def nulls_of(table: OpenTable, columns: Sequence[ArrowColumn]) -> tuple[set[str], set[str]]:
    """Return the names of the columns with a null, and of those with a null in a list.

    The values are read. Parquet's statistics would be faster, but pyarrow 26 crashes the process
    if the statistics contradict the schema.
    """
    sure = {one.name for one in table.schema if not (one.nullable or types.is_nested(one.type))}
    left = {column.name: column for column in columns if column.top not in sure}
    nulls, inner_nulls = set[str](), set[str]()
    batches = table.batches(sorted({column.top for column in left.values()})) if left else ()
    for batch in batches:
        for name, column in [*left.items()]:
            array = array_at(batch, column)
            if array.null_count or _lacks_files(array):
                nulls.add(name)
            if has_nulls_inside(array):
                inner_nulls.add(name)
            if name in nulls and (name in inner_nulls or not is_list(column.type)):
                del left[name]
        if not left:
            break
    return nulls, inner_nulls


def _lacks_files(array: pa.Array) -> bool:
    return bool(types.is_struct(array.type) and pc.struct_field(array, "bytes").null_count)


class ArrowInference:
    """The merged columns of files: numeric dtypes are widened; shapes must be equal."""

    def __init__(self) -> None:
        self._fields = SchemaInference("columns", widens=True)
        self._columns: dict[str, ArrowColumn] = {}  # for each name, the first that is not all null
        self._json: set[str] = set()  # columns with lists that contain nulls

    def add(
        self, columns: Sequence[ArrowColumn], nulls: Collection[str], inner_nulls: Collection[str]
    ) -> None:
        """Add the columns of a file; `nulls` and `inner_nulls` are the results of `nulls_of`."""
        typed = {one.name: one for one in columns if one.spec != UNKNOWN}
        for name, column in typed.items():
            was = self._columns.get(name, column)
            if (was.unit, was.classes) != (column.unit, column.classes):
                raise MediaError(f"column {name!r}: unit or classes differ from earlier files")
        facts: dict[str, DtypeShape] = {one.name: (one.spec, ()) for one in columns}
        self._fields.add(facts, {*nulls, *(facts.keys() - typed.keys())})
        self._columns = {**typed, **self._columns}
        self._json |= {*inner_nulls} - self.units.keys()

    def as_specs(self) -> dict[str, str]:
        """Return the field specs; columns with nulls, or missing from some files, are optional."""
        found = self._fields.as_specs()
        for name in self._json & found.keys():
            found[name] = f"json{'?' * found[name].endswith('?')}"
        return found

    @property
    def units(self) -> dict[str, str]:
        """The units of times, by the name of their column."""
        return {name: column.unit for name, column in self._columns.items() if column.unit}

    @property
    def classes(self) -> list[str]:
        """Class names of the column `label`."""
        return [*self._columns["label"].classes] if "label" in self._columns else []


def refuse_other_type(column: ArrowColumn, known: Field, spec: str) -> None:
    """Check that a column can be stored in the field `known` of spec `spec`."""
    if column.spec == spec.removesuffix("?") or (column.spec == UNKNOWN and known.optional):
        return
    if known.is_json:
        check_json(column.name, column.type)
        return
    if column.spec == "bytes" and known.medium:
        return
    dims, _ = dims_of(column.name, column.type)
    array = known.array or known.item
    shape = array.shape if array else ()
    wanted = (None, *shape) if known.item else shape
    is_same = array is not None and array.dtype == _stored_as(column, array.dtype)
    is_fitting = len(dims) == len(wanted) and all(
        want in (None, n) or n is None for n, want in zip(dims, wanted, strict=True)
    )
    if not (is_same and is_fitting):
        raise MediaError(f"column {column.name!r}: expected {spec}, found {column.spec}")


def _stored_as(column: ArrowColumn, dtype: str) -> str | None:
    own = column.spec.removeprefix("list[").partition("[")[0].rstrip("]")
    return own if column.unit else common_dtype(own, dtype)


def refuse_other_unit_or_classes(
    column: ArrowColumn, units: Mapping[str, str], classes: Sequence[str]
) -> None:
    """Check that a column has the same unit and classes as in other files."""
    expected = units.get(column.name, "")
    if column.unit != expected and column.spec != UNKNOWN:
        raise MediaError(
            f"column {column.name!r}: expected {expected or 'no times'}, found "
            f"{column.unit or 'no times'}"
        )
    if column.name == "label" and column.classes != tuple(classes) and column.spec != UNKNOWN:
        raise MediaError(
            f"column 'label': expected the classes {[*classes]}, found {[*column.classes]}"
        )


FrameColumn = tuple[str, Field, Callable[[int, int], Sequence[Any]], tuple[str, ...], str]
"""A column of a data frame: its name, its field, a function of (start, stop) that returns the
values of these rows, its class names, and the unit of its times."""
ReadRows = Callable[[str, int, int], pa.Table]
"""A function of (name, start, stop) that returns a column of these rows as a table."""


def read_frame(frame: Any, refused: str) -> pa.Table:
    """Return a data frame as a table; `refused` is the text of the error."""
    try:
        return pa.table(frame)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise InvalidArgument(refused) from error


def frame_columns(table: pa.Table, read: ReadRows | None = None) -> Iterator[FrameColumn]:
    """Yield the columns of a table; members of structs have dotted names.

    If `read` is given, the values come from `read`: its rows may be fewer than those of the table,
    or in another order. The fields are still inferred from the table.

    The categories of a column `label` are its class names, and its values are their numbers. Lists
    of times are refused, because their units would be lost. Lists of arrays of several
    dimensions and varying shapes become JSON, because their rows may be ragged.
    """
    features = features_of(table.schema)
    for place, (name, type_) in enumerate(zip(table.schema.names, table.schema.types, strict=True)):
        of_column = table.select([place])
        if read is None and name == "label" and (label := _categorical_label(of_column)):
            yield label
            continue
        rows = partial(_slice, of_column) if read is None else partial(read, name)
        try:
            for column in columns_of_type(name, type_, about=features.get(name)):
                kind = _field_of(of_column, column)
                values = partial(_rows, rows, column, kind)
                yield column.name, kind, values, column.classes, column.unit
        except MediaError as error:
            raise InvalidArgument(str(error)) from error


def _categorical_label(table: pa.Table) -> FrameColumn | None:
    """Return a column of text categories as a column of class numbers; None for other columns."""
    if not types.is_dictionary(table.field(0).type):
        return None
    array = table.column(0).combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0)
    names = array.dictionary.to_pylist()
    if not names or not all(isinstance(name, str) for name in names):
        return None
    numbers = array.indices.cast(pa.int64())
    field = parse_field("label", f"int64{'?' if numbers.null_count else ''}")
    return "label", field, lambda start, stop: numbers[start:stop].to_pylist(), tuple(names), ""


def _field_of(table: pa.Table, column: ArrowColumn) -> Field:
    if column.unit and is_list(column.type):
        _, element = dims_of(column.name, column.type)
        raise MediaError(
            f"column {column.name!r}: {element} cannot be stored in a list or in JSON; cast it to "
            "text"
        )
    arrays = [array_at(batch, column) for batch in table.to_batches()]
    spec = column.spec
    is_deep = spec.startswith("list[") and "," in spec
    if spec == UNKNOWN or is_deep or any(map(has_nulls_inside, arrays)):
        check_json(column.name, column.type)
        spec = "json"
    is_optional = any(array.null_count or _lacks_file_and_path(array) for array in arrays)
    return parse_field(column.name, f"{spec}{'?' if is_optional else ''}")


def _lacks_file_and_path(array: pa.Array) -> bool:
    if not types.is_struct(array.type):
        return False
    parts = [pc.is_null(pc.struct_field(array, name)) for name in ("bytes", "path")]
    return bool(pc.any(pc.and_(*parts)).as_py())


def _slice(table: pa.Table, start: int, stop: int) -> pa.Table:
    return table.slice(start, stop - start)


def _rows(
    rows: Callable[[int, int], pa.Table], column: ArrowColumn, field: Field, start: int, stop: int
) -> Sequence[Any]:
    (batch,) = rows(start, stop).combine_chunks().to_batches()
    try:
        return values_of(batch, column, field, start)
    except MediaError as error:
        raise InvalidArgument(str(error)) from error
