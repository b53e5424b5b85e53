"""Export a dataset as files of another format."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from shardio._base import __version__
from shardio._base.callers import one_of
from shardio._base.classes import one_line
from shardio._base.progress import ProgressState, counted, shows_progress
from shardio.dataset.dataset import Dataset
from shardio.dataset.manifest import holds_dataset, refuse_nested
from shardio.dataset.transaction import NewFolder, detect_conflict
from shardio.errors import DatasetExists, InvalidArgument, UnsupportedEnvironment, install_hint
from shardio.export.formats import Exporter, ExportOptions, SampleReader, Skipped
from shardio.maintenance.jobs import takes_paths
from shardio.samples.shard_dataset import ShardDataset
from shardio.storage.fs import create, sync

ABOUT_FILE: Final = "_export.json"
"""The file with the metadata of an export. Parquet readers ignore names that start with `_`."""
FORMATS: Final = {
    "files": ("shardio.export.files", "FilesExporter"),
    "parquet": ("shardio.export.parquet", "ParquetExporter"),
    "webdataset": ("shardio.export.webdataset", "WebDatasetExporter"),
}
"""For each format, the module and the class of the exporter that writes this format."""
SCHEMA_FILE: Final = "_schema.json"
SHARD_BYTES: Final = 256 << 20
_PACKAGES: Final = {"parquet": ("pyarrow", "arrow")}
_ADVICE: Final = {"format": f"format is one of {', '.join(map(repr, FORMATS))}"}


@dataclass(frozen=True, slots=True)
class ExportProgress:
    """The progress of an export.

    The numbers of bytes are estimated from the sizes of the dataset's shards. `is_syncing` is True
    when all samples are written and the export waits until the files are on the disk.
    """

    n_samples_done: int
    n_samples: int
    n_bytes_done: int
    n_bytes: int
    is_syncing: bool = False


def _progress_state(state: ExportProgress) -> ProgressState:
    counts = f"{state.n_samples_done:,} of {counted(state.n_samples, 'samples')}"
    return ProgressState(
        title="writing to the disk" if state.is_syncing else "exporting",
        done=state.n_bytes_done,
        total=state.n_bytes,
        counts=counts,
    )


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The result of an export.

    `subsets_dropped` are the names of the dataset's subsets, if all its samples were exported: no
    format records subsets.
    """

    out: str
    format: str
    n_samples: int
    n_files: int
    n_bytes: int
    fields: tuple[str, ...]
    skipped: tuple[Skipped, ...] = ()
    subsets_dropped: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return one_line(self, [self.out], self.format, skipped=len(self.skipped))

    def as_json(self) -> dict[str, Any]:
        """Return a JSON-serializable dict."""
        return {**asdict(self), "skipped": [asdict(one) for one in self.skipped]}


@shows_progress(_progress_state)
@takes_paths("export(dataset, out, format)", outputs=("out",), advice=_ADVICE)
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
    progress: Callable[[ExportProgress], None] | bool | None = None,
) -> ExportReport:
    """Write the samples of a dataset as files of another format to a new folder.

    The folder appears when all its files are complete and on the disk.

    Args:
        dataset: the folder of a dataset, or an open dataset with the samples to export.
        out: the folder to create. An empty folder may exist at this path.
        format: "webdataset", "parquet" or "files".
        fields: the names of the fields to export; by default, all fields. The name of a nested
            record selects all fields of the record.
        subset: the name of a subset to export. Only allowed if `dataset` is a folder.
        shard_bytes: the approximate size in bytes of each tar or Parquet file.
        on_error: "stop" raises an error for the first damaged sample. "skip" leaves out damaged
            samples and lists them in the report.
        overwrite: if True, an earlier export at `out` is replaced when the new one is complete.
        progress: called after each batch of samples, and before the files are synced to the disk;
            or True to show a bar on standard error, as `shardio.convert` does.

    Raises:
        InvalidArgument: an option is invalid, the format cannot represent a field, or `out` is or
            lies in a dataset, or contains `dataset`.
        DatasetExists: `out` is not empty, and is not an export that `overwrite` replaces.
        ShardCorrupt, …: a sample is damaged. The incomplete export is removed.
        DatasetConflict: while the export ran, another process published a new state of the dataset
            and removed files that the export still needed.
        UnsupportedEnvironment: a package that the format needs is not installed, or `overwrite` is
            True and the file system cannot replace a folder in one step.
    """
    one_of("format", format, tuple(FORMATS))
    one_of("on_error", on_error, ("stop", "skip"))
    if type(shard_bytes) is not int or shard_bytes < 1:
        raise InvalidArgument(f"shard_bytes is {shard_bytes!r}; it must be 1 or more")
    with _open(dataset, subset) as source:
        options = ExportOptions(source, _select_fields(source, fields), shard_bytes)
        out_path = _check_folder(out, source.path)
        exporter = _make_exporter(format, options)
        samples = SampleReader(
            source, options.fields, exporter.prepare, skip_damaged=on_error == "skip"
        )
        with NewFolder(out_path) as target, detect_conflict(source.path, source.generation):
            if _check_replaceable(out, overwrite=overwrite):
                target.check_can_replace()
            show = progress if callable(progress) else None
            n_samples = _write_samples(samples, exporter, target.folder, show)
            about = {
                "format": format,
                "samples": n_samples,
                "fields": list(samples.fields),
                "classes": list(source.classes),
                "lineage": source.lineage,
                "generation": source.generation,
                "subset": source.subset_name,
                "skipped": [one.sample for one in samples.skipped],
                "shardio": __version__,
            }
            if exporter.schema_spec is not None:
                _write_json(target.folder / SCHEMA_FILE, exporter.schema_spec)
            about["files"] = len(_files_in(target.folder)) + 1
            _write_json(target.folder / ABOUT_FILE, about)
            sizes = [os.path.getsize(file) for file in _files_in(target.folder)]
            target.publish(replace=overwrite and _check_replaceable(out, overwrite=True))
    return ExportReport(
        str(out),
        format,
        n_samples,
        len(sizes),
        sum(sizes),
        tuple(options.fields),
        tuple(samples.skipped),
        () if source.subset_name else tuple(source.subsets),
    )


