"""The facts of the overview: fields, classes, subsets, history, conversion, statistics."""

from __future__ import annotations

import datetime
import itertools
import json
import os
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import shardio
from shardio_tools.output import decode_names, format_count
from shardio_tools.view.jobs import Job, Jobs
from shardio_tools.view.queries import number_fields
from shardio_tools.view.rows import class_field
from shardio_tools.view.source import Source, version_of
from shardio_tools.view.statistics import column_bytes, count_classes, count_fields
from shardio_tools.view.stored import READ_ERRORS

_N_GENERATIONS: Final = 20
_N_FAILED: Final = 200
"""The maximum number of inputs without samples that are listed."""
_MAX_TEXT: Final = 300
_WAIT_S: Final = 0.2
"""The time that an answer waits for facts that are read in the background."""
_MAX_COUNTED: Final = 5_000_000
_MAX_COUNTED_SHARDS: Final = 2_000
"""The maximum numbers of samples and shards that are counted without being asked."""


class Overview:
    """The facts about a dataset as a whole. Slow facts are collected in the background."""

    def __init__(
        self, source: Source, jobs: Jobs, *, is_writable: bool, loader: str | None
    ) -> None:
        self._source, self._jobs = source, jobs
        self._is_writable, self._loader = is_writable, loader

    def describe(self) -> dict[str, Any]:
        """Return the facts of the manifest. No shard is read."""
        source = self._source
        found: dict[str, Any] = {
            "path": decode_names(source.path),
            "name": decode_names(source.name),
            "version": shardio.__version__,
            "writable": self._is_writable,
            "remote": source.is_remote,
            "problems": [decode_names(text) for text in source.problems],
            "loader": None if self._loader is None else {"name": decode_names(self._loader)},
        }
        if (dataset := source.dataset) is None:
            return found | _NOTHING
        return found | self._manifest(dataset) | self._history(dataset)

    def _manifest(self, dataset: shardio.ShardDataset) -> dict[str, Any]:
        sizes, counts = self._counted("fields"), self._class_counts(dataset)
        sortable = number_fields(dataset)
        groups = (dataset.shards, *dataset.column_groups.values())
        fields = []
        for name, field in dataset.schema.items():
            n_bytes = sizes.get(name, {}).get("n_bytes", column_bytes(dataset, name))
            facts = {"n_bytes": n_bytes, "sortable": name in sortable}
            fields.append({**_field(name, field), **facts})
        return {
            "n_samples": len(dataset),
            "n_shards": len(dataset.shards),
            "n_bytes": sum(int(group.sizes.sum()) for group in groups),
            "generation": dataset.generation,
            "fields": fields,
            "classes": [
                {"name": decode_names(name), "count": counts[i] if counts else None}
                for i, name in enumerate(dataset.classes)
            ],
            "class_field": class_field(dataset),
            "subsets": [{"name": name, "n": n} for name, n in dataset.subsets.items()],
            "view": {"kind": dataset.view["kind"], "text": _view_text(dataset.view)},
        }

    def _history(self, dataset: shardio.ShardDataset) -> dict[str, Any]:
        """Return generations and the conversion; `pending` is True while they are being read."""
        kind = f"history of {version_of(dataset)}"
        job = self._jobs.get(kind) or self._jobs.start(
            kind, lambda job: _read_history(self._source, dataset)
        )
        job.wait(_WAIT_S)
        found: dict[str, Any] = {"generations": [], "conversion": None}
        return found | {"pending": job.state == "running"} | (job.result or {})

    def start_statistics(self) -> None:
        """Count values, lengths and classes in the background, again if they are known."""
        dataset = self._source.required()

        def count(job: Job) -> Any:
            with self._source.opened() as copy:
                return count_fields(copy, job.report)

        self._jobs.start(_statistics_of(dataset), count)

    def statistics(self) -> dict[str, Any]:
        """Return the statistics that are known; start to count those of a small dataset."""
        dataset = self._source.required()
        job = self._jobs.get(_statistics_of(dataset))
        if job is None and self._is_small(dataset):
            self.start_statistics()
            job = self._jobs.get(_statistics_of(dataset))
        kept = _kept_fields(dataset)
        fields: dict[str, Any] = {}
        for name in dataset.schema:
            facts: dict[str, Any] = dict.fromkeys(_STATISTICS)
            facts |= self._counted("fields").get(name, {})
            given = kept.get(name, {})
            facts |= {key: given[key] for key in _KEPT if given.get(key) is not None}
            if any(value is not None for value in facts.values()):
                fields[name] = facts
        state = job.state if job is not None else "kept" if kept else "none"
        return {
            "state": state,
            "progress": job.progress if job is not None else 0,
            "text": self._counted("text") or (decode_names(job.text) if job is not None else ""),
            "fields": fields,
            "classes": self._class_counts(dataset),
        }

    def classes_of(self, subset: str) -> dict[str, Any]:
        """Return the number of samples of each class in a subset, counted in the background.

        The labels of a large dataset are not read; `classes` is empty then.

        Raises:
            InvalidArgument: there is no such subset.
        """
        dataset = self._source.required()
        rows = self._source.subset_rows(subset)
        kept = dataset.stats.get("subsets", {})
        counts = _kept_classes(dataset, kept.get(subset) if isinstance(kept, Mapping) else None)
        if counts or not dataset.classes or not self._is_small(dataset):
            return {"state": "done" if counts else "none", "classes": counts}

        def count(job: Job) -> Any:
            with self._source.opened() as copy:
                return count_classes(copy, rows, job.report)

        kind = f"classes of {version_of(dataset)} {subset}"
        job = self._jobs.get(kind) or self._jobs.start(kind, count)
        job.wait(_WAIT_S)
        return {"state": job.state, "classes": job.result or []}

    def _is_small(self, dataset: shardio.ShardDataset) -> bool:
        is_small = len(dataset) <= _MAX_COUNTED and len(dataset.shards) <= _MAX_COUNTED_SHARDS
        return is_small and not self._source.is_remote

    def _counted(self, key: str) -> Any:
        """Return a part of what was counted in the background; an empty value before."""
        job = self._jobs.get(_statistics_of(self._source.required()))
        return (job.result if job is not None and job.result else _UNCOUNTED)[key]

    def _class_counts(self, dataset: shardio.ShardDataset) -> list[int]:
        """Return the number of samples of each class, kept or counted; [] if it is unknown."""
        counts: list[int] = _kept_classes(dataset, dataset.stats.get("whole"))
        return counts or self._counted("classes")


