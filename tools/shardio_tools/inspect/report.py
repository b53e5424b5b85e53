"""The facts that `shardio inspect` reports, as JSON values.

Damage becomes a finding; the readable parts are reported.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import shardio
from shardio._base.progress import format_sides
from shardio.errors import DatasetNotFound, ShardNotFound
from shardio.maintenance import Finding, Survey, survey_shard
from shardio_tools.arguments import is_url, suggestion
from shardio_tools.output import escaped

N_VALUES: Final = 8
"""Number of array values to show."""
N_MEDIA: Final = 32
"""Number of samples, spread over a dataset, whose media fields are described."""
MAX_COUNTED_VIDEOS: Final = 100_000
"""The clips of the default view are counted if a dataset has at most this number of videos."""


def value_facts(value: Any, kind: Any) -> dict[str, Any]:
    """Return facts about a value; for an array its dtype, shape, range and first values."""
    if value is None and kind.optional:
        return {"type": type(kind).__name__, "absent": True}
    if kind.item:
        shapes = [list(np.shape(array)) for array in value[:N_VALUES]]
        return {"type": "List", "dtype": kind.item.dtype, "arrays": len(value), "first": shapes}
    if kind.is_utf8:
        return {"type": "Text", "characters": len(value), "value": value}
    if kind.is_opaque:
        return {"type": "Bytes", "bytes": len(value), "first": value[: 2 * N_VALUES].hex(" ")}
    if kind.medium == "image":
        sides = {name: getattr(value, name) for name in ("height", "width", "channels")}
        return {"type": "Image", "bytes": len(value), **sides}
    if kind.is_streamed:
        return _stream_facts(value, type(kind).__name__)
    if kind.is_json:
        return {"type": "Json", "value": value}
    numbers = np.asarray(value)
    if kind.dtype == "bfloat16":  # stored as the upper halves of float32
        numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
    facts = {"type": "Array", "dtype": kind.dtype, "shape": list(numbers.shape)}
    if numbers.size:
        facts |= _range(numbers)
    return facts


def _stream_facts(stream: shardio.EncodedStream, kind: str) -> dict[str, Any]:
    """Return codec, sizes and length of a stream, without reading its packets."""
    names = ("width", "height") if kind == "Video" else ("channels", "rate")
    return {
        "type": kind,
        "bytes": len(stream.data),
        "codec": stream.parameters["codec"],
        "packets": len(stream.packets),
        "frames" if kind == "Video" else "samples": stream.n_frames,
        names[0]: stream.width,
        names[1]: stream.height,
        "seconds": float(stream.duration * stream.time_base) if stream.duration else None,
    }


def _range(numbers: npt.NDArray[Any]) -> Mapping[str, Any]:
    with np.errstate(all="ignore"):  # infinities and NaN cause warnings
        return {
            "min": numbers.min().item(),
            "max": numbers.max().item(),
            "mean": float(numbers.astype(np.float64).mean()),
            "first": numbers.reshape(-1)[:N_VALUES].tolist(),
        }


Facts = dict[str, Any]

DATA_ERRORS: Final = (shardio.DataError, ShardNotFound)
"""Exceptions for invalid data."""
READ_ERRORS: Final = (*DATA_ERRORS, OSError)
"""Exceptions raised by reading data."""


Samples = shardio.ShardDataset | shardio.ShardReader
"""An open dataset or shard, whose samples are read by number."""


@dataclass
class Inspection:
    """The facts about a dataset or a shard, and the damage found.

    Only `facts` and `findings` are in the JSON report; the other attributes are for the screen.
    `media` maps each media field to facts about at most N_MEDIA of its values, spread over all
    `n_samples` samples; `view` is the default view, and `n_clips` the number of its clips.
    """

    facts: Facts = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    media: dict[str, list[Facts]] = field(default_factory=dict)
    n_samples: int = 0
    view: Mapping[str, Any] = field(default_factory=lambda: {"kind": "rows"})
    n_clips: int | None = None

    def attempt(self, path: str, read: Callable[[], Any], **where: Any) -> Any:
        """Return the result of `read`; if the data is bad, return None and record a finding."""
        try:
            return read()
        except READ_ERRORS as error:
            if isinstance(error, shardio.ShardioError) and not isinstance(error, DATA_ERRORS):
                raise
            self.note(path, error, **where)
        return None

    def read(
        self,
        samples: Samples,
        number: int,
        name: str,
        show: Callable[[Any], Any] = lambda value: value,
    ) -> Any:
        """Return `show(value)` for a field of a sample; record damage as a finding, return None."""
        reader, path, row = self.located(samples, number, name)
        if reader is None:
            return None

        def value() -> Any:
            return show(reader.sample(row, [name])[name])

        return self.attempt(path, value, field=name, sample=row)

    def note_field(self, samples: Samples, number: int, name: str, error: Exception) -> None:
        """Record damage of a field of a sample."""
        _, path, row = self.located(samples, number, name)
        self.note(path, error, field=name, sample=row)

    def located(
        self, samples: Samples, number: int, name: str
    ) -> tuple[shardio.ShardReader | None, str, int]:
        """Return the reader (None if it cannot be opened), the file and the row of a sample."""
        if isinstance(samples, shardio.ShardReader):
            return samples, samples.path, number
        shard, row = _place(samples, number)
        ((summary, _),) = samples.files.files_of_shard(shard, name)
        path = os.path.join(samples.path, summary.name)
        reader = self.attempt(path, partial(samples.reader, shard, name))
        return reader, path, row

    def note(self, path: str, error: Exception, **where: Any) -> None:
        """Record damage at `path` once; `where` names the field and the row of the shard."""
        finding = Finding.of(path, error, **where)
        if finding not in self.findings:
            self.findings.append(finding)

    def describe_media(self, samples: Samples) -> None:
        """Gather facts about the media fields of a few samples spread over all; skip damage.

        In an object store, only the sample to be shown is described.
        """
        self.n_samples = n = len(samples)
        names = [name for name, kind in samples.schema.items() if kind.medium]
        if isinstance(samples, shardio.ShardDataset) and is_url(samples.path):
            shown = self.facts.get("sample", {}).get("fields", {})
            self.media = {name: [shown[name]] for name in names if shown.get(name)}
            return
        numbers = np.unique(np.linspace(0, n - 1, min(n, N_MEDIA)).astype(np.int64)).tolist()
        for name in names:
            found = []
            for number in numbers:
                with contextlib.suppress(*READ_ERRORS):
                    found.append(self._value_facts(samples, number, name))
            self.media[name] = found

    def _value_facts(self, samples: Samples, number: int, name: str) -> Facts:
        if isinstance(samples, shardio.ShardReader):
            reader, row = samples, number
        else:
            shard, row = _place(samples, number)
            reader = samples.reader(shard, name)
        return value_facts(reader.sample(row, [name])[name], samples.schema[name])

    def as_json(self) -> Facts:
        """Return facts and findings as JSON values."""
        return {**self.facts, "damage": [finding.as_json() for finding in self.findings]}


def _place(dataset: shardio.ShardDataset, number: int) -> tuple[int, int]:
    """Return the shard of a sample, and its row in this shard."""
    rows = dataset.rows.at(np.array([number]))
    shard = int(dataset.locate(rows)[0])
    return shard, int(rows[0] - dataset.shard_starts[shard])


def is_dataset(path: str) -> bool:
    """Return True if `path` is a folder (a dataset), False if it is a file (a shard)."""
    if not os.path.exists(path):
        folder, name = os.path.split(os.path.abspath(path))
        hint = suggestion(name, os.listdir(folder) if os.path.isdir(folder) else ())
        raise DatasetNotFound(f"{path}: there is no such dataset or shard{hint}")
    if not (os.path.isdir(path) or os.path.isfile(path)):
        raise shardio.InvalidArgument(f"{path}: neither a file nor a folder")
    folder, name = os.path.split(path)
    if name == "dataset.json":
        raise shardio.InvalidArgument(f"{path}: not a shard; write {folder or '.'}, its dataset")
    is_other = os.path.isfile(path) and not name.endswith(".shard")
    if is_other and survey_shard(path).header is None:
        raise shardio.InvalidArgument(
            f"{path}: not a shard; to load files of other kinds, convert them first: shardio "
            f"convert {path} OUT"
        )
    return os.path.isdir(path)


def schema_facts(schema: shardio.Schema | None) -> Facts:
    """Return the type of each field, with dtype and shape for arrays."""
    facts: Facts = {}
    for name, kind in (schema or {}).items():
        facts[name] = {"type": type(kind).__name__, "codec": kind.codec}
        if kind.optional:
            facts[name]["optional"] = True
        if array := kind.array or kind.item:
            facts[name] |= {"dtype": array.dtype, "shape": list(array.shape)}
    return facts


def type_text(kind: Facts) -> str:
    """Return a field's type, given its facts, in the notation of `shardio add-column --field`."""
    text: str = kind["type"].lower()
    if "dtype" in kind:
        dims = ",".join("any" if n is None else str(n) for n in kind["shape"])
        text = "list of " * (text == "list") + kind["dtype"] + (f"[{dims}]" if dims else "")
    text += "" if kind["codec"] == "raw" else f",{kind['codec']}"
    return f"{text},optional" if kind.get("optional") else text


