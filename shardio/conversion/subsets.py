"""Folders of inputs that are named like splits."""

from __future__ import annotations

import os
import posixpath
import re
import shlex
import warnings
from collections.abc import Iterable
from typing import Final

from shardio._base.callers import caller_stacklevel
from shardio.conversion.inputs import parse_pattern

_SPLIT_NAMES: Final = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
    **dict.fromkeys(("eval", "evaluation"), "eval"),
    **dict.fromkeys(("holdout", "heldout"), "holdout"),
}
"""Words in the names of folders, and the splits that they denote."""
_NEUTRAL_WORDS: Final = frozenset(
    "audio clean clips data files images img imgs other set split videos".split()
)
"""The words that the name of a split's folder may also contain, as in train_images or dev-clean."""
_WORD: Final = re.compile(r"[^\W\d_]+")


def warn_about_split(folders: Iterable[str], source: str, out: str) -> None:
    """Warn if folders of a source are named like splits, because they all go into one dataset."""
    if not (found := find_split(folders)):
        return
    root, stem = parse_pattern(source).root, out.rstrip("/")
    commands = [
        shlex.join(["shardio", "convert", os.path.join(root, path), f"{stem}-{name}"])
        for name, path in found.items()
    ]
    warnings.warn(
        f"{source}: the folders {' and '.join(found)} are named like splits; all their samples go "
        f"into one dataset. To create a dataset of each, convert them separately: "
        f"{'; '.join(commands)}",
        stacklevel=caller_stacklevel(),
    )


def find_split(folders: Iterable[str]) -> dict[str, str]:
    """Return a dict from the name to the path of each folder that is named like a split.

    A folder counts only if a sibling is named like another split, and only at the least depth with
    such siblings. If several parents have them, the paths are patterns, such as `*/train`.
    """
    paths = [tuple(folder.split("/")) for folder in folders]
    for depth in range(max(map(len, paths), default=0)):
        inside: dict[str, set[str]] = {}  # a parent -> the folders in it that are named like splits
        for path in paths:
            if len(path) > depth and _split_name(path[depth]):
                inside.setdefault("/".join(path[:depth]), set()).add(path[depth])
        parents = [one for one, names in inside.items() if len({*map(_split_name, names)}) > 1]
        if parents:
            parent = parents[0] if len(parents) == 1 else "/".join("*" * depth)
            found = sorted(set().union(*(inside[one] for one in parents)))
            return {name: posixpath.join(parent, name) for name in found}
    return {}


def _split_name(name: str) -> str:
    """Return the name of the split that the name of a folder denotes; "" if it denotes none."""
    words = [word for word in _WORD.findall(name.casefold()) if word not in _NEUTRAL_WORDS]
    return _SPLIT_NAMES.get(words[0], "") if len(words) == 1 else ""
