"""Several datasets as one: all their samples, and the proportions in which they are mixed."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from fractions import Fraction
from typing import Any, Final, NamedTuple, NoReturn, get_args

import numpy as np
import numpy.typing as npt

from shardio._base.callers import ANY_OPTION, one_of, refuses
from shardio._base.classes import listed
from shardio._base.progress import counted
from shardio.dataset.dataset import Dataset
from shardio.dataset.external_lists import ShardList
from shardio.dataset.files import DatasetFiles
from shardio.dataset.generation import ROWS, ColumnGroup, Generation
from shardio.dataset.selection import MixtureSelection
from shardio.errors import InvalidArgument
from shardio.format.checksum import hash_bytes
from shardio.format.schema import Schema
from shardio.order import Sequential
from shardio.order.mixture_order import (
    MAX_SHARE_SUM,
    MAX_SOURCES,
    Exhausted,
    MixtureEpochOrder,
    MixtureShares,
    MixtureSizes,
)
from shardio.samples.open_dataset import OpenDataset, Selection
from shardio.samples.shard_dataset import (
    DatasetSource,
    ShardDataset,
    file_groups_of,
    shard_starts_of,
)
from shardio.samples.view import SELECT_ADVICE, RowView
from shardio.shard.verification import Rows, Verify
from shardio.storage.file_access import Access

_MAX_NAMED: Final = 3
_STRICTNESS: Final[tuple[Verify, ...]] = ("off", "first", "always")


class MixtureSpec(NamedTuple):
    """A description of a mixture for workers: path, sources, and the share of each source."""

    path: str
    sources: tuple[DatasetSource, ...]
    mixing: MixtureShares

    @property
    def shown_path(self) -> str:
        """The text that stands for the mixture in errors."""
        return self.path

    def open(self) -> Mixture:
        """Open the mixture. The rows of selections are zeros until the caller sets them."""
        return Mixture([source.open() for source in self.sources], self.mixing)


class Mixture(OpenDataset):
    """The concatenated samples of several datasets, which a loader mixes. It owns its sources.

    As a sequence it has every sample of each source once, in order. A loader draws from the sources
    according to `mixing`. A mixture has the fields that are equal in all sources, and the shards of
    all sources, by absolute paths. The strictest `verify` applies to every source.

    Args:
        sources: the datasets; no sample may have been read from them before.
        mixing: the shares of the sources.
    """

    rows: MixtureSelection

    _public = "sources sources_of"

    def __init__(self, sources: Sequence[ShardDataset], mixing: MixtureShares) -> None:
        self.sources: Final = tuple(sources)
        """The datasets in the mixture, in order."""
        self.mixing: Final = mixing
        self.has_one_view: Final = all(source.view == sources[0].view for source in sources)
        """True if all sources have the same default view (rows or clips)."""
        n_more = len(sources) - _MAX_NAMED
        paths = ", ".join(source.path for source in sources[:_MAX_NAMED])
        path = f"a mixture of {paths}{f' and {n_more} more' if n_more > 0 else ''}"
        is_mapped = all(source.access == "mmap" for source in sources)
        access: Access = "mmap" if is_mapped else "pread"  # one method for all files
        view = sources[0].view if self.has_one_view else ROWS
        state = _generation_of(sources, view)
        files = [each for source in sources for each in source.files.sources]
        verify = max((source.verify for source in sources), key=_STRICTNESS.index)
        rows = [source.rows for source in sources]
        super().__init__(
            path=path,
            root=path,
            generation=state,
            files=DatasetFiles(
                files, file_groups_of(state), verify=verify, access=access, path=path
            ),
            rows=MixtureSelection(shard_starts_of(state), rows, list(map(repr, sources))),
            verify=verify,
        )

    def reopen(self, *, n_workers: int = 1) -> Mixture:
        """Open and mix the same sources again, with separate files; see ShardDataset.reopen."""
        sources = [each.reopen(n_workers=n_workers) for each in self.sources]
        return Mixture(sources, self.mixing)

    def show(self) -> NoReturn:
        """Raise InvalidArgument: a mixture is not stored, so it cannot be shown."""
        raise InvalidArgument(f"{self.path}: show one of the datasets: mixture.sources[0].show()")

    @property
    def worker_source(self) -> MixtureSpec:
        """A description for workers; every source has the strictest `verify` of all sources."""
        sources = (replace(each.worker_source, verify=self.verify) for each in self.sources)
        return MixtureSpec(self.path, tuple(sources), self.mixing)

    def sizes_of(self, ends: Rows) -> MixtureSizes:
        """Return the share and the sample count of each source, given a view's `source_ends`."""
        sizes = np.diff(ends, prepend=0)
        firsts = ends - sizes
        return MixtureSizes(self.mixing, tuple(sizes.tolist()), tuple(firsts.tolist()))

    def first_position(self, number: int, ends: Rows, *, seed: int, epoch: int) -> int:
        """Return the first position of a view's sample in an epoch without shuffling.

        If the epoch leaves the sample out, the position is after the end of the epoch.
        """
        sizes = self.sizes_of(ends)
        order = MixtureEpochOrder(Sequential(), sizes, None, seed=seed, epoch=epoch)
        source = int(np.searchsorted(ends, number, side="right"))
        found = order.first_position(source, number - sizes.firsts[source])
        return sizes.n_positions + number if found is None else found

    def sources_of(self, indices: Any) -> Rows:
        """Return the source of each sample, for sample indices such as `batch.indices`.

        Raises:
            InvalidArgument: an index is invalid.
        """
        return RowView(self).sources_of(indices)

    def check_agreement(self, fields: Iterable[str] | None) -> Iterable[str] | None:
        """Check that `fields`, by default all, are equal in all sources; return `fields`."""
        known = dict.fromkeys(name for source in self.sources for name in source.schema)
        if isinstance(fields, Iterable) and not isinstance(fields, str):
            fields = list(fields)
        wanted = fields if isinstance(fields, list) else list(known)
        for name in known:
            groups = [name[:i] for i, letter in enumerate(name) if letter == "."]
            if name in self.schema or not any(each in wanted for each in (name, *groups)):
                continue
            has = [source.schema.get(name) for source in self.sources]
            i = next(i for i, field in enumerate(has) if field != has[0])
            shown = ["absent" if has[k] is None else repr(has[k]) for k in (0, i)]
            places = [f"in {self.sources[k].path} (source {k})" for k in (0, i)]
            raise InvalidArgument(
                f"a mixture has the fields that are equal in all sources; field {name!r} is "
                f"{shown[0]} {places[0]}, and {shown[1]} {places[1]}: pass fields= without it; "
                f"common fields: {', '.join(self.schema)}"
            )
        return fields

    def __reduce__(self) -> tuple[Any, ...]:
        return Mixture, (self.sources, self.mixing)

    def __repr__(self) -> str:
        sources = listed(map(repr, self.sources), 400)
        closed = ", closed" * self.is_closed
        return f"Mixture({len(self)} samples of {len(self.sources)} sources{closed}: {sources})"

    @refuses(SELECT_ADVICE)
    def select(self, rows: Selection, *, fields: Iterable[str] = ()) -> Mixture:
        """Mix the samples of each source that a function selects; see `ShardDataset.select`.

        Raises:
            InvalidArgument: `rows` is not a function, or selects no sample of a source.
        """
        if not callable(rows):
            raise InvalidArgument(
                f"{self.path}: select with a function, or from its sources, and mix the selections"
            )
        names = [fields] if isinstance(fields, str) else list(fields)
        return self._mix(source.select(rows, fields=names) for source in self.sources)

    def subset(self, name: str) -> Mixture:
        """Return a mixture of subsets: from every source, the subset with this name.

        Raises:
            InvalidArgument: a source has no such subset, or its subset is empty.
        """
        return self._mix(source.subset(name) for source in self.sources)

    def preload(self, fields: Iterable[str] | None = None) -> int:
        """Read some fields, by default the common ones, into the page cache; see `OpenDataset`."""
        return super().preload(None if fields is None else self.check_agreement(fields))

    def _mix(self, sources: Iterable[ShardDataset]) -> Mixture:
        return Mixture([_checked_size(source) for source in sources], self.mixing)

    def close(self) -> None:
        """Close all shards. Samples that were returned stay valid. Idempotent."""
        super().close()
        for source in self.sources:
            source.close()


