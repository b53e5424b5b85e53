"""Targets of a fuzzer: each takes any bytes at all, and returns the outcome.

Errors of shardio are outcomes like any other. A target raises `PromiseBroken` if two parts of
shardio disagree: data that a reader refuses must be a finding of verification.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import zstandard

import shardio
from shardio import Array, Bytes, DatasetWriter, Json, Schema, ShardDataset, ShardReader, Text
from shardio.conversion import journal
from shardio.conversion.classes import apply_labels, read_labels
from shardio.conversion.inputs import Listing
from shardio.conversion.journal import PLAN_FILE, RECORD_FILE, Unit, read_plan, read_record
from shardio.dataset import external_lists
from shardio.dataset.external_lists import INPUTS, SHARDS, ExternalList, InputList, ShardList
from shardio.dataset.generation import describe_shards, lineage_of, parse_shards
from shardio.dataset.manifest import GENERATIONS, POINTER
from shardio.errors import DataError, InsufficientMemory, MediaError, ShardCorrupt, ShardioError
from shardio.format.checksum import content_id
from shardio.format.codecs import Codec, decode
from shardio.format.sections import plan_sections
from shardio.format.types import Field
from shardio.format.types.streams import PLANES
from shardio.maintenance import Finding, repair, survey_shard, verify_dataset
from shardio.maintenance.verify.shard import verify_bytes
from shardio.media import ClipDecoder
from shardio.shard.verification import Verify
from shardio.shard.writer import ShardSummary
from shardio.storage.file_access import Access
from shardio.storage.fs import to_checksummed_json
from tests.corruption.forge import SMALL, small_samples
from tests.fuzz.converting import ConverterFiles
from tests.fuzz.judge import Target
from tests.fuzz.seeds import beside

SEPARATOR: Final = b"\n\0\n"
"""Between dataset.json and its generation, in an input of `DatasetFolder`."""
_VERIFY: Final[tuple[Verify, ...]] = ("first", "always", "off")
_MAX_ROWS: Final = 500
_MAX_PLANES_BYTES: Final = 1 << 18
_FOR_AUDITS: Final = frozenset(
    "padding tiling codec value validity section_hash counting chunks parameters feature"
    " planes more".split()
)
"""Rules that a reader need not check: what breaks them is returned as its writer put it there."""


class PromiseBroken(Exception):
    """Parts of shardio contradict one another."""


def outcome_of(error: ShardioError) -> str:
    if isinstance(error, InsufficientMemory):
        raise error  # no input of a fuzzer justifies that much
    code = f":{error.code}" if isinstance(error, ShardCorrupt) else ""
    return type(error).__name__ + code


def _is_for_audits(finding: Finding, verify: Verify) -> bool:
    """Return True if a reader may accept data with this finding."""
    if finding.code == "checksum":
        return verify == "off" or str(finding.section).startswith("kind ")  # of the future: skipped
    return finding.code in _FOR_AUDITS


class ShardFile:
    """Verifies and reads a shard in all ways there are; the bytes are a file in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "input.shard"
        self._dataset = folder / "dataset"
        (self._dataset / GENERATIONS).mkdir(parents=True)

    def __call__(self, content: bytes) -> str:
        chosen = zlib.crc32(content)
        self._path.unlink(missing_ok=True)  # whoever maps the last one keeps it
        self._path.write_bytes(content)
        findings = verify_bytes(memoryview(content), "input.shard").findings if content else None
        try:
            n_read = self._read(chosen)
        except ShardioError as error:
            # A verification does not decode: what is no picture may be stored as one.
            if findings == () and not isinstance(error, MediaError):
                raise PromiseBroken(f"refused, and verification found nothing: {error}") from error
            if chosen % 4 == 0:
                survey_shard(self._path)
            if chosen % 16 == 0:
                self._repair()
            return outcome_of(error)
        verify = _VERIFY[chosen % 3]
        # A chunk that a forged table gives to two streams is checked as the first one's, once.
        shared = {f.field for f in findings or () if f.code == "counting" and verify == "first"}
        missed = [
            f
            for f in findings or ()
            if not (_is_for_audits(f, verify) or f.code == "checksum" and f.field in shared)
        ]
        if missed and n_read:  # who reads no row looks at no index
            raise PromiseBroken(f"a reader did not notice: {missed[0]}")
        return "sound" if not findings else "read, with findings"

    def _read(self, chosen: int) -> int:
        """Read the file in several ways; returns how many rows."""
        access: Access = "mmap" if chosen % 5 else "pread"
        with ShardReader(self._path, verify=_VERIFY[chosen % 3], access=access) as reader:
            rows = np.arange(min(len(reader), _MAX_ROWS))
            for name in reader.schema:
                if name in reader.schema.columns:
                    reader.column(name, rows)
                else:
                    for value in reader.records.values(name, rows):
                        if isinstance(value, shardio.EncodedStream):
                            value.data[:]
                            _decode_planes(value)
            for row in range(0, len(rows), 50):
                reader[row]
            summary = ShardSummary("i.shard", len(reader), reader.header.file_size, reader.id)
            schema = reader.schema
        if chosen % 8 == 0:
            self._read_as_dataset(schema, summary, chosen)
        return summary.n_samples

    def _repair(self) -> None:
        out = self._path.with_name("repaired")
        try:
            repair(self._path, out)
            if findings := verify_dataset(out, workers=0).findings:
                raise PromiseBroken(f"a repaired dataset is not sound: {findings[0]}")
        except DataError:
            pass  # nothing can be told of it
        finally:
            shutil.rmtree(out, ignore_errors=True)

    def _read_as_dataset(self, schema: Schema, summary: ShardSummary, chosen: int) -> None:
        """Gather from it as a loader does; the dataset says of it what is true."""
        target = self._dataset / summary.name
        target.unlink(missing_ok=True)
        os.link(self._path, target)
        _write_generation(self._dataset, schema, summary)
        with ShardDataset(self._dataset, verify=_VERIFY[chosen % 3]) as dataset:
            rows = np.arange(min(len(dataset), _MAX_ROWS))
            for name, field in schema.columns.items():
                gather, shards = dataset.gather(name), dataset.locate(rows)
                out = np.empty((len(rows), field.row_bytes or 0), np.uint8)
                gather.gather(rows, shards, out)
        names = [name for name, field in schema.items() if not field.is_streamed]
        if chosen % 64 == 0 and summary.n_samples and names:
            with shardio.ShardLoader(
                self._dataset,
                batch_size=2,
                fields=names,
                num_workers=0,
                output="numpy",
                shuffle=True,
            ) as loader:
                for _ in loader:
                    pass


