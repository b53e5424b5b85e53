"""The batches of an epoch as a loader delivers them, in its order and after its transforms.

Any batch is found without the batches before it, because the order of an epoch is computed. Without
a loader of the user, nothing is decoded here: the order gives the samples of a batch, and the
pictures are those of the dataset. With one, a batch is loaded, and its values are shown.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, urlencode

import numpy as np

import shardio
from shardio._base.progress import counted
from shardio.media import fit, preview_pixels, to_jpeg
from shardio_tools.view.rows import class_field, class_name
from shardio_tools.view.source import version_of
from shardio_tools.view.stored import (
    READ_ERRORS,
    parse_count,
    thumbnail_fields,
)
from shardio_tools.view.texts import (
    MAX_FIELDS,
    MAX_FIRST,
    MAX_TEXT,
    array_text,
    number_text,
    stored_texts,
)
from shardio_tools.view.thumbnails import Picture

SHUFFLES: Final = ("none", "full", "blocks", "shards")
_MAX_BATCH: Final = 256
"""The maximum size of a batch without a loader of the user."""
_MAX_SHOWN: Final = 256
"""The maximum number of rows of a batch that are shown."""
_DEFAULT_BATCH: Final = 32
_MAX_KEPT: Final = 4
"""The maximum number of batches that are kept for their pictures: two epochs, and a step each."""
_MAX_KEPT_BYTES: Final = 128 << 20
_MAX_WEIGHTS: Final = 10_000_000
_MAX_SKIPS: Final = 1 << 20
_MAX_COUNT: Final = 1 << 62
_THUMBNAIL: Final = 256
_CLOSE_S: Final = 0.3
"""The time that `close` waits for a batch."""
_ADVICE: Final = (
    "--loader names a ShardLoader, a dict of its options, or a function that returns either"
)


class EpochBatches:
    """The batches of one dataset, for a loader of the user or with the options of a request.

    `loader` is a ShardLoader, a dict of its options, a function that returns either, or None.
    Thread-safe; one batch is loaded at a time.
    """

    def __init__(self, dataset_path: str, loader: Any = None) -> None:
        self._path, self._given = dataset_path, loader
        self._lock = threading.Lock()
        self._loader: Any = None
        self._options: tuple[Any, ...] | None = None
        self._batches: OrderedDict[tuple[int, int], _Loaded] = OrderedDict()

    @property
    def is_fixed(self) -> bool:
        """True if the options are those of a loader of the user."""
        return self._given is not None

    def describe(self, dataset: Any, params: Mapping[str, str]) -> dict[str, Any]:
        """Return the samples of a batch, and the options with which it is found.

        Args:
            dataset: a copy of the dataset that is shown, for the names of shards and classes.
            params: epoch and batch and, without a loader of the user, batch_size, shuffle, seed,
                and weights, the name of a field; all are optional.

        Raises:
            InvalidArgument: an option is invalid, or there is no such batch.
            ShardCorrupt, TransformError, …: the order or the batch cannot be computed.
        """
        with self._lock:
            loader = self._loader_for(dataset, params)
            epoch, batch = (_count(params, name, 0, 0) for name in ("epoch", "batch"))
            if self.is_fixed:
                n_batches = _n_batches(loader, epoch)
                samples, text = self._delivered(loader, epoch, batch)
            else:
                n_batches = len(loader)
                samples, text = _ordered(loader, epoch, batch), loader.view.summary
        if loader.dataset.lineage != dataset.lineage:
            samples = [each | {"row": None} for each in samples]  # rows of another dataset
        transform = _transform_name(self._given) if self.is_fixed else None
        used = {name: params.get(name, "") for name in ("shuffle", "weights")}
        return {
            "n_batches": n_batches,
            "batch": batch,
            "epoch": epoch,
            "samples": samples,
            "transform": transform,
            "text": text,
            "fixed": self.is_fixed,
            "shuffles": list(SHUFFLES),
            "batch_size": loader.batch_size,
            "shuffle": used["shuffle"] or "none",
            "seed": _count(params, "seed", 0, 0),
            "weights": used["weights"],
        }

    def picture(self, epoch: int, batch: int, item: int, field: str) -> Picture:
        """Return a picture of a value of a batch: pixels as the user's loader delivers them.

        Raises:
            InvalidArgument: there is no loader of the user, no such batch, row or field, or the
                value has no picture.
        """
        with self._lock:
            if not self.is_fixed:
                raise shardio.InvalidArgument("batches have pictures of their own with --loader")
            loaded = self._load(self._users_loader(), epoch, batch)
        if field not in loaded.values or not 0 <= item < loaded.n_rows:
            raise shardio.InvalidArgument(
                f"batch {batch} of epoch {epoch} has {counted(loaded.n_rows, 'rows')}, and the "
                f"fields {', '.join(loaded.values)}; found row {item}, field {field!r:.80}"
            )
        pixels = preview_pixels(loaded.values[field][item], _THUMBNAIL)
        if pixels is None:
            raise shardio.InvalidArgument(f"the field {field!r} has no picture")
        return Picture(to_jpeg(fit(np.asarray(pixels), _THUMBNAIL)), "image/jpeg")

    def close(self) -> None:
        """Close the loader, also one of the user, unless a thread still loads a batch with it."""
        if self._lock.acquire(timeout=_CLOSE_S):
            try:
                self._forget_loader()
            finally:
                self._lock.release()

    def _forget_loader(self) -> None:
        self._batches.clear()
        if self._loader is not None:
            self._loader.close()
        self._loader, self._options = None, None

    def _users_loader(self) -> Any:
        if self._loader is None:
            self._loader = _loader_of(self._given, self._path)
        return self._loader

    def _loader_for(self, dataset: Any, params: Mapping[str, str]) -> Any:
        if self.is_fixed:
            return self._users_loader()
        size = _count(params, "batch_size", 1, _DEFAULT_BATCH, _MAX_BATCH)
        seed = _count(params, "seed", 0, 0)
        shuffle, weights = params.get("shuffle") or "none", params.get("weights") or None
        if shuffle not in SHUFFLES:
            raise shardio.InvalidArgument(
                f"shuffle is one of {', '.join(SHUFFLES)}; found {shuffle!r:.80}"
            )
        options = version_of(dataset), size, seed, shuffle, weights
        if options != self._options:
            self._forget_loader()
            self._loader, self._options = _plain_loader(dataset, *options[1:]), options
        return self._loader

    def _delivered(self, loader: Any, epoch: int, batch: int) -> tuple[list[dict[str, Any]], str]:
        """Return the rows of a batch that the user's loader delivers, and a text about it."""
        try:
            loaded = self._load(loader, epoch, batch)
        except shardio.ShardioError as error:
            if isinstance(error, shardio.InvalidArgument):
                raise
            indices = loader.indices_at(epoch, batch)[:_MAX_SHOWN]
            rows = _rows(loader.view, indices)
            return [each | {"valid": False} for each in rows], str(error)
        rows = _rows(loader.view, loaded.indices[:_MAX_SHOWN])
        pictures = [name for name in loaded.values if loaded.has_picture(name)]
        skipped = {each.row: each for each in loaded.skipped}
        for i, row in enumerate(rows):
            row |= {"valid": bool(loaded.valid[i]), "fields": loaded.texts(i)}
            if pictures:
                name = quote(pictures[0], safe="")
                row["thumb"] = f"/epoch/{epoch}/{batch}/{i}/{name}"
            if i in skipped:
                failed = _rows(loader.view, np.array([skipped[i].index]))[0]
                text = f"{skipped[i].error}: {skipped[i].text}"
                row |= {"skipped": text[:MAX_TEXT], "row": failed["row"], "thumb": None}
                row["origin"] = f"{failed['origin']}, replaced by {row['origin']}"
        return rows, loader.view.summary

    def _load(self, loader: Any, epoch: int, batch: int) -> _Loaded:
        """Return a batch with copies of its values; the batches of the last requests are kept."""
        found = self._batches.get((epoch, batch))
        if found is not None:
            self._batches.move_to_end((epoch, batch))
            return found
        loader.load_state_dict(loader.state_at(epoch, batch))
        iterator = iter(loader)
        try:
            found = _Loaded.of(next(iterator))
        finally:
            del iterator
        self._batches[epoch, batch] = found
        while len(self._batches) > _MAX_KEPT or (
            len(self._batches) > 1
            and sum(each.n_bytes for each in self._batches.values()) > _MAX_KEPT_BYTES
        ):
            self._batches.popitem(last=False)
        return found


