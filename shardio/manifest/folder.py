"""The folder of a dataset: what it may be called, and what may lie in it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from shardio._base.file_names import check_encodable
from shardio.errors import DatasetExists, InvalidArgument

POINTER: Final = "dataset.json"
"""The file that names the published generation: a folder that has it is a dataset."""


def holds_dataset(folder: str | os.PathLike[str]) -> bool:
    """Whether a dataset is published in `folder`."""
    return (Path(folder) / POINTER).exists()


def check_folder_name(name: str | os.PathLike[str]) -> None:
    """Make sure that a dataset's folder can be called so.

    Raises:
        InvalidArgument: the name is empty, or none that a file system takes.
    """
    text = os.fspath(name)
    if not text:
        raise InvalidArgument(
            "out (OUT) is empty; expected the name of a folder, as '.' is for the current one"
        )
    check_encodable(text, "out (OUT)")
    if b"\0" in os.fsencode(text):
        raise InvalidArgument(f"out (OUT) is {text!r}, which is no name that a folder can have")


def refuse_existing(folder: str | os.PathLike[str], *, but: str = "") -> None:
    """Make sure that a new dataset can be made in `folder`: it is missing or empty.

    Args:
        but: the name of an entry that may be there.

    Raises:
        DatasetExists: it is a file, or holds anything.
    """
    path = Path(folder)
    if path.is_dir():
        if holds_dataset(path):
            raise DatasetExists(f"{path}: already holds a dataset; choose another folder")
        if found := sorted({*os.listdir(path)} - {but}):
            raise DatasetExists(
                f"{path}: already holds data ({found[0]}, {len(found)} entries in all); "
                "choose another folder"
            )
    elif os.path.lexists(path):
        raise DatasetExists(f"{path}: is a file; a dataset is a folder")
