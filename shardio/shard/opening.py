"""Open a shard and validate its structure. This takes the same time for any number of samples.

After `open_sections`, a shard has all sections that its schema requires; any other section is of an
optional kind. All sections are inside the file, with valid sizes, counts and strides. Readers
therefore check only hashes and values in tables, such as index entries.
"""

from __future__ import annotations

import functools
from typing import Any, Final

from shardio.errors import SchemaError, ShardCorrupt, ShardIncomplete, ShardUnsupported
from shardio.format.checksum import format_hashes, hash_bytes
from shardio.format.codecs import MAX_DICTIONARY_BYTES, RECORD_FEATURES
from shardio.format.layout import (
    FIRST_OPTIONAL_KIND,
    MAX_SAMPLES,
    MAX_SCHEMA_BYTES,
    NO_FIELD,
    PAGE,
    SUPPORTED,
    Header,
    Kind,
    Required,
    Section,
    check_header_fits,
    unpack_header,
    unpack_table,
)
from shardio.format.schema import Schema
from shardio.format.sections import VARIABLE_COUNT_STRIDES, Sections, plan_sections
from shardio.storage.content import Content

_KINDS: Final = frozenset(Kind)

_SCHEMA_FEATURES: Final = SUPPORTED & ~RECORD_FEATURES
"""The features that depend only on the schema."""

_parse_schema = functools.lru_cache(maxsize=64)(Schema.from_json)
"""Parse a schema. The result is cached, because all shards of a dataset have the same schema."""


def open_sections(content: Content, path: str) -> tuple[Header, Schema, Sections]:
    """Validate the structure of a shard; return its header, its schema, and its sections by key."""
    size = content.nbytes
    if size < PAGE:
        if not any(content[:size]):
            raise ShardIncomplete(f"{path}: {size} bytes and no header: its writer did not finish")
        what = "too short to be a shard"
        raise ShardCorrupt(what, code="file_size", path=path, expected=PAGE, found=size)
    first_page = bytes(content[:PAGE])
    header = unpack_header(first_page, path)
    check_header_fits(header, size, path)
    last = size - PAGE
    if (last_page := bytes(content[last:size])) != first_page:
        at = next(i for i in range(PAGE) if last_page[i] != first_page[i])
        raise ShardCorrupt(
            "the first and the last page differ",
            code="trailer",
            path=path,
            section="trailer",
            offset=last + at,
            expected=first_page[at],
            found=last_page[at],
        )
    table = bytes(content[header.table_offset : header.table_offset + header.table_size])
    sections = {s.key: s for s in unpack_table(table, header, path)}
    schema = read_schema(content, sections, path)
    check_sections(header, schema, sections, path)
    return header, schema, sections


def _corrupt(
    path: str, section: Section, what: str, expected: object, found: object
) -> ShardCorrupt:
    rest: Any = {"offset": section.offset, "expected": expected, "found": found}
    return ShardCorrupt(what, code="section", path=path, section=section.name, **rest)


def read_schema(content: Content, sections: Sections, path: str) -> Schema:
    """Return the schema of a shard; raise ShardCorrupt unless it matches its hash and is valid."""
    section = sections.get((Kind.SCHEMA, NO_FIELD, 0))
    if section is None:
        raise ShardCorrupt("there is no schema", code="section", path=path)
    if section is not list(sections.values())[-1]:
        # The schema must be the last section, so that one read of the file's end opens the shard.
        raise _corrupt(path, section, "the schema is not the last section", None, section.name)
    if section.size > MAX_SCHEMA_BYTES:
        raise _corrupt(path, section, "the schema is too large", MAX_SCHEMA_BYTES, section.size)
    raw = bytes(content[section.offset : section.offset + section.size])
    corrupt = functools.partial(ShardCorrupt, path=path, section="schema", offset=section.offset)
    if (found := hash_bytes(raw)) != section.hash:
        what, hashes = "the schema does not match its hash", format_hashes(section.hash, found)
        raise corrupt(what, code="schema_hash", **hashes)
    try:
        return _parse_schema(raw)
    except ShardUnsupported as error:
        raise ShardUnsupported(f"{path}: {error}") from error
    except SchemaError as error:
        raise corrupt(str(error), code="schema") from error


def check_sections(header: Header, schema: Schema, sections: Sections, path: str) -> None:
    """Raise ShardCorrupt unless the sections of a shard match its schema and number of samples.

    Any number of packets and chunks is accepted. Raises ShardUnsupported for an unknown kind that a
    reader must not skip.
    """
    for section in sections.values():
        if section.kind < FIRST_OPTIONAL_KIND and section.kind not in _KINDS:
            raise ShardUnsupported(
                f"{path}: has a section of kind {section.kind} at byte {section.offset}, which "
                "this version of shardio cannot read; read it with a newer shardio"
            )
    if (n := header.n_samples) > MAX_SAMPLES:
        what = "too many samples"
        raise ShardCorrupt(what, code="count", path=path, expected=MAX_SAMPLES, found=n)
    found_bits = Required(header.required & int(_SCHEMA_FEATURES))
    if found_bits != schema.required:
        what = "the feature bits of the header do not match the schema"
        bits: Any = {"expected": str(schema.required), "found": str(found_bits)}
        raise ShardCorrupt(what, code="feature", path=path, section="header", **bits)
    counts = tuple(
        (key, each.count) for key, each in sections.items() if each.kind in VARIABLE_COUNT_STRIDES
    )
    planned = plan_sections(schema, header.n_samples, counts)
    for key, n_items, stride in planned:
        if key not in sections:
            kind = Section(*key, 0, 0, 0, 0, 0).name
            raise ShardCorrupt(f"section {kind} is missing", code="section", path=path)
        section = sections[key]
        if (section.count, section.stride) != (n_items, stride):
            found = (section.count, section.stride)
            raise _corrupt(path, section, "wrong count or stride", (n_items, stride), found)
        if stride and section.size != n_items * stride:
            raise _corrupt(path, section, "wrong size", n_items * stride, section.size)
        if section.kind == Kind.DICTIONARY and section.size > MAX_DICTIONARY_BYTES:
            what = "the dictionary is too large"
            raise _corrupt(path, section, what, MAX_DICTIONARY_BYTES, section.size)
    if len(sections) == len(planned):
        return
    for key in sections.keys() - {spec.key for spec in planned}:
        section = sections[key]
        if section.kind < FIRST_OPTIONAL_KIND:
            what = "a section that does not match the schema"
            raise _corrupt(path, section, what, None, key)
        if section.of_kind:
            what = "a section of an optional kind must not belong to another section"
            raise _corrupt(path, section, what, 0, section.of_kind)
        if section.stride and section.size != (expected := section.count * section.stride):
            raise _corrupt(path, section, "wrong size", expected, section.size)