def _count(
    params: Mapping[str, str], name: str, least: int, default: int, most: int = _MAX_COUNT
) -> int:
    return parse_count(params.get(name) or None, name, least, most, default)


def _n_batches(loader: Any, epoch: int) -> int:
    """Return the number of batches of an epoch, which may be a user's function of the epoch."""
    loader.load_state_dict(loader.state_at(epoch, 0))
    return len(loader)


def _plain_loader(dataset: Any, size: int, seed: int, shuffle: str, weights: str | None) -> Any:
    """Return a loader that finds the samples of batches, and never loads one."""
    sampler = None
    if weights is not None:
        if weights not in dataset.schema.columns:
            raise shardio.InvalidArgument(f"weights: {weights!r:.80} is not a column of numbers")
        if shuffle != "none":
            raise shardio.InvalidArgument("weighted samples are drawn at random: set no shuffle")
        if len(dataset) > _MAX_WEIGHTS:
            raise shardio.InvalidArgument(
                f"weights of up to {_MAX_WEIGHTS:,} samples are read here, and the dataset has "
                f"{len(dataset):,}: use --loader FILE.py:NAME"
            )
        sampler = shardio.WeightedSampler(dataset.column(weights))
    options: dict[str, Any] = {
        "shuffle": False if shuffle == "none" else shuffle,
        "seed": seed,
        "sampler": sampler,
        "num_workers": 0,
        "output": "numpy",
        "rank": 0,
        "world_size": 1,
    }
    try:
        return shardio.ShardLoader(dataset, size, **options)
    except shardio.InvalidArgument:
        # Videos that are too short for a clip, or in several fields, are samples as a whole.
        if not any(field.medium == "video" for field in dataset.schema.values()):
            raise
        return shardio.ShardLoader(dataset, size, decode=False, transform=dict, **options)


