"""The one driver of exports: reads, writes, and publishes the result as a whole."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from shardio.dataset.dataset import Dataset, ShardDataset
from shardio.errors import InvalidArgument, UnsupportedEnvironment, install_hint
from shardio.export.formats import Exporter, ExportOptions, SampleReader, Skipped
from shardio.export.target import ABOUT_FILE, ExportTarget
from shardio.maintenance.overtaking import tell_overtaken
from shardio.storage.fs import create, sync
from shardio.version import __version__

FORMATS: Final = {
    "files": ("shardio.export.files", "FilesExporter"),
    "npy": ("shardio.export.files", "NpyExporter"),
    "parquet": ("shardio.export.parquet", "ParquetExporter"),
    "webdataset": ("shardio.export.webdataset", "WebDatasetExporter"),
}
"""Where what writes each format lives."""
SCHEMA_FILE: Final = "_schema.json"
SHARD_BYTES: Final = 256 << 20
_PACKAGES: Final = {"parquet": ("pyarrow", "arrow")}


@dataclass(frozen=True, slots=True)
class ExportProgress:
    """How far an export is; bytes are those of the dataset.

    `is_syncing`: all samples are written, and the disk is waited for.
    """

    n_samples_done: int
    n_samples: int
    n_bytes_done: int
    n_bytes: int
    is_syncing: bool = False


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What came of an export."""

    out: str
    format: str
    n_samples: int
    n_files: int
    n_bytes: int
    fields: tuple[str, ...]
    skipped: tuple[Skipped, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The report in JSON's terms."""
        return {**asdict(self), "skipped": [asdict(one) for one in self.skipped]}


def export(
    dataset: str | os.PathLike[str] | Dataset,
    out: str | os.PathLike[str],
    format: str,
    *,
    fields: Iterable[str] | None = None,
    subset: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    on_error: str = "stop",
    overwrite: bool = False,
    progress: Callable[[ExportProgress], None] | None = None,
) -> ExportReport:
    """Write the samples of a dataset as files of another format, into a folder of their own.

    The folder appears when all of it is written and on the disk.

    Args:
        dataset: a folder, or an open dataset, of which the samples are those it shows.
        out: the folder to make; it may be there if it is empty.
        format: "webdataset", "parquet", "npy" or "files".
        fields: names of those to export; all by default. A nested record's name stands for all
            that is in it.
        subset: the name of a subset of a folder's dataset.
        shard_bytes: about how much goes into one tar, or one file of Parquet.
        on_error: "stop" at the first damaged sample, or "skip" it.
        overwrite: an export in `out` gives way once the new one is done.
        progress: called now and then, and before the disk is waited for at the end.

    Raises:
        InvalidArgument: an option is not acceptable, or the format cannot hold a field.
        DatasetExists: there is something in `out`.
        ShardCorrupt, …: a sample is damaged; nothing is left of the export.
        DatasetConflict: another writer has removed shards of the generation that is exported.
        UnsupportedEnvironment: a package is missing.
    """
    if format not in FORMATS or on_error not in ("stop", "skip"):
        raise InvalidArgument(
            f"format {format!r}, on_error {on_error!r}; expected one of {', '.join(FORMATS)}, and "
            "stop or skip"
        )
    if type(shard_bytes) is not int or shard_bytes < 1:
        raise InvalidArgument(f"shard_bytes is {shard_bytes!r}; it must be 1 or more")
    with _open(dataset, subset) as source:
        asked = ExportOptions(source, _select_fields(source, fields), shard_bytes)
        target = ExportTarget(out, source.path, overwrite=overwrite)
        writer = _make_exporter(format, asked)
        samples = SampleReader(source, asked.fields, writer.prepare, skips=on_error == "skip")
        with target, tell_overtaken(source.path, source.generation):
            n_samples = _write_samples(samples, writer, target.folder, progress)
            about = {"format": format, "samples": n_samples, **_provenance(source, samples)}
            _write_json(target.folder / ABOUT_FILE, about)
            if writer.words is not None:
                _write_json(target.folder / SCHEMA_FILE, writer.words)
            sizes = [*_sizes(target.folder)]
            target.publish()
    return ExportReport(
        str(out),
        format,
        n_samples,
        len(sizes),
        sum(sizes),
        tuple(asked.fields),
        tuple(samples.skipped),
    )


def _open(
    dataset: str | os.PathLike[str] | Dataset, subset: str | None
) -> contextlib.AbstractContextManager[Dataset]:
    if not isinstance(dataset, Dataset):
        return ShardDataset(dataset, subset=subset)
    if subset is not None:
        raise InvalidArgument("subset is for the path of a dataset: open it with its subset")
    if dataset.rows.clips is not None or dataset.rows.packed is not None:
        raise InvalidArgument(
            f"{dataset.path}: shows clips or windows; what is exported is whole samples"
        )
    return contextlib.nullcontext(dataset)


def _select_fields(dataset: Dataset, names: Iterable[str] | None) -> dict[str, Any]:
    """The fields of some names, or all, in the order of the schema."""
    schema = dataset.schema
    if names is None:
        return dict(schema)
    asked = [names] if isinstance(names, str) else [*names]
    known = {*schema, *schema.groups}
    if not asked or (unknown := [name for name in asked if name not in known]):
        found = f"no field {unknown[0]!r}" if asked else "no field is asked for"
        raise InvalidArgument(f"{dataset.place}: {found}; there are: {', '.join(schema)}")
    inside = tuple(f"{name}." for name in asked)
    return {n: f for n, f in schema.items() if n in asked or f"{n}.".startswith(inside)}


def _make_exporter(format: str, asked: ExportOptions) -> Exporter:
    """What writes a format, once it is sure that it can hold the fields."""
    module, name = FORMATS[format]
    try:
        kind: Callable[[ExportOptions], Exporter] = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        package, extra = _PACKAGES.get(format, ("", ""))
        if error.name != package:
            raise
        raise UnsupportedEnvironment(
            f"format {format!r} needs {package}: {install_hint(extra)}"
        ) from error
    return kind(asked)


def _write_samples(
    samples: SampleReader,
    writer: Exporter,
    folder: Path,
    progress: Callable[[ExportProgress], None] | None,
) -> int:
    """Write all samples; returns how many there are."""
    dataset, n_samples = samples.dataset, 0
    n_all, n_rows = len(dataset), int(dataset.starts[-1])
    n_bytes = sum(shard.n_bytes for shard in dataset.shards) * n_all // max(1, n_rows)
    try:
        writer.begin(folder)
        for batch in samples:
            writer.add(batch)
            n_samples += len(batch)
            if progress is not None:
                n_done = n_samples + len(samples.skipped)
                progress(ExportProgress(n_done, n_all, n_bytes * n_done // n_all, n_bytes))
        if progress is not None:
            progress(ExportProgress(n_all, n_all, n_bytes, n_bytes, is_syncing=True))
        writer.end()
    finally:
        writer.close()
    return n_samples


def _provenance(dataset: Dataset, samples: SampleReader) -> dict[str, Any]:
    """What an export says of where it comes from."""
    return {
        "fields": list(samples.fields),
        "classes": list(dataset.classes),
        "lineage": dataset.lineage,
        "generation": dataset.generation,
        "subset": dataset.subset,
        "skipped": [one.sample for one in samples.skipped],
        "shardio": __version__,
    }


def _write_json(path: Path, content: object) -> None:
    with create(path) as file:
        file.write(json.dumps(content, ensure_ascii=False, indent=1).encode() + b"\n")
        sync(file, path)


def _sizes(folder: Path) -> Iterator[int]:
    """The sizes of all files below a folder."""
    for place, _, names in os.walk(folder):
        for name in names:
            yield os.path.getsize(os.path.join(place, name))
