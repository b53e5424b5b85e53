"""Datasets in object stores, as far as commands have to do with them."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

import shardio
from shardio_tools._facts import (
    Facts,
    Inspection,
    checked_row,
    dataset_facts,
    dataset_sample,
)

_READS_URLS = ("inspect", "serve")
"""Commands that take the URL of a dataset."""
_WRITES_URLS = ("convert",)
"""Commands whose result may be at a URL."""
_ADDRESS_OPTIONS = ("address", "bind")
"""Options that say where others are reached, in what looks like a URL."""


def is_url(text: object) -> bool:
    """Whether it is the URL of something in an object store."""
    return isinstance(text, str) and "://" in text and not text.lower().startswith("file://")


def refuse_urls(options: argparse.Namespace) -> None:
    """Make sure that no command is given a URL that works on folders.

    Raises:
        InvalidArgument: it is; the message says how to have the folder.
    """
    for name, value in vars(options).items():
        if name in _ADDRESS_OPTIONS:
            continue
        for each in value if isinstance(value, list) else [value]:
            is_taken = options.command in _READS_URLS and name == "path"
            is_taken |= options.command in _WRITES_URLS and name == "out"
            if is_url(each) and not is_taken:
                raise shardio.InvalidArgument(
                    f"{each}: shardio {options.command} works on a folder: copy the dataset to "
                    "one first, as by `aws s3 sync` or `gcloud storage rsync`"
                )


def inspect_url(url: str, sample: int | None) -> Inspection:
    """Look at what a dataset in a store says of itself, and at its first or the given sample.

    Of shards that this sample is not in nothing is read.

    Raises:
        DatasetNotFound: there is none.
        InvalidArgument: it has no such sample, or the URL is that of a shard.
    """
    if url.endswith(".shard"):
        folder = url.rpartition("/")[0]
        raise shardio.InvalidArgument(
            f"{url}: a shard in a store is looked at through its dataset: shardio inspect {folder}"
        )
    inspection = Inspection(facts={"dataset": url})
    with shardio.open(url) as dataset:
        inspection.facts |= dataset_facts(inspection, dataset)
        inspection.facts["shards"] = _listed(dataset.shards)
        for name, beside in dataset.sides.items():
            inspection.facts.setdefault("column_groups", {})[name] = _listed(beside)
        row = checked_row(url, sample, len(dataset))
        if row is not None:
            inspection.facts["sample"] = dataset_sample(inspection, dataset, row)
    return inspection


def _listed(shards: Iterable[Any]) -> list[Facts]:
    """What the dataset says of shards that are not looked at."""
    return [
        {
            "name": shard.name,
            "samples": shard.n_samples,
            "bytes": shard.n_bytes,
            "id": shard.id,
            "is_readable": True,
        }
        for shard in shards
    ]