def _decode_planes(stream: shardio.EncodedStream) -> None:
    """Decode a small stream of planes; verification has to find whatever is wrong with it."""
    height, width, n = stream.height * 3 // 2, stream.width, stream.n_frames
    is_odd = (stream.height | width) & 1
    if stream.parameters["codec"] != PLANES or is_odd or n * height * width > _MAX_PLANES_BYTES:
        return
    try:
        with ClipDecoder() as decoder:
            out = np.empty((n, height, width), np.uint8)
            decoder.decode(stream, range(n), out, pixels="yuv420")
    except MediaError as error:
        raise ShardCorrupt(str(error), code="planes") from error


def _write_generation(folder: Path, schema: Schema, summary: ShardSummary) -> None:
    generation = generation_of(schema, [summary])
    (folder / GENERATIONS / "000001.json").write_bytes(to_checksummed_json(generation))
    (folder / POINTER).write_bytes(to_checksummed_json(pointer_to(generation)))


def generation_of(schema: Schema, shards: list[ShardSummary]) -> dict[str, Any]:
    return {
        "format_version": "1.0",
        "generation": 1,
        "lineage": lineage_of(schema, shards),
        "schema": json.loads(schema.to_json()),
        "shards": [
            {"name": s.name, "samples": s.n_samples, "bytes": s.n_bytes, "id": s.id} for s in shards
        ],
        "classes": ["a", "b"],
        "inputs": [{"path": "a/1", "outcome": "converted", "samples": 2}],
        "converter": {"name": "videos", "options": {"size": 4}},
        "versions": {"shardio": "1"},
        "view": {"kind": "rows"},
    }


def pointer_to(generation: dict[str, Any]) -> dict[str, Any]:
    return {
        "format": "shardio dataset",
        "version": 1,
        "generation": generation["generation"],
        "lineage": generation["lineage"],
    }


class DatasetFolder:
    """Opens, reads and verifies a dataset whose two JSON files are the input."""

    def __init__(self, folder: Path) -> None:
        self._root = folder / "folder"
        with DatasetWriter(self._root, SMALL, shard_bytes=1) as writer:
            for sample in small_samples():
                writer.append(sample)
        self._generation = self._root / GENERATIONS / "000001.json"
        files = (self._root / POINTER, self._generation)
        self.pointer, self.generation = (json.loads(file.read_bytes()) for file in files)
        """The content of the two files of the dataset as it was written, without digests."""
        for content in (self.pointer, self.generation):
            del content["digest"]
        self.generation["subsets"] = {"train": {"rows": "0 1 1 1", "samples": 2}}
        self.generation["stats"] = {"vector": {"mean": 0.5}}
        self.generation |= beside(self._root, [s["samples"] for s in self.generation["shards"]])

    def __call__(self, content: bytes) -> str:
        pointer, _, generation = content.partition(SEPARATOR)
        (self._root / POINTER).write_bytes(pointer)
        self._generation.write_bytes(generation)
        refused = None
        try:
            with ShardDataset(self._root) as dataset:
                for _ in dataset:
                    pass
        except ShardioError as error:
            refused = error
        if refused is not None and zlib.crc32(content) % 8 == 0:
            report = verify_dataset(self._root, workers=0)
            if isinstance(refused, DataError) and not report.findings:
                raise PromiseBroken(f"refused, and verification found nothing: {refused}")
        return "sound" if refused is None else outcome_of(refused)