def _generation_of(sources: Sequence[ShardDataset], view: Mapping[str, Any]) -> Generation:
    classes = {source.classes for source in sources}
    lineages = "".join(source.lineage for source in sources)
    schema = {
        name: field
        for name, field in sources[0].schema.items()
        if all(source.schema.get(name) == field for source in sources)
    }
    if not schema:
        some = sources[:_MAX_NAMED]
        found = "; ".join(f"{source.path} has {', '.join(source.schema)}" for source in some)
        raise InvalidArgument(
            f"a mixture has the fields that are equal in all sources, and these have none: {found}"
        )
    added = [name for name in schema if any(name in source.column_groups for source in sources)]
    return Generation(
        number=0,
        lineage=f"{hash_bytes(lineages.encode()):016x}",
        schema=Schema({name: schema[name] for name in schema if name not in added}),
        shards=_summaries(sources),
        view=view,
        classes=classes.pop() if len(classes) == 1 else (),
        column_groups=tuple(
            ColumnGroup(Schema({name: schema[name]}), _summaries(sources, name)) for name in added
        ),
    )


def _summaries(sources: Sequence[ShardDataset], name: str | None = None) -> ShardList:
    """Return the files of all sources: the shards or, for a field, the files that contain it."""
    found = []
    for source in sources:
        (storage,) = source.files.storages
        for summary in source.files.summaries(name):
            found.append(replace(summary, name=storage.path_of(summary)))
    return ShardList.of(found)


