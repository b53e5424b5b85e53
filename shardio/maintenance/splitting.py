"""Make named subsets of a dataset, which are published with its next generation."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio._base.callers import ANY_OPTION
from shardio._base.classes import one_line
from shardio.dataset.manifest import load_generation, publish_next
from shardio.dataset.selection import RowRuns, check_rows
from shardio.dataset.transaction import detect_conflict
from shardio.errors import InvalidArgument
from shardio.maintenance.comparison import Digests, exact_digests, mix
from shardio.maintenance.jobs import takes_paths
from shardio.order.permutation import derive_key
from shardio.samples.shard_dataset import ShardDataset

_TOLERANCE: Final = 1e-6
_MAX_NAME_BYTES: Final = 255
_CHUNK_ROWS: Final = 1 << 16
_PARTS: Final = '{"train": 0.9, "val": 0.1}'
_ADVICE: Final = {
    "parts": f"such as split(folder, {_PARTS})",
    ANY_OPTION: f"write split(folder, {_PARTS}, seed=…)",
}


@dataclass(frozen=True, slots=True)
class SplitReport:
    """The result of a split. `generation` is the number of the generation that has the subsets.

    `n_samples` and `n_groups` map the name of each subset to its numbers of samples and groups.
    `replaced` are the names of the earlier subsets that were removed or replaced.
    """

    dataset: Path
    generation: int
    n_samples: Mapping[str, int]
    n_groups: Mapping[str, int]
    replaced: tuple[str, ...] = ()

    def __repr__(self) -> str:
        sizes = (f"{name!r} {n:,}" for name, n in self.n_samples.items())
        return one_line(self, [self.dataset], f"generation {self.generation}", *sizes)

    def as_json(self) -> dict[str, Any]:
        """Return a JSON-serializable dict."""
        return {**asdict(self), "dataset": str(self.dataset)}


@takes_paths("split(folder, parts)", "folder", advice=_ADVICE)
def split(
    folder: str | os.PathLike[str],
    parts: Mapping[str, float],
    *,
    group: str | None = None,
    seed: int = 0,
) -> SplitReport:
    """Assign each sample of a dataset at random to one of several named subsets.

    All existing subsets are removed. No shard is written. The result depends only on the samples,
    their order, `parts`, `group` and `seed`.

    Args:
        folder: the dataset.
        parts: maps the name of each subset to its share of the samples. If the shares add up to
            less than 1, the other samples are in no subset.
        group: the name of a field. All samples with the same value of this field go to the same
            subset, so that shares are met only approximately. By default, every sample is assigned
            independently.
        seed: the seed of the assignment, from 0 up.

    Raises:
        InvalidArgument: parts, group or seed is invalid, or a subset would be empty.
        DatasetNotFound, ShardCorrupt, …: the dataset or the field `group` cannot be read.
        DatasetConflict: another writer has published in the meantime. Nothing is changed.
    """
    check_split(parts, seed)
    with detect_conflict(folder), ShardDataset(folder) as dataset:
        if group is not None and group not in dataset.schema:
            known = ", ".join(dataset.schema)
            raise InvalidArgument(f"{dataset.path}: no field {group!r}; the fields are {known}")
        previous = load_generation(folder, dataset.generation)
        groups, counts = _groups(dataset, group)
        subset_of_group = _assign_groups(groups, counts, _with_rest(parts), seed)
    group_masks = {name: subset_of_group == k for k, name in enumerate(parts)}
    row_masks = {name: mask[groups] for name, mask in group_masks.items()}
    _refuse_empty(row_masks, folder, f"{len(groups)} samples in {len(counts)} groups")
    stats = {key: value for key, value in previous.stats.items() if key != "subsets"}
    generation = publish_next(
        folder,
        previous,
        subsets={name: RowRuns.from_mask(mask) for name, mask in row_masks.items()},
        stats=stats,
        operation=split_operation(parts, seed, group),
    )
    return SplitReport(
        Path(folder),
        generation.number,
        {name: int(mask.sum()) for name, mask in row_masks.items()},
        {name: int(mask.sum()) for name, mask in group_masks.items()},
        tuple(previous.subsets),
    )


def add_subset(
    folder: str | os.PathLike[str],
    name: str,
    rows: npt.ArrayLike,
    *,
    overwrite: bool = False,
    notes: Mapping[int, str] | None = None,
    generation: int | None = None,
) -> SplitReport:
    """Publish some samples of a dataset as a named subset; other subsets are kept.

    No shard is written.

    Args:
        folder: the dataset.
        name: the name of the subset.
        rows: the indices of the samples, in any order; or a mask with a bool for every sample.
        overwrite: True to replace a subset of this name.
        notes: texts about samples, by index; the generation keeps them in `dataset.operation`.
        generation: the generation that `rows` refers to; by default the published one.

    Raises:
        InvalidArgument: the name or the rows are invalid, or there is such a subset.
        DatasetNotFound, DatasetCorrupt, …: the dataset cannot be read.
        DatasetConflict: another generation than `generation` is published. Nothing is changed.
    """
    _check_parts({name: 1})
    with detect_conflict(folder), ShardDataset(folder, generation=generation) as dataset:
        chosen = np.zeros(len(dataset), np.bool_)
        chosen[check_rows(rows, len(dataset), "rows")] = True
        previous = load_generation(folder, dataset.generation)
    if not chosen.any():
        raise InvalidArgument(f"{os.fspath(folder)}: {name!r} would have no sample: give rows")
    if name in previous.subsets and not overwrite:
        raise InvalidArgument(
            f"{os.fspath(folder)}: there is a subset {name!r}; overwrite=True replaces it"
        )
    stats = dict(previous.stats)
    if name in stats.get("subsets", {}):
        stats["subsets"] = {key: value for key, value in stats["subsets"].items() if key != name}
        stats = {key: value for key, value in stats.items() if value}
    n_samples = int(chosen.sum())
    options: dict[str, Any] = {"name": name, "samples": n_samples}
    if notes:
        options["notes"] = {str(row): text for row, text in sorted(notes.items())}
    following = publish_next(
        folder,
        previous,
        subsets={**previous.subsets, name: RowRuns.from_mask(chosen)},
        stats=stats,
        operation={"name": "add-subset", "options": options},
    )
    replaced = (name,) if name in previous.subsets else ()
    sizes = {name: n_samples}
    return SplitReport(Path(folder), following.number, sizes, sizes, replaced)


def split_operation(
    parts: Mapping[str, float], seed: int, group: str | None = None
) -> dict[str, Any]:
    """Return the operation that a generation records for a split."""
    return {"name": "split", "options": {"parts": dict(parts), "group": group, "seed": seed}}


def random_subsets(
    n_rows: int, parts: Mapping[str, float], seed: int, folder: str | os.PathLike[str]
) -> dict[str, RowRuns]:
    """Assign rows to subsets at random, as `split` does; shares may add up to less than 1.

    `folder` is the dataset, for the message if a subset would be empty.
    """
    rows = np.arange(n_rows, dtype=np.intp)
    subset_of_row = _assign_groups(rows, np.ones(n_rows, np.int64), _with_rest(parts), seed)
    masks = {name: subset_of_row == k for k, name in enumerate(parts)}
    _refuse_empty(masks, folder, f"{n_rows} samples")
    return {name: RowRuns.from_mask(mask) for name, mask in masks.items()}


def _with_rest(parts: Mapping[str, float]) -> list[float]:
    """Return the shares, followed by the share of the samples that are in no subset, if any."""
    shares = [*parts.values()]
    rest = 1 - math.fsum(shares)
    return [*shares, rest] if rest > _TOLERANCE else shares


def _refuse_empty(
    masks: Mapping[str, npt.NDArray[np.bool_]], folder: str | os.PathLike[str], there_are: str
) -> None:
    if empty := [name for name, mask in masks.items() if not mask.any()]:
        raise InvalidArgument(
            f"{os.fspath(folder)}: {', '.join(map(repr, empty))} would have no sample: there are "
            f"{there_are}; give larger shares"
        )


def check_split(parts: Any, seed: Any, *, names: tuple[str, str] = ("parts", "seed")) -> None:
    """Check the shares of subsets, which add up to at most 1, and the seed.

    `names` are the names of the two options in messages.
    """
    if not isinstance(parts, Mapping) or not parts:
        raise InvalidArgument(
            f"{names[0]} must map names to their shares, such as {_PARTS}; found {parts!r}"
        )
    _check_parts(parts)
    if type(seed) is not int or seed < 0:
        raise InvalidArgument(f"{names[1]} must be an integer from 0 up; found {seed!r}")


def _check_parts(parts: Mapping[Any, Any]) -> None:
    for name, share in parts.items():
        if not isinstance(name, str) or not name or not name.isprintable():
            raise InvalidArgument(f"the name of a part must be printable text; found {name!r}")
        if len(name.encode("utf-8", "replace")) > _MAX_NAME_BYTES:
            raise InvalidArgument(
                f"the name of a part has at most {_MAX_NAME_BYTES} bytes: {name!r}"
            )
        is_number = isinstance(share, int | float) and not isinstance(share, bool)
        if not is_number or not 0 < share <= 1:
            is_percent = is_number and 1 < share <= 100
            hint = f"; for {share:g} %, write {share / 100:g}" if is_percent else ""
            raise InvalidArgument(
                f"part {name!r}: a share must be above 0 and at most 1; found {share!r}{hint}"
            )
    total = math.fsum(parts.values())
    if total > 1 + _TOLERANCE:
        raise InvalidArgument(f"the shares of all parts must add up to 1 or less; found {total:g}")


def _groups(
    dataset: ShardDataset, group: str | None
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.int64]]:
    """Return each row's group and each group's size; groups are numbered as they first occur."""
    n_rows = len(dataset)
    if group is None:
        return np.arange(n_rows, dtype=np.intp), np.ones(n_rows, np.int64)
    found: list[Digests] = [np.empty(0, np.uint64)]
    for shard in range(len(dataset.shards)):
        reader = dataset.reader(shard, group)
        for first in range(0, len(reader), _CHUNK_ROWS):
            rows = np.arange(first, min(len(reader), first + _CHUNK_ROWS))
            found.append(exact_digests(reader, group, rows))
    _, firsts, numbers = np.unique(np.concatenate(found), return_index=True, return_inverse=True)
    ranks = np.argsort(np.argsort(firsts))
    ordered = ranks[numbers]
    return ordered, np.bincount(ordered).astype(np.int64)


def _assign_groups(
    groups: npt.NDArray[np.intp], counts: npt.NDArray[np.int64], shares: list[float], seed: int
) -> npt.NDArray[np.int64]:
    """Return, for each group, the index in `shares` of the subset to which it is assigned.

    In random order, each group is assigned to the subset that lacks the most samples.
    """
    indices, key = np.arange(len(counts)), np.full(len(counts), derive_key(seed), np.uint64)
    # Mix in the key several times, so that the results for adjacent groups are not correlated.
    keys = mix(key, indices, key, key)
    lacking = [share * len(groups) for share in shares]
    subset_of_group = np.zeros(len(counts), np.int64)
    for k in np.argsort(keys, kind="stable").tolist():
        subset = lacking.index(max(lacking))
        subset_of_group[k] = subset
        lacking[subset] -= int(counts[k])
    return subset_of_group
