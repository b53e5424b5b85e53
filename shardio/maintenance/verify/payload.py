"""Verify the records of a shard (values of varying size), and the index of the records.

The *payload* is the section with all records. The index has one entry per record, with the hash,
the offset and the codec of the record, and its sizes before and after compression. The records of a
row are next to each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio.errors import ShardCorrupt
from shardio.format.checksum import Hasher, distinct
from shardio.format.codecs import (
    BY_CODE,
    RECORD_FEATURES,
    SPECS,
    Codec,
    Dictionary,
    check_dictionary,
    decode,
)
from shardio.format.layout import NO_FIELD, Header, Kind, Required
from shardio.format.schema import Schema
from shardio.format.sections import (
    ENTRY,
    ENTRY_DTYPE,
    Entries,
    Sections,
    codecs,
    invalid_entries,
    stored_bytes,
)
from shardio.format.types.arrays import RECORD_ALIGNMENT
from shardio.maintenance.verify import Findings
from shardio.maintenance.verify.streams import StreamVerifier, are_utf8, check_absent
from shardio.maintenance.verify.window import (
    DIGEST_BYTES,
    U64,
    WINDOW_BYTES,
    ShardWindows,
    find_mismatches,
    pack_digests,
    slice_window,
)

CHUNK_ENTRIES: Final = 1 << 14
"""The number of index entries that are processed at a time."""


Present = dict[str, npt.NDArray[Any]]
"""A dict from the name of each optional field to a mask of the samples that have a value."""


def _adjacent_parts(
    starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> tuple[Iterator[tuple[int, int, int, int]], npt.NDArray[np.int64]]:
    """Divide records into parts of about WINDOW_BYTES, in which the records are adjacent.

    Return the start and end of each part, as record indices and as file offsets. Also return, for
    each record, the file offset at which its part starts.
    """
    gaps = starts[1:] - ends[:-1]
    is_cut = np.diff(np.cumsum(ends - starts) // WINDOW_BYTES) > 0
    is_cut |= (gaps < 0) | (gaps >= RECORD_ALIGNMENT)
    stops = np.append(np.flatnonzero(is_cut) + 1, len(starts))
    first = np.append(0, stops[:-1])
    numbers = first.tolist(), stops.tolist(), starts[first].tolist(), ends[stops - 1].tolist()
    return zip(*numbers, strict=True), np.repeat(starts[first], stops - first)


class PayloadVerifier:
    """A check of the payload and the index of a shard; `verify` may be called once."""

    def __init__(
        self,
        content: ShardWindows,
        schema: Schema,
        sections: Sections,
        header: Header,
        present: Present,
        findings: Findings,
    ) -> None:
        self._content, self._findings, self._present = content, findings, present
        self._fields = list(schema.records.items())
        self._payload = sections[Kind.PAYLOAD, NO_FIELD, 0]
        self._index = sections[Kind.INDEX, NO_FIELD, 0]
        self._required = Required(header.required)
        self._features = Required(0)
        """The features that a reader must support to decode the records checked so far."""
        self._end = 0
        """The offset in the payload at which the last record ends; -1 if its entry is invalid."""
        self._shapes: dict[str, npt.NDArray[np.uint64]] = {}
        """The stored dimensions of the records of each field, with one row per sample."""
        self._dictionaries: dict[str, Dictionary | None] = {}
        """The dictionary of each field whose codec can have one; None if missing or invalid."""
        self._streams: dict[int, StreamVerifier] = {}
        for k, (name, field) in enumerate(self._fields):
            number = schema.field_id(name)
            self._shapes[name] = np.empty((header.n_samples, 0), np.uint64)
            if n_dims := len(field.stored_dims):
                dims = content.items(sections[Kind.SHAPES, number, 0], U64)
                self._shapes[name] = dims.reshape(-1, n_dims)
            if SPECS[field.codec].has_dictionary:
                section = sections[Kind.DICTIONARY, number, 0]
                learned = content.items(section, np.uint8).tobytes()
                self._dictionaries[name] = None
                with findings.catching(section=section.name, field=name, offset=section.offset):
                    self._dictionaries[name] = Dictionary(learned) if learned else None
            if field.is_streamed:
                mask = present.get(name)
                self._streams[k] = StreamVerifier(content, schema, sections, name, mask, findings)

    def verify(self) -> None:
        """Check all entries of the index and all records; add the findings."""
        hasher, n_fields = Hasher(), len(self._fields)
        n_rows = max(1, CHUNK_ENTRIES // n_fields)
        for first in range(0, self._index.count, n_rows * n_fields):
            n_entries = min(n_rows * n_fields, self._index.count - first)
            entries = self._content.items(self._index, ENTRY_DTYPE, first, n_entries)
            first_row = first // n_fields
            hasher.update(np.ascontiguousarray(entries["hash"]).data)
            bad = self._check_entries(first_row, entries)
            self._check_tiling(first_row, entries, bad)
            for k, verifier in self._streams.items():
                verifier.check(first_row, entries[k::n_fields], bad[k::n_fields])
                bad[k::n_fields] = True  # the streams are checked: `_check_records` must skip them
            self._check_records(first_row, entries, bad)
        for verifier in self._streams.values():
            verifier.close()
            self._features |= verifier.features
        self._check_end(hasher.intdigest())

    def _location(self, first_row: int, i: int, offset: int) -> dict[str, Any]:
        """Return the details of a finding about record i, counted from the row `first_row`."""
        row, number = divmod(first_row * len(self._fields) + i, len(self._fields))
        where = {"field": self._fields[number][0], "sample": row}
        return {"section": self._payload.name, **where, "offset": offset}

    def _check_end(self, digest: int) -> None:
        payload = self._payload
        if self._end not in (-1, payload.size):
            self._findings.add(
                "tiling",
                "the payload holds bytes that belong to no record",
                section=payload.name,
                offset=payload.offset + self._end,
                expected=self._end,
                found=payload.size,
            )
        if digest != payload.hash:
            what = "the payload's hash does not match its records' hashes"
            where = {"section": payload.name}
            self._findings.add_mismatch(payload.hash, digest, "section_hash", what, **where)
        for feature in (self._features ^ self._required) & RECORD_FEATURES:
            codec = str(feature.name).lower()
            self._findings.add(
                "feature",
                f"the {codec} feature bit must be set if, and only if, a record is stored with "
                f"{codec}",
                section="header",
                expected=int(feature in self._features),
                found=int(feature not in self._features),
            )

    def _check_entries(self, first_row: int, entries: Entries) -> npt.NDArray[np.bool_]:
        """Return a mask of the invalid entries; add a finding for each."""
        fields = self._fields
        bad = np.zeros(len(entries), np.bool_)
        for k, (_, field) in enumerate(fields):
            bad[k :: len(fields)] = invalid_entries(
                entries[k :: len(fields)], field, self._payload.size
            )
        for i in np.flatnonzero(bad).tolist():
            offset = self._index.offset + (first_row * len(fields) + i) * ENTRY.size
            self._findings.add(
                "index_entry",
                "an index entry is invalid (codec, offset, sizes or alignment)",
                found=str(tuple(entries[i].tolist())),
                **{**self._location(first_row, i, offset), "section": self._index.name},
            )
        return bad

    def _check_tiling(self, first_row: int, entries: Entries, bad: npt.NDArray[np.bool_]) -> None:
        """Check that nothing but zeros for alignment lies between consecutive records."""
        fields = self._fields
        offsets = entries["offset"].astype(np.int64)
        ends = offsets + stored_bytes(entries).astype(np.int64)
        ends[bad] = -1
        before = np.concatenate([[self._end], ends[:-1]])
        kinds = codecs(entries)
        aligned = np.ones(len(entries), np.int64)
        for k, (_, field) in enumerate(fields):
            raw = kinds[k :: len(fields)] == Codec.RAW
            aligned[k :: len(fields)][raw] = field.alignment
        starts = before + -before % aligned
        known = ~bad & (before >= 0)
        base = self._payload.offset
        for i in np.flatnonzero(known & (offsets != starts)).tolist():
            self._findings.add(
                "tiling",
                "a record does not begin where the previous one ends",
                expected=int(starts[i]),
                found=int(offsets[i]),
                **self._location(first_row, i, base + int(offsets[i])),
            )
        for i in np.flatnonzero(known & (offsets == starts) & (starts > before)).tolist():
            where, end = self._location(first_row, i, base), base + int(starts[i])
            self._content.check_zeros(base + int(before[i]), end, self._findings, **where)
        self._end = int(ends[-1])

    def _check_records(self, first_row: int, entries: Entries, bad: npt.NDArray[np.bool_]) -> None:
        """Check that each record that is not `bad` matches its hash and decodes to a value."""
        fields, content, numbers = self._fields, self._content, np.flatnonzero(~bad)
        if not len(numbers):
            return
        sound = entries[numbers] if len(numbers) < len(entries) else entries
        kinds, sizes = codecs(sound), stored_bytes(sound).astype(np.int64)
        for code in distinct(kinds.astype(np.int64)).tolist():
            self._features |= BY_CODE[code].required_by_record
        starts = self._payload.offset + sound["offset"].astype(np.int64)
        ends, digests = starts + sizes, pack_digests(sound["hash"])
        is_raw = kinds == Codec.RAW
        needs_decoding = ~(is_raw & self._hash_suffices(first_row, numbers))
        is_text = is_raw & self._utf8_suffices(numbers) if needs_decoding.any() else None
        parts, bases = _adjacent_parts(starts, ends)
        ranges = np.stack([starts - bases, sizes], axis=1).astype(np.uint64)
        for first, last, start, end in parts:
            window = content.window(start, end)
            expected = digests[first * DIGEST_BYTES : last * DIGEST_BYTES]
            for i, wanted, found in find_mismatches(
                slice_window(window, ranges[first:last]), expected
            ):
                where = self._location(first_row, int(numbers[first + i]), int(starts[first + i]))
                self._findings.add_mismatch(wanted, found, **where)
                needs_decoding[first + i] = False
            if is_text is None:
                continue
            texts = first + np.flatnonzero(is_text[first:last])
            if are_utf8(slice_window(window, ranges[texts])):
                needs_decoding[texts] = False
            for k in (first + np.flatnonzero(needs_decoding[first:last])).tolist():
                row, number = divmod(first_row * len(fields) + int(numbers[k]), len(fields))
                at, n_stored = ranges[k].tolist()
                stored, n_bytes = window[at : at + n_stored], int(sound["n_bytes"][k])
                self._check_content(number, row, int(starts[k]), stored, int(kinds[k]), n_bytes)

    def _hash_suffices(
        self, first_row: int, numbers: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """Return a mask of the records that are valid if they are raw and match their hashes.

        Records of optional fields need another check: a missing value must not have a record.
        """
        fields, found = self._fields, np.zeros(len(numbers), np.bool_)
        for k, (name, field) in enumerate(fields):
            if name not in self._present:
                here = np.flatnonzero(numbers % len(fields) == k)
                rows = first_row + numbers[here] // len(fields)
                found[here] = field.are_valid(self._shapes[name][rows])
        return found

    def _utf8_suffices(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return a mask of the records that are valid if they are raw, match, and are UTF-8."""
        fields = self._fields
        plain = [field.is_utf8 and name not in self._present for name, field in fields]
        found: npt.NDArray[np.bool_] = np.array(plain)[numbers % len(fields)]
        return found

    def _check_content(
        self, field_index: int, row: int, offset: int, stored: memoryview, codec: int, n_bytes: int
    ) -> None:
        """Check that a record, whose hash is correct, can be decoded to a value of its field.

        `field_index` counts the fields with records, `offset` is the offset of the record in the
        file, and `n_bytes` is the size of the record after decompression.
        """
        name, field = self._fields[field_index]
        dims, dictionary = self._shapes[name][row], self._dictionaries.get(name)
        try:
            spec = BY_CODE[codec]
            if dictionary is not None and spec.compress and not spec.has_dictionary:
                raise ShardCorrupt("a record does not use its field's dictionary", code="codec")
            if name in self._present and not self._present[name][row]:
                check_absent(dims, n_bytes)
            else:
                record = decode(stored, codec, n_bytes, dictionary)
                if dictionary is not None and spec.has_dictionary:
                    check_dictionary(stored, dictionary)
                field.check_record(record, dims)
        except ShardCorrupt as error:
            where = self._location(row, field_index, offset)
            numbers = {"expected": error.expected, "found": error.found}
            self._findings.add(error.code, error.what, **where, **numbers)