_UNORDERED: Final = (Set, Mapping)
"""Types refused for sources and weights: a set has no order, and a mapping iterates over keys."""


@refuses(
    {
        ANY_OPTION: "write mix([a, b], weights=[1, 1])",
        "probabilities": "write weights=",
        "stopping_strategy": "write exhausted=",
    }
)
def mix(
    sources: Iterable[str | os.PathLike[str] | ShardDataset]
    | Mapping[str | os.PathLike[str] | ShardDataset, float],
    *,
    weights: Sequence[float] | npt.NDArray[Any] | None = None,
    exhausted: Exhausted = "stop",
) -> Mixture:
    """Mix several datasets; a ShardLoader draws from each in proportion to its weight.

    The epoch is divided into blocks of 256 positions; in each block, every source has its share of
    the positions. The loader's seed and the epoch determine a source's positions and the samples at
    them; with shuffle=False the samples of a source come in order. Open datasets are opened again,
    with the same subset or selection. The mixture is a separate dataset: close the mixture too, or
    use it in a `with`.

    Args:
        sources: a list of folders or open datasets, in which a dataset may occur several times,
            with different subsets; or a dict from sources to weights.
        weights: the weight of each source of a list, above 0; only the proportions matter.
        exhausted: with "stop", an epoch ends when the first source has no more samples. With
            "repeat", an epoch ends when every source was seen completely; until then exhausted
            sources start again, in another order.

    Raises:
        InvalidArgument: a weight, a source or `exhausted` is invalid.
        DatasetNotFound, DatasetCorrupt, …: a source cannot be opened.
    """
    one_of("exhausted", exhausted, get_args(Exhausted))
    if isinstance(sources, Mapping):
        if weights is not None:
            raise InvalidArgument("weights= is for a list of sources; this dict has the weights")
        weights = list(sources.values())
        sources = list(sources)
    given = _checked(sources)
    mixing = MixtureShares(_shares(weights, len(given)), exhausted)
    opened: list[ShardDataset] = []
    for source in given:
        if isinstance(source, ShardDataset):
            opened.append(source.reopen())
        else:
            opened.append(ShardDataset(os.fspath(source)))
        _checked_size(opened[-1])
    mixture = Mixture(opened, mixing)
    ends = np.cumsum(mixture.rows.source_counts)
    _ = mixture.sizes_of(ends).n_positions  # raises if there are too many
    return mixture


def _checked_size(source: ShardDataset) -> ShardDataset:
    if not len(source):
        raise InvalidArgument(f"{source} has no samples and cannot be mixed: leave it out")
    return source


def _checked(sources: Any) -> list[str | os.PathLike[str] | ShardDataset]:
    is_one = isinstance(sources, str | os.PathLike | Dataset)
    if is_one or isinstance(sources, _UNORDERED) or not isinstance(sources, Iterable):
        raise InvalidArgument(f"mix takes a list of datasets; found {sources!r}")
    found: list[Any] = list(sources)
    for each in found:
        if not isinstance(each, str | os.PathLike | Dataset):
            raise InvalidArgument(f"mix takes folders and open datasets; found {each!r}")
        if isinstance(each, Mixture):
            raise InvalidArgument(f"{each.path} cannot be part of a mixture: mix its sources")
    if not 0 < len(found) <= MAX_SOURCES:
        raise InvalidArgument(f"mix takes 1 to {MAX_SOURCES} datasets; found {len(found)}")
    return found


def _shares(weights: Any, n: int) -> tuple[int, ...]:
    """Return the shares of n sources as positive integers; exact if they fit MAX_SHARE_SUM."""
    what = f"weights must be {counted(n, 'numbers')} above 0, one for each source"
    if weights is None:
        raise InvalidArgument(f"{what}; found none: pass weights=, or a dict {{source: weight}}")
    try:
        if isinstance(weights, (str, *_UNORDERED)):
            raise TypeError("they have no order, or are not numbers")
        # Use each float's decimal repr, so that 0.3 and 0.7 give exactly 3:7.
        numbers = [Fraction(repr(float(each))) for each in weights]
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"{what}; found {weights!r}: {error}") from None
    if len(numbers) != n or min(numbers) <= 0:
        raise InvalidArgument(f"{what}; found {weights!r}")
    unit = Fraction(
        math.gcd(*(each.numerator for each in numbers)),
        math.lcm(*(each.denominator for each in numbers)),
    )
    total = sum(numbers)
    if total <= MAX_SHARE_SUM * unit:
        return tuple(int(each / unit) for each in numbers)
    return tuple(max(1, round(MAX_SHARE_SUM * each / total)) for each in numbers)
