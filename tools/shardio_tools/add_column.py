"""Add a field to every sample of a dataset.

The values come from a file or from a function in a Python file. A file holds the values in the
order of the samples: .npy (an array with one row per sample), .jsonl (one JSON value per line) or
.csv (the column with the name of the field). Existing files are not changed: the new field is
stored in additional shards, and the dataset gets a new generation.

Examples:
    shardio add-column out/ score --from scores.npy
    shardio add-column out/ caption --from captions.csv --field text
    shardio add-column out/ mean --function brightness.py:mean --field float32
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import re
import runpy
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, TextIO, cast

import numpy as np

import shardio
from shardio import Array, InvalidArgument
from shardio.errors import SchemaError
from shardio.maintenance import add_column
from shardio_tools.arguments import (
    add_engine_arguments,
    add_output_arguments,
    engine_options,
    named_once,
)
from shardio_tools.output import (
    escaped,
    inspect_step,
    print_report,
    shorten,
    shown_path,
    utf8_name,
    wants_progress,
)

Kind = shardio.Array | shardio.Bytes | shardio.Json | shardio.List | shardio.Text

_PLAIN: Final[dict[str, Callable[..., Kind]]] = {
    "text": shardio.Text,
    "bytes": shardio.Bytes,
    "json": shardio.Json,
}
_TYPE: Final = re.compile(r"(list of )?(\w+)(?:\[([^\]]*)\])?((?:,\w+)*)")
_PASS_FIELD: Final = "pass it, such as --field float32 or --field text"
_TEXT_SUFFIXES: Final = (".csv", ".jsonl", ".ndjson", ".json")
_MAX_SHOWN: Final = 60
_BOOLS: Final = {"true": True, "1": True, "false": False, "0": False}


def parse_field(text: str) -> Kind:
    """Parse the type of a field, such as "list of uint8[any,2]" or "text, zstd, optional"."""
    found = _TYPE.fullmatch(re.sub(r"\s*([,\[\]])\s*", r"\1", text.strip()))
    if found is None:
        raise InvalidArgument(_not_a_field(text))
    is_list, name, dims, rest = found.groups()
    words = rest.split(",")[1:]
    optional = "optional" in words
    codecs = [word for word in words if word != "optional"]
    if len(codecs) > 1 or len(words) > len(codecs) + optional:
        raise InvalidArgument(_not_a_field(text))
    codec = codecs[0] if codecs else "raw"
    if name in _PLAIN:
        if is_list or dims is not None:
            raise InvalidArgument(_not_a_field(text))
        return _PLAIN[name](codec, optional=optional)
    try:
        shape = [None if d == "any" else int(d) for d in (dims.split(",") if dims else [])]
    except ValueError as error:
        raise InvalidArgument(_not_a_field(text)) from error
    if is_list:
        return shardio.List(Array(name, tuple(shape)), codec, optional=optional)
    return Array(name, tuple(shape), codec, optional=optional)


def _not_a_field(text: str) -> str:
    return (
        f"{text!r} is not a field type: expected a dtype with dimensions, such as float32[3] or "
        "'list of uint8[any,2]', or else text, bytes or json; ',zstd' or ',zstd_dictionary' and "
        "',optional' may follow"
    )


def read_column(path: str, name: str, field: Kind | None) -> tuple[Kind, Iterable[Any]]:
    """Return the type and the values of a column in a file, whose suffix determines the format.

    Without `field`, the type is that of the array in a .npy file.
    """
    suffix = Path(path).suffix.lower()
    if not os.path.isfile(path):
        raise InvalidArgument(f"{path}: file of values not found")
    if suffix == ".npy":
        return _array(path, field)
    if suffix not in _TEXT_SUFFIXES:
        raise InvalidArgument(f"{path}: expected a file that ends in .npy, .jsonl or .csv")
    if field is None:
        raise InvalidArgument(f"{path}: does not state the type of {name}; {_PASS_FIELD}")
    if field.is_opaque:
        raise InvalidArgument(f"{path}: text file; for bytes use shardio.maintenance.add_column")
    return field, _text_values(path, name, field)


def read_function(place: str) -> Callable[..., Any]:
    """Return the function `FILE.py:NAME`; the file is run like an imported module.

    The function is sent to workers by value, because its module cannot be imported.
    """
    path, _, name = place.rpartition(":")
    if not os.path.isfile(path):
        raise InvalidArgument(f"{place}: expected FILE.py:NAME; there is no file {path!r}")
    found = runpy.run_path(path).get(utf8_name(name))
    if not callable(found):
        raise InvalidArgument(f"{path}: has no function {name!r}")
    return cast(Callable[..., Any], found)


def _array(path: str, field: Kind | None) -> tuple[Kind, Iterable[Any]]:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise InvalidArgument(f"{path}: not a readable array: {error}") from error
    if not isinstance(array, np.ndarray) or array.ndim == 0:
        raise InvalidArgument(f"{path}: expected an array with one row per sample")
    if field is not None:
        return field, array
    try:  # the name leaves out the byte order; the writer converts values to its own
        return Array(array.dtype.name, array.shape[1:]), array
    except SchemaError as error:
        raise SchemaError(f"{path}: {error}") from error


def _text_values(path: str, name: str, field: Kind) -> Iterator[Any]:
    """Yield the values of a text file; errors name the line."""
    is_csv = path.lower().endswith(".csv")
    convert = _from_text(field) if is_csv else _from_json
    if convert is None:
        raise InvalidArgument(f"{path}: CSV cells hold numbers or text; use .jsonl for other types")
    line, text = 0, ""
    with open(path, encoding="utf-8-sig", newline="" if is_csv else None) as file:
        try:
            pairs = _cells(path, name, file) if is_csv else enumerate(file, 1)
            for line, text in pairs:  # noqa: B007  (errors name the line)
                if is_csv or text.strip():
                    yield None if is_csv and field.optional and not text else convert(text)
        except UnicodeDecodeError as error:
            what = f"{error.reason} at byte {error.start}"
            raise InvalidArgument(f"{path}: not UTF-8: {what}") from error
        except InvalidArgument:
            raise
        except (ValueError, RecursionError) as error:
            what = f"{_quote(text.strip())} is not a value of {name}: {shorten(str(error))}"
            raise InvalidArgument(f"{path}, line {line}: {what}") from error


def _cells(path: str, name: str, file: TextIO) -> Iterator[tuple[int, str]]:
    rows = csv.reader(file, strict=True)
    try:
        names = next(rows, [])
        if names.count(name) > 1:
            raise InvalidArgument(f"{path}: has {names.count(name)} columns {name!r}; expected one")
        if name not in names:
            known = ", ".join(map(repr, names)) or "none"
            raise InvalidArgument(f"{path}: has no column {name!r}; there are {known}")
        for row in filter(None, rows):
            if len(row) != len(names):
                raise InvalidArgument(
                    f"{path}, line {rows.line_num}: found {len(row)} cells, expected "
                    f"{len(names)} as in the first line; quote text that contains a comma"
                )
            yield rows.line_num, row[names.index(name)]
    except csv.Error as error:
        raise InvalidArgument(
            f"{path}, line {rows.line_num}: not CSV: {error}; use .jsonl for values of any form "
            "and length"
        ) from error


def _from_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=named_once, parse_float=_parse_float)


def _from_text(field: Kind) -> Callable[[str], Any] | None:
    """Return a function that converts a cell's text; None if cells cannot hold the field."""
    if field.is_utf8:
        return str
    array = field.array
    if array is None or array.shape:
        return None
    if array.dtype == "bool":
        return _parse_bool
    is_real = "float" in array.dtype and array.dtype != "bfloat16"
    return _parse_float if is_real else lambda text: int(_check_ascii_digits(text))


