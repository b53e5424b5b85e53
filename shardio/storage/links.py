"""Links that lead out of a folder: what is read of a dataset lies in it."""

from __future__ import annotations

import os
from pathlib import Path

from shardio.errors import DatasetCorrupt


def refuse_links_outside(root: str | Path, *paths: str | Path) -> None:
    """Make sure that nothing of the dataset in `root` is a link to somewhere outside of it.

    A dataset is one folder: what is copied, verified or deleted with it is what is read.

    Raises:
        DatasetCorrupt: naming the link and where it leads.
    """
    for path in paths:
        if not os.path.islink(path):
            continue
        target, inside = os.path.realpath(path), os.path.realpath(root)
        if os.path.commonpath([target, inside]) != inside:
            raise DatasetCorrupt(f"{path}: a link that leads out of the dataset, to {target}")
