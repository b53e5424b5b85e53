"""Verify every byte of one shard: headers, all hashes, all padding, and all values.

After a finding, verification continues if the offsets of the remaining data are still known.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardio.errors import ShardChanged, ShardCorrupt, ShardNotFound
from shardio.format.checksum import hash_bytes, rows_per_unit
from shardio.format.layout import (
    FIRST_OPTIONAL_KIND,
    PAGE,
    Header,
    Kind,
    Section,
    check_header_fits,
    unpack_header,
    unpack_table,
)
from shardio.format.schema import Schema
from shardio.format.sections import Sections
from shardio.format.types import Array
from shardio.maintenance.verify import Finding, Findings
from shardio.maintenance.verify.payload import PayloadVerifier, Present
from shardio.maintenance.verify.window import (
    DIGEST_BYTES,
    U64,
    WINDOW_BYTES,
    ShardWindows,
    find_mismatches,
    pack_digests,
)
from shardio.shard.opening import check_sections, read_schema
from shardio.storage.content import Content, PreadFile
from shardio.storage.file_access import FileState


def _column_windows(n_samples: int, stride: int, per_unit: int) -> Iterator[tuple[int, int]]:
    """Yield the first row and the number of rows of each window of a column.

    A window consists of whole units. A unit is a row, or several rows with one hash. A window also
    consists of whole pages, unless this would make it much larger than WINDOW_BYTES.
    """
    unit = stride * per_unit
    n_bytes = math.lcm(unit, PAGE)
    # Round the quotient, so that the size of a window is as near as possible to WINDOW_BYTES.
    n_whole = (WINDOW_BYTES + n_bytes // 2) // n_bytes
    step = (n_whole * n_bytes // unit or WINDOW_BYTES // unit or 1) * per_unit
    for first in range(0, n_samples, step):
        yield first, min(step, n_samples - first)


def _verify_column(
    content: ShardWindows,
    schema: Schema,
    name: str,
    sections: Sections,
    present: npt.NDArray[np.bool_] | None,
    findings: Findings,
) -> None:
    """Check all hashes, all padding and all values of a column.

    `present` is a mask of the samples that have a value; None if all samples must have one.
    """
    field, number = schema.columns[name], schema.field_id(name)
    column = sections[Kind.COLUMN, number, 0]
    row_bytes, stride = field.row_bytes or 0, column.stride
    per_unit = rows_per_unit(row_bytes, stride)
    n_hashed = row_bytes if per_unit == 1 else per_unit * stride
    where: dict[str, Any] = {"section": column.name, "field": name}
    hashes = content.items(sections[Kind.COLUMN_HASHES, number, 0], U64)
    if (found := hash_bytes(hashes.data)) != column.hash:
        what = "a section's hash does not match its unit hashes"
        findings.add_mismatch(column.hash, found, "section_hash", what, **where)
    expected = pack_digests(hashes)
    # Create the views of units only when `content.window` returns another memoryview object:
    # creating one view takes as long as hashing 3 KB.
    last_window, units = memoryview(b""), list[memoryview]()
    for first, n_rows in _column_windows(column.count, stride, per_unit):
        start = column.offset + first * stride
        window = content.window(start, start + n_rows * stride)
        if window is not last_window:
            starts = range(0, window.nbytes, per_unit * stride)
            last_window, units = window, [window[at : at + n_hashed] for at in starts]
        begin, end = first // per_unit, -(-(first + n_rows) // per_unit)
        here = expected[begin * DIGEST_BYTES : end * DIGEST_BYTES]
        for i, wanted, actual in find_mismatches(units, here):
            row = first + i * per_unit
            place = column.offset + row * stride
            findings.add_mismatch(wanted, actual, sample=row, offset=place, **where)
        mask = None if present is None else present[first : first + n_rows]
        for i, code, message in _invalid_rows(window, field, stride, mask):
            place = start + i * stride
            findings.add(code, message, sample=first + i, offset=place, **where)


def _invalid_rows(
    window: memoryview, field: Array, stride: int, present: npt.NDArray[np.bool_] | None
) -> Iterator[tuple[int, str, str]]:
    """Yield the index, a code and a message for each row with an invalid value or padding.

    Padding and the rows of missing values must be zero, and each bool must be 0 or 1.
    """
    row_bytes, found = field.row_bytes or 0, []
    if present is None and row_bytes == stride and field.dtype != "bool":
        return
    rows = np.frombuffer(window, np.uint8).reshape(-1, stride)
    if row_bytes < stride:
        found.append((rows[:, row_bytes:].any(axis=1), "padding", "padding is not zero"))
    if field.dtype == "bool":
        wrong = (rows[:, :row_bytes] > 1).any(axis=1)
        found.append((wrong, "value", "a bool is neither 0 nor 1"))
    if present is not None:
        wrong = ~present
        wrong[wrong] = rows[wrong].any(axis=1)
        found.append((wrong, "validity", "a sample lacks the field, and its row is not zero"))
    for mask, code, message in found:
        yield from ((i, code, message) for i in np.flatnonzero(mask).tolist())


@dataclass(frozen=True, slots=True)
class VerifiedShard:
    """The findings of one shard, and its metadata. Metadata that could not be read is None."""

    findings: tuple[Finding, ...]
    n_bytes: int
    id: str | None = None
    n_samples: int | None = None
    schema: str | None = None


def verify_file(path: str | os.PathLike[str]) -> VerifiedShard:
    """Verify every byte of a shard; raise ShardNotFound or OSError if it cannot be opened."""
    name, findings = os.fspath(path), Findings(path)
    content = None
    with findings.catching():
        content = PreadFile(name)
    if content is None:
        return VerifiedShard(findings.close(), 0)
    examined = verify_bytes(content, name)
    change = _check_unchanged(name, content.state)
    return replace(examined, findings=(*examined.findings, change)) if change else examined


def verify_or_report(root: Path, name: str) -> VerifiedShard:
    """Verify a shard in the folder `root`; report a missing or unreadable file as a finding."""
    findings = Findings(root / name)
    try:
        return verify_file(root / name)
    except ShardNotFound as error:
        if os.path.lexists(root / name):
            findings.add("unreadable", str(error).removeprefix(f"{findings.path}: "))
        else:
            findings.add("missing", "the shard is missing")
    except OSError as error:
        findings.add_error(error)
    return VerifiedShard(findings.close(), 0)


def _check_unchanged(path: str, opened: FileState) -> Finding | None:
    try:
        now = FileState.of(os.stat(path))
    except OSError as error:
        message = f"the file was removed while it was verified: {error.strerror}"
        return Finding(path, "changed", message)
    if now == opened:
        return None
    message = "the file was replaced or written to while it was verified: verify it again"
    return Finding(path, "changed", message, expected=str(opened), found=str(now))


def verify_bytes(shard: Content, path: str) -> VerifiedShard:
    """Verify every byte of a shard in memory or in a file; findings have the path `path`."""
    content, findings = ShardWindows(shard), Findings(path)
    known = VerifiedShard((), content.n_bytes)
    try:
        if header := _verify_headers(content, findings):
            known = replace(known, id=header.id.hex(), n_samples=header.n_samples)
            if schema := _verify_sections(content, header, findings):
                known = replace(known, schema=schema.to_json().decode())
    except (ShardChanged, OSError) as error:
        findings.add_error(error)
    return replace(known, findings=findings.close())


def _verify_headers(content: ShardWindows, findings: Findings) -> Header | None:
    """Check the first and the last page; return the header, or None if it cannot be relied on."""
    size, path = content.n_bytes, findings.path
    if size < 2 * PAGE:
        if not any(content.bytes[: min(size, PAGE)]):
            findings.add("incomplete", "there is no header: the writer did not finish")
        elif size < PAGE or _header_at(content, 0, "header", findings):
            findings.add("file_size", "too short to be a shard", expected=3 * PAGE, found=size)
        return None
    first = _header_at(content, 0, "header", findings)
    last_offset = size - PAGE
    if first is not None and first.file_size != size:
        with findings.catching():
            check_header_fits(first, size, path)
        if first.file_size > size or first.file_size < 2 * PAGE:
            return None
        last_offset = first.file_size - PAGE
    last = _header_at(content, last_offset, "trailer", findings)
    if first is not None and last is not None and first != last:
        findings.add(
            "trailer",
            "the first and the last page differ",
            section="trailer",
            offset=last_offset,
            expected=str(first),
            found=str(last),
        )
        return None
    header = first or last
    if header is None:
        return None
    n_before = findings.n_found
    with findings.catching():
        check_header_fits(header, last_offset + PAGE, path)
    return header if findings.n_found == n_before else None


def _header_at(content: ShardWindows, offset: int, name: str, findings: Findings) -> Header | None:
    page = bytes(content.bytes[offset : offset + PAGE])
    with findings.catching(section=name, offset=offset):
        try:
            return unpack_header(page, findings.path, offset=offset)
        except ShardCorrupt as error:
            error.section = name
            raise
    return None


def _verify_sections(content: ShardWindows, header: Header, findings: Findings) -> Schema | None:
    """Check the table of sections and all sections; return the schema, or None if it is damaged."""
    path, end = findings.path, header.table_offset + header.table_size
    content.check_zeros(end, header.file_size - PAGE, findings, section="section table")
    sections: Sections = {}
    with findings.catching():
        table = bytes(content.bytes[header.table_offset : end])
        sections = {s.key: s for s in unpack_table(table, header, path)}
    for section in sections.values():
        end = section.offset + section.size
        content.check_zeros(end, section.end, findings, section=section.name)
    schema = None
    with findings.catching():
        schema = read_schema(content.bytes, sections, path) if sections else None
    if schema is None:
        return None
    n_before = findings.n_found
    with findings.catching():
        check_sections(header, schema, sections, path)
    if findings.n_found != n_before:
        return schema
    names = list(schema)
    for section in sections.values():
        # Later versions may have kinds of sections in which `section.field` is not a field index.
        field = names[section.field] if section.field < len(names) else None
        _verify_section_hashes(content, section, sections, field, findings)
    n_samples = header.n_samples
    present = _verify_validity(content, schema, sections, n_samples, findings)
    for name in schema.columns:
        _verify_column(content, schema, name, sections, present.get(name), findings)
    if schema.records:
        PayloadVerifier(content, schema, sections, header, present, findings).verify()
    return schema


def _verify_section_hashes(
    content: ShardWindows,
    section: Section,
    sections: Sections,
    field: str | None,
    findings: Findings,
) -> None:
    """Check a section whose hash covers all its bytes and, if it has block hashes, the blocks."""
    if section.kind == Kind.BLOCK_HASHES:
        content.check_hash(section, findings, field)
        target = sections[section.of_kind, section.field, 0]
        content.check_blocks(target, section, findings, field)
        if target.hash != section.hash:
            what = "a section's hash does not match its block hashes"
            where = {"section": target.name, "field": field}
            findings.add_mismatch(section.hash, target.hash, "section_hash", what, **where)
    elif section.kind >= FIRST_OPTIONAL_KIND or section.kind == Kind.DICTIONARY:
        content.check_hash(section, findings, field)


def _verify_validity(
    content: ShardWindows, schema: Schema, sections: Sections, n_samples: int, findings: Findings
) -> Present:
    """Return a mask of the samples with a value for each optional field; check the unused bits."""
    present: Present = {}
    for name in schema.optional:
        section = sections[Kind.VALIDITY, schema.field_id(name), 0]
        stored = content.items(section, np.uint8)
        bits = np.unpackbits(stored, bitorder="little")
        if bits[n_samples:].any():
            findings.add(
                "validity",
                "bits after the last sample's bit are set",
                section=section.name,
                field=name,
                offset=section.offset + section.size - 1,
                found=int(stored[-1]),
            )
        present[name] = bits[:n_samples].astype(np.bool_)
    return present
