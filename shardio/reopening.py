"""Opening what a loader is given: a dataset of its own, with its own maps."""

from __future__ import annotations

import os

from shardio.access.filesystems import Access
from shardio.dataset import ShardDataset
from shardio.errors import InvalidArgument
from shardio.mixture import Mixture
from shardio.units import Verify


def open_anew(
    dataset: str | os.PathLike[str] | ShardDataset,
    verify: Verify,
    access: Access,
    subset: str | None,
) -> ShardDataset:
    """Open what a loader is given: of an open dataset, the state and the subset that it shows."""
    if not isinstance(dataset, ShardDataset):
        return ShardDataset(os.fspath(dataset), verify=verify, access=access, subset=subset)
    if isinstance(dataset, Mixture):
        if subset is not None:
            raise InvalidArgument(f"subset={subset!r} of {dataset.path}: mix subsets instead")
        sources = [open_anew(source, verify, access, None) for source in dataset.sources]
        return Mixture(sources, dataset.mixing, verify)
    if dataset.selection is not None and subset is not None:
        raise InvalidArgument(
            f"subset={subset!r} of a selection of {dataset.path}: select from that subset instead"
        )
    opened = ShardDataset(
        dataset.place,
        verify=verify,
        access=access,
        subset=dataset.subset if subset is None else subset,
        generation=dataset.generation,
    )
    if dataset.selection is not None:
        opened.show(dataset.selection)
    return opened