_STATISTICS: Final = ("count", "min", "max", "mean", "std", "histogram", "lengths")
_KEPT: Final = ("count", "min", "max", "mean", "std", "not_finite", "missing")
_UNCOUNTED: Final[dict[str, Any]] = {"fields": {}, "classes": [], "text": ""}
_NOTHING: Final[dict[str, Any]] = {
    **{"n_samples": 0, "n_shards": 0, "n_bytes": 0, "generation": None, "fields": []},
    **{"classes": [], "class_field": None, "subsets": [], "view": None, "generations": []},
    **{"conversion": None, "pending": False},
}
"""The facts about a dataset of which no generation can be read."""


def _statistics_of(dataset: shardio.ShardDataset) -> str:
    return f"statistics of {version_of(dataset)}"


def _kept_fields(dataset: shardio.ShardDataset) -> Mapping[str, Any]:
    """Return the statistics of fields that `shardio stats` has stored."""
    whole = dataset.stats.get("whole", {})
    fields = whole.get("fields") if isinstance(whole, Mapping) else None
    if not isinstance(fields, Mapping):
        return {}
    return {name: found for name, found in fields.items() if isinstance(found, Mapping)}


def _kept_classes(dataset: shardio.ShardDataset, kept: Any) -> list[int]:
    """Return the number of samples of each class in kept statistics; [] if they have none."""
    counts = kept.get("classes") if isinstance(kept, Mapping) else None
    if not isinstance(counts, Mapping) or not all(name in counts for name in dataset.classes):
        return []
    return [counts[name] for name in dataset.classes]