def _loader_of(given: Any, path: str) -> Any:
    """Return the loader that the object named by --loader stands for."""
    if callable(given) and not isinstance(given, shardio.ShardLoader | Mapping):
        try:
            given = given()
        except shardio.ShardioError:
            raise
        except (Exception, SystemExit) as error:
            raise shardio.InvalidArgument(
                f"--loader: the function raised {type(error).__name__}: {error}"
            ) from error
    if isinstance(given, shardio.ShardLoader):
        return given
    if not isinstance(given, Mapping):
        raise shardio.InvalidArgument(f"{_ADVICE}; found {type(given).__name__}")
    options = {"on_error": "skip", "num_workers": 0, "output": "numpy", **given}
    if options["on_error"] == "skip":
        options.setdefault("max_skips", _MAX_SKIPS)
    options.setdefault("batch_size", _DEFAULT_BATCH)
    dataset = options.pop("dataset", path)
    try:
        return shardio.ShardLoader(dataset, **options)
    except TypeError as error:
        raise shardio.InvalidArgument(f"{_ADVICE}: {error}") from error


def _transform_name(given: Any) -> str | None:
    """Return the name of the transform in a dict of options; None if it is not known."""
    names = []
    for option in ("transform", "batch_transform") if isinstance(given, Mapping) else ():
        found = given.get(option)
        if found is not None:
            names.append(str(getattr(found, "__name__", None) or repr(found))[:MAX_TEXT])
    return ", ".join(names) or None


