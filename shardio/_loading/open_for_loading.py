"""Open the dataset of a loader, with its own maps, or a mixture of several datasets."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from fractions import Fraction
from typing import Any, Final, get_args

import numpy.typing as npt

from shardio.dataset.dataset import Dataset, ShardDataset
from shardio.dataset.mixture import Mixture
from shardio.errors import InvalidArgument
from shardio.order.mixture_order import MAX_SOURCES, WHOLE, Exhausted, MixtureShares
from shardio.shard.verification import Verify
from shardio.storage.file_access import Access
from shardio.storage.remote.options import RemoteOptions, is_url


def open_anew(
    dataset: str | os.PathLike[str] | Dataset,
    verify: Verify,
    access: Access,
    subset: str | None,
    remote: RemoteOptions,
) -> Dataset:
    """Open a loader's dataset; for an open dataset, in the same state and with the same subset.

    `remote` says how to read shards in object stores; those of an open dataset as it does.
    """
    if not isinstance(dataset, Mixture):
        return open_one(dataset, verify, access, subset, remote)
    _check_not_asked(remote, dataset)
    if subset is not None:
        raise InvalidArgument(f"subset={subset!r} of {dataset.path}: mix subsets instead")
    sources = [open_one(source, verify, access, None, remote) for source in dataset.sources]
    return Mixture(sources, dataset.mixing, verify)


def open_one(
    dataset: str | os.PathLike[str] | Dataset,
    verify: Verify,
    access: Access,
    subset: str | None,
    remote: RemoteOptions,
) -> ShardDataset:
    """Open a folder, a URL or an open dataset, which is no mixture; see `open_anew`."""
    if not isinstance(dataset, Dataset):
        place = os.fspath(dataset)
        access = access if remote.whole or not is_url(place) else "auto"
        return ShardDataset(place, verify=verify, access=access, subset=subset, remote=remote)
    if not isinstance(dataset, ShardDataset):
        raise AssertionError("sources are mixed, not mixtures")
    _check_not_asked(remote, dataset)
    if dataset.rows.row_list is not None and subset is not None:
        raise InvalidArgument(
            f"subset={subset!r} of a selection of {dataset.path}: select from that subset instead"
        )
    access = access if remote.whole or not dataset.remote_storages else "auto"
    opened = ShardDataset(
        dataset.place,
        verify=verify,
        access=access,
        subset=dataset.subset if subset is None else subset,
        generation=dataset.generation,
        remote=dataset.remote.with_usage_of(remote),
    )
    if dataset.rows.row_list is not None:
        opened.rows.set_rows(dataset.rows.row_list)
    return opened


def _check_not_asked(remote: RemoteOptions, dataset: Dataset) -> None:
    if remote.is_set:
        raise InvalidArgument(
            f"cache, cache_bytes and storage_options of {dataset.path}, which is open: give them "
            "to shardio.open instead"
        )


_EXHAUSTED: Final = get_args(Exhausted)
_VERIFY: Final = "first"
_UNORDERED: Final = (Set, Mapping)
"""A set of texts has another order in each process; of a mapping, either side could be meant."""


def mix(
    sources: Iterable[str | os.PathLike[str] | ShardDataset],
    *,
    weights: Sequence[float] | npt.NDArray[Any],
    exhausted: Exhausted = "stop",
) -> Mixture:
    """Mix several datasets, for a ShardLoader to draw from each as often as its weight says.

    Of each 256 positions, counted from an epoch's first, each source has its share. The positions
    of a source, and the samples it takes, follow from the loader's seed and the epoch; with
    shuffle=False the samples of a source come in their order. Sources are opened anew, in their
    state and with their subset or selection. The mixture is a dataset of its own: close it, or use
    it in a `with`.

    Args:
        sources: folders, or open datasets; one may come several times, with different subsets.
        weights: of each source, above 0; only their proportions count.
        exhausted: "stop": an epoch ends when the first source has no more samples. "repeat": it
            ends when every source has been seen whole; until then exhausted sources begin again, in
            another order.

    Raises:
        InvalidArgument: a weight, a source or `exhausted` is not acceptable.
        DatasetNotFound, DatasetCorrupt, …: from opening a source.
    """
    # Typed as object: a user's array would be compared element by element
    asked: object = exhausted
    if not isinstance(asked, str) or asked not in _EXHAUSTED:
        known = ", ".join(map(repr, _EXHAUSTED))
        raise InvalidArgument(f"exhausted must be one of {known}; found {exhausted!r}")
    given = _checked(sources)
    mixing = MixtureShares(_shares(weights, len(given)), exhausted)
    opened: list[ShardDataset] = []
    for source in given:
        access = source.access if isinstance(source, ShardDataset) else "auto"
        opened.append(open_one(source, _VERIFY, access, None, RemoteOptions()))
        if not len(opened[-1]):
            raise InvalidArgument(f"{opened[-1]} has no samples and cannot be mixed: leave it out")
    mixture = Mixture(opened, mixing, _VERIFY)
    _ = mixture.mixture_sizes.n_positions  # raises if there are too many
    return mixture


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
    """Return the share of each of n sources, from 1 up: exactly in proportion, or else of WHOLE."""
    what = f"weights must be {n} numbers above 0, one for each source"
    try:
        if isinstance(weights, (str, *_UNORDERED)):
            raise TypeError("they have no order, or are not numbers")
        # A float as it is written: 0.3 and 0.7 are 3 to 7.
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
    if total <= WHOLE * unit:
        return tuple(int(each / unit) for each in numbers)
    return tuple(max(1, round(WHOLE * each / total)) for each in numbers)
