"""Show datasets and views: HTML fragments in a notebook, and the viewer, `shardio view`."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardio._base.classes import Closing
from shardio._base.html import escaped, fragment, listing, note, pictures
from shardio._base.progress import counted, display_kind, format_sides, format_size
from shardio.dataset.dataset import Dataset
from shardio.dataset.generation import ROWS
from shardio.errors import ShardioError, UnsupportedEnvironment, import_extra
from shardio.format.schema import Schema
from shardio.media.values import describe, thumbnail

if TYPE_CHECKING:
    from shardio.samples.view import SampleView

_N_PICTURES: Final = 5
_MAX_ROWS: Final = 10_000
"""The maximum number of rows of a dataset whose index is read only to show a view."""
_MAX_SAMPLE_BYTES: Final = 64 << 20
"""The maximum size of the arrays of a view's sample that is decoded only to show it."""
_ERRORS: Final = (ShardioError, OSError)


def dataset_html(dataset: Dataset) -> str:
    """Return the fragment of a dataset, with thumbnails of some undamaged samples.

    From an object store, no data is read.
    """
    n = len(dataset)
    n_bytes = sum(
        int(each.sizes.sum()) for each in (dataset.shards, *dataset.column_groups.values())
    )
    facts = [
        counted(n, "samples"),
        "" if dataset.subset_name is None else f"subset {dataset.subset_name!r}",
        "" if dataset.rows.row_list is None else "a selection",
        counted(len(dataset.shards), "shards"),
        format_size(n_bytes),
        f"generation {dataset.generation}" if dataset.generation else "",
        "closed" * dataset.is_closed,
    ]
    clips = _clip_words(dataset.view)
    sizes = dataset.subsets if dataset.rows.selects_all else {}
    subsets = (f"{name} {size:,}" for name, size in sizes.items())
    units = dataset.converter.get("options", {}).get("units") or {}
    times = (f"{name}: {unit}" for name, unit in units.items())
    can_read = bool(n) and not dataset.remote_storages
    value = functools.partial(_stored_value, dataset)
    parts = [
        listing("clips", clips, len(clips)),
        listing("subsets", subsets, len(sizes)),
        listing(f"{len(dataset.classes):,} classes", _classes(dataset), len(dataset.classes)),
        listing("times", times, len(units)),
        _table(dataset.schema, lambda name: value(0, name), can_read=can_read),
    ]
    if can_read:
        parts.append(_thumbnails(dataset, n, _names_of_pictures(dataset.schema), value))
    return fragment(type(dataset).__name__, dataset.path, facts, *parts)


def _clip_words(view: Mapping[str, Any]) -> list[str]:
    """Return the options of a default view of clips as texts; none for rows."""
    if view == ROWS:
        return []
    frames, stride, step = (view[name] for name in ("frames", "stride", "step"))
    words = [counted(frames, "frames"), f"stride {stride:,}", f"a step of {step:,}"]
    if "size" in view:
        height, width = view["size"]
        words.append(format_sides(height, width))
    return words


def view_html(view: SampleView) -> str:
    """Return the fragment of a view, with thumbnails of some undamaged samples.

    Large samples are not decoded. The index is not read if the dataset is large or in an object
    store.
    """
    dataset = view.dataset
    is_small = len(dataset) <= _MAX_ROWS and not dataset.remote_storages
    schema, n, failure = Schema({name: dataset.schema[name] for name in view.fields}), 0, ""
    if view.is_read or is_small:
        try:
            n, schema = len(view), view.schema
        except _ERRORS as error:
            failure = str(error)
    arrays = [array for field in schema.values() if (array := field.array) is not None]
    is_large = sum(array.row_bytes or 0 for array in arrays) > _MAX_SAMPLE_BYTES
    can_read = bool(n) and not dataset.remote_storages and not is_large
    sample = functools.lru_cache(1)(view.sample)

    def value(i: int, name: str) -> Any:
        return sample(i).get(name)

    parts = [note(failure), _table(schema, lambda name: value(0, name), can_read=can_read)]
    if can_read:
        parts.append(_thumbnails(dataset, n, _names_of_pictures(schema), value))
    facts = view.summary, "closed" * dataset.is_closed
    return fragment(type(view).__name__, dataset.path, facts, *parts)


def _table(schema: Schema, value: Callable[[str], Any], *, can_read: bool) -> str:
    def text(name: str) -> str:
        try:
            return describe(value(name))
        except _ERRORS:
            return "cannot be read"

    return schema.html_table("first sample", text) if can_read else schema.html_table()


