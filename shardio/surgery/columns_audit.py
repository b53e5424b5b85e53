"""Check every byte of a column: the hash of each row or run, padding within strides, values."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from shardio.format.checksum import hash_bytes, rows_per_unit
from shardio.format.fields import Array
from shardio.format.layout import Kind, Section
from shardio.format.schema import Schema
from shardio.opening import Sections
from shardio.surgery.content import CHUNK_BYTES, Content
from shardio.surgery.finding import Findings


def audit_column(
    content: Content,
    schema: Schema,
    name: str,
    sections: Sections,
    n_samples: int,
    present: npt.NDArray[np.bool_] | None,
    findings: Findings,
) -> None:
    """Check a column whose sections have the places and sizes they must have.

    `present` says of an optional field which samples have it; the rows of the others are zero.
    """
    number, field = schema.field_id(name), schema.columns[name]
    column = sections[Kind.COLUMN, number, 0]
    hashes = sections[Kind.COLUMN_HASHES, number, 0]
    found = hash_bytes(content.bytes[hashes.offset : hashes.offset + hashes.size])
    if found != column.hash:
        findings.add(
            "section_hash",
            "a section's hash is not that of its unit hashes",
            section=column.name,
            field=name,
            expected=f"{column.hash:016x}",
            found=f"{found:016x}",
        )
    expected = content.numbers(hashes)
    per_unit = rows_per_unit(field.row_bytes or 0, field.stride)
    for first, n_rows in _chunks(n_samples, field.stride, per_unit):
        units = expected[first // per_unit : -(-(first + n_rows) // per_unit)]
        _check_units(content, column, field, name, first, n_rows, units, findings)
        here = None if present is None else present[first : first + n_rows]
        _check_bytes(content, column, field, name, first, n_rows, here, findings)
        content.forget()


def _chunks(n_samples: int, stride: int, per_unit: int) -> Iterator[tuple[int, int]]:
    """First row and number of rows of pieces of whole units."""
    step = max(1, CHUNK_BYTES // (stride * per_unit)) * per_unit
    for first in range(0, n_samples, step):
        yield first, min(step, n_samples - first)


def _check_units(
    content: Content,
    column: Section,
    field: Array,
    name: str,
    first: int,
    n_rows: int,
    expected: npt.NDArray[np.uint64],
    findings: Findings,
) -> None:
    stride, row_bytes = column.stride, field.row_bytes or 0
    per_unit = rows_per_unit(row_bytes, stride)
    rows = np.arange(first, first + n_rows, per_unit)
    starts = column.offset + rows * stride
    n_bytes = row_bytes if per_unit == 1 else per_unit * stride
    ends = np.minimum(starts + n_bytes, column.offset + (first + n_rows) * stride)
    found = content.hashes(starts, ends)
    for i in np.flatnonzero(found != expected).tolist():
        where = {"field": name, "sample": int(rows[i])}
        findings.add_hash(column.name, int(starts[i]), int(expected[i]), int(found[i]), **where)


def _check_bytes(
    content: Content,
    column: Section,
    field: Array,
    name: str,
    first: int,
    n_rows: int,
    present: npt.NDArray[np.bool_] | None,
    findings: Findings,
) -> None:
    """Check that the padding of rows and rows of no value are zero, and that a bool is 0 or 1."""
    row_bytes, stride = field.row_bytes or 0, column.stride
    start = column.offset + first * stride
    rows = np.frombuffer(content.bytes, np.uint8, n_rows * stride, start).reshape(n_rows, stride)
    bad = [(np.flatnonzero(rows[:, row_bytes:].any(axis=1)), "padding", "padding is not zero")]
    if field.dtype == "bool":
        wrong = np.flatnonzero((rows[:, :row_bytes] > 1).any(axis=1))
        bad.append((wrong, "value", "a bool is neither 0 nor 1"))
    if present is not None:
        wrong = np.flatnonzero(rows.any(axis=1) & ~present)
        bad.append((wrong, "validity", "a sample lacks the field, and its row is not zero"))
    for where, code, message in bad:
        for row in where.tolist():
            findings.add(
                code,
                message,
                section=column.name,
                field=name,
                sample=first + row,
                offset=start + row * stride,
            )