def _ordered(loader: Any, epoch: int, batch: int) -> list[dict[str, Any]]:
    """Return the samples of a batch from the order alone, with the pictures of the dataset."""
    indices = loader.indices_at(epoch, batch)[:_MAX_SHOWN]
    view = loader.view
    rows = _rows(view, indices)
    fields = thumbnail_fields(view.dataset.schema)
    clips = getattr(view, "clip_table", None)
    for row, index in zip(rows, indices.tolist(), strict=True):
        if clips is not None:
            video = clips.videos(np.array([index]))
            first = int(clips.start_codes(np.array([index]), video, np.zeros(1, np.uint64))[0])
            frames = clips.frames(first)
            row["origin"] += f", frames {first} to {frames[-1]}"
            name = quote(view.video, safe="")
            row["thumb"] = f"/frame/{row['row']}/{name}/{first}?size={_THUMBNAIL}"
        elif fields:
            name = quote(fields[0], safe="")
            row["thumb"] = f"/thumbnail/{row['row']}/{name}?{urlencode({'size': _THUMBNAIL})}"
        else:
            row["fields"] = stored_texts(view.dataset, row["row"])
    return rows


def _rows(view: Any, indices: Any) -> list[dict[str, Any]]:
    """Return the row, the origin and the label of samples of a view."""
    dataset = view.dataset
    rows = view.at(np.asarray(indices, np.int64))
    shards = dataset.locate(rows)
    names = _labels(dataset, rows)
    made = []
    for row, shard, name in zip(rows.tolist(), shards.tolist(), names, strict=True):
        origin = f"{dataset.shards[shard].name}, row {row - int(dataset.shard_starts[shard]):,}"
        found = {"row": row, "origin": origin, "valid": True, "label": name}
        made.append({**found, "thumb": None, "skipped": None, "fields": []})
    return made


def _labels(dataset: Any, rows: Any) -> list[str | None]:
    if (name := class_field(dataset)) is None:
        return [None] * len(rows)
    try:
        return [class_name(dataset, each) for each in dataset.column_at(name, rows).tolist()]
    except READ_ERRORS:
        return [None] * len(rows)


@dataclass(frozen=True)
class _Loaded:
    """A delivered batch: copies of its values, as arrays and lists with an item per row."""

    values: dict[str, Any]
    n_rows: int
    indices: Any
    valid: Any
    skipped: tuple[Any, ...]

    @classmethod
    def of(cls, batch: Any) -> _Loaded:
        values = {name: _as_items(batch[name]) for name in batch}
        values = {name: each for name, each in values.items() if len(each) == batch.n_rows}
        skipped = tuple(batch.skipped)
        return cls(values, batch.n_rows, np.array(batch.indices), np.array(batch.valid), skipped)

    @property
    def n_bytes(self) -> int:
        """The size of the arrays in bytes."""
        items = (each if isinstance(each, list) else [each] for each in self.values.values())
        return sum(int(getattr(item, "nbytes", 0)) for each in items for item in each)

    def has_picture(self, name: str) -> bool:
        """Return True if the first value of a field that is not None has a picture."""
        items = (each for each in self.values[name] if each is not None)
        first = next(iter(items), None)
        try:
            return first is not None and preview_pixels(first, 64) is not None
        except shardio.ShardioError:
            return False

    def texts(self, row: int) -> list[dict[str, str]]:
        """Return short texts about the values of a row that have no picture."""
        made = []
        for name, items in self.values.items():
            value = items[row]
            if isinstance(value, np.ndarray | np.generic):
                first = value.reshape(-1)[:MAX_FIRST]
                text = array_text(value.dtype, value.shape, first)
            elif isinstance(value, bytes):
                text = counted(len(value), "bytes")
            else:
                text = number_text(value)
            made.append({"name": name, "text": text[:MAX_TEXT]})
        return made[:MAX_FIELDS]


def _as_items(value: Any) -> Any:
    """Return the values of a field, an item per row, in NumPy's arrays where they are tensors."""
    if isinstance(value, Mapping):
        return []
    if isinstance(value, list | tuple):
        return [_as_array(each) for each in value]
    return np.array(_as_array(value))


def _as_array(value: Any) -> Any:
    """Return a tensor of tinygrad, torch or JAX as an array; any other value unchanged."""
    if isinstance(value, np.ndarray | np.generic | bytes | str | int | float | None):
        return value
    for name in ("detach", "cpu", "float", "numpy"):
        if name == "float" and "bfloat16" not in str(getattr(value, "dtype", "")):
            continue
        if callable(getattr(value, name, None)):
            value = getattr(value, name)()
    return np.asarray(value) if hasattr(value, "__array__") else value