def media_text(values: Sequence[Facts]) -> str:
    """Return a text for the values of a media field: codecs, and ranges of sizes and lengths."""
    present = [value for value in values if not value.get("absent")]
    if not present:
        return ""
    kind, parts = present[0]["type"], []
    if kind != "Image":
        parts.append("/".join(sorted({str(value["codec"]) for value in present})))
    if kind == "Audio":
        parts.append(_range_text([value["rate"] for value in present], "Hz"))
    else:
        sides = (_range_text([v[side] for v in present]) for side in ("height", "width"))
        parts.append(format_sides(*sides))
    if kind != "Video":
        channels = [value["channels"] for value in present]
        parts.append(_range_text(channels, "channel" if max(channels) == 1 else "channels"))
    if kind != "Image":
        timed = [value for value in present if value["seconds"]]
        if kind == "Video":
            parts.append(_range_text([v["frames"] / v["seconds"] for v in timed], "fps"))
            parts.append(_range_text([value["frames"] for value in present], "frames"))
        parts.append(_range_text([value["seconds"] for value in timed], "s"))
    return escaped(", ".join(filter(None, parts)))


def _range_text(numbers: Sequence[float], unit: str = "") -> str:
    if not numbers:
        return ""
    ends = [f"{n:,}" if isinstance(n, int) else f"{n:.4g}" for n in (min(numbers), max(numbers))]
    text = ends[0] if ends[0] == ends[1] else "–".join(ends)
    return f"{text} {unit}".rstrip()