def _field(name: str, field: Any) -> dict[str, Any]:
    array = field.array or field.item
    return {
        "name": name,
        "kind": type(field).__name__.lower(),
        "type": repr(field),
        "dtype": array.dtype if array else None,
        "shape": list(array.shape) if array else None,
        "codec": field.codec,
        "optional": field.optional,
        "image": field.medium == "image",
        "video": field.medium == "video",
        "audio": field.medium == "audio",
        "searchable": field.is_utf8,
    }


def _view_text(view: Mapping[str, Any]) -> str:
    if view["kind"] != "clips":
        return "rows, as they are stored"
    frames = format_count(view["frames"], "frame")
    size = "" if "size" not in view else ", {} × {} pixels (high × wide)".format(*view["size"])
    return f"clips of {frames}, stride {view['stride']}, a step of {view['step']}{size}"


def _read_history(source: Source, dataset: shardio.ShardDataset) -> dict[str, Any]:
    """Return the newest generations, and what the conversion reported about its inputs."""
    numbers = [dataset.generation]
    if not source.is_remote:
        numbers = [*range(dataset.generation, 0, -1)][:_N_GENERATIONS]
    generations = []
    for number in numbers:
        try:
            with shardio.open(source.path, generation=number) as found:
                facts = {"what": _operation(found), "n_samples": len(found)}
        except READ_ERRORS as error:
            facts = {"what": decode_names(str(error))[:_MAX_TEXT], "n_samples": None}
        generations.append({"number": number, "when": _written(source, number), **facts})
    return {"generations": generations, "conversion": _conversion(dataset)}


def _written(source: Source, number: int) -> str | None:
    """Return the time at which the file of a generation was written; None at a URL."""
    try:
        path = os.path.join(source.path, "generations", f"{number:06d}.json")
        seconds = os.stat(path).st_mtime
    except OSError:
        return None
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="seconds")


def _operation(dataset: shardio.ShardDataset) -> str:
    """Return the operation that wrote a generation, with its options, as a text."""
    operation, converter = dataset.operation, dataset.converter
    found = operation or converter
    words = [str(operation["name"])] if operation.get("name") else ["convert"] if converter else []
    if not operation and converter.get("name"):
        words.append(str(converter["name"]))
    options = found.get("options")
    if isinstance(options, Mapping):
        words += [f"{key}={json.dumps(value)}" for key, value in options.items()]
    return decode_names(" ".join(words) or "written by a program")[:_MAX_TEXT]


def _conversion(dataset: shardio.ShardDataset) -> dict[str, Any] | None:
    """Return the inputs by outcome, and those without samples with the reason; None if unknown."""
    from shardio_tools.convert_report import outcome_text  # takes 0.1 s to import

    try:
        inputs = dataset.inputs
        outcomes = Counter(str(each.get("outcome")) for each in inputs)
        without = (each for each in inputs if not each.get("samples"))
        failed = [*itertools.islice(without, _N_FAILED)]
        n_failed = sum(not each.get("samples") for each in inputs)
    except READ_ERRORS as error:
        text = f"the list of inputs cannot be read: {decode_names(str(error))}"
        return {"text": text, "failed": [], "n_failed": 0}
    if not outcomes:
        return None
    kind = dataset.converter.get("name")
    texts = [f"{n:,} {outcome_text(kind, outcome)}" for outcome, n in outcomes.items()]
    return {
        "text": decode_names(f"{format_count(outcomes.total(), 'input')}: {', '.join(texts)}"),
        "failed": [
            {
                "input": decode_names(str(each.get("path", "")))[:_MAX_TEXT],
                "reason": decode_names(
                    str(each.get("reason") or outcome_text(kind, str(each.get("outcome"))))
                )[:_MAX_TEXT],
            }
            for each in failed
        ],
        "n_failed": n_failed,
    }