def feed_schema(content: bytes) -> str:
    """Parse a schema; what is accepted must be in the one form it is stored in."""
    try:
        schema = Schema.from_json(content)
    except ShardioError as error:
        return outcome_of(error)
    plan_sections(schema, 1 << 48)
    if schema.to_json() != content:
        raise PromiseBroken("a schema in another than its canonical form was accepted")
    return "sound"


_FIELDS: Final[tuple[Field, ...]] = (
    Text(codec="zstd"),
    Json(codec="zstd"),
    Bytes(codec="zstd"),
    Array("bool", (None,), codec="zstd"),
    Array("float32", (2, 3), codec="zstd"),
)


def feed_record(content: bytes) -> str:
    """Decode one record: its first byte tells the field, the second the codec."""
    if len(content) < 2:
        return "too short"
    field, codec, stored = _FIELDS[content[0] % len(_FIELDS)], content[1] % 2, content[2:]
    n_bytes = len(stored)
    if codec == Codec.ZSTD:
        try:
            declared = zstandard.frame_content_size(stored)  # -1 if it says nothing
            n_bytes = max(0, min(declared, 32768 * len(stored)))
        except zstandard.ZstdError:
            n_bytes = 1 + len(stored)
    try:
        record = decode(memoryview(stored), codec, n_bytes)
    except ShardioError as error:
        return outcome_of(error)
    dims = np.array([n_bytes] * len(field.stored_dims), np.uint64)
    try:
        field.check_record(record, dims)
    except ShardioError as error:
        return outcome_of(error)
    if isinstance(field, Array):
        return "sound"
    try:
        field.decode(record, ())
    except ValueError as error:
        raise PromiseBroken(f"verification accepts an undecodable record: {error}") from None
    return "sound"


def feed_labels(folder: Path, content: bytes) -> str:
    """Read labels, CSV or JSON Lines by the first byte, and give them to the files they name."""
    path = folder / ("labels.jsonl" if content and content[0] % 2 else "labels.csv")
    path.write_bytes(content[1:])
    try:
        labels = read_labels(str(path))
        inputs = Listing(tuple(shardio.Input(n, n, 1, -1) for n in labels), ())
        listing = apply_labels(inputs, labels, "here")
    except ShardioError as error:
        return outcome_of(error)
    named = [listing.classes[source.label] for source in listing.inputs]
    if named != list(labels.values()):
        raise PromiseBroken("a file has another class than its label says")
    return "sound" if labels else "empty"


def feed_journal(folder: Path, content: bytes) -> str:
    """Read what an interrupted conversion left: the plan, or by the first byte a unit's record."""
    is_plan = not content or content[0] % 2 == 0
    (folder / (PLAN_FILE if is_plan else RECORD_FILE)).write_bytes(content[1:])
    try:
        if not is_plan:
            return "kept" if read_record(folder, Unit(0, 0, ())) else "made anew"
        if plan := read_plan(folder):
            journal.check_same_settings(plan, {"machine": "x86_64"}, folder, "or not")
    except ShardioError as error:
        return outcome_of(error)
    return "sound"


def feed_part(folder: Path, content: bytes) -> str:
    """Read a list that lies in a part: of shards, or by the first byte of inputs.

    The second byte is how many entries a generation says that it has. What is accepted must be in
    the one form it is stored in, and be what the JSON of a generation may list as well.
    """
    if len(content) < 2:
        return "too short"
    kind, count, stored = (SHARDS, INPUTS)[content[0] % 2], content[1], content[2:]
    place = folder / "000001.json"
    part = ExternalList(place.with_suffix(f".{kind}"), "", len(stored), max(1, count))
    try:
        if kind == INPUTS:
            part.path.write_bytes(stored)
            listing = InputList(replace(part, id=content_id(stored).hex()))
            known = external_lists.pack_inputs(list(listing))
        else:
            found = ShardList.parse(part, stored)
            listed = ShardList.of(found[k] for k in range(len(found)))
            if parse_shards(describe_shards(listed, {}), place) != tuple(found):
                raise PromiseBroken("shards of a part are others than a generation could list")
            known = listed.content
    except ShardioError as error:
        return outcome_of(error)
    if known != stored:
        raise PromiseBroken(f"a part of {kind} in another than its one form was accepted")
    return "sound"


def targets(folder: Path) -> dict[str, Target]:
    """All targets by name; those that need files keep them in `folder`."""
    plan_folder, part = folder / "journal", folder / "part" / GENERATIONS
    for place in (plan_folder, part):
        place.mkdir(parents=True)
    return {
        "shard": ShardFile(folder),
        "dataset": DatasetFolder(folder),
        "schema": feed_schema,
        "record": feed_record,
        "labels": partial(feed_labels, folder),
        "journal": partial(feed_journal, plan_folder),
        "part": partial(feed_part, part),
        "converter": ConverterFiles(folder),
    }