def shard_facts(survey: Survey) -> Facts:
    """Return the name and size of a shard, and the facts in its header."""
    header = survey.header
    return {
        "name": os.path.basename(survey.path),
        "samples": header.n_samples if header else None,
        "bytes": survey.n_bytes,
        "id": header.id.hex() if header else None,
        "is_readable": not survey.findings,
    }


def section_facts(survey: Survey) -> list[Facts]:
    """Return kind, field, offset and size of each section."""
    facts = []
    for section in survey.sections:
        numbers = {name: getattr(section, name) for name in ("offset", "count", "stride")}
        named = {"kind": section.name, "field": survey.field_of(section), "bytes": section.size}
        facts.append(named | numbers)
    return facts


def inspect_shard(path: str, sample: int | None) -> Inspection:
    """Inspect one shard, and one of its samples: by default, the first."""
    survey = survey_shard(path)
    inspection = Inspection(findings=list(survey.findings))
    inspection.facts = {
        "shard": path,
        **shard_facts(survey),
        "schema": schema_facts(survey.schema),
        "sections": section_facts(survey),
    }
    if not survey.findings:
        with shardio.ShardReader(path) as reader:
            row = checked_row(path, sample, len(reader))
            if row is not None:
                inspection.facts["sample"] = sample_facts(inspection, reader, row)
            inspection.describe_media(reader)
    return inspection


