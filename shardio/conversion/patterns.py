"""A source that is named by a pattern: the folder to look in, and what of it is meant."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import translate
from functools import lru_cache
from typing import Final

from shardio._base.file_names import utf8_name

_SPECIAL: Final = re.compile(r"[*?\[]")
ANY_FOLDERS: Final = "**"

Reached = frozenset[int]
"""How much of a pattern the path to a folder has matched: the parts that may come next."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """What is meant below `root`: paths that match `parts`, each with all that lies below it.

    Without parts that is everything. A part matches one name as in a shell (`*`, `?`, `[…]`, names
    that begin with a dot only where it does); `**` any number of folders, also none.
    """

    root: str
    parts: tuple[str, ...] = ()

    @property
    def start(self) -> Reached:
        """What may come next below the root itself."""
        return self._and_after([0])

    def is_whole(self, reached: Reached) -> bool:
        """Whether all that lies in a folder is meant."""
        return len(self.parts) in reached

    def below(self, reached: Reached, name: str) -> Reached:
        """What may come next in a folder of this name; nothing where none of it is meant."""
        if self.is_whole(reached):
            return reached
        stays = [k for k in reached if self.parts[k] == ANY_FOLDERS and name[:1] != "."]
        return self._and_after([*stays, *(k + 1 for k in self._matched(reached, name))])

    def takes(self, reached: Reached, name: str) -> bool:
        """Whether a file of this name is meant."""
        return self.is_whole(reached) or len(self.parts) - 1 in self._matched(reached, name)

    def _matched(self, reached: Reached, name: str) -> list[int]:
        """The parts among those that may come next that match a name."""
        return [k for k in reached if self.parts[k] != ANY_FOLDERS and _fits(self.parts[k], name)]

    def _and_after(self, numbers: Iterable[int]) -> Reached:
        """With the parts that may come next as well because `**` before them matches nothing."""
        found = set(numbers)
        for k, part in enumerate(self.parts):
            if k in found and part == ANY_FOLDERS:
                found.add(k + 1)
        return frozenset(found)


def pattern_of(source: str) -> Pattern:
    """What a source is, by its name: a pattern if nothing is there that is called so.

    The root of a pattern is what comes before its first part with one of `*?[` in it; what is there
    under the name with such characters belongs to the root.
    """
    if not _SPECIAL.search(source) or os.path.lexists(source):
        return Pattern(source)
    root = os.sep if source.startswith(os.sep) else ""
    parts = [part for part in source.split(os.sep) if part not in ("", os.curdir)]
    while parts and _is_fixed(root, parts[0]):
        root = os.path.join(root, parts.pop(0))
    if source.endswith(os.sep):  # folders only
        parts.append(ANY_FOLDERS)
    return Pattern(root or os.curdir, tuple(parts))


def _is_fixed(root: str, part: str) -> bool:
    return not _SPECIAL.search(part) or os.path.lexists(os.path.join(root, part))


def _fits(part: str, name: str) -> bool:
    # `?` and `[…]` stand for a character, also where the locale makes several of it.
    return bool(_compiled(utf8_name(part)).match(utf8_name(name))) and (
        name[:1] != "." or part[:1] == "."
    )


@lru_cache(maxsize=256)
def _compiled(part: str) -> re.Pattern[str]:
    return re.compile(translate(part))
