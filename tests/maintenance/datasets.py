"""Datasets for the tests of maintenance, and damage to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardio import Array, Schema, ShardReader, ShardWriter, Text
from shardio.dataset.manifest import load, publish
from shardio.format.layout import NO_FIELD, Kind
from shardio.maintenance import verify_dataset
from shardio.storage import fs
from tests.shards import EVERY_FIELD, every_field_sample

LABELS = Schema({"label": Array("int64"), "source": Text()})


def write(
    folder: Path,
    n_samples: int,
    n_shards: int = 1,
    names: str = "000000-{:03d}",
    *,
    schema: Schema = EVERY_FIELD,
    samples: Iterable[Mapping[str, Any]] | None = None,
    classes: Sequence[str] = (),
    **details: Any,
) -> Path:
    """Write a dataset of n_samples in n_shards shards; of EVERY_FIELD's values by default."""
    folder.mkdir(parents=True)
    values = map(every_field_sample, range(n_samples)) if samples is None else iter(samples)
    shards = []
    for k in range(n_shards):
        with ShardWriter(folder / f"{names.format(k)}.shard", schema) as writer:
            for _ in range((k + 1) * n_samples // n_shards - k * n_samples // n_shards):
                writer.append(next(values))
            shards.append(writer.close())
    publish(folder, schema=schema, shards=shards, classes=classes, **details)
    return folder


def labelled(n: int, *, first: int = 0, n_classes: int = 2) -> list[dict[str, Any]]:
    """Make samples of LABELS: the label is a class, the source holds the number."""
    return [{"label": i % n_classes, "source": f"clip {i}"} for i in range(first, first + n)]


def shard_of(folder: Path, k: int) -> Path:
    """Return the k-th shard that `write` made."""
    return folder / f"000000-{k:03d}.shard"


def side_of(folder: Path, name: str, k: int) -> Path:
    """Return the k-th shard of an added column."""
    (side,) = [side for side in load(folder).column_groups if side.name == name]
    return Path(folder, side.shards[k].name)


def place(path: Path, kind: Kind, field: str | None = None, of_kind: int = 0) -> tuple[int, int]:
    """Offset and size of a section."""
    with ShardReader(path) as reader:
        number = NO_FIELD if field is None else reader.schema.field_id(field)
        found = {s.key: s for s in reader.sections}[kind, number, of_kind]
        return found.offset, found.size


def tree(folder: Path) -> dict[str, bytes]:
    """All files below a folder, and what they hold."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def is_sound(folder: Path) -> bool:
    """Return True if verification finds nothing wrong, and no file that is unknown."""
    report = verify_dataset(folder, workers=0)
    return (report.findings, report.unknown) == ((), ())


def generation_file(folder: Path, number: int = 1) -> Path:
    return folder / "generations" / f"{number:06d}.json"


def forge(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Change a published file as its own writer would have written it: canonical, right digest."""
    content = fs.read_checksummed_json(path)
    content.pop("digest", None)
    change(content)
    path.write_bytes(fs.to_checksummed_json(content))
    return path
