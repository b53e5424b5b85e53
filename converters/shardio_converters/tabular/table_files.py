"""CSV and JSON Lines files, read in blocks of columns, and the files that tables reference."""

from __future__ import annotations

import json
import os
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec, module_from_spec
from itertools import repeat
from json.scanner import make_scanner
from operator import itemgetter
from typing import IO, Any, Final

from shardio import Input, MediaError, Schema
from shardio.media import decode_image, demux, has_image_suffix, has_media_suffix, has_sound_suffix
from shardio_converters.parsing import (
    NESTED,
    OutOfRange,
    float_of,
    inside,
    may_be_out_of_range,
    unique_names,
)
from shardio_converters.schema_spec import Field, check_names

DELIMITERS: Final = {".csv": ",", ".tsv": "\t"}
SUFFIXES: Final = (*DELIMITERS, ".jsonl", ".ndjson")

MAX_LINE: Final = 1 << 28  # characters; limits memory for a file without line ends
_BLOCK_CHARS: Final = 1 << 17
_BLOCK_ROWS: Final = 256
_SPACE: Final = " \t\r\n"  # the whitespace of JSON
_SCAN: Final = make_scanner(json.JSONDecoder())  # type: ignore[arg-type]
_SCAN_CHECKED: Final = make_scanner(json.JSONDecoder(parse_float=float_of))  # type: ignore[arg-type]


def _load_csv() -> Any:
    """Return an instance of `_csv` with a limit of its own, MAX_LINE characters per cell.

    The limit of `csv`, 131,072 by default, holds for the whole process.
    """
    spec = find_spec("_csv")
    if spec is None or spec.loader is None:
        raise ImportError("the module _csv is missing", name="_csv")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    module.field_size_limit(MAX_LINE)
    return module


_CSV: Final = _load_csv()


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Consecutive rows, stored by column; `lines` lists the number of the last line of each row.

    CSV cells are text, JSON values are Python values. None stands for null, and for a value
    that a row lacks.
    """

    columns: dict[str, Sequence[Any]]
    lines: list[int]


def is_table(name: str) -> bool:
    """Return True if the suffix of `name` is that of a table."""
    return os.path.splitext(name)[1].lower() in SUFFIXES


def is_csv(name: str) -> bool:
    """Return True if a table has text cells rather than JSON values."""
    return os.path.splitext(name)[1].lower() in DELIMITERS


def read_blocks(path: str, name: str) -> Iterator[RowBlock]:
    """Yield the blocks of a UTF-8 table; a CSV without rows yields one empty block."""
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
    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self.n_lines = 0
        self.n_chars = 0

    def __iter__(self) -> Iterator[str]:
        while line := self._file.readline(MAX_LINE):
            self.n_lines += 1
            self.n_chars += len(line)
            if len(line) == MAX_LINE:
                raise MediaError(f"line {self.n_lines}: more than {MAX_LINE - 1:,} characters")
            yield line


def _read_csv(lines: _Lines, delimiter: str) -> Iterator[RowBlock]:
    reader = _CSV.reader(lines, strict=True, delimiter=delimiter)
    try:
        yield from _blocks_of_csv(reader, lines)
    except _CSV.Error as error:
        raise MediaError(f"line {reader.line_num}: not CSV: {error}") from error


def _blocks_of_csv(reader: Any, lines: _Lines) -> Iterator[RowBlock]:
    names: list[str] | None = next(filter(None, reader), None)
    if names is None:
        return
    check_names(names, "columns", "rename it or leave it out (pandas: to_csv(index=False))")
    yield RowBlock({name: () for name in names}, [])
    rows: list[list[str]] = []
    ends: list[int] = []
    n_read = lines.n_chars
    for row in filter(None, reader):  # a blank line is an empty row
        if len(row) != len(names):
            raise MediaError(
                f"line {reader.line_num}: expected {len(names)} cells, as the first line has, "
                f"found {len(row)}"
            )
        rows.append(row)
        ends.append(reader.line_num)
        if len(rows) == _BLOCK_ROWS or lines.n_chars - n_read > _BLOCK_CHARS:
            yield RowBlock(dict(zip(names, zip(*rows, strict=True), strict=True)), ends)
            rows, ends, n_read = [], [], lines.n_chars
    if rows:
        yield RowBlock(dict(zip(names, zip(*rows, strict=True), strict=True)), ends)


def _read_json(lines: _Lines) -> Iterator[RowBlock]:
    texts: list[str] = []
    n_read = 0
    for line in lines:
        texts.append(line.strip(_SPACE))
        if len(texts) == _BLOCK_ROWS or lines.n_chars - n_read > _BLOCK_CHARS:
            yield from _json_block(texts, lines.n_lines)
            texts, n_read = [], lines.n_chars
    yield from _json_block(texts, lines.n_lines)


def _json_block(texts: list[str], n_lines: int) -> Iterator[RowBlock]:
    first = n_lines - len(texts) + 1
    rows = _load_all(texts)
    ends = [*range(first, n_lines + 1)]
    if rows is None:
        ends = [number for number, text in enumerate(texts, first) if text]
        rows = [_load_line(texts[number - first], number) for number in ends]
    if rows:
        yield RowBlock(columns_of(rows), ends)


def _load_line(text: str, number: int) -> dict[str, Any]:
    try:
        row = load(text)
    except OutOfRange as error:
        where = f"line {number}"
        with suppress(ValueError, RecursionError, AttributeError):  # the text has another error
            # Find the column: fractions are parsed as bytes, so that `dumps` passes each to
            # `default`, which checks the range.
            for name, value in json.loads(text, parse_float=str.encode).items():
                where = f"line {number}, column {name!r}"
                json.dumps(value, default=lambda raw: float_of(raw.decode()))
        raise MediaError(f"{where}: {error}") from error
    except (ValueError, RecursionError) as error:
        reason = str(error).removeprefix("Expecting ")  # the rest of the message gives the position
        raise MediaError(f"line {number}: not JSON: {reason}") from error
    if type(row) is not dict:
        raise MediaError(f"line {number}: expected an object, found {text[:40]}")
    return row


def _load_all(texts: Sequence[str]) -> list[dict[str, Any]] | None:
    """Return the objects of many texts; None if a text is not an object, or may repeat a name."""
    whole = "\n".join(texts)
    scan = _SCAN_CHECKED if may_be_out_of_range(whole) else _SCAN
    try:
        # At a text that does not begin with a value, `scan` raises StopIteration, which ends map().
        found = [*map(scan, texts, repeat(0))]
    except (ValueError, RecursionError):
        return None
    rows = [row for row, _ in found]
    if [end for _, end in found] != [*map(len, texts)] or {*map(type, rows)} - {dict}:
        return None
    # If an object repeats a name, its dict has fewer names than the text has colons.
    n_names = sum(map(len, rows))
    if whole.count("{") > len(rows):  # objects within objects, or braces in texts
        inner = inside(rows)
        while not NESTED.isdisjoint(map(type, inner)):
            n_names += sum([len(each) for each in inner if type(each) is dict])
            inner = inside(inner)
    if n_names == whole.count(":"):
        return rows
    # Some texts contain colons. Count only colons after a quote or white space, as after a name;
    # colons within texts rarely follow these characters.
    return rows if n_names == sum(map(whole.count, ('":', " :", "\t:"))) else None


def columns_of(rows: Sequence[dict[str, Any]]) -> dict[str, Sequence[Any]]:
    """Return the members of objects by name; None where an object lacks the name."""
    return {name: _column(rows, name) for name in sorted(set().union(*rows))}


def _column(rows: Sequence[dict[str, Any]], name: str) -> list[Any]:
    try:
        return [*map(itemgetter(name), rows)]
    except KeyError:
        return [row.get(name) for row in rows]


_DECODER: Final = json.JSONDecoder(object_pairs_hook=unique_names, parse_float=float_of)


def load(text: str) -> Any:
    """Return the value of a JSON text; raise OutOfRange, ValueError or RecursionError."""
    text = text.strip(_SPACE)
    value, end = _DECODER.raw_decode(text)
    # If characters follow the value, `decode` raises an error that shows them.
    return value if end == len(text) else _DECODER.decode(text)


def leaves_of(
    columns: Mapping[str, Sequence[Any]], lines: Sequence[int], schema: Schema, prefix: str = ""
) -> dict[str, Sequence[Any]]:
    """Return the columns by field; the members of a nested record get dotted names."""
    found: dict[str, Sequence[Any]] = {}
    for key, values in columns.items():
        name = prefix + key
        if name in schema:
            leaves = {name: values}
        elif name in schema.groups:
            for line, value in zip(lines, values, strict=False):
                if not (value is None or type(value) is dict):
                    raise MediaError(
                        f"line {line}, column {name!r}: expected an object, found {value!r:.40}"
                    )
            inner = columns_of([value or {} for value in values])
            leaves = leaves_of(inner, lines, schema, f"{name}.")
        else:
            check_names([name], "columns")
            message = f"column {name!r}: expected no such column"
            if lines:
                message = f"line {lines[0]}, {message}, found {values[0]!r:.40}"
            raise MediaError(message)
        if twice := found.keys() & leaves:
            raise MediaError(f"two columns are named {min(twice)!r}")
        found |= leaves
    return found


def name_of(table: Input, reference: str) -> str:
    """Return the name of the input to which `reference` in a table refers."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(table.name), reference))


