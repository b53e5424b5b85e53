"""Tables in files, CSV and JSON Lines, read block by block: columns of values, and their lines."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import IO, Any, Final

from shardio import InvalidArgument, MediaError, Schema
from shardio_converters.field_specs import make_schema

DELIMITERS: Final = {".csv": ",", ".tsv": "\t"}
SUFFIXES: Final = (*DELIMITERS, ".jsonl", ".ndjson")

MAX_LINE: Final = 1 << 28
"""Characters of a line, and of a cell of CSV: a file without an end of line is not held whole."""
_BLOCK_CHARS: Final = 1 << 20
_BLOCK_ROWS: Final = 256


@dataclass(frozen=True, slots=True)
class Block:
    """Rows that follow each other, by columns; `lines` says where in the file each of them ends.

    Cells of CSV are text, values of JSON are as Python has them. Where a row lacks a column, or has
    null, the column has None.
    """

    columns: dict[str, Sequence[Any]]
    lines: list[int]


def is_table(name: str) -> bool:
    """Whether the suffix of `name` promises a table."""
    return os.path.splitext(name)[1].lower() in SUFFIXES


def is_csv(name: str) -> bool:
    """Whether a table has cells of text, and not values of JSON."""
    return os.path.splitext(name)[1].lower() in DELIMITERS


def read_blocks(path: str, name: str) -> Iterator[Block]:
    """Read a table, in UTF-8; one of CSV without rows gives one block, which has its columns.

    Raises:
        MediaError: it is no such table, or damaged; it says in which line.
        OSError: it cannot be read.
    """
    delimiter = DELIMITERS.get(os.path.splitext(name)[1].lower())
    with open(path, encoding="utf-8-sig", newline="" if delimiter else None) as file:
        lines = _Lines(file)
        try:
            yield from _read_csv(lines, delimiter) if delimiter else _read_json(lines)
        except UnicodeDecodeError as error:
            raise MediaError(
                f"after line {lines.n_lines}: not UTF-8: {error.reason}; save the table as UTF-8"
            ) from error


class _Lines:
    """The lines of a file, and how many and how long those are that were read."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self.n_lines = 0
        self.n_chars = 0

    def __iter__(self) -> Iterator[str]:
        while line := self._file.readline(MAX_LINE):
            self.n_lines += 1
            self.n_chars += len(line)
            if len(line) == MAX_LINE:
                raise MediaError(
                    f"line {self.n_lines}: expected fewer than {MAX_LINE:,} characters, found more"
                )
            yield line


def _read_csv(lines: _Lines, delimiter: str) -> Iterator[Block]:
    # The limit is the process's own, and 131,072 by default; it is only ever raised.
    csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE))
    reader = csv.reader(lines, strict=True, delimiter=delimiter)
    try:
        names = next(filter(None, reader), None)
        if names is None:
            return
        _check_names(names)
        rows: list[list[str]] = []
        ends: list[int] = []
        n_read, n_columns = lines.n_chars, len(names)
        yield Block({name: () for name in names}, [])
        for row in reader:
            if len(row) != n_columns:
                if not row:  # a blank line
                    continue
                raise MediaError(
                    f"line {reader.line_num}: expected {n_columns} cells, as the first line has, "
                    f"found {len(row)}"
                )
            rows.append(row)
            ends.append(reader.line_num)
            if len(rows) == _BLOCK_ROWS or lines.n_chars - n_read > _BLOCK_CHARS:
                yield Block(dict(zip(names, zip(*rows, strict=True), strict=True)), ends)
                rows, ends, n_read = [], [], lines.n_chars
    except csv.Error as error:
        raise MediaError(f"line {reader.line_num}: not CSV: {error}") from error
    if rows:
        yield Block(dict(zip(names, zip(*rows, strict=True), strict=True)), ends)


def _check_names(names: Sequence[str]) -> None:
    """Make sure that the first line of a CSV names columns."""
    for number, name in enumerate(names, 1):
        if not name:
            raise MediaError(
                f"column {number} has no name in the first line; give it one "
                "(pandas writes none with to_csv(index=False))"
            )
        if name in names[: number - 1]:
            raise MediaError(f"two columns are named {name!r}")
    check_names(names)


def check_names(names: Sequence[str]) -> None:
    """Make sure that columns can be fields of one sample.

    Raises:
        MediaError: they cannot.
    """
    try:
        make_schema(dict.fromkeys(names, "json"))
    except InvalidArgument as error:
        raise MediaError(f"names of columns must be names of fields: {error}") from error


def _read_json(lines: _Lines) -> Iterator[Block]:
    rows: list[dict[str, Any]] = []
    ends: list[int] = []
    n_read = 0
    for line in lines:
        try:
            row = load(line)
        except (ValueError, RecursionError) as error:
            if not line.strip():
                continue
            reason = str(error).removeprefix("Expecting ")  # the place in it is said by the rest
            raise MediaError(f"line {lines.n_lines}: not JSON: {reason}") from error
        if type(row) is not dict:
            raise MediaError(f"line {lines.n_lines}: expected an object, found {line[:40].strip()}")
        rows.append(row)
        ends.append(lines.n_lines)
        if len(rows) == _BLOCK_ROWS or lines.n_chars - n_read > _BLOCK_CHARS:
            yield Block(columns_of(rows), ends)
            rows, ends, n_read = [], [], lines.n_chars
    if rows:
        yield Block(columns_of(rows), ends)


def columns_of(rows: Sequence[dict[str, Any]]) -> dict[str, Sequence[Any]]:
    """What objects have, by name; None where one has nothing of that name."""
    return {name: _column(rows, name) for name in sorted(set().union(*rows))}


def _column(rows: Sequence[dict[str, Any]], name: str) -> list[Any]:
    try:
        return [*map(itemgetter(name), rows)]
    except KeyError:
        return [row.get(name) for row in rows]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is there twice in one object")
    return found


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_once)


def load(text: str) -> Any:
    """What a text of JSON says.

    Raises:
        ValueError: it says nothing, or something twice.
        RecursionError: it is nested too deep.
    """
    text = text.strip(" \t\r\n")
    value, end = _DECODER.raw_decode(text)
    return value if end == len(text) else _DECODER.decode(text)  # which says what is too much


def leaves_of(block: Block, schema: Schema) -> dict[str, Sequence[Any]]:
    """The columns of a block, with those of nested records under their dotted names.

    Raises:
        MediaError: one is no field of the schema; it says in which line.
    """
    found: dict[str, Sequence[Any]] = {}
    _add_leaves(block.columns, block.lines, schema, found, "")
    return found


def _add_leaves(
    columns: dict[str, Sequence[Any]],
    lines: Sequence[int],
    schema: Schema,
    found: dict[str, Sequence[Any]],
    prefix: str,
) -> None:
    for key, values in columns.items():
        name = prefix + key
        if name in found:
            raise MediaError(f"two columns are named {name!r}")
        if name in schema:
            found[name] = values
            continue
        is_group = name in schema.groups
        for line, value in zip(lines, values, strict=False):
            if not is_group or not (value is None or type(value) is dict):
                what = "an object" if is_group else "no such column"
                raise MediaError(
                    f"line {line}, column {name!r}: expected {what}, found {value!r:.40}"
                )
        if not is_group:  # named, without rows
            raise MediaError(f"column {name!r}: expected no such column")
        inner = columns_of([value or {} for value in values])
        _add_leaves(inner, lines, schema, found, f"{name}.")