def _check_folder(out: str | os.PathLike[str], source: str) -> Path:
    refuse_nested(out, source)
    out_path = Path(os.path.abspath(out))
    if holds_dataset(out_path):
        raise InvalidArgument(f"{out_path}: holds a dataset; choose another folder")
    return out_path


def _files_in(folder: str | os.PathLike[str]) -> list[str]:
    return [os.path.join(at, name) for at, _, names in os.walk(folder) for name in names]


def _check_replaceable(out: str | os.PathLike[str], *, overwrite: bool) -> bool:
    """Return True if `out` is an export that may be replaced, False if it is missing or empty.

    Raise DatasetExists for anything else, also for an export to which files were added.
    """
    if not os.path.lexists(out):
        return False
    if os.path.islink(out) or not os.path.isdir(out):
        raise DatasetExists(f"{out}: expected a folder, found a link or file")
    names = os.listdir(out)
    if names and not (overwrite and ABOUT_FILE in names):
        hint = "which overwrite does not replace" if overwrite else "choose another folder"
        what = f"holds {min(names)!r}, not an export, {hint}"
        if ABOUT_FILE in names:
            what = (
                "already holds an export; overwrite=True (--overwrite) replaces it; or choose "
                "another folder"
            )
        raise DatasetExists(f"{out}: {what}")
    if not names:
        return False
    n_files, n_written = len(_files_in(out)), _n_files_written(os.path.join(out, ABOUT_FILE))
    if n_written is None:
        raise DatasetExists(
            f"{out}: its {ABOUT_FILE} does not say how many files the export wrote, so files that "
            "were added cannot be told apart: remove the folder, or choose another"
        )
    if n_files > n_written:
        raise DatasetExists(
            f"{out}: holds {n_files} files, of which the export wrote {n_written}; overwrite would "
            "remove the others, too: move them away, or choose another folder"
        )
    return True


def _n_files_written(about_path: str) -> int | None:
    """Return the number of files that the metadata of an export records; None without one."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return int(json.loads(Path(about_path).read_bytes())["files"])
    return None


def _open(
    dataset: str | os.PathLike[str] | Dataset, subset: str | None
) -> contextlib.AbstractContextManager[Dataset]:
    if not isinstance(dataset, Dataset):
        return ShardDataset(dataset, subset=subset)
    if subset is not None:
        raise InvalidArgument(
            f"subset: only for the path of a dataset; pass dataset.subset({subset!r}) instead"
        )
    return contextlib.nullcontext(dataset)


def _select_fields(dataset: Dataset, names: Iterable[str] | None) -> dict[str, Any]:
    """Return the fields that `names` select, in the order of the schema; by default, all fields."""
    schema = dataset.schema
    if names is None:
        return dict(schema)
    selected = [names] if isinstance(names, str) else [*names]
    known = {*schema, *schema.groups}
    if not selected or (unknown := [name for name in selected if name not in known]):
        problem = f"no field {unknown[0]!r}" if selected else "fields is empty"
        raise InvalidArgument(
            f"{dataset.current_path}: {problem}; the fields are {', '.join(schema)}"
        )
    inside = tuple(f"{name}." for name in selected)
    return {n: f for n, f in schema.items() if n in selected or f"{n}.".startswith(inside)}


def _make_exporter(format: str, options: ExportOptions) -> Exporter:
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
    return kind(options)


def _write_samples(
    samples: SampleReader,
    exporter: Exporter,
    folder: Path,
    progress: Callable[[ExportProgress], None] | None,
) -> int:
    dataset, n_samples = samples.dataset, 0
    n_all, n_rows = len(dataset), int(dataset.shard_starts[-1])
    n_bytes = sum(shard.n_bytes for shard in dataset.shards) * n_all // max(1, n_rows)
    try:
        exporter.open(folder)
        for batch in samples:
            exporter.write(batch)
            n_samples += len(batch)
            if progress is not None:
                n_done = n_samples + len(samples.skipped)
                progress(ExportProgress(n_done, n_all, n_bytes * n_done // n_all, n_bytes))
        if progress is not None:
            progress(ExportProgress(n_all, n_all, n_bytes, n_bytes, is_syncing=True))
        exporter.finish()
    finally:
        exporter.close()
    return n_samples


def _write_json(path: Path, content: object) -> None:
    with create(path) as file:
        file.write(json.dumps(content, ensure_ascii=False, indent=1).encode() + b"\n")
        sync(file, path)
