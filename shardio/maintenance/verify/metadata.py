"""Read the metadata of a shard, damaged or not: header, section table, schema, and findings.

Opening refuses a shard that breaks any rule; this reads just such a file. A damaged first page is
replaced by the last one; data is not read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from shardio.errors import DataError, ShardIncomplete
from shardio.format.layout import NO_FIELD, PAGE, Header, Kind, Section, unpack_header, unpack_table
from shardio.format.schema import Schema
from shardio.maintenance.verify.findings import Finding, Findings
from shardio.maintenance.verify.window import access_once
from shardio.shard.opening import open_sections, read_schema
from shardio.storage.content import Content, open_content
from shardio.storage.file_access import Access

_Sections = dict[tuple[int, int, int], Section]


@dataclass(frozen=True, slots=True)
class Survey:
    """The readable metadata of one shard; `findings` say what is wrong, and where.

    Without findings the shard opens. Unreadable parts are None or empty.
    """

    path: str
    n_bytes: int
    findings: tuple[Finding, ...]
    header: Header | None = None
    schema: Schema | None = None
    sections: tuple[Section, ...] = ()

    def field_of(self, section: Section) -> str | None:
        """Return the name of the field that a section belongs to, if any."""
        if section.field == NO_FIELD:
            return None
        names = list(self.schema or {})
        return names[section.field] if section.field < len(names) else f"number {section.field}"


def survey_shard(path: str | os.PathLike[str], *, access: Access = "auto") -> Survey:
    """Read the metadata of a shard, damaged or not.

    Args:
        path: the file.
        access: as in `audit_shard`.

    Raises:
        InvalidArgument: `access` is none of the three.
        ShardNotFound: there is no such file.
        OSError: the system refuses to open it.
    """
    findings = Findings(path)
    name = findings.path
    try:
        content, _ = open_content(name, access_once(access))
    except ShardIncomplete as error:
        findings.add("incomplete", str(error).removeprefix(f"{name}: "))
        return Survey(name, 0, findings.close())
    with findings.catching():
        header, schema, sections = open_sections(content, name)
        return Survey(name, content.nbytes, (), header, schema, tuple(sections.values()))
    return _salvage(content, name, findings.close())


def _salvage(content: Content, path: str, refusal: tuple[Finding, ...]) -> Survey:
    """Go on, piece by piece, where opening refused."""
    header = _any_header(content, path)
    further = Findings(path)
    sections = _sections(content, header, further) if header else {}
    schema = _schema(content, sections, further)
    findings = (*refusal, *(f for f in further.close() if f not in refusal))
    return Survey(path, content.nbytes, findings, header, schema, tuple(sections.values()))


def _any_header(content: Content, path: str) -> Header | None:
    """Return the header of the first page, else that of the last."""
    if content.nbytes < PAGE:
        return None
    for offset in (0, content.nbytes - PAGE):
        try:
            return unpack_header(bytes(content[offset : offset + PAGE]), path, offset=offset)
        except DataError:
            continue  # opening has said what is wrong; the other page may still help
    return None


def _sections(content: Content, header: Header, findings: Findings) -> _Sections:
    end = header.table_offset + header.table_size
    if end > content.nbytes:
        return {}  # cut off: that the file is too short is known
    with findings.catching():
        table = bytes(content[header.table_offset : end])
        return {s.key: s for s in unpack_table(table, header, findings.path)}
    return {}


def _schema(
    content: Content, sections: Mapping[tuple[int, int, int], Section], findings: Findings
) -> Schema | None:
    schema = sections.get((Kind.SCHEMA, NO_FIELD, 0))
    if schema is None or schema.offset + schema.size > content.nbytes:
        return None
    with findings.catching():
        return read_schema(content, dict(sections), findings.path)
    return None
