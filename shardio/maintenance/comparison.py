"""Compare two datasets or shards, and find the samples that differ.

Instead of values, 64-bit digests are compared. A *stored* digest is computed from the hashes in a
shard, if possible without reading the data. The stored digests of equal values may differ if the
values were encoded with different codecs or codec versions. A *value* digest is computed from the
decoded value.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio._base.classes import one_line
from shardio._base.html import fragment, listing, table
from shardio.dataset.transaction import detect_conflict
from shardio.format.checksum import hash_bytes, rows_per_unit
from shardio.format.codecs import BY_CODE
from shardio.format.sections import codecs
from shardio.maintenance.jobs import takes_paths
from shardio.samples.shard_dataset import ShardDataset
from shardio.shard.reader import ShardReader
from shardio.shard.verification import Rows

Digests = npt.NDArray[np.uint64]
DigestsOf = Callable[[ShardReader, str, Rows], Digests]

_WORD: Final = 8
_MISSING: Final = b"None"
"""The bytes that are hashed for a missing value. No value consists of these bytes."""


def stored_digests(reader: ShardReader, name: str, rows: Rows) -> Digests:
    """Return a digest of the field `name` for each row, from stored hashes if possible."""
    field = reader.schema[name]
    if name in reader.schema.columns:
        return _column_digests(reader, name, rows)
    entries = reader.records.entries(name, rows)
    kinds = codecs(entries)
    # If two shards have different compression dictionaries, the same stored bytes may stand for
    # different values.
    if any(BY_CODE[kind].has_dictionary for kind in np.unique(kinds).tolist()):
        return value_digests(reader, name, rows)
    digests = mix(entries["hash"].astype(np.uint64), kinds)
    if field.is_streamed:
        tables = reader.records.tables(name, rows, entries)
        found = [hash_bytes(each.row + each.packets) for each in tables]
        digests = mix(digests, np.array(found, np.uint64))
    return mix(digests, *reader.records.shapes(name, rows).T, reader.present(name, rows))


def value_digests(reader: ShardReader, name: str, rows: Rows) -> Digests:
    """Return a digest of the decoded value of the field `name` for each row."""
    field = reader.schema[name]
    found = np.empty(len(rows), np.uint64)
    for i, row in enumerate(rows.tolist()):
        value = reader.sample(row, [name])[name]
        is_missing = value is None and field.optional
        found[i] = hash_bytes(_MISSING if is_missing else field.value_bytes(value))
    return found


def exact_digests(reader: ShardReader, name: str, rows: Rows) -> Digests:
    """Return digests that are equal if, and only if, the values of the field `name` are equal."""
    compute = _column_digests if name in reader.schema.columns else value_digests
    return compute(reader, name, rows)


def mix(digests: Digests, *others: npt.NDArray[Any]) -> Digests:
    """Combine several arrays of digests, or of other numbers, into one digest for each row."""
    mixed = digests.copy()
    for other in others:
        mixed ^= other.astype(np.uint64)
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return mixed


def _column_digests(reader: ShardReader, name: str, rows: Rows) -> Digests:
    """Return digests of a column that are equal if, and only if, the values are equal."""
    digests = _row_digests(reader, name, rows)
    if reader.schema.columns[name].optional:  # the row of a missing value consists of zeros
        return mix(digests, reader.present(name, rows))
    return digests


def _row_digests(reader: ShardReader, name: str, rows: Rows) -> Digests:
    """Return the stored hash of each row of a column or, if rows share hashes, compute digests."""
    field = reader.schema.columns[name]
    n_bytes = field.row_bytes or 0
    if rows_per_unit(n_bytes, field.stride) == 1:
        return reader.units.column_hashes(name, rows).astype(np.uint64)
    found = reader.column(name, rows)
    values = np.ascontiguousarray(found).reshape(len(rows), -1).view(np.uint8)
    if n_bytes <= _WORD:
        words = np.zeros((len(rows), _WORD), np.uint8)
        words[:, :n_bytes] = values
        return words.view("<u8").reshape(-1).astype(np.uint64)
    return np.array([hash_bytes(value.data) for value in values], np.uint64)


MAX_LISTED: Final = 10_000
"""The maximum length of each list of samples in a report. Further samples are only counted."""
_CHUNK_ROWS: Final = 1 << 14


@dataclass
class DiffReport:
    """The differences between two datasets or shards, with the paths `a` and `b`.

    If both have the same number of samples, samples with the same index are compared: `changed`
    lists the index of each sample that differs, and the names of the fields in which it differs.
    Otherwise, the order is ignored: `only_a` and `only_b` list the indices of the samples without
    an equal sample on the other side.

    Each list has at most `MAX_LISTED` items; `n_changed`, `n_only_a` and `n_only_b` count all
    samples.
    """

    a: str
    b: str
    n_a: int = 0
    n_b: int = 0
    fields_only_a: list[str] = field(default_factory=list)
    fields_only_b: list[str] = field(default_factory=list)
    fields_redefined: list[str] = field(default_factory=list)
    classes_differ: bool = False
    n_changed: int = 0
    n_only_a: int = 0
    n_only_b: int = 0
    changed: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    only_a: list[int] = field(default_factory=list)
    only_b: list[int] = field(default_factory=list)

    def _facts(self) -> tuple[str, ...]:
        result = "same" if self.is_same else "different"
        classes = "class names differ" * self.classes_differ
        each = self.n_a == self.n_b
        samples = f"{self.n_a:,} {'samples each' if each else f'and {self.n_b:,} samples'}"
        return result, classes, samples

    def __repr__(self) -> str:
        n = len({*self.fields_only_a, *self.fields_only_b, *self.fields_redefined})
        return one_line(self, [self.a, self.b], *self._facts(), a=0, b=0, different_fields=n)

    def _repr_html_(self) -> str:
        lists = (
            ("fields only in a", self.fields_only_a, len(self.fields_only_a)),
            ("fields only in b", self.fields_only_b, len(self.fields_only_b)),
            ("fields of other types", self.fields_redefined, len(self.fields_redefined)),
            ("samples only in a", self.only_a, self.n_only_a),
            ("samples only in b", self.only_b, self.n_only_b),
        )
        rows = ((i, ", ".join(names)) for i, names in self.changed)
        changed = table(("sample", "different fields"), rows, self.n_changed)
        parts = *(listing(*each) for each in lists), changed
        return fragment("DiffReport", self.a, (f"and {self.b}", *self._facts()), *parts)

    @property
    def is_same(self) -> bool:
        """True if there are no differences."""
        fields = self.fields_only_a or self.fields_only_b or self.fields_redefined
        samples = self.n_changed or self.n_only_a or self.n_only_b
        return not (fields or samples or self.classes_differ)

    def as_json(self) -> dict[str, Any]:
        """Return a JSON-serializable dict."""
        changed = [{"sample": row, "fields": list(names)} for row, names in self.changed]
        return {"is_same": self.is_same, **asdict(self), "changed": changed}


class _Side:
    def __init__(self, path: str, stack: ExitStack) -> None:
        self.classes: tuple[str, ...] = ()
        self._reader: Callable[[int, str], ShardReader]
        if os.path.isfile(path):
            reader = stack.enter_context(ShardReader(path))
            self._reader = lambda shard, name: reader
            self.schema, counts = reader.schema, [len(reader)]
        else:
            stack.enter_context(detect_conflict(path))
            dataset = stack.enter_context(ShardDataset(path))
            self._reader, self.schema = dataset.reader, dataset.schema
            self.classes = dataset.classes
            counts = [shard.n_samples for shard in dataset.shards]
        self._starts: Rows = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def digests(self, compute: DigestsOf, name: str, rows: Rows) -> Digests:
        """Return the digests of `rows`, which are indices over all shards."""
        found = np.zeros(len(rows), np.uint64)
        shards = np.searchsorted(self._starts, rows, side="right") - 1
        for shard in np.unique(shards).tolist():
            here = shards == shard
            found[here] = compute(self._reader(shard, name), name, rows[here] - self._starts[shard])
        return found


@takes_paths("diff(a, b)", "a", "b")
def diff(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> DiffReport:
    """Compare two datasets or shards: their fields, their classes and their samples.

    Samples are compared in the fields that both sides have. First, the hashes in the shards are
    compared; compressed values are decoded if their hashes differ. The distribution of samples over
    shards makes no difference. Only data that must be read is verified.

    Raises:
        DatasetNotFound, ShardCorrupt, …: a dataset or shard cannot be read.
        DatasetConflict: another writer removed shards during the comparison.
    """
    report = DiffReport(os.fspath(a), os.fspath(b))
    with ExitStack() as stack:
        sides = _Side(report.a, stack), _Side(report.b, stack)
        report.n_a, report.n_b = len(sides[0]), len(sides[1])
        report.classes_differ = sides[0].classes != sides[1].classes
        a_schema, b_schema = (side.schema for side in sides)
        names = [name for name in a_schema if name in b_schema]
        report.fields_only_a = [name for name in a_schema if name not in b_schema]
        report.fields_only_b = [name for name in b_schema if name not in a_schema]
        report.fields_redefined = [name for name in names if a_schema[name] != b_schema[name]]
        if report.n_a == report.n_b:
            _compare_by_number(report, *sides, names)
        else:
            _compare_by_content(report, *sides, names)
    return report


def _row_chunks(n: int) -> Iterator[Rows]:
    for start in range(0, n, _CHUNK_ROWS):
        yield np.arange(start, min(n, start + _CHUNK_ROWS))


def _compare_by_number(report: DiffReport, a: _Side, b: _Side, names: list[str]) -> None:
    for rows in _row_chunks(len(a)):
        differ: dict[str, npt.NDArray[np.bool_]] = {}
        for name in names:
            masks = a.digests(stored_digests, name, rows) != b.digests(stored_digests, name, rows)
            if masks.any() and not _is_exact(a, b, name):
                some = rows[masks]
                values = a.digests(value_digests, name, some), b.digests(value_digests, name, some)
                masks[masks] = values[0] != values[1]
            differ[name] = masks
        if not differ:
            continue
        found = np.flatnonzero(np.any(list(differ.values()), axis=0))
        report.n_changed += len(found)
        for i in found[: MAX_LISTED - len(report.changed)].tolist():
            fields = tuple(name for name, mask in differ.items() if mask[i])
            report.changed.append((int(rows[i]), fields))


def _is_exact(a: _Side, b: _Side, name: str) -> bool:
    """Return True if values of a field always differ when their stored digests differ."""
    if a.schema[name] != b.schema[name]:
        return False
    return name in a.schema.columns or a.schema[name].codec == "raw"


def _compare_by_content(report: DiffReport, a: _Side, b: _Side, names: list[str]) -> None:
    exact = all(_is_exact(a, b, name) for name in names)
    found_a = _combined_digests(a, stored_digests, names, np.arange(len(a)))
    found_b = _combined_digests(b, stored_digests, names, np.arange(len(b)))
    rows_a, rows_b = _unmatched(found_a, found_b)
    if not exact and len(rows_a) and len(rows_b):
        left_a = _combined_digests(a, value_digests, names, rows_a)
        left_b = _combined_digests(b, value_digests, names, rows_b)
        kept_a, kept_b = _unmatched(left_a, left_b)
        rows_a, rows_b = rows_a[kept_a], rows_b[kept_b]
    report.n_only_a, report.n_only_b = len(rows_a), len(rows_b)
    report.only_a, report.only_b = rows_a[:MAX_LISTED].tolist(), rows_b[:MAX_LISTED].tolist()


def _combined_digests(side: _Side, compute: DigestsOf, names: list[str], rows: Rows) -> Digests:
    """Return, for each of `rows`, one digest of all fields in `names`."""
    found = np.zeros(len(rows), np.uint64)
    for places in _row_chunks(len(rows)):
        part = rows[places]
        fields = [side.digests(compute, name, part) for name in names]
        found[places] = mix(np.zeros(len(part), np.uint64), *fields)
    return found


def _unmatched(a: Digests, b: Digests) -> tuple[Rows, Rows]:
    """Return the indices of digests that occur only in `a`, and of those that occur only in `b`.

    If a digest has n more occurrences on one side, the last n of them are returned.
    """
    known, numbers = np.unique(np.concatenate([a, b]), return_inverse=True)
    of_a, of_b = numbers[: len(a)], numbers[len(a) :]
    surplus = np.bincount(of_a, minlength=len(known)) - np.bincount(of_b, minlength=len(known))
    return _last_occurrences(of_a, surplus), _last_occurrences(of_b, -surplus)


def _last_occurrences(numbers: npt.NDArray[np.intp], wanted: npt.NDArray[np.intp]) -> Rows:
    """Return the indices of the last `wanted[k]` occurrences of each k in `numbers`, ascending."""
    order = np.argsort(numbers, kind="stable")
    ordered = numbers[order]
    ends = np.searchsorted(ordered, ordered, side="right")
    is_wanted = ends - np.arange(len(ordered)) <= wanted[ordered]
    return np.sort(order[is_wanted]).astype(np.int64)
