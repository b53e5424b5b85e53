"""Datasets for the tests of the loader, and comparisons of batches with direct reads."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import Array, Batch, Bytes, Schema, ShardDataset, ShardLoader, ShardReader, Text
from shardio.dataset.manifest import load, publish_next
from shardio.order import Samples
from shardio.samples.clip_view import ClipView
from shardio.samples.mixture import Mixture
from shardio.samples.open_dataset import OpenDataset
from shardio.samples.token_view import TokenView
from shardio.samples.view import SampleView
from tests.maintenance.datasets import write
from tests.shards import EVERY_FIELD, every_field_sample, flip, same_in_batch

# Generous: reached only by a test that is about to fail.
PATIENCE_S = 60.0

TWO_FIELDS = Schema({"image": Array("uint8", (64, 96)), "label": Array("int64")})
WORKERS = pytest.mark.parametrize("num_workers", [0, 2])
AT_MOST_ONE_WORKER = pytest.mark.parametrize("num_workers", [0, 1])
"""For errors, which are the same for any number of workers above 0."""
RAGGED = Schema({"number": Array("int64"), "note": Text(), "blob": Bytes()})


def write_dataset(
    folder: Path,
    n_samples: int,
    n_shards: int = 1,
    schema: Schema = EVERY_FIELD,
    samples: Iterable[Mapping[str, Any]] | None = None,
) -> str:
    """Write a dataset of n_samples in n_shards shards; of EVERY_FIELD's values by default."""
    if samples is None:
        made = (every_field_sample(i) for i in range(n_samples))
        samples = ({name: sample[name] for name in schema} for sample in made)
    return str(write(folder, n_samples, n_shards, "{:06d}-000", schema=schema, samples=samples))


def append_shard(folder: Path, schema: Schema, samples: Sequence[Mapping[str, Any]]) -> None:
    """Publish a generation that has these samples in one more shard."""
    beside = folder.with_name("more")
    write_dataset(beside, len(samples), 1, schema, samples)
    old, (new,) = load(folder), load(beside).shards
    shutil.move(beside / new.name, folder / "more.shard")
    shutil.rmtree(beside)
    publish_next(folder, old, shards=(*old.shards, dataclasses.replace(new, name="more.shard")))


def samples(n: int, ends: Sequence[int] = (), *, is_mixture: bool = False) -> Samples:
    shard_ends = np.array(ends, np.int64)
    return Samples("set", n, is_mixture, None, lambda: shard_ends, lambda: None, lambda: (0, n))


OPENING = ("access", "cache", "cache_bytes", "generation", "storage_options", "subset", "verify")


def opened(dataset: Any, options: dict[str, Any]) -> Any:
    """Take the options of `shardio.open` out of a loader's, and open the dataset with them."""
    how = {name: options.pop(name) for name in OPENING if name in options}
    if not how:
        return dataset
    if isinstance(dataset, Mixture):
        return Mixture([opened(source, dict(how)) for source in dataset.sources], dataset.mixing)
    if not isinstance(dataset, ShardDataset):
        return shardio.open(dataset, **how)
    how = {"subset": dataset.subset_name, "generation": dataset.generation, **how}
    found = shardio.open(dataset.root, **how)
    if dataset.rows.row_list is not None:  # a selection
        found.rows.set_rows(dataset.rows.row_list)
    return found


def viewed(dataset: Any, options: dict[str, Any]) -> Any:
    """Take the options of clips or windows out of a loader's, and return a view made by them."""
    clip, pack = options.pop("clip", None), options.pop("pack", None)
    if clip is None and pack is None:
        return dataset
    source = dataset if isinstance(dataset, OpenDataset) else shardio.open(dataset)
    return TokenView(source, pack) if clip is None else ClipView(source, clip)


def make_loader(dataset: Any, *arguments: Any, **options: Any) -> ShardLoader:
    """Make a loader; options of `shardio.open` open the dataset, `clip` and `pack` make a view."""
    given = viewed(opened(dataset, options), options)
    try:
        return ShardLoader(given, *arguments, **options)
    finally:
        if isinstance(given, SampleView) and given.dataset is not dataset:
            given.dataset.close()