def _classes(dataset: Dataset) -> Iterable[str]:
    whole = dataset.stats.get("whole", {})
    counts = whole.get("classes", {}) if dataset.rows.selects_all else {}
    return (f"{name} {counts[name]:,}" if name in counts else name for name in dataset.classes)


def _names_of_pictures(schema: Schema) -> list[str]:
    """Return the names of fields that may have pictures; encoded images and videos come first."""
    arrays = [
        name
        for name, field in schema.items()
        if (array := field.array) is not None and array.dtype == "uint8" and len(array.shape) > 1
    ]
    return [n for n, field in schema.items() if field.medium in ("image", "video")] + arrays


def _thumbnails(
    dataset: Dataset, n: int, names: Iterable[str], value: Callable[[int, str], Any]
) -> str:
    """Return thumbnails of evenly spaced samples, from the first field that has pictures."""
    numbers = np.unique(np.linspace(0, n - 1, min(n, _N_PICTURES)).astype(int)).tolist()
    for name in names:
        shown = (_captioned_thumbnail(dataset, i, name, value) for i in numbers)
        if found := pictures(shown):
            return found
    return ""


def _captioned_thumbnail(
    dataset: Dataset, i: int, name: str, value: Callable[[int, str], Any]
) -> tuple[bytes | None, object]:
    """Return a thumbnail of sample i, with its number and the name of its class."""
    try:
        jpeg = thumbnail(value(i, name))
        label = value(i, "label") if dataset.classes and "label" in dataset.schema else None
    except _ERRORS:
        return None, ""
    if isinstance(label, np.integer) and 0 <= label < len(dataset.classes):
        return jpeg, f"{i} {dataset.classes[int(label)]}"
    return jpeg, i


def _stored_value(dataset: Dataset, i: int, name: str) -> Any:
    row = dataset.rows.at(np.array([i]))
    shard = int(dataset.locate(row)[0])
    return dataset.sample(shard, int(row[0] - dataset.shard_starts[shard]), [name])[name]


_PROGRAM: Final = """
import os, signal, sys, threading

def end_with_parent():
    sys.stdin.buffer.read()  # returns when the parent closes the pipe, or has exited
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=end_with_parent, daemon=True).start()
from shardio_tools.entry import main
raise SystemExit(main())
"""
_HEIGHT: Final = 640
_END_S: Final = 5.0
"""The time that a server gets to end before it is killed."""


class Viewer(Closing):
    """A running `shardio view`, which ends with `close` or with this process.

    In a notebook, the page is shown in an iframe. `link` leads to the page.
    """

    _public = "close link"

    def __init__(self, path: str, *, opens_browser: bool = False) -> None:
        import_extra("showing a dataset needs Starlette and uvicorn", "view", "starlette")
        options = () if opens_browser else ("--no-open",)
        words = [sys.executable, "-c", _PROGRAM, "view", *options, "--", path]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._end = weakref.finalize(self, _end, process, os.getpid())
        self.link = process.stdout.readline().strip() if process.stdout is not None else ""
        if not self.link:
            self.close()
            raise UnsupportedEnvironment(
                f"{path}: the viewer has ended; run it to see why: shardio view {path}"
            )

    def close(self) -> None:
        """End the server. Idempotent."""
        self._end()

    def __repr__(self) -> str:
        return f"Viewer({self.link})"

    def _repr_html_(self) -> str:
        # Frames get cookies if notebook and page are one site: usually, both are at `localhost`.
        link = escaped(self.link.replace("//127.0.0.1:", "//localhost:"), 200)
        style = f"width:100%;height:{_HEIGHT}px;border:1px solid rgba(128,128,128,.4)"
        return (
            f'<iframe src="{link}" style="{style}"></iframe>'
            f'<div><a href="{link}" target="_blank" rel="noopener">open in a window</a></div>'
        )


def _end(process: subprocess.Popen[str], owner: int) -> None:
    """End a server; a fork of the process that owns it leaves it alone."""
    if os.getpid() != owner:
        return
    # A fork may hold a copy of the pipe, so that the server does not see its end.
    process.terminate()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def show(path: str) -> Viewer:
    """Start a viewer; outside of notebooks, open its page in the browser."""
    return Viewer(path, opens_browser=display_kind(sys.stdout) != "notebook")
