"""A folder of videos on every store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

import shardio

STORES: Final = ("raw", "planes", "jpeg", "h264", "packets")


def on_every_store(
    root: Path, folders: pytest.TempPathFactory, **options: Any
) -> Callable[[str], Path]:
    """Return the folder converted to a store, by its name."""
    place = folders.mktemp("stores")
    for store in STORES:
        shardio.convert(root, place / store, workers=0, store=store, **options)
    return lambda store: place / store


def with_the_broken(media_root: Path, folder: Path) -> Path:
    """Return a folder with the real clips, and what is broken beside them."""
    folder.mkdir()
    for name in ("clips", "broken"):
        (folder / name).symlink_to(media_root / name)
    return folder
