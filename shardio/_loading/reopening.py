"""Opening what a loader is given: a dataset of its own, with its own maps."""

from __future__ import annotations

import os

from shardio.dataset.dataset import Dataset, ShardDataset
from shardio.dataset.mixture import Mixture
from shardio.errors import InvalidArgument
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
    """Open what a loader is given: of an open dataset, the state and the subset that it shows.

    `remote` says how shards in object stores are read; those of an open dataset as it was told.
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
    access = access if remote.whole or not dataset.buckets else "auto"
    opened = ShardDataset(
        dataset.place,
        verify=verify,
        access=access,
        subset=dataset.subset if subset is None else subset,
        generation=dataset.generation,
        remote=dataset.remote.like(remote),
    )
    if dataset.rows.row_list is not None:
        opened.rows.show(dataset.rows.row_list)
    return opened


def _check_not_asked(remote: RemoteOptions, dataset: Dataset) -> None:
    if remote.is_asked:
        raise InvalidArgument(
            f"cache, cache_bytes and storage_options of {dataset.path}, which is open: give them "
            "to shardio.open instead"
        )