def two_fields(n_samples: int) -> Iterator[dict[str, Any]]:
    """Make samples of TWO_FIELDS in which every value depends on the sample's number."""
    for i in range(n_samples):
        image = np.arange(64 * 96, dtype=np.int64).reshape(64, 96) * 7 + i * 31
        yield {"image": image.astype(np.uint8), "label": i}


def noisy(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"label": sample["label"], "noise": rng.integers(1 << 60)}


def drawn(loader: ShardLoader, n_epochs: int = 1) -> list[tuple[int, int, int]]:
    """Return epoch, label and the draw of `noisy` for each valid sample of the coming epochs."""
    found = []
    for _ in range(n_epochs):
        for batch in loader:
            assert batch["label"].tolist() == batch.indices.tolist()
            columns = (batch[name][batch.valid].tolist() for name in ("label", "noise"))
            found += [(batch.epoch, *pair) for pair in zip(*columns, strict=True)]
    return found


def state_after(loader: ShardLoader, n_batches: int, *, n_epochs: int = 0) -> dict[str, Any]:
    """Return the state in the loop's body after n_batches batches, and close the loader."""
    with loader:
        for _ in range(n_epochs):
            for _batch in loader:
                pass
        for i, _ in enumerate(loader, start=1):
            if i == n_batches:
                return json.loads(json.dumps(loader.state_dict()))  # type: ignore[no-any-return]
    raise AssertionError("there are not so many")


def _copied(value: Any) -> Any:
    if isinstance(value, list):
        return [_copied(each) for each in value]
    return value.copy() if isinstance(value, np.ndarray | np.generic) else value


def values_of(batch: Batch) -> dict[str, list[Any]]:
    """Return a batch as lists of copied values: NumPy arrays, text and so on."""
    found: dict[str, list[Any]] = {}
    for name, column in batch.items():
        rows = column if isinstance(column, list) else np.atleast_1d(np.asarray(column))
        found[name] = [_copied(value) for value in rows]
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    is_array = isinstance(value, np.ndarray | np.generic)
    return (value.dtype.str, value.shape, value.tobytes()) if is_array else value


def bits(batch: Batch) -> tuple[Any, ...]:
    """Return all content of a batch of arrays as plain comparable values."""
    fields = []
    for name, values in values_of(batch).items():
        fields.append((name, [_plain(value) for value in values], batch.present(name).tolist()))
    return batch.epoch, batch.step, batch.indices.tolist(), batch.origins.tolist(), fields


def whole(batch: Batch) -> tuple[Any, ...]:
    """Return all that a batch says, with the shapes of its arrays and what was skipped."""
    shapes = [getattr(value, "shape", None) for value in batch.values()]
    return *bits(batch), shapes, batch.valid.tolist(), batch.skipped


def check_resumes(make: Callable[[], ShardLoader]) -> None:
    """Leave an epoch after its first batch, and check that another loader gives the rest."""
    with make() as loader:
        batches = iter(loader)
        next(batches)
        state = json.loads(json.dumps(loader.state_dict()))
        rest = [bits(batch) for batch in batches]
    assert rest
    with make() as loader:
        loader.load_state_dict(state)
        assert [bits(batch) for batch in loader] == rest


def check_workers_agree(make: Callable[..., ShardLoader]) -> None:
    """Check that two epochs are the same without workers, in processes and in threads."""
    found = []
    for options in ({}, {"num_workers": 2}, {"num_workers": 2, "start_method": "thread"}):
        with make(**options) as loader:
            found.append([bits(batch) for _ in range(2) for batch in loader])
    assert found[0] == found[1] == found[2]


def damage_row(folder: str, field: str, row: int, *, shard: int = 0) -> tuple[str, int]:
    """Change a byte of a row of a column; return the file and the offset of the row."""
    path = Path(folder) / f"{shard:06d}-000.shard"
    with ShardReader(path) as reader:
        section = reader.column_section(field)
    offset = section.offset + row * section.stride
    flip(path, offset)
    return str(path), offset


def check_against(batch: Batch, samples: Sequence[Mapping[str, Any]]) -> None:
    """Compare every value of a batch of arrays with the samples whose numbers it carries."""
    indices = batch.indices.tolist()
    assert batch.valid.all()
    for name, values in values_of(batch).items():
        assert len(values) == len(indices)
        for value, index in zip(values, indices, strict=True):
            assert same_in_batch(value, samples[index][name]), (name, index)