def inspect_dataset(path: str, sample: int | None, subset: str | None = None) -> Inspection:
    """Inspect a dataset, its shards, and one sample: by default, the first.

    With `subset`, the samples, clips and classes are those of this subset. If the dataset is in an
    object store, only the shard of the sample is read.
    """
    inspection = Inspection(facts={"dataset": path})
    if (dataset := _open_dataset(inspection, path, subset)) is None:
        return inspection
    if subset is not None:
        inspection.facts["subset"] = subset
    with dataset:
        inspection.facts |= dataset_facts(inspection, dataset)
        inspection.facts["shards"] = _shards_facts(inspection, dataset, dataset.shards)
        if groups := dataset.column_groups:
            inspection.facts["column_groups"] = {
                name: _shards_facts(inspection, dataset, shards, name)
                for name, shards in groups.items()
            }
        if not (inspection.findings or is_url(path)):
            inspection.facts |= _samples_by_class(inspection, dataset)
        row = checked_row(path, sample, len(dataset))
        if row is not None:
            inspection.facts["sample"] = sample_facts(inspection, dataset, row)
        inspection.describe_media(dataset)
        inspection.view = dataset.view
        is_small = len(dataset) <= MAX_COUNTED_VIDEOS
        if is_small and not (inspection.findings or is_url(path)):
            inspection.n_clips = count_clips(dataset)
    return inspection


def count_clips(dataset: shardio.ShardDataset) -> int | None:
    """Return the number of clips of the default view; None if it has rows, or is damaged."""
    view = dataset.view
    if view["kind"] != "clips":
        return None
    try:
        return len(dataset.clips(view["frames"], stride=view["stride"], step=view["step"]))
    except (shardio.ShardioError, OSError):  # `shardio verify` reports the place
        return None


def _open_dataset(
    inspection: Inspection, path: str, subset: str | None
) -> shardio.ShardDataset | None:
    """Open a dataset. If no generation can be read, describe the shards in the folder instead."""
    if is_url(path):
        if path.endswith(".shard"):
            raise shardio.InvalidArgument(
                f"{path}: cannot inspect one shard in a store; inspect its dataset: shardio "
                f"inspect {path.rpartition('/')[0]}"
            )
        return shardio.open(path, subset=subset)
    in_folder = sorted(n for n in os.listdir(path) if n.endswith(".shard"))
    dataset: shardio.ShardDataset | None = None
    try:
        dataset = inspection.attempt(path, partial(shardio.open, path, subset=subset))
    except DatasetNotFound as error:
        if not in_folder:
            raise
        inspection.note(path, error)
    if dataset is None:
        surveys = []
        for name in in_folder:
            place = os.path.join(path, name)
            if (survey := inspection.attempt(place, partial(survey_shard, place))) is not None:
                inspection.findings += survey.findings
                surveys.append(survey)
        schema = next((survey.schema for survey in surveys if survey.schema), None)
        inspection.facts["schema"] = schema_facts(schema)
        inspection.facts["shards"] = [*map(shard_facts, surveys)]
    return dataset


