"""What the overview shows: fields, classes, subsets, generations, the report of the conversion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import shardio
from shardio_tools.output import decode_names
from shardio_tools.view.rows import class_field
from shardio_tools.view.source import Source


def describe_dataset(source: Source, *, is_writable: bool) -> dict[str, Any]:
    """Return the facts of the manifest. No shard is read."""
    found: dict[str, Any] = {
        "path": decode_names(source.path),
        "name": decode_names(source.name),
        "version": shardio.__version__,
        "writable": is_writable,
        "remote": source.is_remote,
        "problems": [decode_names(text) for text in source.problems],
        "loader": None,
    }
    dataset = source.dataset
    if dataset is None:
        empty: dict[str, Any] = {
            "fields": [],
            "classes": [],
            "subsets": [],
            "generations": [],
            "conversion": None,
        }
        numbers = {"n_samples": 0, "n_shards": 0, "n_bytes": 0, "generation": None}
        return found | empty | numbers | {"class_field": None, "view": None}
    groups = (dataset.shards, *dataset.column_groups.values())
    return found | {
        "n_samples": len(dataset),
        "n_shards": len(dataset.shards),
        "n_bytes": sum(group.n_bytes for group in groups),
        "generation": dataset.generation,
        "fields": [_field(name, field) for name, field in dataset.schema.items()],
        "classes": _classes(dataset),
        "class_field": class_field(dataset),
        "subsets": [{"name": name, "n": n} for name, n in dataset.subsets.items()],
        "view": {"kind": dataset.view["kind"], "text": _view_text(dataset.view)},
        "generations": [],
        "conversion": None,
    }


def _field(name: str, field: Any) -> dict[str, Any]:
    array = field.array or field.item
    column = field.column
    is_number = column is not None and not column.shape and column.dtype != "bfloat16"
    return {
        "name": name,
        "kind": type(field).__name__.lower(),
        "type": repr(field),
        "dtype": array.dtype if array else None,
        "shape": list(array.shape) if array else None,
        "codec": field.codec,
        "n_bytes": None,
        "image": field.medium == "image",
        "video": field.medium == "video",
        "audio": field.medium == "audio",
        "sortable": is_number,
        "searchable": field.is_utf8,
    }


def _classes(dataset: shardio.ShardDataset) -> list[dict[str, Any]]:
    whole = dataset.stats.get("whole", {})
    counts = whole.get("classes", {}) if isinstance(whole, Mapping) else {}
    return [{"name": decode_names(name), "count": counts.get(name)} for name in dataset.classes]


def _view_text(view: Mapping[str, Any]) -> str:
    if view["kind"] != "clips":
        return "rows, as they are stored"
    return f"clips of {view['frames']} frames, stride {view['stride']}, step {view['step']}"