def file_spec(references: Sequence[str] | set[str]) -> str:
    """Return the medium to which the suffixes of all files belong, or `file`."""
    if all(map(has_image_suffix, references)):
        return "image"
    if all(map(has_sound_suffix, references)):
        return "audio"
    others = [*map(has_sound_suffix, references), *map(has_image_suffix, references)]
    return "video" if all(map(has_media_suffix, references)) and not any(others) else "file"


def read_files(
    table: Input,
    name: str,
    field: Field,
    column: Sequence[Any],
    lines: Sequence[int],
    parts: Mapping[str, Input],
) -> Iterator[Any]:
    """Yield the contents of the files that a column names; read each when it is requested.

    `parts` maps names to the referenced inputs.
    """
    for line, reference in zip(lines, column, strict=True):
        try:
            yield _read(table, field, reference, parts)
        except MediaError as error:
            raise MediaError(f"line {line}, column {name!r}: {error}") from error


def _read(table: Input, field: Field, reference: Any, parts: Mapping[str, Input]) -> Any:
    if reference in (None, ""):
        if field.optional:
            return None
        raise MediaError("is missing; expected the name of a file")
    if type(reference) is not str:
        raise MediaError(f"expected the name of a file, found {reference!r:.40}")
    one = parts.get("" if posixpath.isabs(reference) else name_of(table, reference))
    if one is None:
        raise MediaError(
            f"{reference!r}: not a file of the source; paths are relative to the table"
        )
    if field.is_streamed:
        return demux(one.path, field.medium, name=one.name)
    with open(one.path, "rb") as file:
        data = file.read()
    if field.medium == "image":
        try:
            decode_image(data)  # decoded only to find damage
        except MediaError as error:
            raise MediaError(f"{reference!r}: {error}") from error
    return data