def _shards_facts(
    inspection: Inspection,
    dataset: shardio.ShardDataset,
    shards: Sequence[Any],
    column: str | None = None,
) -> list[Facts]:
    """Open the shards, unless they are in a store; return the recorded facts about each shard.

    `column` is the added column that the shards hold; None for the shards of all other fields.
    """
    facts = []
    for i, shard in enumerate(shards):
        place, is_readable = os.path.join(dataset.path, shard.name), True
        if not is_url(dataset.path):
            open_shard = partial(dataset.reader, i, column)
            is_readable = inspection.attempt(place, open_shard) is not None
        facts.append(
            {
                "name": shard.name,
                "samples": shard.n_samples,
                "bytes": shard.n_bytes,
                "id": shard.id,
                "is_readable": is_readable,
            }
        )
    return facts


def dataset_facts(inspection: Inspection, dataset: shardio.ShardDataset) -> Facts:
    """Return the facts in a generation, without inputs if their list is damaged."""
    inputs = inspection.attempt(dataset.path, lambda: tuple(dataset.inputs)) or ()
    sides = dataset.column_groups.values()
    return {
        "generation": dataset.generation,
        "lineage": dataset.lineage,
        "samples": len(dataset),
        "bytes": sum(s.n_bytes for group in (dataset.shards, *sides) for s in group),
        "schema": schema_facts(dataset.schema),
        "classes": dict.fromkeys(dataset.classes),
        "converter": dict(dataset.converter),
        "versions": dict(dataset.versions),
        "subsets": dict(dataset.subsets),
        "stats": dict(dataset.stats),
        "operation": dict(dataset.operation),
        "outcomes": dict(Counter(entry["outcome"] for entry in inputs)),
        "without_samples": [dict(e) for e in inputs if not e.get("samples")],
    }


def _samples_by_class(inspection: Inspection, dataset: shardio.ShardDataset) -> Facts:
    """Count the samples per class and without a class; return {} if there is no usable `label`."""
    names, kind = dataset.classes, dataset.schema.columns.get("label")
    if not names or kind is None or kind.shape or not kind.dtype.startswith(("int", "uint")):
        return {}
    found, n_without, starts = np.zeros(len(names), np.int64), 0, dataset.shard_starts
    is_selected = None if dataset.rows.selects_all else np.zeros(int(starts[-1]), np.bool_)
    if is_selected is not None:
        is_selected[dataset.rows.at(np.arange(len(dataset)))] = True
    for i in range(len(dataset.shards)):
        place = os.path.join(dataset.path, dataset.shards[i].name)
        labels = inspection.attempt(place, partial(_labels, dataset, i))
        if labels is None:
            return {}
        if is_selected is not None:
            labels = labels[is_selected[starts[i] : starts[i + 1]]]
        inside = labels[(labels >= 0) & (labels < len(names))]
        found += np.bincount(inside.astype(np.int64), minlength=len(names))
        n_without += len(labels) - len(inside)
    return {"classes": dict(zip(names, found.tolist(), strict=True)), "without_class": n_without}


def _labels(dataset: shardio.ShardDataset, shard: int) -> npt.NDArray[Any]:
    reader = dataset.reader(shard, "label")
    return reader.column("label", rows=np.arange(len(reader)))


def checked_row(path: str, sample: int | None, n_samples: int) -> int | None:
    """Return the row to inspect: the given one, else the first; None if there is no sample."""
    if sample is None:
        return 0 if n_samples else None
    if not -n_samples <= sample < n_samples:
        raise shardio.InvalidArgument(f"{path}: there is no sample {sample}; it has {n_samples:,}")
    return sample % n_samples


def sample_facts(inspection: Inspection, samples: Samples, number: int) -> Facts:
    """Return the shard and row of a sample, and the facts about each field.

    A field that cannot be read is None. Fields of a shard that cannot be opened are left out.
    """
    fields: Facts = {}
    for name, kind in samples.schema.items():
        if inspection.located(samples, number, name)[0] is not None:
            show = partial(value_facts, kind=kind)
            fields[name] = inspection.read(samples, number, name, show)
    _, path, row = inspection.located(samples, number, next(iter(samples.schema)))
    facts: Facts = {"sample": number, "shard": os.path.basename(path), "fields": fields}
    return facts | {"row": row} if fields else facts