def _parse_float(text: str) -> float:
    """Return the nearest float64; raise ValueError for a finite number outside its range."""
    value = float(_check_ascii_digits(text))
    is_zero = not text.lower().partition("e")[0].strip("+-0. ")
    is_infinite = "n" in text.lower()
    if (value == 0 and not is_zero) or (math.isinf(value) and not is_infinite):
        raise ValueError(f"{_quote(text)} is outside the range of float64; store it as text")
    return value


def _check_ascii_digits(text: str) -> str:
    """Return the text; raise ValueError for notations that only Python accepts, such as 1_000."""
    if "_" in text or not text.isascii():
        raise ValueError("expected an ASCII number without underscores")
    return text


def _quote(text: str) -> str:
    return repr(text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…")


def _parse_bool(text: str) -> bool:
    if (found := _BOOLS.get(text.lower())) is None:
        raise ValueError(f"expected one of {', '.join(_BOOLS)}")
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    add = parser.add_argument
    add("path", metavar="DATASET", help="the dataset to extend")
    add(
        "name",
        type=utf8_name,
        metavar="NAME",
        help="name of the field; dots address nested records",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--from", dest="file", metavar="FILE", help="file of values: .npy, .jsonl, .csv"
    )
    source.add_argument(
        "--function",
        metavar="FILE.py:NAME",
        help=(
            "function that returns the value for a sample or, with --batch-size, the values "
            "for a list of samples"
        ),
    )
    add(
        "--field",
        metavar="TYPE",
        help=(
            "type of the field, such as 'float32[3]' or 'text, optional' (default: that "
            "of the array)"
        ),
    )
    add(
        "--batch-size",
        type=int,
        metavar="N",
        help="call the function with lists of up to N samples",
    )
    add_engine_arguments(
        add, "processes that call the function (default: 0, call it in this process)"
    )
    add(
        "--gpus",
        type=float,
        default=0,
        metavar="N",
        help="GPUs of the cluster per process (default: 0)",
    )
    add_output_arguments(add)


def run(options: argparse.Namespace) -> int:
    """Add the column, report, and return the exit code."""
    given = None if options.field is None else parse_field(options.field)
    field, values = _field_and_values(options, given)
    report = add_column(
        options.path,
        options.name,
        field,
        values,
        batch_size=options.batch_size,
        workers=options.workers,
        gpus=options.gpus,
        **engine_options(options),
        progress=wants_progress(options),
    )
    steps = [
        inspect_step(options.path),
        (f"shardio stats {shown_path(options.path)}", "mean, deviation and range of each field"),
    ]
    print_report(report, options, f"added {escaped(options.name)}", *steps)
    return 0


def _field_and_values(
    options: argparse.Namespace, given: Kind | None
) -> tuple[Kind, Iterable[Any] | Callable[[Any], Any]]:
    if options.function is None:
        return read_column(options.file, options.name, given)
    if given is None:
        raise InvalidArgument(
            f"--function: does not state the type of {options.name}; {_PASS_FIELD}"
        )
    return given, read_function(options.function)
