"""dataset.json and its generations: the only commit point of a dataset.

`generation` is what a generation says and how it is written down, `listing` the shards in it,
`commit` how one is published and read, `folder` what the folder may be. Nothing that is published
is ever modified.
"""

from shardio.manifest.commit import (
    GENERATIONS,
    check_classes,
    load,
    load_generation,
    publish,
    publish_next,
    read_pointer,
    remove_halves,
    settle,
    withdraw,
)
from shardio.manifest.default_view import ROWS
from shardio.manifest.folder import (
    POINTER,
    check_folder_name,
    holds_dataset,
    refuse_existing,
)
from shardio.manifest.generation import Generation, lineage_of
from shardio.manifest.listing import Side, whole_schema
from shardio.storage.fs import refuse_links_outside

__all__ = [
    "GENERATIONS",
    "POINTER",
    "ROWS",
    "Generation",
    "Side",
    "check_classes",
    "check_folder_name",
    "holds_dataset",
    "lineage_of",
    "load",
    "load_generation",
    "publish",
    "publish_next",
    "read_pointer",
    "refuse_existing",
    "refuse_links_outside",
    "remove_halves",
    "settle",
    "whole_schema",
    "withdraw",
]
