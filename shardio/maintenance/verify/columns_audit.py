"""Check every byte of a column: the hash of each row or run, padding within strides, values."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from shardio.format.checksum import hash_bytes, rows_per_unit
from shardio.format.fields import Array
from shardio.format.layout import PAGE, Kind, Section
from shardio.format.schema import Schema
from shardio.maintenance.verify.findings import Findings
from shardio.maintenance.verify.window import (
    DIGEST_BYTES,
    WINDOW_BYTES,
    Content,
    differing,
    digests_of,
)
from shardio.shard.opening import Sections


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
    stored = content.numbers(hashes)
    found = hash_bytes(stored.data)
    if found != column.hash:
        findings.add(
            "section_hash",
            "a section's hash is not that of its unit hashes",
            section=column.name,
            field=name,
            expected=f"{column.hash:016x}",
            found=f"{found:016x}",
        )
    expected = digests_of(stored)
    audit = _ColumnAudit(name, field, column, findings)
    stride = column.stride
    per_unit = rows_per_unit(field.row_bytes or 0, stride)
    for first, n_rows in _chunks(n_samples, stride, per_unit):
        start = column.offset + first * stride
        window = content.window(start, start + n_rows * stride)
        end = -(-(first + n_rows) // per_unit)
        units = expected[first // per_unit * DIGEST_BYTES : end * DIGEST_BYTES]
        audit.check_units(window, first, units)
        audit.check_bytes(window, first, n_rows, present)


def _chunks(n_samples: int, stride: int, per_unit: int) -> Iterator[tuple[int, int]]:
    """First row and number of rows of windows: whole units, and whole pages where that can be."""
    unit = stride * per_unit
    n_bytes = math.lcm(unit, PAGE)
    n_whole = (WINDOW_BYTES + n_bytes // 2) // n_bytes  # the nearest: two rows of 600 KB are one
    step = (n_whole * n_bytes // unit or WINDOW_BYTES // unit or 1) * per_unit
    for first in range(0, n_samples, step):
        yield first, min(step, n_samples - first)


class _ColumnAudit:
    """Checks one column, window by window."""

    def __init__(self, name: str, field: Array, column: Section, findings: Findings) -> None:
        self._name, self._field, self._column, self._findings = name, field, column, findings
        self._row_bytes, self._stride = field.row_bytes or 0, column.stride
        self._per_unit = rows_per_unit(self._row_bytes, self._stride)
        self._window = memoryview(b"")
        self._units: list[memoryview] = []
        """The units of the window. Making them takes as long as hashing them, if they are 3 KB."""

    def check_units(self, window: memoryview, first: int, expected: bytes) -> None:
        """Check the hashes of a window of whole rows, the first of which is `first`."""
        if window is not self._window:
            self._window, self._units = window, self._cut(window)
        for i, wanted, found in differing(self._units, expected):
            row = first + i * self._per_unit
            place = self._column.offset + row * self._stride
            where = {"field": self._name, "sample": row}
            self._findings.add_hash(self._column.name, place, wanted, found, **where)

    def _cut(self, window: memoryview) -> list[memoryview]:
        n_bytes = self._per_unit * self._stride
        starts = range(0, window.nbytes, n_bytes)
        n_hashed = self._row_bytes if self._per_unit == 1 else n_bytes
        return [window[start : start + n_hashed] for start in starts]

    def check_bytes(
        self,
        window: memoryview,
        first: int,
        n_rows: int,
        present: npt.NDArray[np.bool_] | None,
    ) -> None:
        """Check that padding of rows and rows of no value are zero, and that a bool is 0 or 1."""
        row_bytes = self._row_bytes
        if present is None and row_bytes == self._stride and self._field.dtype != "bool":
            return
        rows = np.frombuffer(window, np.uint8).reshape(n_rows, self._stride)
        bad = []
        if row_bytes < self._stride:
            wrong = np.flatnonzero(rows[:, row_bytes:].any(axis=1))
            bad.append((wrong, "padding", "padding is not zero"))
        if self._field.dtype == "bool":
            wrong = np.flatnonzero((rows[:, :row_bytes] > 1).any(axis=1))
            bad.append((wrong, "value", "a bool is neither 0 nor 1"))
        if present is not None:
            wrong = np.flatnonzero(~present[first : first + n_rows])
            wrong = wrong[rows[wrong].any(axis=1)]
            bad.append((wrong, "validity", "a sample lacks the field, and its row is not zero"))
        for where, code, message in bad:
            for row in where.tolist():
                self._findings.add(
                    code,
                    message,
                    section=self._column.name,
                    field=self._name,
                    sample=first + row,
                    offset=self._column.offset + (first + row) * self._stride,
                )
